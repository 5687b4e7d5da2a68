"""Whether one way to train is better than another, from the accuracies of a few seeds: the tests the papers use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LEVEL = 0.05  # below which the assumptions of a t-test are given up
_SIGNIFICANT = 0.01


@dataclass(frozen=True)
class Verdict:
    """What a comparison found: the difference of the means, and the two-sided p-value of the test that applies.

    >>> verdict = Verdict(0.01, 0.003, "t-test", 0.6, 0.4, (5, 5))
    >>> verdict.significant, verdict.count
    (True, '5 runs each')
    """

    difference: float
    p_value: float | None
    test: str
    normality: float | None  # the smaller of the two Shapiro-Wilk p-values
    equal_variances: float | None  # Levene's p-value
    runs: tuple[int, int]

    @property
    def significant(self) -> bool:
        """At 1%."""
        return self.p_value is not None and self.p_value < _SIGNIFICANT

    @property
    def count(self) -> str:
        """How many runs there were, in words."""
        one, other = self.runs
        if one != other:
            return f"{one} and {other} runs"
        return f"{one} run{'s' if one > 1 else ''} each"


@dataclass(frozen=True)
class Line:
    """The least-squares line through points, y = intercept + slope x, Pearson's correlation and its p-value, and what the 95%
    band of the line's height is made from.

    >>> line = fitted([0.0, 1.0, 2.0, 3.0], [0.0, 1.1, 1.9, 3.0])
    >>> round(line.slope, 2), round(line.correlation, 3), round(line.half_width(1.5), 3)
    (0.98, 0.998, 0.204)
    """

    slope: float
    intercept: float
    correlation: float
    p_value: float
    points: int
    middle: float  # the mean of x
    spread: float  # the sum of (x - middle)^2
    residual: float  # the standard deviation about the line

    def height(self, x: float) -> float:
        """The line at x."""
        return self.intercept + self.slope * x

    def half_width(self, x: float) -> float:
        """How far the 95% confidence band of the line's height goes up and down at x."""
        from scipy import stats

        student = float(stats.t.ppf(0.975, self.points - 2))
        return student * self.residual * math.sqrt(1 / self.points + (x - self.middle) ** 2 / self.spread)


def fitted(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """A line through the points; None if there are fewer than three, or all lie at one x.

    >>> fitted([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    True
    """
    if len(xs) < 3 or len(set(xs)) < 2:
        return None
    from scipy import stats

    found = stats.linregress(xs, ys)
    middle = sum(xs) / len(xs)
    rest = sum((y - found.intercept - found.slope * x) ** 2 for x, y in zip(xs, ys))
    return Line(
        float(found.slope),
        float(found.intercept),
        float(found.rvalue),
        float(found.pvalue),
        len(xs),
        middle,
        sum((x - middle) ** 2 for x in xs),
        math.sqrt(rest / (len(xs) - 2)),
    )


def compared(one: Sequence[float], other: Sequence[float]) -> Verdict:
    """Shapiro-Wilk on both, Levene on the pair, then a t-test, Welch's where variances differ, Mann and Whitney's where the
    numbers are not normal: over all ways to divide the runs, so that ties do no harm. Fewer than three runs each are too few
    for any of it, and fewer than five each for the last, which could not reach 1%.

    >>> verdict = compared([0.981, 0.982, 0.983, 0.982, 0.981], [0.971, 0.969, 0.970, 0.972, 0.970])
    >>> verdict.test, verdict.significant, round(verdict.difference, 4)
    ('t-test', True, 0.0114)
    >>> compared([0.98], [0.97]).test
    'too few runs'
    """
    difference = sum(one) / len(one) - sum(other) / len(other)
    runs = (len(one), len(other))
    if min(runs) < 3:
        return Verdict(difference, None, "too few runs", None, None, runs)
    # Imported here: it takes a second, and listing studies does not need it.
    from scipy import stats

    constant = len(set(one)) == 1 or len(set(other)) == 1
    normality = None if constant else float(min(stats.shapiro(one).pvalue, stats.shapiro(other).pvalue))
    variances = None if constant else float(stats.levene(one, other).pvalue)
    if normality is not None and variances is not None and normality >= _LEVEL:
        equal = variances >= _LEVEL
        p_value = float(stats.ttest_ind(one, other, equal_var=equal).pvalue)
        return Verdict(difference, p_value, "t-test" if equal else "Welch's t-test", normality, variances, runs)
    divisions = math.comb(sum(runs), runs[0])
    if 2 / divisions >= _SIGNIFICANT:
        return Verdict(difference, None, "too few runs", normality, variances, runs)
    every = stats.PermutationMethod(n_resamples=max(divisions, 9999), rng=0)
    p_value = float(stats.mannwhitneyu(one, other, method=every).pvalue)
    return Verdict(difference, p_value, "Mann-Whitney", normality, variances, runs)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The two-sided p-value of a paired t-test over the seeds that both have. Runs with one seed begin with the same weights and
    draw the same batches, so that their difference is free of what those bring. None if there are fewer than three such seeds, if
    all differences are equal, or if they are not normal (Shapiro-Wilk).

    >>> one, other = {0: 0.90, 1: 0.95, 2: 0.92, 3: 0.94}, {0: 0.89, 1: 0.938, 2: 0.911, 3: 0.931}
    >>> paired(one, other) < 0.01 < compared(list(one.values()), list(other.values())).p_value
    True
    """
    differences = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if len(differences) < 3 or len(set(differences)) == 1:
        return None
    from scipy import stats

    if stats.shapiro(differences).pvalue < _LEVEL:
        return None
    return float(stats.ttest_1samp(differences, 0.0).pvalue)
