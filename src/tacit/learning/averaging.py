"""Averages of the weights along the way: noise that each step adds is averaged out, and it costs no privacy.

The iterates are released already; a mean of them is computed from nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.learning.named import make_named
from tacit.privacy.validation import UserError, check_positive


class Averaging(Protocol):
    """How much of the average the weights after a step are; steps are counted from 1."""

    def weight(self, step: int, steps: int) -> float: ...


@dataclass(frozen=True)
class Exponential:
    """average <- d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)) at step t.

    The first, bad iterates are soon forgotten (De et al., "Unlocking High-Accuracy Differentially Private Image Classification
    through Scale", 2022).

    >>> Exponential(0.9).weight(1000, 2000), round(Exponential(0.9).weight(1, 2000), 3)
    (0.09999999999999998, 0.818)
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise UserError(f"averaging.decay must lie between 0 and 1, not {self.decay}")

    def weight(self, step: int, steps: int) -> float:
        """1 - d."""
        return 1 - min(self.decay, (1 + step) / (10 + step))


@dataclass(frozen=True)
class Tail:
    """The mean of the weights after each of the last steps, a `fraction` of all of them (Polyak and Ruppert's average, late).

    >>> [Tail(0.5).weight(step, 6) for step in range(1, 7)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.3333333333333333]
    """

    fraction: float = 0.25

    def __post_init__(self) -> None:
        if check_positive("averaging.fraction", self.fraction) > 1:
            raise UserError(f"averaging.fraction must be at most 1, not {self.fraction}")

    def weight(self, step: int, steps: int) -> float:
        """1 / k at the k-th step of the tail, and 1 before it."""
        before = math.floor(steps * (1 - self.fraction) + 1e-9)
        return 1 / max(step - before, 1)


AVERAGINGS: Mapping[str, Callable[..., Averaging]] = {"exponential": Exponential, "tail": Tail}


def make_averaging(name: str, **options: Any) -> Averaging:
    """The averaging of this name, with its options.

    >>> make_averaging("exponential", decay=0.95)
    Exponential(decay=0.95)
    """
    return make_named("averaging", AVERAGINGS, name, options)


class AveragedWeights:
    """The average of a model's parameters so far; until the first update, there is none.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = AveragedWeights(Tail(1.0))
    >>> for step, weight in enumerate((1.0, 3.0), 1):
    ...     _ = nn.init.constant_(model.weight, weight)
    ...     average.update(model, step, 2)
    >>> with average.in_place(model): model.weight.item()
    2.0
    >>> model.weight.item()
    3.0
    """

    def __init__(self, averaging: Averaging) -> None:
        self.averaging = averaging
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int, steps: int) -> None:
        """Take the weights after this step (counted from 1, of so many) into the average."""
        weight = self.averaging.weight(step, steps)
        for name, parameter in model.named_parameters():
            now = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
            if name not in self.tensors:
                self.tensors[name] = now.clone()
            else:
                self.tensors[name].lerp_(now, weight)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Give the model the average for its weights."""
        for name, parameter in model.named_parameters():
            if name in self.tensors:
                parameter.copy_(self.tensors[name])

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the average for its weights, and with its own afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.put(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(own[name])

    def restore(self, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
        """Go on from a stored average of this model's parameters."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        if tensors and {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise UserError("the stored average is of another model")
        devices = {name: parameter.device for name, parameter in model.named_parameters()}
        self.tensors = {name: tensor.to(devices[name]) for name, tensor in tensors.items()}
