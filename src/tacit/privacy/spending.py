"""How a plan spends its epsilon: as much as which constant noise, and how much of it by which step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from tacit.privacy import accounting
from tacit.privacy.driven import LossDriven
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError, check_count

_UNITS = 10_000  # of a noise multiplier: four decimals
_MOST_UNITS = 10**6 * _UNITS  # accounting takes no multiplier to be larger
_MOST_SECANTS, _MOST_JUMPS = 12, 8


def equal_constant(plan: PrivacyPlan, delta: float, *, accountant: str = "pld") -> float:
    """The constant noise multiplier, with four decimals, that costs what the plan's schedule costs.

    It is sought on the coarse grid and settled on the fine one, which takes two or three evaluations there. A PLD of more than
    four levels is accounted on the coarse grid, which says up to a thousandth too much, so that the constant is lower than that
    of the schedule's exact epsilon by about as much. A schedule without an epsilon costs what no noise costs.

    *Guarantee.* The plan with this constant has an epsilon of at most the plan's own, both as `PrivacyPlan.epsilon` gives them;
    with one ten-thousandth less it has a larger one.

    >>> from tacit.privacy import Curriculum
    >>> plan = PrivacyPlan(sample_rate=600 / 60000, steps=2000, noise=Curriculum("piecewise", 5.0, 1.0, epochs=20))
    >>> equal_constant(plan, 1e-5, accountant="rdp")
    1.3806
    """
    target = plan.epsilon(delta, accountant=accountant)
    if not math.isfinite(target):
        return 0.0

    def cost(units: float, coarse: bool = False) -> float:
        return accounting.epsilon_of(
            plan.sample_rate,
            [(units / _UNITS, plan.steps)],
            delta,
            whole=plan.whole_releases,
            accountant=accountant,
            coarse=coarse,
        )

    # The mean of 1 / sigma^2 is what a schedule costs where sampling is rare and noise is large.
    harmonic = sum(count / min(sigma, _MOST_UNITS / _UNITS) ** 2 for sigma, count in plan.levels()) / plan.steps
    units, slope = _near(lambda units: cost(units, coarse=True), target, _UNITS / math.sqrt(harmonic))
    return _first_within(cost, target, units, slope) / _UNITS


def epsilon_along(
    plan: PrivacyPlan, delta: float, *, points: int = 20, accountant: str = "pld"
) -> list[tuple[int, float]]:
    """(steps made, epsilon of all that is released by then) at so many points of the plan, for pictures.

    *Guarantee.* Upper bounds, on a coarse grid: for what is certified, take `PrivacyPlan.epsilon`.

    >>> plan = PrivacyPlan(sample_rate=0.01, steps=100)
    >>> [(steps, round(epsilon, 2)) for steps, epsilon in epsilon_along(plan, 1e-5, points=2, accountant="rdp")]
    [(0, 0.0), (50, 1.14), (100, 1.21)]
    """
    if isinstance(plan.noise, LossDriven):
        raise UserError("noise that follows the released loss is not known beforehand, so its way cannot be drawn")
    count = min(check_count("points", points), plan.steps)
    places = [round(plan.steps * place / count) for place in range(count + 1)]
    parts = [
        sorted(Counter(plan.noise_multiplier(step) for step in range(begin, end)).items())
        for begin, end in pairwise(places)
    ]
    before = plan.epsilon_after([], delta, whole=plan.whole_releases, accountant=accountant, coarse=True)
    along = accounting.epsilons_along(plan.sample_rate, parts, delta, whole=plan.whole_releases, accountant=accountant)
    return list(zip(places, [before, *along]))


def _near(cost: Callable[[float], float], target: float, units: float) -> tuple[float, float]:
    """About where the falling `cost` meets the target, and its slope there, both in logarithms: secants, nothing promised."""
    slope, previous = -1.0, None
    for _ in range(_MOST_SECANTS):
        found = cost(units)
        if target <= 0 or not 0 < found < math.inf:
            break
        value = math.log(found / target)
        if previous is not None and previous[0] != units:
            slope = min((value - previous[1]) / math.log(units / previous[0]), -0.1)
        previous = (units, value)
        units *= _factor(found / target, slope)
        if abs(units - previous[0]) < 0.2:
            break
    return units, slope


def _factor(ratio: float, slope: float) -> float:
    """By how much to multiply the noise so that so many times the target become the target, if the slope is right."""
    return math.exp(min(max(-math.log(ratio) / slope, -2.0), 2.0))


def _first_within(cost: Callable[[float], float], target: float, guess: float, slope: float) -> int:
    """The whole number of units at which `cost` is within the target, while it is not at the number before it."""
    low, high, tries = 0, _MOST_UNITS, 0  # no noise is never within a finite target
    units = min(max(round(guess), 1), high)
    while high - low > 1:
        found = cost(units)
        low, high = (low, units) if found <= target else (units, high)
        tries += 1
        if tries <= _MOST_JUMPS and target > 0 and 0 < found < math.inf:
            ahead = math.ceil(units * _factor(found / target, slope))
            units = ahead if found > target else ahead - 1  # the other side of the crossing, so that it is closed in
        else:
            units = (low + high) // 2
        units = min(max(units, low + 1), high - 1)
    return high
