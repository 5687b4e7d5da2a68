"""From what was released to epsilon, by dp-accounting: a PLD bound, with RDP beside it.

Both are upper bounds for adding or removing one example. Everything here works on *levels*: pairs of a noise multiplier and the
number of Poisson-sampled Gaussian releases made with it; beside them, `whole` are the multipliers of Gaussian releases in which
every example takes part. Several runs are several *parts*: pairs of a sampling rate and the levels of the releases made at it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from typing import Any

from tacit.privacy.validation import (
    UserError,
    check_choice,
    check_count,
    check_delta,
    check_not_negative,
    check_positive,
    check_probability,
)

Levels = Sequence[tuple[float, int]]
Parts = Sequence[tuple[float, Levels]]

ACCOUNTANTS = ("pld", "rdp")

# A PLD costs time in proportion to the number of distinct levels; a schedule with more of them is rounded down to these many.
# With more than a few of them, the coarse grid has to do for all.
MOST_LEVELS, _MOST_FINE_LEVELS = 32, 4
_GRID = 1e-4  # the PLD's grid at an epsilon of about 2; finer below, coarser above
_COARSE = 10  # how much coarser the grid of a search is
_TOLERANCE = 4e-3  # calibration ends within this fraction below the target
_SMALLEST_MULTIPLIER, _LARGEST_MULTIPLIER = 0.05, 1e6
# Below these a PLD is not to be trusted (its convolutions are right to about 1e-15) or takes for ever; RDP answers alone.
_SMALLEST_PLD_DELTA, _SMALLEST_PLD_MULTIPLIER = 1e-10, 0.02
_LARGEST_PLD_EPSILON = 1e4  # nobody needs it to be tight any more
_NO_NOISE = 1e-6  # less noise than this is none: its moments leave the range of a float
# RDP of one release is a logarithm near 0 and may be wrong by this much, even negative; dp-accounting reads that as epsilon 0.
_RDP_ERROR = 1e-12
# Whole orders are quick; they set the scale of the PLD's grid.
_ROUGH_ORDERS = (*range(2, 33), 48, 64, 128, 256, 512)


def composed_event(sample_rate: float, levels: Levels, whole: Sequence[float] = ()) -> Any:
    """The dp-accounting event of Poisson-sampled Gaussian releases, one composition a level, and of those without sampling.

    >>> composed_event(0.01, [(1.3, 100)])
    ComposedDpEvent(events=[SelfComposedDpEvent(event=PoissonSampledDpEvent(sampling_probability=0.01,
        event=GaussianDpEvent(noise_multiplier=1.3)), count=100)])
    """
    return _composed([(check_probability("sample_rate", sample_rate), levels)], whole)


def _composed(parts: Parts, whole: Sequence[float]) -> Any:
    import dp_accounting

    # Plain floats: dp-accounting mistreats a NumPy scalar or an int inside nested events.
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(float(rate), dp_accounting.GaussianDpEvent(float(sigma))),
                int(count),
            )
            for rate, levels in parts
            for sigma, count in levels
        ]
        + [dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(float(sigma)), 1) for sigma in whole]
    )


def epsilon_of(
    sample_rate: float,
    levels: Levels,
    delta: float,
    *,
    whole: Sequence[float] = (),
    accountant: str = "pld",
    coarse: bool = False,
) -> float:
    """The epsilon, at this delta, of all the releases together.

    *Guarantee.* An upper bound for neighbours that differ by adding or removing one example; `coarse` is quicker and can only be
    higher. A level of (almost) 0 gives infinity. More than 32 levels are rounded down to 32 first, which can only raise epsilon.

    >>> round(epsilon_of(1024 / 50000, [(1.54, 1440)], 1e-5), 3)
    2.365
    >>> round(epsilon_of(1024 / 50000, [(1.54, 1440)], 1e-5, accountant="rdp"), 3)
    2.585
    """
    return epsilon_of_all([(sample_rate, levels)], delta, whole=whole, accountant=accountant, coarse=coarse)


def epsilon_of_all(
    parts: Parts,
    delta: float,
    *,
    whole: Sequence[float] = (),
    accountant: str = "pld",
    coarse: bool = False,
) -> float:
    """The epsilon, at this delta, of the releases of several runs together, each part at its own sampling rate.

    *Guarantee.* That of `epsilon_of`, for an example that may take part in all of them; parts of equal rate are one part, so that
    two runs are accounted as one of twice the length. More than 32 levels in all are rounded down, an equal number for each rate.

    >>> round(epsilon_of_all([(0.01, [(1.0, 300)]), (0.02, [(2.0, 100)])], 1e-5), 3)
    1.135
    >>> epsilon_of_all([(0.01, [(1.0, 300)])] * 2, 1e-5) == epsilon_of(0.01, [(1.0, 600)], 1e-5)
    True
    """
    check_choice("accountant", accountant, ACCOUNTANTS)
    check_delta(delta)
    by_rate: dict[float, list[tuple[float, int]]] = {}
    for rate, levels in parts:
        by_rate.setdefault(check_probability("sample_rate", rate), []).extend(
            (min(check_not_negative("noise_multiplier", sigma), _LARGEST_MULTIPLIER), count)
            for sigma, count in levels
            if check_count("number of releases", count, at_least=0)
        )
    all_at_once = tuple(min(check_not_negative("noise_multiplier", sigma), _LARGEST_MULTIPLIER) for sigma in whole)
    sigmas = [sigma for levels in by_rate.values() for sigma, _ in levels]
    if min([*sigmas, *all_at_once], default=math.inf) < _NO_NOISE:
        return math.inf
    used = [(rate, levels) for rate, levels in sorted(by_rate.items()) if levels]
    most = max(MOST_LEVELS // max(len(used), 1), 1)
    rounded = tuple((rate, tuple(rounded_down(levels, most))) for rate, levels in used)
    return _epsilon_of(rounded, joined(all_at_once), float(delta), accountant, coarse)


@lru_cache(maxsize=256)
def _epsilon_of(
    parts: tuple[tuple[float, tuple[tuple[float, int], ...]], ...],
    whole: tuple[float, ...],
    delta: float,
    accountant: str,
    coarse: bool,
) -> float:
    sigmas = [sigma for _, levels in parts for sigma, _ in levels]
    if not sigmas and not whole:
        return 0.0
    smallest = min([*sigmas, *whole])
    event = _composed(parts, whole)
    if accountant == "rdp" or delta < _SMALLEST_PLD_DELTA or smallest < _SMALLEST_PLD_MULTIPLIER:
        return _by_rdp(event, delta)
    rough = _by_rdp(event, delta, orders=_ROUGH_ORDERS)
    if rough > _LARGEST_PLD_EPSILON:
        return rough
    # Both bounds hold, so the smaller one does; RDP is the smaller one only at extremes, where the grid tells.
    grid = _interval(rough, smallest) * (_COARSE if coarse or len(sigmas) > _MOST_FINE_LEVELS else 1)
    return min(rough, _by_pld(event, delta, grid))


def epsilons_along(
    sample_rate: float,
    parts: Sequence[Levels],
    delta: float,
    *,
    whole: Sequence[float] = (),
    accountant: str = "pld",
) -> list[float]:
    """The epsilon after each of the parts of a run, one after the other, of which each adds to those before it.

    All are accounted on one coarse grid, a part at a time, so that a whole curve costs little more than its end.

    *Guarantee.* Upper bounds, as in `epsilon_of`; each part is rounded down to two levels first, which can only raise them. From
    a part on in which there is (almost) no noise they are infinite.

    >>> [round(epsilon, 2) for epsilon in epsilons_along(0.01, [[(2.0, 500)], [(1.0, 500)]], 1e-5)]
    [0.43, 1.4]
    """
    from dp_accounting import pld, rdp

    check_choice("accountant", accountant, ACCOUNTANTS)
    check_delta(delta)
    noisy = []
    for levels in takewhile(lambda levels: min(sigma for sigma, _ in levels) >= _NO_NOISE, parts):
        capped = [(min(sigma, _LARGEST_MULTIPLIER), count) for sigma, count in levels]
        noisy.append((check_probability("sample_rate", sample_rate), rounded_down(capped, 2)))
    if not noisy or min(whole, default=math.inf) < _NO_NOISE:
        return [math.inf] * len(parts)
    whole = joined(whole)
    smallest = min([*(sigma for _, levels in noisy for sigma, _ in levels), *whole])
    rough = _by_rdp(_composed(noisy, whole), delta, _ROUGH_ORDERS)
    by_rdp = accountant == "rdp" or delta < _SMALLEST_PLD_DELTA or smallest < _SMALLEST_PLD_MULTIPLIER
    by_rdp = by_rdp or rough > _LARGEST_PLD_EPSILON
    losses = None if by_rdp else pld.PLDAccountant(value_discretization_interval=_COARSE * _interval(rough, smallest))
    moments, releases = rdp.RdpAccountant(None if by_rdp else _ROUGH_ORDERS), 0
    found: list[float] = []
    for place, part in enumerate(noisy):
        event = _composed([part], whole if place == 0 else ())
        releases += sum(level.count for level in event.events)
        try:
            with _without_warnings():
                moments.compose(event)
            bound = float(rdp.compute_epsilon(moments.orders, moments.rdp + _RDP_ERROR * releases, delta)[0])
        except OverflowError:
            break
        found.append(bound if losses is None else min(bound, float(losses.compose(event).get_epsilon(delta))))
    return found + [math.inf] * (len(parts) - len(found))


def rdp_of(sample_rate: float, levels: Levels, order: float) -> float:
    """The Renyi differential privacy, at one order, of Poisson-sampled Gaussian releases: what a filter adds up.

    *Guarantee.* An upper bound for adding or removing one example; infinite where it cannot be computed.

    >>> round(rdp_of(1.0, [(2.0, 3)], order=8.0), 6)
    3.0
    """
    check_probability("sample_rate", sample_rate)
    counts: Counter[float] = Counter()
    for sigma, count in levels:  # the same levels give the same sum, in whatever order they come
        counts[float(sigma)] += count
    return sum(count * _rdp_of_one(float(sample_rate), sigma, float(order)) for sigma, count in sorted(counts.items()))


@lru_cache(maxsize=4096)
def _rdp_of_one(sample_rate: float, sigma: float, order: float) -> float:
    from dp_accounting import rdp

    if sigma < _NO_NOISE:
        return math.inf
    try:
        with _without_warnings():
            found = float(rdp.RdpAccountant([order]).compose(composed_event(sample_rate, [(sigma, 1)])).rdp[0])
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(found) else max(found, 0.0) + _RDP_ERROR


def epsilon_of_rdp(order: float, rdp: float, delta: float) -> float:
    """The epsilon that (order, rdp)-Renyi differential privacy gives at this delta.

    *Guarantee.* An upper bound (Canonne, Kamath & Steinke, 2020, Proposition 12).

    >>> round(epsilon_of_rdp(8.0, 0.5, 1e-5), 4)
    1.7141
    """
    if not math.isfinite(rdp):
        return math.inf
    return max(0.0, rdp - rdp_budget(order, 0.0, delta))


def rdp_budget(order: float, epsilon: float, delta: float) -> float:
    """The RDP at this order that gives epsilon; negative if none does.

    *Guarantee.* The opposite of `epsilon_of_rdp`.

    >>> round(epsilon_of_rdp(8.0, rdp_budget(8.0, 3.0, 1e-5), 1e-5), 9)
    3.0
    """
    check_delta(delta)
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def joined(whole: Sequence[float]) -> tuple[float, ...]:
    """Gaussian releases in which every example takes part, as one of the multiplier that they have together: none, or one.

    1 / sigma^2 adds up. A PLD for each of them would take time in proportion to their number, which a ledger may claim at will.

    *Guarantee.* Not above (sum_k sigma_k^-2)^(-1/2), of which the one release is a Gaussian mechanism that gives all of them.

    >>> joined([]), joined([8.0]), round(joined([3.0, 4.0])[0], 6)
    ((), (8.0,), 2.4)
    """
    if len(whole) < 2:
        return tuple(whole)
    # hypot, because squares of large multipliers leave the range of a float; a little less, for its own rounding.
    return ((1 - 1e-12) / math.hypot(*(1 / sigma for sigma in whole)),)


def rounded_down(levels: Levels, most: int = MOST_LEVELS) -> list[tuple[float, int]]:
    """At most `most` levels that are nowhere above the given ones: neighbours on a logarithmic scale share their smallest.

    >>> rounded_down([(1.0, 1), (1.1, 2), (4.0, 3)], most=2)
    [(1.0, 3), (4.0, 3)]
    """
    merged: Counter[float] = Counter()
    for sigma, count in levels:
        merged[sigma] += count
    ordered = sorted(merged.items())
    if len(ordered) <= most:
        return ordered
    low, high = math.log(ordered[0][0]), math.log(ordered[-1][0])
    bins: dict[int, tuple[float, int]] = {}
    for sigma, count in ordered:
        index = min(int((math.log(sigma) - low) / (high - low) * most), most - 1)
        smallest, total = bins.get(index, (sigma, 0))
        bins[index] = (smallest, total + count)
    return list(bins.values())


def calibrated_scale(
    sample_rate: float,
    shape: Callable[[float], Levels],
    *,
    epsilon: float,
    delta: float,
    whole: Sequence[float] = (),
) -> float:
    """The smallest factor for a noise schedule, within tolerance, whose releases stay within epsilon.

    `shape(factor)` are the levels of the schedule scaled by `factor`; those of `whole` are paid first, as they are. The search
    runs on a coarse grid and ends on the fine one.

    *Guarantee.* `epsilon_of` of the scaled levels is at most `epsilon`, and above 0.995 of it.

    >>> factor = calibrated_scale(0.01, lambda f: [(f, 2000)], epsilon=1.5, delta=1e-5)
    >>> 0.995 * 1.5 < epsilon_of(0.01, [(factor, 2000)], 1e-5) <= 1.5
    True
    """
    target, delta = check_positive("epsilon", epsilon), check_delta(delta)
    check_probability("sample_rate", sample_rate)
    smallest = min(sigma for sigma, _ in shape(1.0))
    if smallest <= 0:
        raise UserError("a schedule with a step of no noise cannot reach any epsilon; make every step's noise above 0")
    if whole and epsilon_of(sample_rate, [], delta, whole=whole) >= target:
        raise UserError(
            f"epsilon {target:g} at delta {delta:g} is spent by the statistics of the training set alone; "
            "give them more noise, or ask for a larger epsilon"
        )
    if 1 - (1 - sample_rate) ** sum(count for _, count in shape(1.0)) <= delta:
        raise UserError(
            f"delta {delta:g} is above the chance that an example is ever sampled; choose a far smaller delta"
        )
    floor, log_factor, ceiling = (
        math.log(multiplier / smallest) for multiplier in (_SMALLEST_MULTIPLIER, 1.0, _LARGEST_MULTIPLIER)
    )

    def rough(levels: Levels) -> float:
        return _by_rdp(composed_event(sample_rate, rounded_down(levels), whole), delta, _ROUGH_ORDERS)

    def coarse(levels: Levels) -> float:
        return epsilon_of(sample_rate, levels, delta, whole=whole, coarse=True)

    def fine(levels: Levels) -> float:
        return epsilon_of(sample_rate, levels, delta, whole=whole)

    found = math.nan
    for bound in (rough, coarse, fine):

        def excess(x: float, bound: Callable[[Levels], float] = bound) -> float:
            # In logarithms epsilon falls almost in a straight line as the noise grows, so few evaluations are needed.
            return math.log(max(bound(shape(math.exp(x))), 1e-300) / target)

        log_factor, found = _solved(excess, log_factor, floor, ceiling)
    if not -_TOLERANCE <= found <= 0:
        if found > 0:
            trouble = "cannot be reached by any noise; ask for a larger one, or take fewer steps"
        elif log_factor < floor + 0.1:
            trouble = "needs almost no noise here; ask for a smaller one"
        else:
            trouble = "is too small to be told from 0 here; ask for a larger one, or for a smaller delta"
        raise UserError(f"epsilon {target:g} at delta {delta:g} {trouble}")
    return math.exp(log_factor)


def _solved(excess: Callable[[float], float], x: float, floor: float, ceiling: float) -> tuple[float, float]:
    """A point where the decreasing `excess` lies in [-tolerance, 0], and its value there: secants inside a shrinking bracket."""
    low, high, slope, value, previous = floor, ceiling, -1.0, math.nan, None
    for _ in range(60):
        value = min(excess(x), 1e3)
        if -_TOLERANCE <= value <= 0 or high - low < 1e-9:
            break
        if previous is not None and value != previous[1]:
            slope = min((value - previous[1]) / (x - previous[0]), -0.1)
        previous = (x, value)
        low, high = (x, high) if value > 0 else (low, x)
        following = x - (value + _TOLERANCE / 4) / slope
        x = following if low < following < high else (low + high) / 2
    return x, value


def _interval(rough: float, smallest: float) -> float:
    """The PLD's grid: proportional to epsilon (by powers of two, so that it is stable), not too fine for the noise to afford."""
    exponent = math.floor(math.log2(max(rough, 1e-6) / 2)) if math.isfinite(rough) else 20
    return max(_GRID * 2.0 ** min(exponent, 20), 5e-5 / max(smallest, 0.5))


def _by_rdp(event: Any, delta: float, orders: Sequence[float] | None = None) -> float:
    from dp_accounting import rdp

    try:
        with _without_warnings():
            accountant = rdp.RdpAccountant(orders).compose(event)
        error = _RDP_ERROR * sum(level.count for level in event.events)
        return float(rdp.compute_epsilon(accountant.orders, accountant.rdp + error, delta)[0])
    except OverflowError:  # so little noise that the moments leave the range of a float
        return math.inf


@contextmanager
def _without_warnings() -> Iterator[None]:
    """An order whose series does not converge is left out, which can only raise epsilon; nobody needs to read that each time."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)


def _by_pld(event: Any, delta: float, interval: float) -> float:
    from dp_accounting import pld

    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(event).get_epsilon(delta))
