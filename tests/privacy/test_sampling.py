"""Poisson sampling: every example by its own coin. Each check also rejects samplers that do otherwise.

A check rejects below `ALPHA`, so on fresh randomness each would fail by chance once in a million; the seeds are fixed.
"""

import numpy as np
import pytest
from scipy import stats

from tacit.privacy import PoissonSampler, Randomness, UserError

ALPHA = 1e-6
EXAMPLES, STEPS, RATE = 2000, 500, 0.05


def participation(sampler, steps=STEPS, examples=EXAMPLES):
    """[steps, examples] of who took part."""
    taken = np.zeros((steps, examples), dtype=bool)
    for row in taken:
        row[sampler.draw()] = True
    return taken


def poisson(rate=RATE, seed=1):
    return participation(PoissonSampler(EXAMPLES, rate, Randomness.from_seed(seed)))


def shuffled():
    """Epochs of a random order cut into batches of the same size: what many libraries do instead."""
    generator, per_epoch = np.random.default_rng(0), round(1 / RATE)
    taken = np.zeros((STEPS, EXAMPLES), dtype=bool)
    for start in range(0, STEPS, per_epoch):
        for offset, batch in enumerate(generator.permutation(EXAMPLES).reshape(per_epoch, -1)):
            taken[start + offset, batch] = True
    return taken


def in_pairs():
    """Two examples share one coin."""
    return np.repeat(poisson()[:, : EXAMPLES // 2], 2, axis=1)


def sticky():
    """Two steps share their batch."""
    return np.repeat(poisson()[: STEPS // 2], 2, axis=0)


def binomial_p_value(successes, trials, probability):
    """Exact two-sided p-value, by doubling the smaller tail."""
    law = stats.binom(trials, probability)
    return min(1.0, 2 * min(law.cdf(successes), law.sf(successes - 1)))


def rate_p_value(taken, rate=RATE):
    """All participations together are Binomial(n T, q)."""
    return binomial_p_value(int(taken.sum()), taken.size, rate)


def batch_size_p_value(taken, rate=RATE):
    """Batch sizes have the variance n q (1-q): the sum of squares is chi-square with T degrees of freedom (n q = 100)."""
    return _variance_p_value(taken.sum(axis=1), taken.shape[1], rate)


def example_count_p_value(taken, rate=RATE):
    """How often each example takes part has the variance T q (1-q)."""
    return _variance_p_value(taken.sum(axis=0), taken.shape[0], rate)


def _variance_p_value(counts, trials, rate):
    statistic = float(((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate)))
    return 2 * min(stats.chi2.cdf(statistic, len(counts)), stats.chi2.sf(statistic, len(counts)))


def example_pairs_p_value(taken, rate=RATE):
    """Examples 2i and 2i+1 take part together Binomial(T n/2, q^2) times."""
    together = taken[:, ::2] & taken[:, 1::2]
    return binomial_p_value(int(together.sum()), together.size, rate**2)


def step_pairs_p_value(taken, rate=RATE):
    """An example takes part in both of steps 2t and 2t+1 Binomial(n T/2, q^2) times."""
    both = taken[::2] & taken[1::2]
    return binomial_p_value(int(both.sum()), both.size, rate**2)


CHECKS = [rate_p_value, batch_size_p_value, example_count_p_value, example_pairs_p_value, step_pairs_p_value]


@pytest.mark.parametrize("check", CHECKS)
def test_every_example_takes_part_by_its_own_coin_at_every_step(check):
    """Each check rejects true Poisson sampling with probability 1e-6."""
    assert check(poisson()) > ALPHA


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_rate_check_rejects_a_rate_that_is_ten_percent_off(factor):
    assert rate_p_value(poisson(RATE * factor)) < ALPHA


@pytest.mark.parametrize(
    ("check", "other"),
    [
        (batch_size_p_value, shuffled),
        (example_count_p_value, shuffled),
        (step_pairs_p_value, shuffled),
        (batch_size_p_value, in_pairs),
        (example_pairs_p_value, in_pairs),
        (example_count_p_value, sticky),
        (step_pairs_p_value, sticky),
    ],
)
def test_the_checks_reject_sampling_that_is_not_poisson(check, other):
    assert check(other()) < ALPHA


def test_neighbouring_data_sets_share_every_other_examples_coin():
    """Adding an example at the end leaves the first batch of the others as it was: nobody's coin depends on another's."""
    small, large = (PoissonSampler(n, 0.3, Randomness.from_seed(2)).draw() for n in (999, 1000))
    assert [index for index in large if index < 999] == small.tolist()


def test_at_rate_one_everybody_takes_part():
    sampler = PoissonSampler(1000, 1.0, Randomness.from_seed(0))
    assert all(sampler.draw().tolist() == list(range(1000)) for _ in range(20))


def test_empty_batches_happen_as_often_as_they_should():
    """(1-q)^n = 0.1326 of the batches; two-sided binomial check with error probability 1e-6, which rejects never and always."""
    sampler = PoissonSampler(20, 0.0961, Randomness.from_seed(3))
    empty = sum(len(sampler.draw()) == 0 for _ in range(2000))
    probability = (1 - 0.0961) ** 20
    assert binomial_p_value(empty, 2000, probability) > ALPHA
    assert binomial_p_value(0, 2000, probability) < ALPHA
    assert binomial_p_value(empty, 2000, probability * 2) < ALPHA


@pytest.mark.parametrize(
    ("examples", "rate"), [(0, 0.1), (-1, 0.1), (2.5, 0.1), (10, 0.0), (10, 1.1), (10, float("nan"))]
)
def test_a_sampler_that_makes_no_sense_is_refused(examples, rate):
    with pytest.raises(UserError):
        PoissonSampler(examples, rate, Randomness.from_seed(0))
