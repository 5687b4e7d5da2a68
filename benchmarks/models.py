"""The networks that are raced, by name, and synthetic examples for them.

They are tacit's own, so that a reader can train what was timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit import models

CLASSES = 10
_VOCABULARY = 1000  # token numbers are drawn below this where the inputs are words


@dataclass(frozen=True)
class Network:
    """A model and what its examples look like."""

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False

    @property
    def images(self) -> bool:
        """Whether the layout of images in memory (channels first or last) is a question at all."""
        return len(self.shape) == 3

    def model(self) -> nn.Module:
        """The model with the same weights every time."""
        torch.manual_seed(0)
        return self.build()

    def examples(self, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets, already in memory."""
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(0, CLASSES, (count,), generator=generator)
        if self.tokens:
            return torch.randint(0, _VOCABULARY, (count, *self.shape), generator=generator), targets
        return torch.randn(count, *self.shape, generator=generator), targets


def _wide_cifar_cnn() -> nn.Module:
    return models.cifar_cnn((3, 32, 32), CLASSES, widths=(64, 128, 256))


NETWORKS: dict[str, Network] = {
    "mnist-cnn": Network("MNIST CNN", lambda: models.mnist_cnn((1, 28, 28), CLASSES), (1, 28, 28)),
    "cifar-cnn": Network("CIFAR-10 CNN", lambda: models.cifar_cnn((3, 32, 32), CLASSES), (3, 32, 32)),
    "cifar-cnn-x2": Network("CIFAR-10 CNN, twice as wide", _wide_cifar_cnn, (3, 32, 32)),
    "scatter-cnn": Network("scattering CNN", lambda: models.scatter_cnn((243, 8, 8), CLASSES), (243, 8, 8)),
    "resnet-20": Network("ResNet-20", lambda: models.resnet((3, 32, 32), CLASSES), (3, 32, 32)),
    "wrn-16-4": Network("WRN-16-4", lambda: models.wide_resnet((3, 32, 32), CLASSES), (3, 32, 32)),
    "transformer": Network("transformer", lambda: models.transformer(_VOCABULARY, 64, CLASSES), (64,), tokens=True),
}


def parameters_of(name: str) -> int:
    """How many numbers a network learns."""
    return sum(parameter.numel() for parameter in NETWORKS[name].model().parameters() if parameter.requires_grad)
