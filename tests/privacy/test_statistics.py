"""Statistics of the whole training set: one example moves them within bounds, they carry the noise that is paid, once."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tacit.privacy import (
    BoundedSum,
    Constant,
    Ledger,
    PrivacyPlan,
    Randomness,
    UserError,
    certificate_of,
    epsilon_of,
    read_ledger,
    verify,
)

PLAN = PrivacyPlan(sample_rate=0.1, steps=20, noise=Constant(2.0), expected_batch_size=10, whole_releases=(8.0,))


def mechanism_of(plan, ledger=None, seed=None):
    randomness = Randomness.from_operating_system() if seed is None else Randomness.from_seed(seed)
    return plan.mechanism(randomness, ledger or Ledger.in_memory(plan, delta=1e-5))


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-3, 1.0, 1e6, 1e300]),
    bounds=st.sampled_from([(1.0,), (0.1, 50.0), (3.0, 1e-4, 7.0)]),
)
def test_adding_one_example_moves_the_sum_by_at_most_its_sensitivity(seed, scale, bounds):
    torch.manual_seed(seed)
    rows = scale * torch.randn(7, len(bounds), 5, dtype=torch.float64)
    with_it, without = BoundedSum.over([rows[:3], rows[3:]], bounds), BoundedSum.over([rows[1:]], bounds)
    moved = (with_it.total - without.total) / torch.tensor(bounds, dtype=torch.float64).unsqueeze(1)
    assert float(moved.norm()) <= with_it.sensitivity * (1 + 1e-9)
    if scale == 1e6:  # and that much it can be; beyond the range of a float an example adds nothing
        assert float(moved.norm()) >= with_it.sensitivity * (1 - 1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_example_that_is_not_finite_adds_nothing(value):
    rows = torch.ones(3, 2, 4)
    expected = BoundedSum.over([rows[[0, 2]]], (1.0, 1.0))
    rows[1, 1, 2] = value
    assert torch.equal(BoundedSum.over([rows], (1.0, 1.0)).total, expected.total)


def test_small_rows_are_added_as_they_are():
    rows = torch.rand(6, 2, 3)
    torch.testing.assert_close(BoundedSum.over(rows.split(2), (10.0, 10.0)).total, rows.double().sum(dim=0))


def test_wrong_sums_are_refused_in_words():
    with pytest.raises(UserError, match="nothing to sum"):
        BoundedSum.over([], (1.0,))
    with pytest.raises(UserError, match=r"takes \[batch, 2, width\]"):
        BoundedSum.over([torch.zeros(3, 1, 4)], (1.0, 1.0))
    with pytest.raises(UserError, match="bounds"):
        BoundedSum.over([torch.zeros(3, 1, 4)], (0.0,))


def test_the_noise_is_that_of_the_plan():
    """A Kolmogorov-Smirnov test with a fixed seed, and its power: 10% more or less noise fails it."""
    bounds, width = (0.5, 20.0), 20_000
    summed = BoundedSum.over([torch.zeros(1, 2, width)], bounds)
    noisy = mechanism_of(PLAN, seed=1).release_whole(summed, what="sums")
    for noise, bound in zip(noisy.numpy(), bounds):
        deviation = 8.0 * math.sqrt(2) * bound
        assert stats.kstest(noise / deviation, "norm").pvalue > 1e-3
        for factor in (0.9, 1.1):
            assert stats.kstest(noise / deviation * factor, "norm").pvalue < 1e-6
    assert abs(np.corrcoef(noisy.numpy())[0, 1]) < 0.03


def test_it_is_in_the_ledger_as_no_step_and_made_once():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    mechanism = mechanism_of(PLAN, ledger)
    summed = BoundedSum.over([torch.ones(3, 1, 2)], (1.0,))
    mechanism.release_whole(summed, what="the sum")
    assert ledger.entries[-1]["kind"] == "whole-release"
    assert ledger.entries[-1]["noise_multiplier"] == 8.0
    with pytest.raises(UserError, match="start a new run"):
        mechanism.release_whole(summed, what="the sum")
    with pytest.raises(UserError, match="pays for no statistics"):
        mechanism_of(PrivacyPlan(sample_rate=0.1, steps=2, expected_batch_size=1)).release_whole(summed, what="x")
    assert ledger.whole_releases == 1
    assert ledger.releases == 0, "it is no step"


class Broken(Ledger):
    def _append(self, entry):
        if entry["kind"] == "whole-release":
            raise UserError("the disk is full")
        super()._append(entry)


def test_nothing_is_released_if_the_ledger_cannot_be_written():
    ledger = Broken.in_memory(PLAN, delta=1e-5)
    with pytest.raises(UserError, match="disk is full"):
        mechanism_of(PLAN, ledger).release_whole(BoundedSum.over([torch.ones(3, 1, 2)], (1.0,)), what="the sum")


def test_the_certificate_counts_it():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    mechanism_of(PLAN, ledger).release_whole(BoundedSum.over([torch.ones(3, 1, 2)], (1.0,)), what="the sum")
    alone = certificate_of(ledger.entries)
    gaussian = epsilon_of(0.1, [], 1e-5, whole=[8.0])
    assert alone["epsilon"] == pytest.approx(gaussian, abs=2e-6)
    assert 0.3 < gaussian < 0.6
    assert any("the sum of all training examples" in line for line in alone["released"])
    for _ in range(20):
        ledger.record_release(noise_multiplier=2.0, sample_rate=0.1, sampled_by="tacit")
    both = certificate_of(ledger.entries)
    assert both["epsilon"] > epsilon_of(0.1, [(2.0, 20)], 1e-5) + 0.01
    assert both["epsilon"] == pytest.approx(PLAN.epsilon(1e-5), abs=2e-6)
    assert "21 releases" in both["statement"]


def test_a_gaussian_release_costs_what_the_exact_formula_says():
    """delta(epsilon) of a Gaussian of multiplier s: Phi(1/2s - eps s) - e^eps Phi(-1/2s - eps s) (Balle and Wang, 2018)."""
    for sigma in (2.0, 8.0, 30.0):
        epsilon = epsilon_of(0.5, [], 1e-5, whole=[sigma])

        def delta(e, s=sigma, phi=stats.norm.cdf):
            return phi(1 / (2 * s) - e * s) - math.exp(e) * phi(-1 / (2 * s) - e * s)

        assert delta(epsilon) <= 1e-5 * (1 + 1e-6)
        assert delta(epsilon * 0.98) > 1e-5


def test_calibration_pays_for_it_first():
    plan = PrivacyPlan(sample_rate=0.02, steps=500, whole_releases=(8.0,)).calibrated(epsilon=3.0, delta=1e-5)
    assert 0.995 * 3.0 < plan.epsilon(1e-5) <= 3.0
    free = PrivacyPlan(sample_rate=0.02, steps=500).calibrated(epsilon=3.0, delta=1e-5)
    assert plan.noise_multiplier(0) > free.noise_multiplier(0)
    assert plan.whole_releases == (8.0,)
    with pytest.raises(UserError, match="spent by the statistics"):
        PrivacyPlan(sample_rate=0.02, steps=500, whole_releases=(0.5,)).calibrated(epsilon=3.0, delta=1e-5)


def test_no_noise_is_no_privacy():
    assert epsilon_of(0.1, [(2.0, 20)], 1e-5, whole=[0.0]) == math.inf


def test_a_plan_with_it_is_read_back_and_one_without_it_is_written_as_before():
    assert PrivacyPlan.from_dict(PLAN.to_dict()) == PLAN
    assert "whole_releases" not in PrivacyPlan(sample_rate=0.1, steps=2).to_dict()


def test_a_changed_line_of_the_ledger_is_noticed(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=1e-5)
    mechanism_of(PLAN, ledger).release_whole(BoundedSum.over([torch.ones(3, 1, 2)], (1.0,)), what="the sum")
    ledger.close()
    content = (tmp_path / "ledger.jsonl").read_text()
    assert len(read_ledger(tmp_path / "ledger.jsonl")) == 2
    (tmp_path / "ledger.jsonl").write_text(content.replace('"noise_multiplier":8.0', '"noise_multiplier":9.0'))
    with pytest.raises(UserError, match="changed"):
        read_ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(UserError):
        verify(tmp_path)
