"""Sums over all training examples of vectors with public bounds: what statistics are made of, once noise was added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tacit.privacy.validation import UserError, check_positive

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BoundedSum:
    """A sum of one matrix an example, [blocks, width], each block clipped to its bound. It is *private data*: only the mechanism
    may turn it into something else.

    *Guarantee.* With each block divided by its bound, adding or removing one example moves `total` by at most `sensitivity`, the
    square root of the number of blocks. An example with a number that is not finite adds nothing.

    >>> import torch
    >>> summed = BoundedSum.over([torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]])], bounds=[1.0])
    >>> summed.total, summed.sensitivity
    (tensor([[0.9000, 1.2000]], dtype=torch.float64), 1.0)
    """

    total: Tensor
    bounds: tuple[float, ...]

    @property
    def sensitivity(self) -> float:
        """How far one example can move the blocks, each divided by its bound."""
        return math.sqrt(len(self.bounds))

    @classmethod
    def over(cls, chunks: Iterable[Tensor], bounds: Sequence[float]) -> BoundedSum:
        """The sum over chunks of examples, [batch, blocks, width] each, every example in exactly one of them."""
        import torch

        limits = tuple(check_positive("bounds", bound) for bound in bounds)
        total: Tensor | None = None
        for chunk in chunks:
            if chunk.dim() != 3 or chunk.shape[1] != len(limits):
                raise UserError(
                    f"a bounded sum of {len(limits)} blocks takes [batch, {len(limits)}, width], not {list(chunk.shape)}"
                )
            rows = chunk.detach().cpu().double()  # some accelerators have no doubles
            norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
            factors = torch.clamp(torch.tensor(limits, dtype=torch.float64).view(1, -1, 1) / norms, max=1.0)
            finite = norms.isfinite().all(dim=1, keepdim=True)
            added = torch.where(finite, rows * factors, 0.0).sum(dim=0)
            total = added if total is None else total + added
        if total is None:
            raise UserError("there is nothing to sum: not even the width is known")
        return cls(total, limits)
