"""DiceSGD's formula is computed as written, and what is certified counts the error whatever it holds."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import (
    ClippedSum,
    Constant,
    DiceMechanism,
    DicePlan,
    Flat,
    Ledger,
    PrivacyPlan,
    Randomness,
    UserError,
    certificate_of,
    dice_epsilon,
    dice_epsilon_that_holds,
    dice_noise,
    epsilon_of,
)
from tacit.privacy.clipping import Clipping, clipping_from_dict
from tacit.privacy.dice import ASSUMPTIONS, ErrorFeedback

RUN = {"delta": 1e-5, "steps": 100, "examples": 1000, "clipping_norm": 1.0, "error_norm": 1.0}
HOLDING = {"delta": 1e-5, "steps": 100, "batch_size": 50.0, "clipping_norm": 1.0, "error_norm": 1.0}
PLAN = DicePlan(examples=20, batch_size=4, steps=6, clipping_norm=1.0, error_norm=0.5, noise_std=2.0)


class Silent(Randomness):
    """Noise of 0, so that what is released is what noise would have been added to."""

    reproducible = True

    def __init__(self):
        self.draws = 0

    def normal(self, shape):
        self.draws += 1
        return np.zeros(shape)


def mechanism_of(plan=PLAN, randomness=None, ledger=None):
    accounted = plan.accounted()
    ledger = ledger or Ledger.in_memory(accounted, delta=1e-5)
    return DiceMechanism(accounted.mechanism(randomness or Silent(), ledger))


def exact(plan=PLAN):
    """A mechanism without noise, and so without the grid of its noise: what is released is what noise would be added to."""
    return mechanism_of(dataclasses.replace(plan, noise_std=0.0))


def sums_of(gradients, clipping):
    """The clipped and the unclipped sum of these gradients, one a row, the slow way."""
    rows = torch.as_tensor(gradients, dtype=torch.float64)
    norms = rows.norm(dim=1, keepdim=True)
    clipped = (rows * torch.clamp(clipping.clipping_norm / norms, max=1.0).nan_to_num(nan=1.0)).sum(dim=0)
    return ClippedSum({"w": clipped}, norms, clipping), ClippedSum({"w": rows.sum(dim=0)}, norms, Flat(1e30))


def released(mechanism, gradients, clipping=PLAN.clipping):
    return mechanism.release(*sums_of(gradients, clipping)).gradients["w"]


# the authors' formula


def test_the_formula_gives_the_numbers_worked_out_by_hand():
    # log(1e5) = 11.512925465; 32 * 100 * 3 * log(1e5) = 110524.084464; its root = 332.451627; / (1000 * 2)
    assert dice_noise(epsilon=2.0, **RUN) == pytest.approx(0.166225813, rel=1e-7)
    # 32 * 2500 * (0.1^2 + 2 * 0.3^2) * log(1e6) = 80000 * 0.19 * 13.815510558 = 209995.760; its root = 458.252943; / (50000 * 3)
    other = {"delta": 1e-6, "steps": 2500, "examples": 50000, "clipping_norm": 0.1, "error_norm": 0.3}
    assert dice_noise(epsilon=3.0, **other) == pytest.approx(0.00305501962, rel=1e-7)


def test_a_smaller_bound_on_the_error_lowers_the_noise_and_a_larger_one_does_not_raise_it():
    # 32 * 100 * (1 + 2 * 0.5^2) * log(1e5) = 55262.0422; its root = 235.078800
    assert dice_noise(epsilon=1.0, **RUN, error_bound=0.5) == pytest.approx(0.2350788, rel=1e-6)
    assert dice_noise(epsilon=1.0, **RUN, error_bound=7.0) == dice_noise(epsilon=1.0, **RUN)


def test_where_the_sources_differ_the_larger_noise_is_taken():
    """The authors' code has C1^2 + 2 C1 C2, their formula C1^2 + 2 C^2."""
    for fed_back in (0.1, 0.5, 1.0, 2.0, 10.0):
        noise = dice_noise(epsilon=1.0, **{**RUN, "error_norm": fed_back})
        unit = math.sqrt(32 * 100 * math.log(1e5)) / 1000
        assert noise >= unit * math.sqrt(1 + 2 * fed_back) * (1 - 1e-12)
        assert noise >= unit * math.sqrt(1 + 2 * fed_back**2) * (1 - 1e-12)


@given(st.floats(1e-3, 1e3), st.floats(1e-12, 0.5), st.integers(1, 10**6), st.integers(1, 10**7), st.floats(1e-3, 1e3))
def test_the_formula_and_its_inverse_agree(epsilon, delta, steps, examples, norm):
    constants = {"delta": delta, "steps": steps, "examples": examples, "clipping_norm": norm, "error_norm": 0.3}
    noise = dice_noise(epsilon=epsilon, **constants)
    assert dice_epsilon(noise_std=noise, **constants) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"steps": 101}, True),
        ({"clipping_norm": 1.1}, True),
        ({"error_norm": 1.1}, True),
        ({"delta": 1e-6}, True),
        ({"examples": 1001}, False),
    ],
)
def test_the_noise_grows_and_falls_with_what_it_should(change, more):
    assert (dice_noise(epsilon=1.0, **{**RUN, **change}) > dice_noise(epsilon=1.0, **RUN)) is more
    assert dice_noise(epsilon=1.1, **RUN) < dice_noise(epsilon=1.0, **RUN)


@pytest.mark.parametrize(("examples", "batch", "steps"), [(60000, 600, 2000), (50000, 1000, 10000), (10000, 200, 500)])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_the_constant_is_enough_for_a_sampled_gaussian_of_the_formulas_own_sensitivity(examples, batch, steps, epsilon):
    """So what is doubtful in it is the sensitivity, not the 32."""
    noise = dice_noise(epsilon=epsilon, **{**RUN, "steps": steps, "examples": examples})
    assert epsilon_of(batch / examples, [(noise * batch / math.sqrt(3), steps)], 1e-5, coarse=True) <= epsilon


def test_the_formula_asks_for_more_noise_than_the_authors_code_adds_at_its_own_settings():
    """Two epochs of batches of 1000 out of 50000, C1 = C2, epsilon 2: sqrt(3) times the Gaussian accountant's noise."""
    code = math.sqrt(3) * PrivacyPlan(sample_rate=0.02, steps=100).calibrated(epsilon=2, delta=1e-5).noise_multiplier(0)
    assert 2 * code < 1000 * dice_noise(epsilon=2.0, **{**RUN, "examples": 50000})


def test_no_noise_is_no_privacy_by_either_count():
    assert dice_epsilon(noise_std=0.0, **RUN) == math.inf
    assert dice_epsilon_that_holds(noise_std=0.0, **HOLDING) == math.inf


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"examples": 0}, {"delta": 0.0}, {"clipping_norm": -1.0}, {"error_norm": 0.0}]
)
def test_values_that_make_no_sense_are_refused_by_name(change):
    with pytest.raises(UserError, match=next(iter(change))):
        dice_noise(epsilon=1.0, **{**RUN, **change})


# what holds


def test_what_holds_is_the_composition_of_gaussians_of_sensitivity_c1_over_b_and_two_c2():
    found = dice_epsilon_that_holds(noise_std=30.0, **HOLDING)
    # one Gaussian of multiplier 30 / (1/50 + 2) / sqrt(100) = 1.485149, by its exact curve
    assert found == pytest.approx(exact_gaussian_epsilon(1.4851485, 1e-5), rel=2e-3)
    assert found >= exact_gaussian_epsilon(1.4851485, 1e-5)


def exact_gaussian_epsilon(multiplier, delta):
    """By bisection on delta(epsilon) = Phi(1/2s - eps s) - e^eps Phi(-1/2s - eps s)."""
    phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    low, high = 0.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        half, slope = 0.5 / multiplier, middle * multiplier
        low, high = (
            (middle, high) if phi(half - slope) - math.exp(middle) * phi(-half - slope) > delta else (low, middle)
        )
    return high


@pytest.mark.parametrize(
    ("change", "larger"),
    [
        ({"steps": 120}, True),
        ({"error_norm": 1.1}, True),
        ({"clipping_norm": 10.0}, True),
        ({"delta": 1e-6}, True),
        ({"batch_size": 5.0}, True),
        ({"noise_std": 33.0}, False),
    ],
)
def test_the_epsilon_that_holds_moves_as_it_should(change, larger):
    run = {"noise_std": 30.0, **HOLDING}
    assert (dice_epsilon_that_holds(**{**run, **change}) > dice_epsilon_that_holds(**run)) is larger


def test_a_plan_by_the_theorem_holds_at_a_far_larger_epsilon_and_a_calibrated_one_at_the_wanted():
    plan = DicePlan(examples=60000, batch_size=256, steps=2340, clipping_norm=1.0, error_norm=1.0)
    by_theorem = plan.by_theorem(epsilon=3.0, delta=1e-5)
    assert by_theorem.epsilon_by_theorem(1e-5) == pytest.approx(3.0)
    assert by_theorem.epsilon(1e-5) > 1e7
    assert by_theorem.epsilon_without_error(1e-5) < 3.0
    calibrated = plan.calibrated(epsilon=3.0, delta=1e-5)
    assert 0.995 * 3.0 < calibrated.epsilon(1e-5) <= 3.0
    assert calibrated.noise_std > 1000 * by_theorem.noise_std


def test_the_plan_names_the_assumptions_and_the_conditions_it_breaks():
    plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=1.0)
    roomy = dataclasses.replace(plan, noise_std=4.0 * math.sqrt(3) / 100 * 1.0001)
    assert roomy.assumptions() == list(ASSUMPTIONS)
    assert "multiplier of at least 4" in dataclasses.replace(roomy, noise_std=0.06).assumptions()[-1]
    assert "sampling rate of at most 0.2" in dataclasses.replace(roomy, batch_size=300).assumptions()[-1]


def test_more_than_all_examples_in_a_batch_are_refused():
    with pytest.raises(UserError, match="batch_size 21"):
        dataclasses.replace(PLAN, batch_size=21)


def test_the_clipping_is_described_in_the_ledger_and_read_back():
    assert isinstance(PLAN.clipping, Clipping)
    assert clipping_from_dict(PLAN.clipping.to_dict()) == PLAN.clipping
    assert PrivacyPlan.from_dict(PLAN.accounted().to_dict()) == PLAN.accounted()
    with pytest.raises(UserError, match="cannot be read"):
        clipping_from_dict({**PLAN.clipping.to_dict(), "more": 1})


# the mechanism


def test_the_recursion_is_the_papers_worked_out_slowly():
    generator = np.random.default_rng(0)
    mechanism, error = exact(), np.zeros(3)
    for step in range(PLAN.steps):
        gradients = generator.normal(size=(step % 4, 3)) * 10 ** generator.uniform(-1, 1.5)
        clipped = sum((g * min(1, 1.0 / np.linalg.norm(g)) for g in gradients), np.zeros(3)) / 4
        fed_back = error * min(1.0, 0.5 / max(np.linalg.norm(error), 1e-300))
        direction = clipped + fed_back
        error = error + gradients.sum(axis=0) / 4 - direction
        np.testing.assert_allclose(released(mechanism, gradients.reshape(-1, 3)), direction, rtol=1e-12, atol=1e-14)
    assert np.linalg.norm(error) > 0.5  # so the error was clipped along the way


def test_without_clipping_it_is_plain_sgd_whatever_the_error_norm():
    for error_norm in (1e-6, 1.0, 100.0):
        plan = dataclasses.replace(PLAN, clipping_norm=1e9, error_norm=error_norm)
        mechanism = exact(plan)
        for size in (3, 0, 2):
            gradients = torch.randn(size, 3, dtype=torch.float64)
            assert torch.allclose(released(mechanism, gradients, plan.clipping), gradients.sum(dim=0) / 4)


def neighbours(steps):
    """Gradients of everyone but one example, and that example's, a step; each is in a batch or not by its own coin."""
    exponent = st.floats(-2, 6)
    vector = st.tuples(exponent, st.lists(st.floats(-1, 1), min_size=2, max_size=2)).map(
        lambda drawn: [10 ** drawn[0] * value for value in drawn[1]]
    )
    return st.lists(st.tuples(st.lists(vector, max_size=3), st.none() | vector), min_size=steps, max_size=steps)


@settings(max_examples=200, deadline=None)
@given(neighbours(PLAN.steps), st.floats(0.01, 10), st.floats(0.01, 10), st.integers(1, 8))
def test_one_example_moves_no_direction_by_more_than_the_sensitivity_at_any_step(rows, own, fed_back, batch):
    """The same batches and the same models in both runs: gradients are given, as if all releases before had been the same."""
    plan = dataclasses.replace(PLAN, clipping_norm=own, error_norm=fed_back, batch_size=batch)
    without, with_it = exact(plan), exact(plan)
    for others, example in rows:
        gradients = torch.tensor(others, dtype=torch.float64).reshape(-1, 2)
        added = gradients if example is None else torch.cat([gradients, torch.tensor([example], dtype=torch.float64)])
        moved = released(without, gradients, plan.clipping) - released(with_it, added, plan.clipping)
        assert float(moved.norm()) <= plan.clipping.sensitivity / batch * (1 + 1e-9) + 1e-9
    assert plan.clipping.sensitivity / batch == pytest.approx(own / batch + 2 * fed_back)


def test_the_sensitivity_is_reached_long_after_the_batch_and_without_the_example():
    """One huge gradient turns the error over for good, so neither the factor 2 nor the lack of amplification is a courtesy."""
    without, with_it = exact(), exact()
    others, huge = [[100.0, 0.0]], [[100.0, 0.0], [-1e6, 0.0]]
    moved = []
    for step in range(PLAN.steps):
        first = released(without, others)
        moved.append(float((first - released(with_it, huge if step in (0, 5) else others)).norm()))
    assert moved[0] == pytest.approx(1 / 4)
    assert moved[1:5] == pytest.approx([2 * 0.5] * 4)  # the example is in none of these batches
    assert moved[5] == pytest.approx(PLAN.clipping.sensitivity / 4)


def test_bounded_shares_of_one_example_add_up_in_the_error_and_leave_at_once():
    """All gradients are bounded by 3; yet one step shows forty times what the authors' formula counts on for the error."""
    batch, grown = 1000.0, 100
    plan = DicePlan(examples=10**6, batch_size=batch, steps=400, clipping_norm=1.0, error_norm=1.0, noise_std=1.0)
    without, with_it = exact(plan), exact(plan)
    moved = []
    for step in range(plan.steps):
        # a batch of 1000 others whose gradients are 2.5 at first, and 0 from the middle on: the error grows, then empties
        size = 2.5 if step < grown else 0.0
        norms = torch.zeros(0, 1)
        sums = []
        for extra in (0.0, 3.0 if step < grown else 0.0):
            clipped = batch * min(size, 1.0) + min(extra, 1.0)
            sums.append(
                (
                    ClippedSum({"w": torch.tensor([clipped], dtype=torch.float64)}, norms, plan.clipping),
                    ClippedSum({"w": torch.tensor([batch * size + extra], dtype=torch.float64)}, norms, Flat(1e30)),
                )
            )
        first, second = (m.release(*pair).gradients["w"] for m, pair in zip((without, with_it), sums))
        moved.append(abs(float(first - second)))
    assert max(moved[:grown]) == pytest.approx(1 / batch)
    assert max(moved[grown:]) > 40 * plan.error_norm / batch
    assert max(moved) <= plan.clipping.sensitivity / batch


def test_every_release_is_in_the_ledger_with_the_multiplier_of_its_noise_and_of_the_whole_sensitivity():
    accounted = PLAN.accounted()
    ledger = Ledger.in_memory(accounted, delta=1e-5)
    mechanism = mechanism_of(ledger=ledger)
    for _ in range(PLAN.steps):
        released(mechanism, [[1.0, 2.0]])
    entries = [entry for entry in ledger.entries if entry["kind"] == "release"]
    assert len(entries) == PLAN.steps
    for entry in entries:
        assert entry["noise_multiplier"] == pytest.approx(2.0 / (1.0 / 4 + 2 * 0.5))
        assert entry["sample_rate"] == 1.0
    with pytest.raises(UserError, match="budget is spent"):
        released(mechanism, [[1.0, 2.0]])


def test_the_noise_that_is_added_is_the_plans():
    """The standard deviation of 200000 numbers is within 1% of the truth but for one time in 10^9."""
    accounted = PLAN.accounted()
    mechanism = mechanism_of(randomness=Randomness.from_seed(3))
    zeros = {"w": torch.zeros(200_000)}
    none = torch.zeros(0, 1)
    private = mechanism.release(ClippedSum(zeros, none, accounted.clipping), ClippedSum(zeros, none, Flat(1e30)))
    assert float(private.gradients["w"].std()) == pytest.approx(PLAN.noise_std, rel=0.01)


def test_the_certificate_states_the_epsilon_that_holds_and_the_authors_claim_beside_it():
    plan = PLAN.by_theorem(epsilon=3.0, delta=1e-3)
    ledger = Ledger.in_memory(plan.accounted(), delta=1e-3, examples=20, dice=plan.facts(1e-3))
    mechanism = mechanism_of(plan, Randomness.from_operating_system(), ledger)
    for _ in range(plan.steps):
        mechanism.release(*sums_of([[1.0, 2.0]], plan.clipping), sampled_by="tacit")
    certificate = certificate_of(ledger.entries)
    assert certificate["epsilon"] == pytest.approx(plan.epsilon(1e-3), abs=2e-6)
    assert certificate["epsilon"] > certificate["facts"]["dice"]["epsilon_by_the_theorem"] == 3.0
    assert certificate["facts"]["dice"]["assumptions_of_the_theorem"][: len(ASSUMPTIONS)] == list(ASSUMPTIONS)
    assert certificate["clipping"] == {
        "kind": "error-feedback",
        "clipping_norm": 1.0,
        "error_norm": 0.5,
        "batch_size": 4.0,
        "sensitivity": 5.0,
    }
    assert certificate["valid_for_release"]


def test_without_noise_the_certificate_has_no_epsilon_and_is_void():
    plan = dataclasses.replace(PLAN, noise_std=0.0)
    ledger = Ledger.in_memory(plan.accounted(), delta=1e-5, dice=plan.facts(1e-5))
    released(mechanism_of(plan, ledger=ledger), [[1.0, 2.0]])
    certificate = certificate_of(ledger.entries)
    assert certificate["epsilon"] is None
    assert "no epsilon holds" in certificate["void_because"][-1]


def test_a_release_that_was_not_made_leaves_the_error_as_it_was(tmp_path):
    accounted = PLAN.accounted()
    ledger, randomness = Ledger.create(tmp_path / "ledger.jsonl", accounted, delta=1e-5), Silent()
    mechanism, twin = mechanism_of(randomness=randomness, ledger=ledger), mechanism_of()
    for both in (mechanism, twin):
        released(both, [[9.0, 0.0]])
    ledger.close()
    with pytest.raises(UserError, match="was closed"):
        released(mechanism, [[0.0, 7.0]])
    assert randomness.draws == 1
    mechanism._mechanism = accounted.mechanism(Silent(), Ledger.resume(tmp_path / "ledger.jsonl"))
    assert torch.equal(released(mechanism, [[0.0, 1.0]]), released(twin, [[0.0, 1.0]]))


@pytest.mark.parametrize("worst", [math.inf, -math.inf, math.nan, 1e300])
def test_an_error_that_is_not_finite_counts_nothing(worst):
    mechanism = mechanism_of()
    none = torch.zeros(0, 1)
    small = ClippedSum({"w": torch.tensor([0.1, 0.2])}, none, PLAN.clipping)
    mechanism.release(small, ClippedSum({"w": torch.tensor([worst, 0.0], dtype=torch.float64)}, none, Flat(1e30)))
    moved = mechanism.release(small, small).gradients["w"] - small.gradients["w"].double() / 4
    assert float(moved.norm()) <= 0.5 * (1 + 1e-12)


def test_a_plan_that_claims_amplification_or_another_clipping_or_batch_is_refused():
    for change, trouble in [
        ({"sample_rate": 0.2}, "sampling amplifies nothing"),
        ({"clipping": Flat(1.0)}, "accounts for it"),
        ({"expected_batch_size": 5.0}, "divides by 5.0"),
        ({"clipping": ErrorFeedback(1.0, 0.5, 8.0)}, "counts on 8"),
    ]:
        with pytest.raises(UserError, match=trouble):  # noqa: PT012 - the first is refused by the plan itself
            plan = dataclasses.replace(PLAN.accounted(), **change)
            DiceMechanism(plan.mechanism(Silent(), Ledger.in_memory(plan, delta=1e-5)))


def test_sums_that_do_not_fit_are_refused_before_they_cost_anything():
    ledger = Ledger.in_memory(PLAN.accounted(), delta=1e-5)
    mechanism = mechanism_of(ledger=ledger)
    clipped, whole = sums_of([[1.0, 2.0]], PLAN.clipping)
    with pytest.raises(UserError, match="the plan accounts for"):
        mechanism.release(dataclasses.replace(clipped, clipping=Flat(1.0)), whole)
    with pytest.raises(UserError, match="same parameters"):
        mechanism.release(clipped, dataclasses.replace(whole, gradients={"b": torch.zeros(2)}))
    assert ledger.releases == 0


def test_a_noise_schedule_of_the_plan_is_constant():
    assert PLAN.accounted().noise == Constant(2.0 / 1.25)
