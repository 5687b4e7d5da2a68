"""Epsilon: known values, exact formulas written here anew, and the order in which bounds must lie."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from tacit.privacy import (
    Constant,
    Linear,
    PrivacyPlan,
    UserError,
    accounting,
    effective_multiplier,
    epsilon_of,
    epsilon_of_all,
)
from tacit.privacy.accounting import ACCOUNTANTS, calibrated_scale, composed_event, rounded_down
from tacit.privacy.schedules import levels

CIFAR, MNIST = 1024 / 50000, 600 / 60000


def rdp(rate, some, delta):
    return epsilon_of(rate, some, delta, accountant="rdp")


def test_known_values_of_rdp_and_pld():
    assert rdp(CIFAR, [(1.54, 1440)], 1e-5) == pytest.approx(2.585, abs=6e-4)
    assert rdp(MNIST, [(1.38, 2000)], 1e-5) == pytest.approx(1.641, abs=6e-4)
    assert epsilon_of(CIFAR, [(1.54, 1440)], 1e-5) == pytest.approx(2.365, abs=6e-4)


def test_forty_groups_with_noise_each_of_their_own_cost_fifty_times_what_was_thought():
    effective = effective_multiplier([1.0] * 40, [2.8] * 40)
    assert effective == pytest.approx(0.443, abs=1e-3)
    assert rdp(4096 / 50000, [(effective, 600)], 1e-5) == pytest.approx(166, abs=1)
    assert rdp(4096 / 50000, [(2.8, 600)], 1e-5) == pytest.approx(3.46, abs=0.01)


def gaussian_delta(epsilon, sigma):
    """Balle and Wang (2018), Theorem 8, for sensitivity 1."""
    ratio = 1 / (2 * sigma)
    return stats.norm.cdf(ratio - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(-ratio - epsilon * sigma)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(1.0, 1, 1e-5), (4.0, 1, 1e-6), (0.7, 1, 1e-3), (6.0, 25, 1e-5)])
def test_without_sampling_epsilon_is_that_of_the_exact_gaussian_mechanism(sigma, steps, delta):
    """T releases at rate 1 are one release with noise sigma / sqrt(T)."""
    one = sigma / math.sqrt(steps)
    exact = optimize.brentq(lambda epsilon: gaussian_delta(epsilon, one) - delta, 0, 100)
    pld = epsilon_of(1.0, [(sigma, steps)], delta)
    assert exact * (1 - 1e-6) <= pld <= exact * 1.005 + 1e-4
    assert exact <= rdp(1.0, [(sigma, steps)], delta) <= exact * 1.3


def hockey_stick(epsilon, rate, sigma, direction):
    """The integral of max(P - e^epsilon Q, 0): P mixes N(0), N(1) at the sampling rate, Q is N(0), or the other way round."""

    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    without = stats.norm.pdf(x, 0, sigma)
    mixed = (1 - rate) * without + rate * stats.norm.pdf(x, 1, sigma)
    upper, lower = (mixed, without) if direction == "remove" else (without, mixed)
    return float(integrate.trapezoid(np.maximum(upper - math.exp(epsilon) * lower, 0), x))


@pytest.mark.parametrize(("rate", "sigma", "delta"), [(0.1, 0.8, 1e-4), (0.5, 1.5, 1e-3)])
def test_with_sampling_one_release_has_the_epsilon_of_the_worse_direction(rate, sigma, delta):
    """Below the larger of both hockey-stick divergences no epsilon holds; a thousandth above it one does."""
    pld = epsilon_of(rate, [(sigma, 1)], delta)
    for direction in ("add", "remove"):
        assert hockey_stick(pld, rate, sigma, direction) <= delta * (1 + 1e-6)
        assert hockey_stick(rdp(rate, [(sigma, 1)], delta), rate, sigma, direction) <= delta * (1 + 1e-6)
    assert max(hockey_stick(pld * 0.998, rate, sigma, direction) for direction in ("add", "remove")) > delta


def convolved_delta(epsilon, rates, sigmas):
    """The delta of two releases, removing an example, by summing over a grid of both outputs."""
    grid = np.linspace(-9 * max(sigmas), 1 + 9 * max(sigmas), 2001)
    logs, masses = [], []
    for rate, sigma in zip(rates, sigmas):
        without = stats.norm.pdf(grid, 0, sigma)
        mixed = (1 - rate) * without + rate * stats.norm.pdf(grid, 1, sigma)
        logs.append(np.log1p(rate * np.expm1((grid - 0.5) / sigma**2)))
        masses.append(mixed * (grid[1] - grid[0]))
    loss = logs[0][:, None] + logs[1][None, :]
    weight = masses[0][:, None] * masses[1][None, :]
    return float((weight * np.maximum(-np.expm1(epsilon - loss), 0)).sum())


def test_two_levels_compose_as_their_exact_joint_distribution_does():
    some, delta = [(0.9, 1), (1.3, 1)], 1e-4
    pld = epsilon_of(0.2, some, delta)
    assert convolved_delta(pld, (0.2, 0.2), (0.9, 1.3)) <= delta * (1 + 1e-4)
    assert convolved_delta(pld * 0.995, (0.2, 0.2), (0.9, 1.3)) > delta


def test_two_rates_compose_as_their_exact_joint_distribution_does():
    parts, delta = [(0.3, [(0.9, 1)]), (0.1, [(0.7, 1)])], 1e-4
    pld = epsilon_of_all(parts, delta)
    assert convolved_delta(pld, (0.3, 0.1), (0.9, 0.7)) <= delta * (1 + 1e-4)
    assert convolved_delta(pld * 0.995, (0.3, 0.1), (0.9, 0.7)) > delta
    assert pld <= epsilon_of_all(parts, delta, accountant="rdp")


def test_several_parts_are_one_where_rates_are_equal_and_whole_releases_are_of_none_of_them():
    one = epsilon_of(0.05, [(1.5, 60), (2.0, 40)], 1e-5, whole=[8.0, 9.0])
    parts = [(0.05, [(2.0, 40), (1.5, 10)]), (0.05, []), (0.05, [(1.5, 50)]), (0.9, [(1.0, 0)])]
    assert epsilon_of_all(parts, 1e-5, whole=[8.0, 9.0]) == one
    assert epsilon_of_all([], 1e-5, whole=[8.0]) == epsilon_of(0.5, [], 1e-5, whole=[8.0]) > 0
    assert epsilon_of_all([], 1e-5) == 0
    assert epsilon_of_all([(0.1, [(1.0, 5)]), (0.2, [(0.0, 1)])], 1e-5) == math.inf


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_part_more_costs_more_and_its_rate_matters(accountant):
    def epsilon(*parts):
        return epsilon_of_all(parts, 1e-5, accountant=accountant, coarse=True)

    first, second, more = (0.02, [(1.2, 200)]), (0.05, [(2.0, 100)]), (0.1, [(2.0, 100)])
    assert max(epsilon(first), epsilon(second)) < epsilon(first, second) < epsilon(first) + epsilon(second)
    assert epsilon(first, second) < epsilon(first, more)


def test_many_levels_of_many_rates_are_rounded_down_to_a_few_dozen_in_all(monkeypatch):
    seen = []
    compose = accounting._composed
    monkeypatch.setattr(accounting, "_composed", lambda parts, whole: seen.append(parts) or compose(parts, whole))
    parts = [(rate, levels(Linear(4.0, 2.0), 15)) for rate in (0.01, 0.02, 0.03)]
    rounded = epsilon_of_all(parts, 1e-5, accountant="rdp")
    assert {len(some) for _, some in seen[0]} <= set(range(8, 11))
    assert [sum(count for _, count in some) for _, some in seen[0]] == [15] * 3
    monkeypatch.setattr(accounting, "MOST_LEVELS", 1000)
    assert rounded >= epsilon_of_all(parts, 1e-5, accountant="rdp")


GRID = [
    (rate, [(sigma, steps)], delta)
    for rate, sigma, steps, delta in [
        (0.01, 0.6, 100, 1e-5),
        (0.01, 1.0, 3000, 1e-6),
        (0.1, 8.0, 1000, 1e-7),
        (1.0, 10.0, 20, 1e-5),
        (1e-3, 1.0, 10000, 1e-5),
    ]
] + [(0.02, list(levels(Linear(3.0, 1.0), 3)), 1e-5)]


@pytest.mark.parametrize(("rate", "some", "delta"), GRID)
def test_pld_is_at_most_rdp_and_a_coarse_grid_is_not_below_a_fine_one(rate, some, delta):
    fine, coarse = epsilon_of(rate, some, delta), epsilon_of(rate, some, delta, coarse=True)
    assert 0 < fine <= rdp(rate, some, delta)
    assert fine * (1 - 1e-4) <= coarse <= fine * 1.05


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise_and_delta(accountant):
    def epsilon(rate=0.02, sigma=1.2, steps=200, delta=1e-5):
        return epsilon_of(rate, [(sigma, steps)], delta, accountant=accountant, coarse=True)

    base = epsilon()
    assert epsilon(steps=100) < base < epsilon(steps=400)
    assert epsilon(rate=0.01) < base < epsilon(rate=0.04)
    assert epsilon(sigma=2.4) < base < epsilon(sigma=0.9)
    assert epsilon(delta=1e-4) < base < epsilon(delta=1e-7)


def test_a_schedule_costs_between_its_largest_and_its_smallest_constant():
    for accountant, steps in [("rdp", 10), ("pld", 3)]:
        least, schedule, most = (
            epsilon_of(0.1, some, 1e-5, accountant=accountant)
            for some in ([(3.0, steps)], levels(Linear(3.0, 1.0), steps), [(1.0, steps)])
        )
        assert least < schedule < most


some_levels = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 100)), min_size=1, max_size=80)


@given(some_levels, st.integers(1, 40))
def test_rounding_down_raises_no_sigma_keeps_the_counts_and_the_limit(some, most):
    rounded = rounded_down(some, most)
    assert len(rounded) <= max(most, 1)
    before = sorted(sigma for sigma, count in some for _ in range(count))
    after = sorted(sigma for sigma, count in rounded for _ in range(count))
    assert len(before) == len(after)
    assert all(low <= high for low, high in zip(after, before))
    assert {sigma for sigma, _ in rounded} <= {sigma for sigma, _ in some}


def test_rounding_down_can_only_raise_epsilon():
    some = levels(Linear(4.0, 1.0), 12)
    epsilon_of_all = rdp(0.02, some, 1e-5)
    for most in (3, 8):
        rounded = rounded_down(some, most)
        assert len(rounded) <= most
        assert rdp(0.02, rounded, 1e-5) >= epsilon_of_all
    some = levels(Linear(4.0, 1.0), 4)
    assert epsilon_of(0.1, rounded_down(some, 2), 1e-5, coarse=True) > epsilon_of(0.1, some, 1e-5, coarse=True)


def test_the_same_level_listed_many_times_is_one_level():
    assert rounded_down([(1.0, 2)] * 40) == [(1.0, 80)]
    assert epsilon_of(0.02, [(1.5, 1)] * 40, 1e-5) == epsilon_of(0.02, [(1.5, 40)], 1e-5)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_numpy_scalars_and_whole_numbers_give_the_epsilon_of_floats(accountant):
    """dp-accounting itself mistreats them inside nested events."""
    expected = epsilon_of(0.5, [(2.0, 30)], 1e-5, accountant=accountant)
    for kind in (int, np.float32, np.float64):
        some = [(kind(2), np.int64(30))]
        assert epsilon_of(np.float64(0.5), some, np.float64(1e-5), accountant=accountant) == expected
    whole = epsilon_of(1.0, [(8.0, 5)], 1e-5, accountant=accountant)
    assert epsilon_of(1, [(8, np.int32(5))], 1e-5, accountant=accountant) == whole


def test_the_event_holds_plain_numbers_only():
    event = composed_event(np.float64(0.5), [(np.float64(2), np.int64(3))])
    sampled = event.events[0]
    assert type(sampled.count) is int
    assert type(sampled.event.sampling_probability) is float
    assert type(sampled.event.event.noise_multiplier) is float


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_release_without_noise_is_infinity_and_no_release_is_nothing(accountant):
    assert epsilon_of(0.1, [(0.0, 1), (5.0, 10)], 1e-5, accountant=accountant) == math.inf
    assert epsilon_of(0.1, [(1e-160, 1)], 1e-5, accountant=accountant) == math.inf
    assert epsilon_of(0.1, [], 1e-5, accountant=accountant) == 0
    assert epsilon_of(0.1, [(0.0, 0), (1.0, 0)], 1e-5, accountant=accountant) == 0


@settings(max_examples=15, deadline=None)
@given(st.floats(0, 1e300), st.floats(1e-12, 1), st.integers(1, 1000))
def test_rdp_answers_for_every_noise_however_extreme(sigma, rate, steps):
    epsilon = rdp(rate, [(sigma, steps)], 1e-6)
    assert epsilon >= 0
    assert not math.isnan(epsilon)


@pytest.mark.parametrize("sigma", [1e-5, 1e-3, 0.015, 1e300])
def test_pld_answers_for_extreme_noise(sigma):
    epsilon = epsilon_of(0.5, [(sigma, 3)], 1e-5, coarse=True)
    assert epsilon > 100 if sigma < 1 else epsilon == 0


def test_rounding_errors_of_rdp_never_pass_for_no_loss_at_all():
    """A thousand million releases of almost nothing: RDP of one is below the rounding error, the sum of all is not nothing."""
    almost_a_gaussian = 0.5 * math.sqrt(10**9) / 1e6
    exact = optimize.brentq(lambda epsilon: gaussian_delta(epsilon, 1 / almost_a_gaussian) - 1e-9, 0, 1)
    assert rdp(0.5, [(1e6, 10**9)], 1e-9) >= exact > 0.01


@pytest.mark.parametrize("delta", [1e-12, 1e-14, 1e-18])
def test_a_delta_near_the_rounding_error_of_a_pld_is_answered_by_rdp(delta):
    assert epsilon_of(0.3, [(2.0, 200)], delta) == rdp(0.3, [(2.0, 200)], delta)


@pytest.mark.parametrize(
    ("rate", "schedule", "steps", "epsilon"),
    [
        (CIFAR, Constant(1.0), 1440, 3.0),
        (MNIST, Constant(7.0), 2000, 0.05),
        (0.1, Constant(1.0), 30, 50.0),
        (1.0, Constant(1.0), 10, 1.0),
        (0.1, Linear(3.0, 1.0), 2, 2.0),
    ],
)
def test_calibration_never_exceeds_the_target_and_misses_it_by_less_than_half_a_percent(rate, schedule, steps, epsilon):
    plan = PrivacyPlan(sample_rate=rate, steps=steps, noise=schedule)
    calibrated = plan.calibrated(epsilon=epsilon, delta=1e-5)
    assert 0.995 * epsilon < calibrated.epsilon(1e-5) <= epsilon
    ratio = calibrated.noise_multiplier(0) / plan.noise_multiplier(0)
    assert calibrated.noise_multiplier(steps - 1) == pytest.approx(ratio * plan.noise_multiplier(steps - 1))
    assert (calibrated.sample_rate, calibrated.steps, calibrated.clipping) == (plan.sample_rate, steps, plan.clipping)


@pytest.mark.parametrize(
    ("rate", "schedule", "epsilon", "delta"),
    [
        (0.1, Constant(0.0), 1.0, 1e-5),
        (0.1, Linear(1.0, 0.0), 1.0, 1e-5),
        (0.1, Constant(1.0), 1e-9, 1e-30),
        (0.1, Constant(1.0), 1e7, 1e-5),
        (1e-9, Constant(1.0), 1.0, 1e-5),
        (0.1, Constant(1.0), 0.0, 1e-5),
        (0.1, Constant(1.0), -1.0, 1e-5),
        (0.1, Constant(1.0), math.nan, 1e-5),
        (0.1, Constant(1.0), 1.0, 0.0),
        (0.1, Constant(1.0), 1.0, 1.0),
        (0.1, Constant(1.0), 1.0, math.nan),
    ],
)
def test_a_target_that_no_noise_reaches_is_refused(rate, schedule, epsilon, delta):
    with pytest.raises(UserError):
        PrivacyPlan(sample_rate=rate, steps=20, noise=schedule).calibrated(epsilon=epsilon, delta=delta)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: epsilon_of(0.0, [(1.0, 1)], 1e-5),
        lambda: epsilon_of(1.5, [(1.0, 1)], 1e-5),
        lambda: epsilon_of(0.1, [(1.0, 1)], 0),
        lambda: epsilon_of(0.1, [(1.0, 1)], 1.0),
        lambda: epsilon_of(0.1, [(math.nan, 1)], 1e-5),
        lambda: epsilon_of(0.1, [(-1.0, 1)], 1e-5),
        lambda: epsilon_of(0.1, [(1.0, -1)], 1e-5),
        lambda: epsilon_of(0.1, [(1.0, 2.9)], 1e-5),
        lambda: epsilon_of(0.1, [(1.0, 1)], 1e-5, accountant="moments"),
        lambda: epsilon_of_all([(0.1, [(1.0, 1)]), (1.5, [(1.0, 1)])], 1e-5),
        lambda: epsilon_of_all([(0.1, [(1.0, 1)]), (0.5, [(-1.0, 1)])], 1e-5),
        lambda: calibrated_scale(2.0, lambda f: [(f, 3)], epsilon=1.0, delta=1e-5),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(ask):
    with pytest.raises(UserError):
        ask()


def test_a_long_schedule_that_ends_without_noise_has_no_epsilon():
    assert PrivacyPlan(sample_rate=0.1, steps=100, noise=Linear(5.0, 0.0)).epsilon(1e-5) == math.inf
