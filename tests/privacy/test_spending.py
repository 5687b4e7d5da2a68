"""The constant of equal epsilon is neither too low nor a ten-thousandth too high, and what is drawn is a bound at every point."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import (
    Constant,
    Curriculum,
    Linear,
    LossDriven,
    PrivacyPlan,
    Table,
    UserError,
    epsilon_along,
    equal_constant,
)
from tacit.privacy.accounting import epsilons_along

# Paper D: twenty epochs of a hundred steps; the constants as RDP and as PLD account them.
NINE = [
    ("exponential", 5.0, 1.0, 1.0473, 1.0515),
    ("piecewise", 5.0, 1.0, 1.3806, 1.5088),
    ("linear", 5.0, 1.0, 1.5391, 1.8368),
    ("quadratic", 5.0, 1.0, 1.6042, 2.0350),
    ("logarithmic", 1.0, 5.0, 1.6359, 2.1442),
    ("piecewise", 1.0, 5.0, 1.3806, 1.5088),
    ("linear", 1.0, 5.0, 1.5391, 1.8368),
    ("quadratic", 1.0, 5.0, 1.3500, 1.4350),
    ("exponential", 1.0, 5.0, 1.0473, 1.0515),
]


def with_constant(plan, sigma):
    return dataclasses.replace(plan, noise=Constant(sigma))


def check_equal(plan, found, delta, accountant):
    """The definition: at most the plan's epsilon, and more with one ten-thousandth less."""
    assert found == round(found, 4)
    units = round(found * 10_000)
    target = plan.epsilon(delta, accountant=accountant)
    assert with_constant(plan, found).epsilon(delta, accountant=accountant) <= target
    assert with_constant(plan, (units - 1) / 10_000).epsilon(delta, accountant=accountant) > target


@pytest.mark.parametrize(("shape", "first", "last", "by_rdp", "by_pld"), NINE)
def test_the_equal_constants_of_the_papers_nine_schedules(shape, first, last, by_rdp, by_pld):
    plan = PrivacyPlan(sample_rate=600 / 60000, steps=2000, noise=Curriculum(shape, first, last, 20))
    for accountant, expected in (("rdp", by_rdp), ("pld", by_pld)):
        found = equal_constant(plan, 1e-5, accountant=accountant)
        assert found == pytest.approx(expected, abs=1.01e-4)  # the last digit of an epsilon may differ between machines
        check_equal(plan, found, 1e-5, accountant)


sigmas = st.floats(0.4, 20)
schedules = st.one_of(
    st.builds(Linear, sigmas, sigmas),
    st.builds(Curriculum, st.sampled_from(["exponential", "quadratic", "logarithmic"]), sigmas, sigmas, st.just(5)),
    st.builds(Table, st.lists(sigmas, min_size=1, max_size=4).map(tuple)),
)
plans = st.builds(
    PrivacyPlan,
    sample_rate=st.floats(1e-3, 1),
    steps=st.integers(1, 300),
    noise=schedules,
    whole_releases=st.sampled_from([(), (8.0,)]),
)


@given(plans, st.floats(1e-9, 1e-3))
@settings(max_examples=6, deadline=None)
def test_by_rdp_the_equal_constant_costs_no_more_and_a_ten_thousandth_less_noise_does(plan, delta):
    check_equal(plan, equal_constant(plan, delta, accountant="rdp"), delta, "rdp")


@given(plans, st.floats(1e-9, 1e-3))
@settings(max_examples=3, deadline=None)
def test_by_pld_the_equal_constant_costs_no_more_and_a_ten_thousandth_less_noise_does(plan, delta):
    found = equal_constant(plan, delta)
    if plan.epsilon(delta) > 0:
        check_equal(plan, found, delta, "pld")
    else:
        assert with_constant(plan, found).epsilon(delta) == 0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_equal_constant_of_a_constant_is_itself(accountant):
    plan = PrivacyPlan(sample_rate=0.02, steps=100, noise=Constant(1.2345))
    assert equal_constant(plan, 1e-5, accountant=accountant) == 1.2345


def test_a_step_of_no_noise_costs_as_much_as_no_noise_at_all():
    assert equal_constant(PrivacyPlan(sample_rate=0.1, steps=10, noise=Linear(3.0, 0.0)), 1e-5) == 0.0


def test_a_bad_first_guess_is_mended():
    from tacit.privacy.spending import _first_within

    for guess, slope in ((1.0, -1.0), (10**9, -0.1), (500.0, -30.0)):
        assert _first_within(lambda units: 1e4 / units, 7.3, guess, slope) == math.ceil(1e4 / 7.3)
        assert _first_within(lambda units: max(0.0, 1000.0 - units), 0.0, guess, slope) == 1000


def test_noise_that_follows_the_loss_costs_what_its_filter_costs():
    plan = PrivacyPlan(sample_rate=0.05, steps=80, noise=LossDriven(1.0, 3.0)).calibrated(epsilon=2.0, delta=1e-5)
    check_equal(plan, equal_constant(plan, 1e-5, accountant="rdp"), 1e-5, "rdp")
    with pytest.raises(UserError, match="not known beforehand"):
        epsilon_along(plan, 1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("whole", [(), (6.0,)])
def test_what_is_spent_on_the_way_is_a_bound_at_every_point_and_close_to_it(accountant, whole):
    noise = Table((4.0, 1.5, 3.0))
    plan = PrivacyPlan(sample_rate=0.02, steps=151, noise=noise, whole_releases=whole)
    along = epsilon_along(plan, 1e-5, points=4, accountant=accountant)
    assert [steps for steps, _ in along] == [0, 38, 76, 113, 151]
    for steps, epsilon in along:
        levels = [(plan.noise_multiplier(step), 1) for step in range(steps)]
        exact = plan.epsilon_after(levels, 1e-5, whole=whole, accountant=accountant)
        assert exact <= epsilon * (1 + 1e-9)
        assert epsilon <= exact * 1.01 + 1e-3
    assert [epsilon for _, epsilon in along] == sorted(epsilon for _, epsilon in along)


def test_a_long_schedule_is_rounded_down_on_the_way_never_up():
    plan = PrivacyPlan(sample_rate=0.01, steps=1000, noise=Linear(5.0, 1.0))
    end = epsilon_along(plan, 1e-5, points=20, accountant="rdp")[-1][1]
    exact = PrivacyPlan(sample_rate=0.01, steps=25, noise=Table(tuple(5 - 4 * k / 24 for k in range(25))))
    assert len(exact.levels()) == 25  # which are not rounded, each for forty steps
    thin = exact.epsilon_after([(sigma, 40) for sigma, _ in exact.levels()], 1e-5, accountant="rdp")
    assert thin * 0.98 < end < thin * 1.1


def test_from_a_part_without_noise_on_nothing_is_guaranteed():
    found = epsilons_along(0.1, [[(1.0, 5)], [(0.0, 1)], [(1.0, 5)]], 1e-5)
    assert math.isfinite(found[0])
    assert found[1:] == [math.inf, math.inf]
    assert epsilons_along(0.1, [[(1.0, 5)]], 1e-5, whole=[0.0]) == [math.inf]
    assert epsilons_along(0.1, [[(1e-4, 5)]], 1e-5)[0] > 1e6
    assert epsilons_along(0.1, [], 1e-5) == []


@pytest.mark.parametrize(("accountant", "delta", "points"), [("pdl", 1e-5, 2), ("pld", 0.0, 2), ("pld", 1e-5, 0)])
def test_a_way_that_makes_no_sense_is_refused(accountant, delta, points):
    with pytest.raises(UserError):
        epsilon_along(PrivacyPlan(sample_rate=0.1, steps=10), delta, points=points, accountant=accountant)


@pytest.mark.parametrize(("shape", "first", "last"), [row[:3] for row in NINE])
@given(target=st.floats(0.5, 8))
@settings(max_examples=2, deadline=None)
def test_every_curriculum_is_calibrated_to_any_target_from_below(shape, first, last, target):
    plan = PrivacyPlan(sample_rate=0.02, steps=250, noise=Curriculum(shape, first, last, epochs=5))
    found = plan.calibrated(epsilon=target, delta=1e-5)
    assert 0.995 * target <= found.epsilon(1e-5) <= target
    assert found.noise_multiplier(249) * first == pytest.approx(found.noise_multiplier(0) * plan.noise_multiplier(249))
