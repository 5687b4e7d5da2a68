"""The noise is what the plan says: its scale, its shape, its independence. Every check also rejects noise that is not.

A check computes a p-value and rejects below `ALPHA`, so on fresh randomness each would fail by chance once in a million; the
seeds are fixed, so none ever does.
"""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from tacit.privacy import ClippedSum, Constant, Flat, Grouped, Ledger, Linear, PrivacyPlan, Randomness, UserError

ALPHA = 1e-6
SIGMA = Constant(1.7)
SHAPES = {"conv.weight": (40, 25, 5), "conv.bias": (5000,), "head.weight": (70, 80)}
CLIPPINGS = {
    "flat": Flat(0.3),
    "grouped": Grouped((("conv*",), ("head*",)), (0.3, 0.4)),
    "grouped, shaped": Grouped((("conv.weight",), ("conv.bias", "head*")), (2.0, 0.1), noise_shape=(1.0, 7.0)),
}


class Altered(Randomness):
    """A generator with a fault: the noise passes through `fault` first."""

    def __init__(self, seed, fault):
        self._true, self._fault = Randomness.from_seed(seed), fault
        self.reproducible = True

    def normal(self, shape):
        return self._fault(self._true.normal(shape))


def scale_p_value(noise, std):
    """Two-sided p-value that `noise` is N(0, std^2): sum of squares / std^2 is chi-square with as many degrees of freedom."""
    statistic = float(np.sum((noise / std) ** 2))
    return 2 * min(stats.chi2.cdf(statistic, noise.size), stats.chi2.sf(statistic, noise.size))


def shape_p_value(noise, std):
    """Kolmogorov-Smirnov p-value that `noise` is N(0, std^2)."""
    return stats.kstest(noise / std, "norm").pvalue


def mean_p_value(noise, std):
    """Two-sided p-value that N(0, std^2) has the mean of `noise`."""
    return 2 * stats.norm.sf(abs(noise.mean()) / std * np.sqrt(noise.size))


def independence_p_value(first, second):
    """p-value that two samples are uncorrelated, and so are their squares (Bonferroni over the two)."""
    return 2 * min(stats.pearsonr(first, second).pvalue, stats.pearsonr(first**2, second**2).pvalue)


def plan_of(clipping=CLIPPINGS["flat"], noise=SIGMA, steps=8, batch=16.0):
    return PrivacyPlan(sample_rate=0.1, steps=steps, clipping=clipping, noise=noise, expected_batch_size=batch)


def sums_of(clipping, shapes=SHAPES, *, examples=0, value=0.0):
    gradients = {name: torch.full(shape, value, dtype=torch.float64) for name, shape in shapes.items()}
    return ClippedSum(gradients, torch.zeros(examples, len(clipping.clipping_norms)), clipping)


def noises(plan, randomness, releases=1, **summed):
    """The noise of so many releases, per parameter, undone from the division by the expected batch size."""
    mechanism = plan.mechanism(randomness, Ledger.in_memory(plan, delta=1e-5))
    value = summed.get("value", 0.0)
    return [
        {
            name: gradient.numpy().ravel() * plan.expected_batch_size - value
            for name, gradient in mechanism.release(sums_of(plan.clipping, **summed)).gradients.items()
        }
        for _ in range(releases)
    ]


def expected_std(clipping, name, sigma):
    """From the definition, not from `noise_stds`: s_j = c * shape_j with sum (C_j / s_j)^2 = 1 / sigma^2."""
    if isinstance(clipping, Flat):
        return sigma * clipping.clipping_norm
    shape = clipping.noise_shape or (1.0,) * len(clipping.groups)
    total = sum((bound / relative) ** 2 for bound, relative in zip(clipping.clipping_norms, shape))
    group = next(j for j, names in enumerate(clipping.groups) if any(name.startswith(n.rstrip("*")) for n in names))
    return sigma * np.sqrt(total) * shape[group]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_noise_has_the_scale_and_the_shape_and_the_mean_of_its_group(kind, name):
    """Each of the three checks rejects true noise with probability 1e-6."""
    clipping = CLIPPINGS[kind]
    noise, std = noises(plan_of(clipping), Randomness.from_seed(1))[0][name], expected_std(clipping, name, 1.7)
    assert scale_p_value(noise, std) > ALPHA
    assert shape_p_value(noise, std) > ALPHA
    assert mean_p_value(noise, std) > ALPHA


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_the_scale_check_rejects_noise_that_is_ten_percent_off(kind, factor):
    """Ten percent move the statistic of 5000 coordinates by at least 9 of its standard deviations."""
    clipping = CLIPPINGS[kind]
    wrong = noises(plan_of(clipping), Altered(1, lambda noise: noise * factor))[0]
    for name in SHAPES:
        assert scale_p_value(wrong[name], expected_std(clipping, name, 1.7)) < ALPHA


def test_the_scale_check_rejects_the_noise_of_another_group():
    """Noise of the effective multiplier put on every group alike is wrong for both groups of a shaped clipping."""
    clipping = CLIPPINGS["grouped, shaped"]
    noise = noises(plan_of(clipping), Randomness.from_seed(1))[0]
    assert scale_p_value(noise["conv.weight"], expected_std(clipping, "head.weight", 1.7)) < ALPHA


@pytest.mark.parametrize(
    "fault",
    [lambda z: np.sqrt(3) * (2 * stats.norm.cdf(z) - 1), lambda z: np.clip(z, -1.5, 1.5), np.sign, np.abs],
    ids=["uniform", "cut off", "signs", "absolute"],
)
def test_the_shape_check_rejects_other_distributions(fault):
    noise = noises(plan_of(), Altered(1, fault))[0]["head.weight"]
    assert shape_p_value(noise, expected_std(CLIPPINGS["flat"], "head.weight", 1.7)) < ALPHA


def test_the_mean_check_rejects_a_shift_of_a_tenth_of_the_scale():
    noise = noises(plan_of(), Altered(1, lambda z: z + 0.1))[0]["head.weight"]
    assert mean_p_value(noise, expected_std(CLIPPINGS["flat"], "head.weight", 1.7)) < ALPHA


def pairs_of(randomness):
    """Pairs that must be independent: coordinates, parameters, releases next to each other and far apart."""
    releases = noises(plan_of(), randomness, releases=4)
    first, second, last = (release["conv.weight"] for release in (releases[0], releases[1], releases[3]))
    return {
        "neighbouring coordinates": (first[:-1], first[1:]),
        "halves of a parameter": (first[:2500], first[2500:]),
        "parameters": (releases[0]["conv.bias"], first),
        "parameters, reversed": (releases[0]["conv.bias"], first[::-1]),
        "consecutive releases": (first, second),
        "the end of one release and the start of the next": (releases[0]["head.weight"][:5000], second),
        "distant releases": (first, last),
    }


@pytest.mark.parametrize("pair", pairs_of(Randomness.from_seed(2)))
def test_noise_is_independent(pair):
    """Each check rejects independent noise with probability 1e-6."""
    assert independence_p_value(*pairs_of(Randomness.from_seed(2))[pair]) > ALPHA


def test_the_independence_check_rejects_noise_used_twice_and_noise_smoothed():
    once = {}
    repeated = pairs_of(Altered(2, lambda z: once.setdefault(z.shape, z).copy()))
    smoothed = pairs_of(Altered(2, lambda z: z + 0.15 * np.roll(z.ravel(), 1).reshape(z.shape)))
    assert independence_p_value(*repeated["consecutive releases"]) < ALPHA
    assert independence_p_value(*repeated["distant releases"]) < ALPHA
    assert independence_p_value(*smoothed["neighbouring coordinates"]) < ALPHA


def test_noise_and_sampling_come_from_streams_that_do_not_touch():
    quiet, busy = Randomness.from_seed(3), Randomness.from_seed(3)
    busy.bernoulli(12345, 0.5)
    assert (quiet.normal(1000) == busy.normal(1000)).all()
    quiet.normal(777)
    busy.bernoulli(1000, 0.5), quiet.bernoulli(12345 + 1000, 0.5)
    assert (quiet.bernoulli(1000, 0.5) == busy.bernoulli(1000, 0.5)).all()


def test_noise_is_independent_of_who_takes_part():
    """Point-biserial correlation of the noise of coordinate i with the coin of example i; error probability 1e-6."""
    randomness = Randomness.from_seed(4)
    coins, noise = randomness.bernoulli(20_000, 0.5), randomness.normal(20_000)
    assert stats.pearsonr(coins, noise).pvalue > ALPHA
    assert stats.pearsonr(noise > 0.3, noise).pvalue < ALPHA


def test_an_empty_batch_gets_the_same_noise_as_a_full_one():
    empty, full = (noises(plan_of(), Randomness.from_seed(5), examples=n)[0] for n in (0, 40))
    for name in SHAPES:
        assert (empty[name] == full[name]).all()
        assert scale_p_value(empty[name], expected_std(CLIPPINGS["flat"], name, 1.7)) > ALPHA


@pytest.mark.parametrize("examples", [0, 1, 16, 400])
def test_the_divisor_is_the_expected_batch_size_whatever_the_batch(examples):
    plan = plan_of(noise=Constant(0.0), batch=16.0)
    mechanism = plan.mechanism(Randomness.from_seed(0), Ledger.in_memory(plan, delta=1e-5))
    released = mechanism.release(sums_of(plan.clipping, examples=examples, value=8.0))
    assert all((gradient == 0.5).all() for gradient in released.gradients.values())


def test_each_step_of_a_schedule_gets_its_own_scale():
    """Four checks with error probability 1e-6 each; each rejects the scale of the step before."""
    plan = plan_of(noise=Linear(4.0, 1.0), steps=4)
    for step, noise in enumerate(noises(plan, Randomness.from_seed(6), releases=4)):
        std = (4.0 - step) * 0.3
        assert scale_p_value(noise["head.weight"], std) > ALPHA
        assert scale_p_value(noise["head.weight"], std + 0.3) < ALPHA


def test_a_sum_in_half_precision_is_refused_before_anything_is_paid():
    plan = plan_of()
    ledger = Ledger.in_memory(plan, delta=1e-5)
    summed = ClippedSum({"w": torch.zeros(6, dtype=torch.bfloat16)}, torch.zeros(0, 1), plan.clipping)
    with pytest.raises(UserError, match="half precision"):
        plan.mechanism(Randomness.from_seed(7), ledger).release(summed)
    assert ledger.releases == 0


def test_a_forked_process_cannot_draw_its_parents_noise():
    randomness = Randomness.from_operating_system()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            randomness.normal(1)
            os.write(writer, b"drawn")
        except UserError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"refused"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_in_double_precision_and_comes_back_in_the_type_of_the_sum(dtype):
    plan = plan_of()
    summed = ClippedSum({"w": torch.zeros(6000, dtype=dtype)}, torch.zeros(0, 1), plan.clipping)
    released = plan.mechanism(Randomness.from_seed(7), Ledger.in_memory(plan, delta=1e-5)).release(summed)
    assert released.gradients["w"].dtype == dtype
    assert (
        released.gradients["w"].double()
        - torch.from_numpy(Randomness.from_seed(7).normal(6000) * (1.7 * 0.3) / 16).to(dtype)
    ).abs().max() == 0


def test_a_scalar_and_an_empty_parameter_get_noise_of_their_shape():
    plan = plan_of()
    summed = ClippedSum({"s": torch.zeros(()), "e": torch.zeros(0, 3)}, torch.zeros(0, 1), plan.clipping)
    released = plan.mechanism(Randomness.from_seed(7), Ledger.in_memory(plan, delta=1e-5)).release(summed).gradients
    assert released["s"].shape == ()
    assert released["s"] != 0
    assert released["e"].shape == (0, 3)


def test_objects_keyed_by_the_operating_system_never_repeat_each_other():
    """Two equal doubles among 4 x 4 x 1000 pairs from true randomness: probability below 1e-8."""
    drawn = [set(Randomness.from_operating_system().normal(1000).tolist()) for _ in range(4)]
    assert len(set.union(*drawn)) == 4000
    coins = [Randomness.from_operating_system().bernoulli(1000, 0.5).tolist() for _ in range(4)]
    assert len({tuple(row) for row in coins}) == 4


def test_launches_and_seeds_and_streams_never_repeat_each_other():
    objects = [Randomness.from_seed(seed, launch=launch) for seed in (0, 1, 10) for launch in (0, 1, 10, 100)]
    drawn = [value for randomness in objects for value in randomness.normal(500)]
    assert len(set(drawn)) == len(drawn)
    coins = {tuple(randomness.bernoulli(200, 0.5).tolist()) for randomness in objects}
    assert len(coins) == len(objects)
    again = Randomness.from_seed(1, launch=10).normal(500)
    assert set(again.tolist()) <= set(drawn)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_randomness_cannot_be_copied_because_a_copy_repeats_the_noise(duplicate):
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(Randomness.from_operating_system())
