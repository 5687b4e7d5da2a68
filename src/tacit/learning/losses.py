"""Losses by name. A loss gives one value an example: `loss(logits, targets) -> [batch]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.nn import functional

PerExampleLoss = Callable[[Tensor, Tensor], Tensor]


def sum_of_squares(logits: Tensor, targets: Tensor) -> Tensor:
    """1/2 * sum_d (logit_d - y_d)^2, with y the one-hot label.

    >>> import torch
    >>> sum_of_squares(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    tensor([2.])
    """
    wanted = functional.one_hot(targets, logits.shape[1]).to(logits.dtype)
    return 0.5 * (logits - wanted).square().sum(dim=1)


LOSSES: Mapping[str, PerExampleLoss] = {
    "cross-entropy": nn.CrossEntropyLoss(reduction="none"),
    "sum-of-squares": sum_of_squares,
}
