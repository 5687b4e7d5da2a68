"""The bounds on attackers hold for real mechanisms, and are reached by the worst one."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from tacit.privacy import UserError
from tacit.privacy.meaning import factor_of, most_accuracy, most_true_positives, of_several_examples

epsilons = st.floats(0, 30)
deltas = st.floats(1e-12, 0.5)
rates = st.floats(1e-9, 1)


def worst_roc(epsilon, delta):
    """(f, t) along the decisions on the outcomes of the mechanism that every other (epsilon, delta) one can be made from: one
    outcome that only members give, with probability delta, two that both give, and one that only the others give."""
    likely, unlikely = ((1 - delta) / (1 + math.exp(sign * epsilon)) for sign in (-1, 1))
    return [(0.0, 0.0), (0.0, delta), (unlikely, delta + likely), (1 - delta, 1.0), (1.0, 1.0)]


@given(epsilons, deltas, rates)
def test_the_worst_mechanism_reaches_the_bound_at_every_false_positive_rate(epsilon, delta, rate):
    points = worst_roc(epsilon, delta)
    reached = max(
        t0 + (t1 - t0) * (rate - f0) / (f1 - f0) if f1 > f0 else t1
        for (f0, t0), (f1, t1) in pairwise(points)
        if f0 <= rate <= f1
    )
    assert most_true_positives(epsilon, delta, rate) == pytest.approx(reached, rel=1e-9, abs=1e-12)


@given(epsilons, deltas)
def test_the_worst_mechanism_reaches_the_accuracy(epsilon, delta):
    best = max((t + 1 - f) / 2 for f, t in worst_roc(epsilon, delta))
    assert most_accuracy(epsilon, delta) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-2])
def test_the_gaussian_mechanism_stays_below_the_bound(sigma, delta):
    """The most powerful test of N(0, sigma^2) against N(1, sigma^2), and the exact epsilon of Balle and Wang (2018)."""

    def excess(epsilon):
        mean = 1 / (2 * sigma)
        upper = stats.norm.cdf(mean - epsilon * sigma)
        return upper - math.exp(epsilon) * stats.norm.cdf(-mean - epsilon * sigma) - delta

    epsilon = optimize.brentq(excess, 0, 60)
    for rate in (1e-6, 1e-3, 0.01, 0.1, 0.5, 0.9):
        power = stats.norm.cdf(stats.norm.ppf(rate) + 1 / sigma)
        assert power <= most_true_positives(epsilon, delta, rate) + 1e-9
    assert stats.norm.cdf(1 / (2 * sigma)) <= most_accuracy(epsilon, delta)


@given(epsilons, deltas, rates)
def test_a_bound_is_a_probability_and_never_below_guessing(epsilon, delta, rate):
    assert rate - 1e-12 <= most_true_positives(epsilon, delta, rate) <= 1
    assert 0.5 <= most_accuracy(epsilon, delta) <= 1


@given(epsilons, deltas, st.integers(1, 6))
def test_several_examples_are_one_after_the_other(epsilon, delta, count):
    """From k - 1 examples to k, P <= e^epsilon (e^((k-1) epsilon) Q + delta') + delta."""
    wide, rest = 0.0, 0.0
    for _ in range(count):
        wide, rest = wide + epsilon, math.exp(epsilon) * rest + delta
    found = of_several_examples(epsilon, delta, count)
    assert found == (pytest.approx(wide), pytest.approx(rest))


def test_an_epsilon_too_large_for_a_float_bounds_nothing():
    assert factor_of(1e4) == math.inf
    assert most_true_positives(1e4, 1e-5, 0.001) == most_accuracy(1e4, 1e-5) == 1.0
    assert of_several_examples(1e4, 1e-5, 2)[1] == math.inf


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate"), [(-1, 1e-5, 0.1), (math.nan, 1e-5, 0.1), (1, 0, 0.1), (1, 1, 0.1), (1, 1e-5, 0)]
)
def test_what_makes_no_sense_is_refused(epsilon, delta, rate):
    with pytest.raises(UserError):
        most_true_positives(epsilon, delta, rate)
