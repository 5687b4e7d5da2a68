"""The sample curriculum of a paper as its authors have it, for reproduction: the examples sorted by the loss of a logistic
regression, in the same order every epoch. There is no privacy in it, and its runs' certificates say so."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tacit.privacy.validation import UserError
from tacit.training.examples import Examples, Indices

_ITERATIONS = 100  # of the logistic regression, at most


@dataclass
class SortedPasses:
    """Passes over the examples in one order, in batches that follow each other and hold about the same number.

    *No guarantee.* Which examples a batch holds depends on all examples, without noise: one more shifts every later batch. What
    is released of them must be recorded as `tacit.privacy.ledger.SORTED`, for which no epsilon holds.

    >>> passes = SortedPasses(np.array([3, 1, 4, 0, 2]), batches=2)
    >>> [passes.draw().tolist() for _ in range(3)]
    [[3, 1], [4, 0, 2], [3, 1]]
    """

    order: Indices
    batches: int  # of one pass
    step: int = 0

    @classmethod
    def of(cls, examples: Examples, sample_rate: float, *, first: int = 0) -> SortedPasses:
        """Easy ones first; the same order whenever a run goes on, since nothing in it is random."""
        losses = logistic_losses(*examples.batch())
        return cls(np.argsort(losses, kind="stable"), max(1, round(1 / sample_rate)), first)

    def draw(self) -> Indices:
        """The indices of the next batch."""
        place, count = self.step % self.batches, len(self.order)
        self.step += 1
        return self.order[place * count // self.batches : (place + 1) * count // self.batches]


def logistic_losses(inputs: Any, targets: Tensor) -> NDArray[np.float64]:
    """Each example's log loss under a logistic regression that was trained on all of them, without noise: private data.

    >>> import torch
    >>> inputs, targets = torch.tensor([[0.0], [1.0], [9.0], [10.0], [0.5]]), torch.tensor([0, 0, 1, 1, 1])
    >>> int(logistic_losses(inputs, targets).argmax())
    4
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    if not isinstance(inputs, Tensor):
        raise UserError(
            f"a logistic regression takes one tensor an example, not a {type(inputs).__name__}; choose another curriculum"
        )
    rows, labels = inputs.flatten(1).cpu().numpy(), targets.cpu().numpy()
    if len(np.unique(labels)) < 2:
        return np.zeros(len(labels))  # nothing to learn, and nobody is harder than another
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = LogisticRegression(max_iter=_ITERATIONS).fit(rows, labels)
    logs = found.predict_log_proba(rows)
    return np.asarray(-logs[np.arange(len(labels)), np.searchsorted(found.classes_, labels)], dtype=np.float64)
