"""Noise that follows a *released* loss, under a filter that stops in time.

A noise multiplier that depends on what was released before is chosen adaptively. A PLD of the multipliers that happened to be
used is then no bound; an RDP *filter* is (Feldman & Zrnic, "Individual Privacy Accounting via a Renyi Filter", 2021): at an order
alpha and with a budget rho, both fixed beforehand, releases are made while the sum of their RDP at alpha stays within rho, and
all of them together are (alpha, rho)-RDP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tacit.privacy import accounting
from tacit.privacy.beside import LOSS, Beside, check_share
from tacit.privacy.validation import UserError, check_positive

LEVELS = 16  # the multipliers that are ever used: few, so that each one's RDP is computed once
_ORDERS = (*(1 + x / 4 for x in range(1, 60)), *range(16, 65, 2), 96, 128, 256)
_SMOOTHING = 0.9  # of the released loss, which is noisy


@dataclass(frozen=True)
class LossDriven:
    """The less the loss, the more noise: from `smallest` while the released loss is at `reference` or above, to `largest` at 0.

    Beside each gradient, the noisy mean of the losses, each cut to at most `loss_bound`, is released for a `share` of the
    privacy. The multiplier is smallest (largest / smallest)^(1 - loss / reference), rounded to one of 16 levels. Releases stop
    before their RDP at `order` would exceed `budget`; `PrivacyPlan.calibrated` sets both, and scales the multipliers, for an
    epsilon.

    *Guarantee.* A multiplier depends on what was released before alone; and see the filter, `allows`.

    >>> noise = LossDriven(1.0, 4.0, reference=2.3)
    >>> noise.multiplier_at(None), round(noise.multiplier_at(1.15), 2), noise.multiplier_at(-0.2)
    (1.0, 2.09, 4.0)
    """

    smallest: float
    largest: float
    reference: float = math.log(10)
    loss_bound: float = 2 * math.log(10)
    share: float = 0.01
    order: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        for name in ("smallest", "largest", "reference", "loss_bound"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        if self.largest < self.smallest:
            raise UserError(f"largest must be at least smallest, not {self.largest} and {self.smallest}")
        object.__setattr__(self, "share", check_share(self.share))
        if (self.order is None) != (self.budget is None):
            raise UserError("a filter needs both its order and its budget; `calibrated` sets them")
        if self.order is not None and self.budget is not None:
            if not check_positive("order", self.order) > 1:
                raise UserError(f"order must be above 1, not {self.order!r}")
            check_positive("budget", self.budget)

    @property
    def beside(self) -> tuple[Beside, ...]:
        """What is released with each gradient."""
        return (Beside(LOSS, self.loss_bound, self.share),)

    def multiplier(self, step: int, steps: int) -> float:
        """The least of all, which no step is below: what `accounting` needs without a filter."""
        return self.smallest

    def multiplier_at(self, loss: float | None) -> float:
        """The multiplier after this released loss; before any, the smallest.

        *Guarantee.* A function of what was released alone, one of 16 levels.
        """
        if loss is None:
            return self.smallest
        level = round((LEVELS - 1) * (1 - min(max(loss / self.reference, 0.0), 1.0)))
        return float(self.smallest * (self.largest / self.smallest) ** (level / (LEVELS - 1)))

    def smoothed(self, before: float | None, released: float) -> float:
        """The released loss, averaged with those before it."""
        return released if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * released

    def allows(self, sample_rate: float, used: accounting.Levels, following: float) -> bool:
        """The filter: whether a release with the multiplier `following` may be made after those with `used`.

        *Guarantee.* If it is asked before every release, and obeyed, the sum of all releases' RDP at `order` is at most `budget`.

        >>> noise = LossDriven(1.0, 1.0, order=8.0, budget=0.1)
        >>> noise.allows(0.01, [(1.0, 10)], 1.0), noise.allows(0.01, [(1.0, 10_000)], 1.0)
        (True, False)
        """
        return self.within_budget(sample_rate, [*used, (following, 1)])

    def within_budget(self, sample_rate: float, used: accounting.Levels) -> bool:
        """Whether the RDP of these releases, at `order`, is at most `budget`.

        *Guarantee.* False if it cannot be computed.
        """
        order, budget = self._filter()
        return accounting.rdp_of(sample_rate, used, order) <= budget

    def epsilon(self, delta: float, whole: tuple[float, ...] = ()) -> float:
        """The epsilon of all that the filter lets through, and of releases of all examples (`whole`) before.

        *Guarantee.* An upper bound however many releases were made, and with whichever multipliers.
        """
        order, budget = self._filter()
        return accounting.epsilon_of_rdp(
            order, budget + accounting.rdp_of(1.0, [(s, 1) for s in accounting.joined(whole)], order), delta
        )

    def calibrated(
        self, sample_rate: float, steps: int, *, epsilon: float, delta: float, whole: tuple[float, ...] = ()
    ) -> LossDriven:
        """With the filter for this epsilon, and multipliers for which so many steps at their geometric mean just fit; and half as
        many at the smallest, so that no run ends before half of its steps.

        The order is the one at which they fit with the least noise.

        *Guarantee.* `epsilon(delta, whole)` is at most the one asked for.
        """
        wanted = [(math.sqrt(self.smallest * self.largest), steps), (self.smallest, (steps + 1) // 2)]
        found: tuple[float, float, float] | None = None
        for order in _ORDERS:
            budget = accounting.rdp_budget(order, epsilon, delta)
            budget -= accounting.rdp_of(1.0, [(s, 1) for s in accounting.joined(whole)], order)
            if budget <= 0:
                continue
            factor = max(_least_factor(sample_rate, level, order, budget) for level in wanted)
            if math.isfinite(factor) and (found is None or factor < found[0]):
                found = (factor, order, budget)
        if found is None:
            raise UserError(
                f"epsilon {epsilon:g} at delta {delta:g} is too small for so many steps; ask for a larger one"
            )
        factor, order, budget = found
        return replace(self.scaled(factor), order=order, budget=budget)

    def scaled(self, factor: float) -> LossDriven:
        """Every multiplier times the factor."""
        return replace(self, smallest=self.smallest * factor, largest=self.largest * factor)

    def to_dict(self) -> dict[str, Any]:
        names = ("smallest", "largest", "reference", "loss_bound", "share", "order", "budget")
        return {"kind": "loss-driven", **{name: getattr(self, name) for name in names}}

    def _filter(self) -> tuple[float, float]:
        if self.order is None or self.budget is None:
            raise UserError(
                "noise that follows the loss has no epsilon of its own; ask for one, and a filter is made for it"
            )
        return self.order, self.budget


def _least_factor(sample_rate: float, level: tuple[float, int], order: float, budget: float) -> float:
    """For a multiplier with which so many steps are to fit. By bisection: the RDP falls as the noise grows."""
    sigma, steps = level
    low, high = math.log(0.05 / sigma), math.log(1e4 / sigma)
    for _ in range(40):
        at = (low + high) / 2
        spent = accounting.rdp_of(sample_rate, [(sigma * math.exp(at), steps)], order)
        low, high = (at, high) if spent > budget else (low, at)
    fits = accounting.rdp_of(sample_rate, [(sigma * math.exp(high), steps)], order) <= budget
    return math.exp(high) if fits else math.inf
