"""Training without privacy: what a step costs anyway."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.contestants.setup import Setup, sgd
from tacit.gradients.kernels import keep_memory


class Plain:
    """Forward, mean loss, backward, update."""

    def __init__(self, setup: Setup, compiled: bool, kept: bool) -> None:
        if kept:  # as tacit does it, for a comparison on equal terms
            keep_memory()
        self.setup = setup
        self.model = setup.model()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = sgd(self.model)

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = self.setup.laid_out(inputs), targets

    def step(self) -> None:
        self._step(self.inputs, self.targets)

    def clipped_sum(self) -> dict[str, Tensor]:
        raise NotImplementedError("nothing is clipped")

    def epoch(self) -> None:
        for indices in torch.randperm(len(self.inputs)).split(self.setup.batch):
            self._step(self.setup.laid_out(self.inputs[indices]), self.targets[indices])

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        for part_inputs, part_targets in self.setup.pieces(inputs, targets):
            loss = functional.cross_entropy(self.forward(part_inputs), part_targets, reduction="sum") / len(inputs)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make(setup: Setup, compiled: bool = False, kept: bool = False) -> Plain:
    return Plain(setup, compiled, kept)
