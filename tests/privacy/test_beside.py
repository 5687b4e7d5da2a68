"""What is released beside a gradient is part of the same release, and what follows from it stays within the plan."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import (
    Adaptive,
    ClippedSum,
    Constant,
    Flat,
    Ledger,
    LossDriven,
    PrivacyPlan,
    Randomness,
    UserError,
    certificate_of,
)
from tacit.privacy.accounting import epsilon_of_rdp, rdp_of
from tacit.privacy.beside import LOSS, WITHIN, Beside

RATE, SIZE = 0.1, 40


def summed(clipping, norms, losses=None, value=0.0):
    column = torch.tensor([[float(norm)] for norm in norms]).view(-1, 1)
    kept = None if losses is None else torch.tensor(losses, dtype=torch.float32)
    return ClippedSum({"w": torch.full((1000,), value)}, norms=column, clipping=clipping, losses=kept)


def opened(plan, seed=0):
    ledger = Ledger.in_memory(plan, delta=1e-5)
    return plan.mechanism(Randomness.from_seed(seed), ledger), ledger


def adaptive_plan(steps=400, share=0.1, **options):
    return PrivacyPlan(
        sample_rate=RATE,
        steps=steps,
        noise=Constant(2.0),
        clipping=Adaptive(1.0, share=share, **options),
        expected_batch_size=SIZE,
    )


def driven_plan(steps=400, epsilon=3.0, smallest=1.0, largest=3.0, share=0.1):
    noise = LossDriven(smallest, largest, reference=2.0, loss_bound=4.0, share=share)
    plan = PrivacyPlan(sample_rate=RATE, steps=steps, noise=noise, clipping=Flat(1.0), expected_batch_size=SIZE)
    return plan.calibrated(epsilon=epsilon, delta=1e-5)


strange = st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(strange, max_size=5), strange, st.floats(0.01, 10), st.sampled_from([WITHIN, LOSS]))
def test_one_example_moves_a_number_by_at_most_its_bound_whatever_it_is(others, one, bound, name):
    clipping, number = Flat(1.0), Beside(name, 0.5 if name == WITHIN else bound, 0.1)
    norms = [abs(value) for value in others]
    before = number.sum_over(summed(clipping, norms, others))
    after = number.sum_over(summed(clipping, [*norms, abs(one)], [*others, one]))
    assert abs(after - before) <= number.bound * (1 + 1e-6)


@given(st.floats(0.1, 10), st.floats(1e-4, 0.5), st.floats(1e-4, 0.4), st.floats(0.01, 10))
def test_gradient_and_numbers_together_are_one_release_of_the_stated_multiplier(sigma, first, second, bound):
    """(C/s)^2 + sum_k (b_k/s_k)^2 = 1/sigma^2: the mathematics of the whole file, in one line."""
    plan = PrivacyPlan(
        sample_rate=RATE,
        steps=3,
        clipping=Adaptive(0.7, share=first),
        noise=LossDriven(sigma, sigma, loss_bound=bound, share=second, order=8.0, budget=100.0),
        expected_batch_size=SIZE,
    )
    parts = [plan.clipping.sensitivity / plan.clipping.noise_stds(plan.gradient_multiplier(sigma))[0]]
    parts += [number.bound / number.noise_std(sigma) for number in plan.beside]
    assert len(parts) == 3
    assert 1 / math.hypot(*parts) == pytest.approx(sigma, rel=1e-9)


def test_the_noise_that_is_added_is_the_noise_that_is_accounted():
    """Fails if the gradient's noise is not raised for the share, or a number's noise is less than its share asks for."""
    plan = adaptive_plan(steps=400, share=0.2, rate=1e-9)
    mechanism, ledger = opened(plan)
    gradients, within = [], []
    for _ in range(plan.steps):
        private = mechanism.release(summed(mechanism.clipping, [0.5, 2.0]))
        gradients.append(private.gradients["w"] * SIZE)
        within.append(private.beside[WITHIN] * SIZE)
    gradient_std = float(torch.cat(gradients).std())
    # 400,000 draws: five standard errors are 0.6 %; 400 draws: five are 18 %
    assert gradient_std == pytest.approx(2.0 / math.sqrt(0.8), rel=6e-3)
    assert np.std(within) == pytest.approx(2.0 * 0.5 / math.sqrt(0.2), rel=0.18)
    assert {entry["noise_multiplier"] for entry in ledger.entries if entry["kind"] == "release"} == {2.0}


def test_an_adaptive_norm_finds_the_quantile_and_noise_stays_in_proportion():
    plan = adaptive_plan(steps=400, share=0.1, quantile=0.25, rate=0.3)
    mechanism, _ = opened(plan)
    generator = np.random.default_rng(0)
    for _ in range(plan.steps):
        norms, clipping = generator.uniform(0, 10, SIZE), mechanism.clipping
        private = mechanism.release(summed(clipping, norms))
        assert private.noise_stds["w"] / clipping.clipping_norm == pytest.approx(2.0 / math.sqrt(0.9))
    assert 1.0 < mechanism.clipping.clipping_norm < 5.0  # a quarter of them lies within 2.5


def test_the_noise_on_the_mean_loss_is_what_its_share_asks_for():
    noise = LossDriven(2.0, 2.0, loss_bound=4.0, share=0.2, order=4.0, budget=1e9)
    plan = PrivacyPlan(sample_rate=RATE, steps=500, noise=noise, clipping=Flat(1.0), expected_batch_size=SIZE)
    mechanism, _ = opened(plan)
    losses = [mechanism.release(summed(Flat(1.0), [1.0] * 3, [1.0, 2.0, 50.0])).beside[LOSS] for _ in range(500)]
    std = 2.0 * 4.0 / math.sqrt(0.2) / SIZE
    assert np.std(losses) == pytest.approx(std, rel=0.16)  # five standard errors
    assert np.mean(losses) == pytest.approx((1.0 + 2.0 + 4.0) / SIZE, abs=5 * std / math.sqrt(500))


def test_the_released_loss_is_smoothed_and_survives_in_the_state():
    plan = driven_plan()
    mechanism, _ = opened(plan)
    for _ in range(10):
        mechanism.release(summed(Flat(1.0), [1.0] * SIZE, [0.0] * SIZE))
    again, _ = opened(plan)
    assert again._noise_multiplier() == plan.noise.smallest
    again.restore(mechanism.state)
    assert again._noise_multiplier() == mechanism._noise_multiplier() > plan.noise.smallest
    assert plan.noise.smoothed(1.0, 2.0) == pytest.approx(1.1)
    for broken in ({"loss": math.nan}, {"loss": None}, {"loss": "x"}):
        with pytest.raises(UserError):
            again.restore(broken)


def test_the_filter_and_the_certificate_agree_to_the_last_bit():
    """A budget that so many releases reach exactly."""
    for count in range(1, 60):
        budget = rdp_of(RATE, [(1.3, count)], 8.0)
        noise = LossDriven(1.3, 1.3, order=8.0, budget=budget)
        assert noise.allows(RATE, [(1.3, count - 1)], 1.3) == noise.within_budget(RATE, [(1.3, count)])


def test_a_sum_clipped_at_another_norm_than_the_present_one_is_refused():
    mechanism, ledger = opened(adaptive_plan())
    with pytest.raises(UserError, match="the plan accounts for"):
        mechanism.release(summed(mechanism.clipping.at(2.0), [0.5]))
    assert ledger.releases == 0


def test_the_state_is_of_released_numbers_and_brings_the_norm_back():
    mechanism, _ = opened(adaptive_plan())
    for _ in range(5):
        mechanism.release(summed(mechanism.clipping, [0.1] * SIZE))
    again, _ = opened(adaptive_plan())
    again.restore(mechanism.state)
    assert again.clipping == mechanism.clipping
    assert again.clipping.clipping_norm < 1.0


def test_an_empty_batch_still_releases_its_numbers_with_noise():
    mechanism, ledger = opened(adaptive_plan())
    private = mechanism.release(summed(mechanism.clipping, []))
    assert private.beside[WITHIN] != 0
    assert ledger.releases == 1


def test_less_noise_follows_a_large_loss_and_more_a_small_one():
    plan = driven_plan()
    noise = plan.noise
    multipliers = {}
    for loss in (0.0, 2.0):
        mechanism, ledger = opened(plan)
        for _ in range(30):
            mechanism.release(summed(Flat(1.0), [1.0] * SIZE, [loss] * SIZE))
        multipliers[loss] = [entry["noise_multiplier"] for entry in ledger.entries if entry["kind"] == "release"]
    assert multipliers[0.0][0] == multipliers[2.0][0] == noise.smallest
    assert np.mean(multipliers[0.0][5:]) > 1.5 * np.mean(multipliers[2.0][5:])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 5), min_size=1, max_size=8), st.integers(0, 5))
def test_the_filter_stops_in_time_whatever_the_losses_are(losses, seed):
    """Fails if releases are not counted, are counted with another multiplier, or the filter is asked too late."""
    plan = driven_plan(steps=300, epsilon=1.0)
    mechanism, ledger = opened(plan, seed)
    made = 0
    while mechanism.steps_left > 0:
        mechanism.release(summed(Flat(1.0), [1.0] * SIZE, [losses[made % len(losses)]] * SIZE))
        made += 1
    used = [(entry["noise_multiplier"], 1) for entry in ledger.entries if entry["kind"] == "release"]
    assert made == len(used) <= plan.steps
    spent = rdp_of(RATE, used, plan.noise.order)
    assert spent <= plan.noise.budget
    assert epsilon_of_rdp(plan.noise.order, spent, 1e-5) <= plan.epsilon(1e-5) <= 1.0 + 1e-9
    with pytest.raises(UserError, match="the budget is spent"):
        mechanism.release(summed(Flat(1.0), [1.0] * SIZE, [1.0] * SIZE))
    assert ledger.releases == made
    assert made >= plan.steps // 2
    if made < plan.steps:  # it did not stop sooner than it had to
        assert rdp_of(RATE, [*used, (plan.noise.smallest, 1)], plan.noise.order) > plan.noise.budget


def test_the_certificate_of_a_filtered_run_claims_the_whole_budget_and_says_how():
    plan = driven_plan(steps=300, epsilon=2.0)
    mechanism, ledger = opened(plan)
    for _ in range(3):
        mechanism.release(summed(Flat(1.0), [1.0] * SIZE, [1.0] * SIZE))
    certificate = certificate_of(ledger.entries)
    assert certificate["epsilon"] == pytest.approx(plan.epsilon(1e-5), abs=2e-6)
    assert 1.9 < certificate["epsilon"] <= 2.0
    assert "RDP filter" in certificate["accountant"]
    assert any("mean of the losses" in what for what in certificate["released"])


def test_a_ledger_with_more_releases_than_its_filter_allows_proves_nothing():
    plan = driven_plan(steps=300, epsilon=1.0)
    _, ledger = opened(plan)
    for _ in range(300):
        ledger.record_release(noise_multiplier=plan.noise.smallest, sample_rate=RATE)
    with pytest.raises(UserError, match="more releases than its filter allows"):
        certificate_of(ledger.entries)


def test_losses_that_the_plan_needs_and_does_not_get_are_asked_for():
    mechanism, ledger = opened(driven_plan())
    with pytest.raises(UserError, match="with_losses=True"):
        mechanism.release(summed(Flat(1.0), [1.0]))
    assert ledger.releases == 0


def test_a_filter_pays_for_statistics_too():
    plan = driven_plan(epsilon=3.0)
    plain = plan.epsilon(1e-5)
    assert plan.noise.epsilon(1e-5, (8.0,)) > plain
    with_statistics = PrivacyPlan(
        sample_rate=RATE, steps=400, noise=LossDriven(1.0, 3.0), expected_batch_size=SIZE, whole_releases=(8.0,)
    ).calibrated(epsilon=3.0, delta=1e-5)
    assert 2.9 < with_statistics.epsilon(1e-5) <= 3.0 + 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda: LossDriven(2.0, 1.0),
        lambda: LossDriven(0.0, 1.0),
        lambda: LossDriven(1.0, 2.0, order=8.0),
        lambda: LossDriven(1.0, 2.0, order=1.0, budget=1.0),
        lambda: LossDriven(1.0, 2.0).epsilon(1e-5),
        lambda: LossDriven(1.0, 2.0).calibrated(0.1, 100, epsilon=1e-9, delta=1e-5),
        lambda: LossDriven(1.0, 2.0).calibrated(1.0, 10**14, epsilon=0.05, delta=1e-5),
        lambda: PrivacyPlan(
            sample_rate=0.1, steps=1, clipping=Adaptive(1.0, share=0.5), noise=LossDriven(1.0, 2.0, share=0.5)
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(UserError):
        make()


def test_plans_survive_their_description():
    for plan in (adaptive_plan(), driven_plan()):
        assert PrivacyPlan.from_dict(plan.to_dict()) == plan


def test_the_certificate_says_that_a_norm_is_only_the_first_and_that_noise_follows_the_loss():
    mechanism, ledger = opened(adaptive_plan())
    mechanism.release(summed(mechanism.clipping, [0.5]))
    clipping = certificate_of(ledger.entries)["clipping"]
    assert clipping["first_clipping_norm"] == 1.0
    assert not {"clipping_norm", "sensitivity"} & set(clipping)
    mechanism, ledger = opened(driven_plan())
    mechanism.release(summed(Flat(1.0), [0.5], [0.5]))
    assert certificate_of(ledger.entries)["noise"]["follows_the_released_loss"]["kind"] == "loss-driven"
