"""One frozen plan, from which everything that runs and everything that is claimed is made."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tacit.privacy import Constant, Flat, Grouped, Ledger, Linear, PrivacyPlan, Randomness, UserError
from tacit.privacy.accounting import composed_event

positive = st.floats(1e-3, 1e3)
plans = st.builds(
    PrivacyPlan,
    sample_rate=st.floats(1e-6, 1),
    steps=st.integers(1, 10**6),
    clipping=st.one_of(
        st.builds(Flat, positive),
        st.builds(
            lambda a, b, s: Grouped((("x*",), ("y*", "z")), (a, b), s), positive, positive, st.none() | st.just((1, 2))
        ),
    ),
    noise=st.one_of(st.builds(Constant, positive), st.builds(Linear, positive, positive)),
    expected_batch_size=st.none() | positive,
)
PLAN = PrivacyPlan(sample_rate=0.1, steps=7, clipping=Flat(0.5), noise=Linear(3.0, 1.0), expected_batch_size=32)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PrivacyPlan)])
def test_a_plan_cannot_be_changed(field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(PLAN, field, getattr(PLAN, field))


def test_its_parts_cannot_be_changed_either():
    for part, field in [(PLAN.clipping, "clipping_norm"), (PLAN.noise, "first")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, 9.0)


@given(plans)
def test_a_plan_survives_its_description_through_json(plan):
    assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_sampler_mechanism_and_event_use_the_plans_own_values():
    sampler = PLAN.sampler(1000, Randomness.from_seed(0))
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    mechanism = PLAN.mechanism(Randomness.from_seed(0), ledger)
    event = PLAN.event()
    assert (sampler.sample_rate, sampler.examples) == (0.1, 1000)
    assert mechanism.plan is PLAN
    assert mechanism.steps_left == sum(level.count for level in event.events) == PLAN.steps
    assert {level.event.sampling_probability for level in event.events} == {sampler.sample_rate}
    used = sorted(PLAN.noise_multiplier(step) for step in range(PLAN.steps))
    assert [level.event.event.noise_multiplier for level in event.events] == used
    assert event == composed_event(0.1, PLAN.levels())


@pytest.mark.parametrize("step", [-1, 7, 8, 10**9])
def test_a_step_outside_the_plan_does_not_exist(step):
    with pytest.raises(UserError, match="no step"):
        PLAN.noise_multiplier(step)


@given(st.integers(1, 10**6), st.floats(0.01, 1), st.floats(0.1, 30))
def test_the_usual_words_give_rate_steps_and_batch(examples, part, epochs):
    batch = examples * part
    plan = PrivacyPlan.for_examples(examples, batch_size=batch, epochs=epochs)
    assert plan.sample_rate == pytest.approx(part)
    assert plan.expected_batch_size == batch
    assert abs(plan.steps - epochs / part) <= 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrivacyPlan.for_examples(100, batch_size=101, epochs=1),
        lambda: PrivacyPlan.for_examples(0, batch_size=1, epochs=1),
        lambda: PrivacyPlan.for_examples(100, batch_size=0, epochs=1),
        lambda: PrivacyPlan.for_examples(100, batch_size=10, epochs=0),
        lambda: PrivacyPlan.for_examples(100, batch_size=10, epochs=math.inf),
        lambda: PrivacyPlan(sample_rate=0, steps=1),
        lambda: PrivacyPlan(sample_rate=1.01, steps=1),
        lambda: PrivacyPlan(sample_rate=math.nan, steps=1),
        lambda: PrivacyPlan(sample_rate=0.1, steps=0),
        lambda: PrivacyPlan(sample_rate=0.1, steps=1.5),
        lambda: PrivacyPlan(sample_rate=0.1, steps=True),
        lambda: PrivacyPlan(sample_rate=0.1, steps=1, expected_batch_size=0),
        lambda: PrivacyPlan(sample_rate=0.1, steps=1, clipping=1.0),
        lambda: PrivacyPlan(sample_rate=0.1, steps=1, noise=1.0),
        lambda: PrivacyPlan.from_dict({"sample_rate": 0.1, "steps": 1}),
        lambda: PrivacyPlan.from_dict({**PLAN.to_dict(), "more": 1}),
        lambda: PrivacyPlan.from_dict({**PLAN.to_dict(), "noise": "constant"}),
        lambda: PrivacyPlan.from_dict({**PLAN.to_dict(), "clipping": ["flat", 1]}),
        lambda: PrivacyPlan.from_dict({**PLAN.to_dict(), "sample_rate": 10**400}),
        lambda: PrivacyPlan.from_dict({**PLAN.to_dict(), "steps": "7"}),
        lambda: PrivacyPlan.from_dict("plan"),
        lambda: PrivacyPlan.from_dict(5),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(make):
    with pytest.raises(UserError):
        make()
