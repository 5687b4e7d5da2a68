"""What a contestant is given, and what it must be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.models import NETWORKS, Network

LEARNING_RATE = 0.1
MOMENTUM = 0.9
NOISE_MULTIPLIER = 1.0


@dataclass(frozen=True)
class Setup:
    """One contestant's task: the network, the batch, the bound, and how to hold them in memory."""

    network_name: str
    batch: int
    layout: str = "channels last"
    physical: int | None = None
    clipping_norm: float = 1.0

    @property
    def network(self) -> Network:
        return NETWORKS[self.network_name]

    @property
    def memory_format(self) -> torch.memory_format:
        last = self.layout == "channels last" and self.network.images
        return torch.channels_last if last else torch.contiguous_format

    def model(self) -> nn.Module:
        """The network in the layout asked for."""
        return self.network.model().to(memory_format=self.memory_format)

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Inputs in the layout asked for."""
        return inputs.contiguous(memory_format=self.memory_format)

    def pieces(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The batch as one piece, or in micro-batches."""
        size = self.physical or len(inputs)
        for start in range(0, len(inputs), size):
            yield inputs[start : start + size], targets[start : start + size]


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer everybody uses."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Contestant(Protocol):
    """Someone who trains. Inputs and targets come as torch tensors, channels first."""

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        """Take the examples into memory, in the form that suits; not timed."""

    def step(self) -> None:
        """One whole training step on the loaded examples; it has ended when this returns."""

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sum of the clipped gradients of the loaded examples, without noise, by the names of the torch model."""

    def epoch(self) -> None:
        """One pass over the loaded examples, sampled as the library itself does."""
