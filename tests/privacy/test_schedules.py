"""A schedule is a public function of the step, and its levels are what is accounted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.privacy import Constant, Linear, NoiseSchedule, UserError
from tacit.privacy.driven import LossDriven
from tacit.privacy.schedules import levels, schedule_from_dict, schedule_from_text

sigma = st.floats(0, 1e3)
schedules = st.one_of(st.builds(Constant, sigma), st.builds(Linear, sigma, sigma))


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
        lambda: schedule_from_text("linear:5:1:2"),
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
