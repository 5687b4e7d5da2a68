"""Norms first, then one weighted sum: from what the rules answer to a clipped sum."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.gradients.batches import norm_dtype
from tacit.gradients.contribution import (
    Add,
    Contribution,
    at_least_float32,
    instantiated,
    squared_norms,
    weighted_sum,
)
from tacit.gradients.toward import decayed
from tacit.privacy.clipping import Clipping, clip_factors

Sums = dict[str, Tensor]

# Parameters with at most so many numbers (biases, normalisations) are put side by side: a model has many of them, and each
# operation on a small tensor costs as much as one on a larger.
_SMALL = 4096


def is_ghost(uses: list[Contribution], strategy: str) -> bool:
    """Whether the norms of a parameter's gradients are found without holding these. Only for a single use: the norm of a
    *sum* of several does not follow from their norms.

    *Guarantee.* A choice of speed and memory alone.

    >>> is_ghost([Contribution(lambda: torch.zeros(1))], "ghost")
    False
    """
    if len(uses) > 1 or uses[0].ghost is None:
        return False
    return strategy == "ghost" or (strategy != "instantiate" and uses[0].ghost_is_cheaper)


def all_finite(norms: Tensor) -> bool:
    """Whether none is infinite or nan.

    *Guarantee.* Exact.

    >>> all_finite(torch.tensor([1.0, float("nan")]))
    False
    """
    # NumPy takes a tenth of the time for so few numbers.
    return bool(np.isfinite(norms.numpy()).all() if norms.device.type == "cpu" else norms.isfinite().all())


class Adding:
    """A clipped sum in the making: parameters come one after the other with all they contribute, and their norms are taken
    at once, so that output gradients need not be kept. `weight_decay` is by name: so many times the parameter is added to every
    example's gradient of it.

    *Guarantee.* Example i enters group j with the factor min(1, C_j / norm_ij), where norm_ij is the norm of all of its
    gradient in that group, with its decay.

    >>> from tacit.privacy.clipping import Flat
    >>> adding = Adding({"w": nn.Parameter(torch.zeros(1))}, Flat(1.0), batch_size=2)
    >>> adding.take("w", [Contribution(lambda: torch.tensor([[3.0], [0.5]]))])
    >>> adding.finish()
    ({'w': tensor([1.5000])}, tensor([[3.0000], [0.5000]]))
    """

    def __init__(
        self,
        trainable: dict[str, nn.Parameter],
        clipping: Clipping,
        batch_size: int,
        strategy: str = "rules",
        weight_decay: Mapping[str, float] | None = None,
    ) -> None:
        self._group_of = dict(zip(trainable, clipping.group_of(list(trainable))))
        self._clipping, self._batch_size, self._strategy = clipping, batch_size, strategy
        self._device = next(iter(trainable.values())).device
        self._dtype = norm_dtype(trainable)
        self._large: dict[str, Add] = {}
        self._small: dict[int, dict[str, Tensor]] = {}  # by group
        self._squares: list[tuple[int, Tensor]] = []  # each with its group
        # of those still to come: what is added to each example's gradient, as (parameter, rate)
        self._decay = {
            name: (at_least_float32(trainable[name].detach()), rate)
            for name, rate in (weight_decay or {}).items()
            if rate
        }

    def _added(self, squares: list[tuple[int, Tensor]]) -> Tensor:
        """Squared norms by group, [groups, batch]."""
        groups = len(self._clipping.clipping_norms)
        if not squares:
            return torch.zeros(groups, self._batch_size, dtype=self._dtype, device=self._device)
        rows = torch.stack([value.to(self._dtype) for _, value in squares])
        if groups == 1:
            return rows.sum(dim=0, keepdim=True)
        index = torch.tensor([group for group, _ in squares], device=self._device)
        return rows.new_zeros(groups, self._batch_size).index_add_(0, index, rows)

    def _full_precision(self) -> AbstractContextManager[Any]:
        """Whatever precision the model runs in: norms and sums in half precision would not keep the sensitivity."""
        if torch.is_autocast_enabled(self._device.type):
            return torch.autocast(self._device.type, enabled=False)
        return nullcontext()  # which takes no time

    def take(self, name: str, uses: list[Contribution]) -> None:
        """All that one parameter's gradient consists of, but for its decay."""
        group, decay = self._group_of[name], self._decay.pop(name, None)
        with self._full_precision():
            way = along = None
            if len(uses) == 1:
                way, along = (uses[0].ghost if is_ghost(uses, self._strategy) else uses[0].held), uses[0].along
            if way is None or (decay is not None and along is None):
                parts = [use.per_example() for use in uses]
                if decay is not None:
                    parameter, rate = decay
                    parts.append((rate * parameter).expand(self._batch_size, *parameter.shape))
                    decay = None
                gradients = parts[0]
                for another in parts[1:]:
                    gradients = gradients + another
                if gradients.numel() <= _SMALL * self._batch_size:
                    self._small.setdefault(group, {})[name] = gradients
                    return
                way = instantiated(lambda: gradients)
            squares, add = way()
            if decay is not None and along is not None:
                squares, add = decayed(squares, add, along(), *decay)
            self._large[name] = add
            self._squares.append((group, squares))

    def finish(self) -> tuple[Sums | None, Tensor]:
        """(sums by parameter, norms before clipping); no sums if a norm is not finite, since 0 times infinity is not 0."""
        for name in list(self._decay):  # no example reached it
            self.take(name, [])
        with self._full_precision():
            beside = {
                group: torch.cat([g.flatten(1) for g in found.values()], 1) for group, found in self._small.items()
            }
            squares = [*self._squares, *((group, squared_norms(rows)) for group, rows in beside.items())]
            norms = self._added(squares).sqrt_().t()
            if not all_finite(norms):
                return None, norms
            factors = clip_factors(norms, self._clipping).t().contiguous().unbind()  # by group
            sums = {name: add(factors[self._group_of[name]]) for name, add in self._large.items()}
            for group, rows in beside.items():
                members = self._small[group]
                parts = torch.split(weighted_sum(rows, factors[group]), [g[0].numel() for g in members.values()])
                sums.update({name: part.view(g.shape[1:]) for (name, g), part in zip(members.items(), parts)})
            return sums, norms


def clip_and_add(
    uses: dict[str, list[Contribution]],
    trainable: dict[str, nn.Parameter],
    clipping: Clipping,
    batch_size: int,
    strategy: str = "rules",
    weight_decay: Mapping[str, float] | None = None,
) -> tuple[Sums | None, Tensor]:
    """The clipped sum of what is all there already: see `Adding`.

    *Guarantee.* As for `Adding`.

    >>> from tacit.privacy.clipping import Flat
    >>> uses = {"w": [Contribution(lambda: torch.tensor([[3.0], [0.5]]))]}
    >>> clip_and_add(uses, {"w": nn.Parameter(torch.zeros(1))}, Flat(1.0), 2)
    ({'w': tensor([1.5000])}, tensor([[3.0000], [0.5000]]))
    """
    adding = Adding(trainable, clipping, batch_size, strategy, weight_decay)
    for name, found in uses.items():
        adding.take(name, found)
    return adding.finish()
