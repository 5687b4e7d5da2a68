"""Norms first, then one weighted sum: from what the rules answer to a clipped sum."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.batches import norm_dtype
from tacit.gradients.contribution import (
    Add,
    Contribution,
    instantiated,
    squared_norms,
    weighted_sum,
)
from tacit.gradients.toward import Decay
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
    at once, so that output gradients need not be kept. With `decay`, a multiple of the parameter is added to every example's
    gradient of it.

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
        decay: Decay | None = None,
    ) -> None:
        self._group_of = dict(zip(trainable, clipping.group_of(list(trainable))))
        self._clipping, self._batch_size, self._strategy = clipping, batch_size, strategy
        self._device = next(iter(trainable.values())).device
        self._dtype = norm_dtype(trainable)
        self._large: dict[str, Add] = {}
        self._small: dict[int, dict[str, Tensor]] = {}  # by group
        self._squares: list[tuple[int, Tensor]] = []  # each with its group
        self._decay = decay if decay else None
        self._decaying: list[str] = []  # of those in `_large`: what decay adds to their sums is still missing
        self._constants = [0.0] * len(clipping.clipping_norms)  # and the square of that, by group

    def _norms(self) -> Tensor:
        """Norms by group, [groups, batch]. Squares are added up in double precision where there is one: with decay, some of what
        is added up may cancel. A sum is below 0 only by rounding, or not finite, which it must stay."""
        groups = len(self._clipping.clipping_norms)
        if self._device.type == "cpu":  # by NumPy, for which so few numbers take a fraction of the time
            added = np.empty((groups, self._batch_size))
            added[:] = np.array(self._constants)[:, None]
            for group, squares in self._squares:
                added[group] += squares.numpy()
            return torch.from_numpy(np.abs(added, out=added)).to(self._dtype).sqrt_()
        dtype = self._dtype if self._decay is None else torch.float64
        found = torch.tensor(self._constants, dtype=dtype, device=self._device).repeat(self._batch_size, 1).t()
        for group, squares in self._squares:
            found[group] += squares.to(dtype)
        return found.abs_().to(self._dtype).sqrt_()

    def _full_precision(self) -> AbstractContextManager[Any]:
        """Whatever precision the model runs in: norms and sums in half precision would not keep the sensitivity."""
        if torch.is_autocast_enabled(self._device.type):
            return torch.autocast(self._device.type, enabled=False)
        return nullcontext()  # which takes no time

    def take(self, name: str, uses: list[Contribution]) -> None:
        """All that one parameter's gradient consists of, but for its decay."""
        group, decay = self._group_of[name], self._decay
        decays = decay is not None and name in decay.rates
        with self._full_precision():
            way = None
            if len(uses) == 1:
                ghost = is_ghost(uses, self._strategy)
                way = uses[0].ghost if ghost else uses[0].held
                if decays and (uses[0].ghost_decays if ghost else uses[0].held_decays):
                    decays = False
                elif decays and uses[0].along is None:
                    way = None
            if way is None:
                gradients = uses[0].per_example()
                for another in uses[1:]:
                    gradients = gradients + another.per_example()
                if gradients.numel() <= _SMALL * self._batch_size:
                    self._small.setdefault(group, {})[name] = gradients
                    return
                if decay is not None and decays:
                    gradients = decay.add_to(gradients.clone(), name)
                    decays = False
                way = instantiated(lambda: gradients)
            squares, self._large[name] = way()
            self._squares.append((group, squares))
            if decay is not None and decays:
                along = uses[0].along
                assert along is not None
                self._squares.append((group, along().mul_(2 * decay.rates[name])))
                self._decays_later(name)

    def _decays_later(self, name: str) -> None:
        assert self._decay is not None
        self._decaying.append(name)
        self._constants[self._group_of[name]] += self._decay.square(name)

    def finish(self) -> tuple[Sums | None, Tensor]:
        """(sums by parameter, norms before clipping); no sums if a norm is not finite, since 0 times infinity is not 0."""
        with self._full_precision():
            self._take_unreached()
            beside = {}
            for group, found in self._small.items():
                beside[group], squares = self._beside(found)
                self._squares.append((group, squares))
            norms = self._norms().t()
            if not all_finite(norms):
                return None, norms
            factors = clip_factors(norms, self._clipping).t().contiguous().unbind()  # by group
            sums = {name: add(factors[self._group_of[name]]) for name, add in self._large.items()}
            if self._decay is not None and self._decaying:
                for name in self._decaying:
                    if name not in sums:
                        sums[name] = torch.zeros_like(self._decay.parameters[name])
                    self._decay.add_to(sums[name], name, self._decay.total(factors[self._group_of[name]]))
            for group, rows in beside.items():
                members = self._small[group]
                parts = torch.split(weighted_sum(rows, factors[group]), [g[0].numel() for g in members.values()])
                sums.update({name: part.view(g.shape[1:]) for (name, g), part in zip(members.items(), parts)})
            return sums, norms

    def _beside(self, found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Small gradients side by side, each with its decay: [batch, all their numbers]; and their squared norms."""
        gradients = list(found.values())
        decaying: list[tuple[Tensor, float] | None] = [None] * len(found)
        if self._decay is not None:
            parameters, rates = self._decay.parameters, self._decay.rates
            decaying = [(parameters[name], rates[name]) if name in rates else None for name in found]
        if kernels.usable(*gradients):
            return kernels.beside(gradients, decaying)
        rows = torch.cat([g.flatten(1) for g in gradients], 1)
        if any(decaying):
            sizes = [g[0].numel() for g in gradients]
            for part, more in zip(torch.split(rows, sizes, dim=1), decaying, strict=True):
                if more is not None:
                    part.add_(more[0].flatten(), alpha=more[1])
        return rows, squared_norms(rows)

    def _take_unreached(self) -> None:
        """What no example's loss depends on decays all the same."""
        taken = len(self._large) + sum(map(len, self._small.values()))
        if self._decay is None or taken == len(self._group_of):
            return
        for name in self._decay.rates:
            if name not in self._large and not any(name in found for found in self._small.values()):
                self._decays_later(name)


def clip_and_add(
    uses: dict[str, list[Contribution]],
    trainable: dict[str, nn.Parameter],
    clipping: Clipping,
    batch_size: int,
    strategy: str = "rules",
    decay: Decay | None = None,
) -> tuple[Sums | None, Tensor]:
    """The clipped sum of what is all there already: see `Adding`.

    *Guarantee.* As for `Adding`.

    >>> from tacit.privacy.clipping import Flat
    >>> uses = {"w": [Contribution(lambda: torch.tensor([[3.0], [0.5]]))]}
    >>> clip_and_add(uses, {"w": nn.Parameter(torch.zeros(1))}, Flat(1.0), 2)
    ({'w': tensor([1.5000])}, tensor([[3.0000], [0.5000]]))
    """
    adding = Adding(trainable, clipping, batch_size, strategy, decay)
    for name, found in uses.items():
        adding.take(name, found)
    return adding.finish()
