"""A schedule is a public function of the step, and its levels are what is accounted."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Constant, Linear, NoiseSchedule, PrivacyPlan, UserError
from tacit.privacy.curricula import SHAPES, Curriculum, Table
from tacit.privacy.driven import LossDriven
from tacit.privacy.schedules import levels, schedule_from_dict, schedule_from_text

sigma = st.floats(0, 1e3)
curricula = st.builds(Curriculum, st.sampled_from(sorted(SHAPES)), sigma, sigma, st.integers(1, 30), st.booleans())
tables = st.builds(Table, st.lists(sigma, min_size=1, max_size=20).map(tuple))
schedules = st.one_of(st.builds(Constant, sigma), st.builds(Linear, sigma, sigma), curricula, tables)


@given(schedules, st.integers(1, 60))
def test_levels_count_every_step_once(schedule, steps):
    counted = levels(schedule, steps)
    assert sum(count for _, count in counted) == steps
    assert sorted(level for level, count in counted for _ in range(count)) == sorted(
        schedule.multiplier(step, steps) for step in range(steps)
    )
    assert len({level for level, _ in counted}) == len(counted)


@given(schedules, st.floats(1e-3, 1e3), st.integers(1, 30))
def test_scaling_multiplies_every_level(schedule, factor, steps):
    scaled = schedule.scaled(factor)
    for step in range(steps):
        expected = schedule.multiplier(step, steps) * factor
        assert scaled.multiplier(step, steps) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(sigma, sigma, st.integers(2, 50))
def test_a_line_goes_from_its_first_to_its_last_level_without_leaving_them(first, last, steps):
    values = [Linear(first, last).multiplier(step, steps) for step in range(steps)]
    assert values[0] == first
    assert values[-1] == pytest.approx(last, abs=1e-9)
    assert all(min(first, last) - 1e-9 <= value <= max(first, last) + 1e-9 for value in values)
    assert values in (sorted(values), sorted(values, reverse=True))


def test_a_line_of_one_step_is_its_first_level():
    assert levels(Linear(5.0, 1.0), 1) == ((5.0, 1),)


@given(schedules)
def test_a_schedule_survives_its_description(schedule):
    assert schedule_from_dict(schedule.to_dict()) == schedule
    assert isinstance(schedule, NoiseSchedule)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_schedule_survives_the_command_line(first, last):
    assert schedule_from_text(f"linear:{first!r}:{last!r}") == Linear(first, last)
    assert schedule_from_text(f"constant:{first!r}") == Constant(first)


def test_a_loss_driven_schedule_takes_its_reference_loss_as_a_third_number():
    assert schedule_from_text("loss-driven:1:3") == LossDriven(
        1.0, 3.0, reference=math.log(10), loss_bound=2 * math.log(10)
    )
    given = schedule_from_text("loss-driven:1:3:0.69")
    assert given == LossDriven(1.0, 3.0, reference=0.69, loss_bound=1.38)
    assert given.multiplier_at(0.69) == given.multiplier_at(5.0) == 1.0
    assert given.multiplier_at(0.35) > 1.0
    assert schedule_from_dict(given.to_dict()) == given


@pytest.mark.parametrize(
    "make",
    [
        lambda: Constant(-1.0),
        lambda: Constant(math.nan),
        lambda: Constant("1"),
        lambda: Linear(1.0, math.inf),
        lambda: Linear(-1.0, 1.0),
        lambda: levels(Constant(1.0), 0),
        lambda: schedule_from_text("linear:5"),
        lambda: schedule_from_text("linear:5:x"),
        lambda: schedule_from_text("constant:1:2"),
        lambda: schedule_from_text("constant:nan"),
        lambda: schedule_from_text("linear:5:1:2:3"),
        lambda: schedule_from_dict({"kind": "table", "multipliers": []}),
        lambda: schedule_from_dict({"kind": "curriculum", "shape": "cubic", "first": 1.0, "last": 2.0, "epochs": 3}),
        lambda: schedule_from_text("loss-driven:1"),
        lambda: schedule_from_text("loss-driven:1:3:0"),
        lambda: schedule_from_text("loss-driven:1:3:nan"),
        lambda: schedule_from_text("loss-driven:1:3:1:2"),
        lambda: schedule_from_text("lineal:5:1"),
        lambda: schedule_from_text(""),
        lambda: schedule_from_dict({"kind": "linear", "first": 1.0}),
        lambda: schedule_from_dict({"first": 1.0, "last": 2.0}),
        lambda: schedule_from_dict({"kind": ["linear"], "first": 1.0, "last": 2.0}),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(make):
    with pytest.raises(UserError):
        make()


# Paper D: twenty epochs of a hundred steps, multipliers from 5 to 1; the RDP epsilons that it prints, and ours agree with.
@pytest.mark.parametrize(
    ("shape", "epsilon"), [("exponential", 2.61), ("piecewise", 1.64), ("linear", 1.40), ("quadratic", 1.32)]
)
def test_the_decreasing_curricula_have_the_papers_epsilons(shape, epsilon):
    plan = PrivacyPlan(sample_rate=600 / 60000, steps=2000, noise=Curriculum(shape, 5.0, 1.0, 20))
    assert round(plan.epsilon(1e-5, accountant="rdp"), 2) == epsilon


def by_the_paper(shape, t, epochs, falling):
    """Its formulas as printed, for multipliers between 5 and 1."""
    if shape == "exponential" and falling:
        asymptote = (1 - 5 * math.exp(-(epochs - 1))) / (1 - math.exp(-(epochs - 1)))
        return (5 - asymptote) * math.exp(-t) + asymptote
    if shape == "exponential":
        start = (math.exp(epochs - 1) - 5) / (math.exp(epochs - 1) - 1)
        return (1 - start) * math.exp(t) + start
    if shape == "logarithmic":
        return 1 + 4 * math.log(t + 1) / math.log(epochs + 1)
    part = {
        "linear": t / (epochs - 1),
        "quadratic": t**2 / (epochs - 1) ** 2,
        "piecewise": math.floor(t / (epochs / 5)) / 4,
    }[shape]
    return 5 - 4 * part if falling else 1 + 4 * part


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("falling", [True, False])
def test_a_curriculum_is_the_papers_formula_in_every_epoch(shape, falling):
    if shape == "logarithmic" and falling:
        pytest.skip("the paper has it rising only")
    schedule = Curriculum(shape, *((5.0, 1.0) if falling else (1.0, 5.0)), epochs=20)
    for step in range(2000):
        assert schedule.multiplier(step, 2000) == pytest.approx(by_the_paper(shape, step // 100, 20, falling))


@given(curricula, st.integers(1, 200))
def test_a_curriculum_stays_between_its_ends_and_goes_one_way(schedule, steps):
    values = [schedule.multiplier(step, steps) for step in range(steps)]
    low, high = sorted((schedule.first, schedule.last))
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)
    slack = 1e-9 * (1 + high)
    rising = all(b >= a - slack for a, b in pairwise(values))
    falling = all(b <= a + slack for a, b in pairwise(values))
    assert rising or falling
    assert values[0] == pytest.approx(schedule.first)
    assert schedule.smooth or len(set(values)) <= schedule.epochs


noisy = st.floats(0.5, 8)
some_noise = st.one_of(
    st.builds(Linear, noisy, noisy),
    st.builds(Curriculum, st.sampled_from(sorted(SHAPES)), noisy, noisy, st.integers(1, 6), st.booleans()),
    st.builds(Table, st.lists(noisy, min_size=1, max_size=6).map(tuple)),
)


@pytest.mark.parametrize(("accountant", "grid"), [("pld", 2e-3), ("rdp", 1e-9)])  # a coarse PLD says that much too much
@given(noise=some_noise, rate=st.floats(1e-3, 0.2), steps=st.integers(1, 60))
@settings(max_examples=5, deadline=None)
def test_any_schedule_costs_no_less_than_its_largest_constant_and_no_more_than_its_smallest(
    accountant, grid, noise, rate, steps
):
    def epsilon(noise):
        return PrivacyPlan(sample_rate=rate, steps=steps, noise=noise).epsilon(1e-5, accountant=accountant)

    (smallest, _), *_, (largest, _) = [*levels(noise, steps)] * 2
    mixed = epsilon(noise)
    assert epsilon(Constant(largest)) <= mixed * (1 + grid) + 1e-6
    assert mixed <= epsilon(Constant(smallest)) * (1 + grid) + 1e-6


def test_a_table_on_the_command_line():
    assert schedule_from_text("table:5,4,3.5,1") == Table((5.0, 4.0, 3.5, 1.0))
    assert schedule_from_text("table:1, 5", epochs=20) == Table((1.0, 5.0))
    assert schedule_from_text("table:2") == Table((2.0,))
    for wrong in ("table", "table:", "table:5:1", "table:5,,1", "table:5,x", "table:5,-1", "table:5,nan"):
        with pytest.raises(UserError, match=r"table|noise multiplier"):
            schedule_from_text(wrong)


def test_curricula_on_the_command_line():
    assert schedule_from_text("exponential:5:1:20") == Curriculum("exponential", 5.0, 1.0, 20)
    assert schedule_from_text("quadratic:5:1", epochs=7.6) == Curriculum("quadratic", 5.0, 1.0, 8)
    assert schedule_from_text("linear:5:1:4") == Curriculum("linear", 5.0, 1.0, 4)
    assert schedule_from_text("linear:5:1", epochs=4) == Linear(5.0, 1.0)
    for wrong in (
        "exponential:5:1",
        "exponential:5",
        "exponential:5:1:0",
        "exponential:5:1:2.5",
        "exponential:5:1:2:3",
    ):
        with pytest.raises(UserError, match="exponential"):
            schedule_from_text(wrong)


def test_a_thousand_levels_are_accounted_at_once_and_never_too_low():
    import time

    noise = Table.of(lambda part: 5 - 4 * part, 1000)
    plan = PrivacyPlan(sample_rate=0.01, steps=1000, noise=noise)
    begun = time.process_time()
    found = plan.epsilon(1e-5)
    assert time.process_time() - begun < 5
    more_noise = Table(tuple(math.ceil(value * 8) / 8 for value in noise.multipliers))  # at every step, in 33 levels
    less_noise = Table(tuple(math.floor(value * 8) / 8 for value in noise.multipliers))
    low, high = (
        PrivacyPlan(sample_rate=0.01, steps=1000, noise=other).epsilon(1e-5) for other in (more_noise, less_noise)
    )
    assert low <= found <= high
