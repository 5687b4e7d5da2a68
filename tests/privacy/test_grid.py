"""What is released lies on a public grid, as exact noise rounded to it would: the low bits tell nothing about the sum.

Statistical checks reject below `ALPHA`, so on fresh randomness each would fail by chance once in a million; the seeds are fixed.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tacit.privacy import (
    Adaptive,
    BoundedSum,
    ClippedSum,
    Constant,
    Flat,
    Grouped,
    Ledger,
    LossDriven,
    PrivacyPlan,
    Randomness,
)
from tacit.privacy import normals as arithmetic
from tacit.privacy.dice import DicePlan
from tacit.privacy.dice_mechanism import DiceMechanism
from tacit.privacy.normals import grid_of, noisy_mean

ALPHA = 1e-6
SHAPES = {"conv.weight": (40, 25, 5), "conv.bias": (500,), "head.weight": (70, 30)}
CLIPPINGS = {
    "flat": Flat(0.3),
    "grouped, shaped": Grouped((("conv.weight",), ("conv.bias", "head*")), (2.0, 0.1), noise_shape=(1.0, 7.0)),
}


def mechanism_of(plan, seed=1):
    return plan.mechanism(Randomness.from_seed(seed), Ledger.in_memory(plan, delta=1e-5))


def is_on(values, grid):
    return bool((np.asarray(values, dtype=np.float64) / grid % 1 == 0).all())


@pytest.mark.parametrize("examples", [0, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_every_released_value_lies_on_the_grid_of_its_noise_whatever_the_sum(kind, dtype, examples):
    """Sums of many scales, negative ones and 0; and the grid is no coarser than it says."""
    clipping, batch = CLIPPINGS[kind], 24.0
    plan = PrivacyPlan(sample_rate=0.1, steps=9, clipping=clipping, noise=Constant(1.7), expected_batch_size=batch)
    mechanism, torch_seed = mechanism_of(plan), torch.Generator().manual_seed(0)
    stds = dict(
        zip(SHAPES, (clipping.noise_stds(1.7)[group] for group in clipping.group_of(list(SHAPES))), strict=True)
    )
    for scale in (0.0, 1e-9, -0.3, 1.0, math.pi * 1e3, 1e8):
        sums = {name: scale * torch.randn(shape, generator=torch_seed, dtype=dtype) for name, shape in SHAPES.items()}
        released = mechanism.release(ClippedSum(sums, torch.zeros(examples, len(clipping.clipping_norms)), clipping))
        for name, gradient in released.gradients.items():
            grid = grid_of(stds[name], batch)
            assert gradient.dtype == dtype
            assert bool(gradient.isfinite().all())
            assert is_on(gradient, grid)
            if abs(scale) <= 1:
                assert not is_on(gradient, 2 * grid)


@given(st.floats(1e-150, 1e150), st.floats(1e-3, 1e9))
def test_the_grid_is_a_power_of_two_between_a_512th_and_a_256th_of_the_noise(std, divisor):
    grid = grid_of(std, divisor)
    assert math.frexp(grid)[0] == 0.5
    assert 1 / 512 < grid / (std / divisor) <= 1 / 256


@pytest.mark.parametrize("std", [5e-324, 1e-300, 1e300, 1.7e308])
def test_noise_at_the_ends_of_the_range_of_doubles_gives_no_nan(std):
    private = np.empty(3)
    noisy_mean(np.array([0.0, 1.0, -1.0]), np.array([0.5, -0.5, 0.0]), std, 128.0, private)
    assert np.isfinite(private).all()


def test_the_grid_is_the_same_for_neighbours_and_an_example_that_is_not_finite_releases_no_nan():
    """Through the engine: one example more, and one with NaN and infinity in it, change neither grid nor finiteness."""
    from tacit.gradients import ClippedGradient

    torch.manual_seed(0)
    model, plan = (
        torch.nn.Linear(4, 3),
        PrivacyPlan(sample_rate=0.5, steps=9, clipping=Flat(1.0), expected_batch_size=3),
    )
    gradient = ClippedGradient(model, loss=torch.nn.CrossEntropyLoss(reduction="none"), clipping=Flat(1.0))
    inputs, targets, mechanism = torch.randn(4, 4), torch.tensor([0, 1, 2, 0]), mechanism_of(plan)
    spoilt = inputs.clone()
    spoilt[1, 2], spoilt[3, 0] = math.nan, math.inf
    for batch, count in ((inputs, 3), (inputs, 4), (spoilt, 4)):
        released = mechanism.release(gradient(batch[:count], targets[:count]))
        assert all(is_on(value, grid_of(1.0, 3.0)) for value in released.gradients.values())


def test_numbers_beside_the_gradient_lie_on_the_grids_of_their_noise():
    plan = PrivacyPlan(
        sample_rate=0.1,
        steps=30,
        clipping=Adaptive(1.0, share=0.01),
        noise=LossDriven(1.0, 3.0, share=0.02, order=4.0, budget=100.0),
        expected_batch_size=10,
    )
    mechanism, seen = mechanism_of(plan), []
    for step in range(6):
        losses = torch.rand(7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        sums = ClippedSum({"w": torch.ones(4)}, torch.rand(7, 1), mechanism.clipping, losses=losses)
        released = mechanism.release(sums)
        for number in plan.beside:
            grid = grid_of(number.noise_std(released.noise_multiplier), 10.0)
            assert is_on(released.beside[number.name], grid)
            seen.append(is_on(released.beside[number.name], 2 * grid))
    assert not all(seen)


def test_whole_releases_lie_on_the_grid_of_each_block():
    plan = PrivacyPlan(sample_rate=0.1, steps=2, expected_batch_size=10, whole_releases=(8.0,))
    bounds = (0.5, 20.0)
    summed = BoundedSum.over([torch.randn(9, 2, 500, generator=torch.Generator().manual_seed(0))], bounds)
    released = mechanism_of(plan).release_whole(summed, what="sums")
    assert released.dtype == torch.float64
    for row, bound in zip(released, bounds, strict=True):
        grid = grid_of(8.0 * math.sqrt(2) * bound, 1.0)
        assert is_on(row, grid)
        assert not is_on(row, 2 * grid)


def test_dice_releases_on_the_grid_of_its_noise_too():
    dice = DicePlan(examples=20, batch_size=4, steps=6, clipping_norm=1.0, error_norm=0.5, noise_std=2.0)
    plan = dice.accounted()
    mechanism = DiceMechanism(mechanism_of(plan))
    clipped = ClippedSum({"w": torch.rand(300)}, torch.ones(1, 1), plan.clipping)
    for _ in range(3):
        released = mechanism.release(clipped, ClippedSum({"w": torch.rand(300)}, torch.ones(1, 1), Flat(1e30)))
        (std,) = released.noise_stds.values()
        assert std / 4 == pytest.approx(2.0)
        assert is_on(released.gradients["w"], grid_of(std, 4.0))


@settings(max_examples=25, deadline=None)
@given(st.floats(-50, 50), st.floats(0.3, 3.0))
def test_rounding_leaves_the_mean_where_it_was(offset, std):
    """By quadrature, not by chance: over 2^16 quantiles of the normal law. A rounding downwards would be half a grid off."""
    quantiles = stats.norm.ppf((np.arange(2**16) + 0.5) / 2**16)
    private, grid = np.empty(2**16), grid_of(std, 8.0)
    clipped = np.full(2**16, offset * grid)
    noisy_mean(clipped, quantiles, std, 8.0, private)
    assert abs(private.mean() - offset * grid / 8.0) < 0.02 * grid
    downwards = np.floor((clipped + std * quantiles) / 8.0 / grid) * grid
    assert abs(downwards.mean() - offset * grid / 8.0) > 0.4 * grid


def test_after_rounding_the_noise_has_its_scale_and_its_shape_at_every_offset():
    """Chi-square of the scale and of 64 equally probable intervals, error probability 1e-6 each; 1% more noise is rejected."""
    for seed, offset in enumerate((0.0, 0.25, 0.5, -7.9)):
        noise, private = Randomness.from_seed(seed).normal(400_000), np.empty(400_000)
        std, divisor = 1.3, 100.0
        shift = offset * grid_of(std, divisor) * divisor
        noisy_mean(np.full(noise.size, shift), noise, std, divisor, private)
        standard = (private * divisor - shift) / std
        square = float((standard**2).sum())
        assert 2 * min(stats.chi2.cdf(square, noise.size), stats.chi2.sf(square, noise.size)) > ALPHA
        assert stats.chi2.sf(1.01**2 * square, noise.size) < ALPHA
        # half a grid to and fro, so that the borders of the intervals do not matter
        standard += (np.random.default_rng(seed).random(noise.size) - 0.5) * grid_of(std, divisor) * divisor / std
        counts = np.histogram(stats.norm.cdf(standard), bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > ALPHA


# the attacks


def low_bits(values, unit):
    """Whether there are digits below the unit: which a sum cannot have to which a number of at least 2^t units was added."""
    return np.asarray(values, dtype=np.float64) / unit % 1 != 0


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, 24), (np.float64, 53)])
def test_low_bits_tell_neighbours_apart_with_naive_noise_and_not_with_ours(dtype, bits):
    """Precision-based attack (Mironov 2012; Haney et al. 2022) on the sums 0 and 1, at noise 1: 200 releases of 50 numbers each.

    With noise added in the type of the sum, digits below 2^-bits are there only if the sum was 0: always right. With ours they
    are never there, and what low bits there are, the last four on the grid, are as uniform for 0 as for 1: chi-square, each with
    error probability 1e-6; the same check rejects naive noise.
    """
    noise = Randomness.from_seed(5).normal((2, 200, 50)).astype(dtype)
    naive = noise + np.array([0, 1], dtype=dtype)[:, None, None]
    guessed = low_bits(naive, 2.0**-bits).any(axis=2)  # "the sum is 0"
    assert guessed[0].mean() - guessed[1].mean() > 0.99

    plan = PrivacyPlan(sample_rate=0.1, steps=400, clipping=Flat(1.0), noise=Constant(1.0), expected_batch_size=1)
    mechanism, ours = mechanism_of(plan, seed=6), []
    for value in (0.0, 1.0):
        sums = {"w": torch.full((200 * 50,), value, dtype=torch.from_numpy(noise).dtype)}
        ours.append(mechanism.release(ClippedSum(sums, torch.zeros(1, 1), plan.clipping)).gradients["w"].numpy())
    assert not low_bits(ours, 2.0**-bits).any()
    grid = grid_of(1.0, 1.0)
    tables = [np.bincount((row.astype(np.float64) / grid).astype(np.int64) % 16, minlength=16) for row in ours]
    assert all(stats.chisquare(table).pvalue > ALPHA for table in tables)
    assert stats.chi2_contingency(tables).pvalue > ALPHA
    units = [(row.ravel().astype(np.float64) * 2.0 ** (bits + 2)).astype(np.int64) % 16 for row in naive]
    assert stats.chi2_contingency([np.bincount(row, minlength=16) + 1 for row in units]).pvalue < ALPHA


def test_neighbouring_sums_reach_the_same_values_and_naively_hardly_one_in_a_hundred():
    """Mironov's attack: with a generator of 2^18 numbers, which values can come out at all? No chance in it."""
    generator = stats.norm.ppf((np.arange(2**18) + 0.5) / 2**18)
    sums = (0.1, 0.7)
    naive = [set((total + generator).tolist()) for total in sums]
    assert len(naive[0] & naive[1]) < 0.01 * len(naive[0])
    ours = []
    for total in sums:
        private = np.empty(generator.size)
        noisy_mean(np.full(generator.size, total), generator, 1.0, 1.0, private)
        ours.append(set(private[np.abs(private) < 1.5].tolist()))
    assert ours[0] == ours[1]
    assert len(ours[0]) == 3 * 256 - 1


def test_compiled_and_numpy_round_to_the_same_values(monkeypatch):
    if arithmetic._compiled is None:
        pytest.skip("the C code was not built")
    rng = np.random.default_rng(0)
    clipped, noise = (rng.standard_normal(100_000) * 50).astype(np.float32), rng.standard_normal(100_000)
    noise[:1000], clipped[:1000] = 0.0, (np.arange(1000) - 500) * grid_of(3.0, 1.0) / 2  # many halves of a grid
    both = np.empty((2, noise.size), dtype=np.float32)
    noisy_mean(clipped, noise, 3.0, 1.0, both[0])
    monkeypatch.setattr(arithmetic, "_compiled", None)
    noisy_mean(clipped, noise, 3.0, 1.0, both[1])
    # Where multiplication and addition are one instruction, a value beside the middle of two may go to the other.
    assert (both[0] == both[1]).mean() > 1 - 1e-4
    assert (both[0, :1000] == both[1, :1000]).all()


# how far from exact noise it is: docs/security.md


def excess(parameters, steps, *, examples=0.0, sigma=1.0, failure=1e-12, tail_bits=62):
    """(epsilon', delta') between a run with noise as it is computed and one with exact noise, rounded: docs/security.md."""
    pairs, furthest = parameters * steps / 2, math.sqrt(2 * tail_bits * math.log(2))
    radius = np.linspace(1e-6, furthest, 200_001)
    moved = 2.0**-50 * radius + 2.0**-51 * radius + 2.0**-95 * np.exp(radius**2 / 2) / radius
    ratio = 5 * 512 * moved
    square = 2 * pairs * float(np.trapezoid(ratio**2 * radius * np.exp(-(radius**2) / 2), radius))
    by_sum = 5 * 512 * 3 * 2.0**-53 * examples / sigma
    square += 2 * steps * by_sum**2
    log = math.log(1 / failure)
    largest = float(ratio.max()) + by_sum
    return square + math.sqrt(8 * square * log) + 8 / 3 * largest * log, failure + pairs * 2.0**-tail_bits


def test_computed_noise_is_as_good_as_exact_noise_up_to_a_hundred_thousandth_of_epsilon():
    """The numbers of docs/security.md: 1440 steps of 550,570 parameters, batches of up to 2048 at noise multiplier 1.54."""
    epsilon, delta = excess(550_570, 1440, examples=2048, sigma=1.54)
    assert 1e-6 < epsilon < 5e-6
    assert delta < 1e-10
    # A small network; and a thousand million parameters over a million steps.
    assert excess(26_010, 1000, examples=1000)[0] < 4e-6
    assert excess(1e9, 1e6, examples=2**20, tail_bits=72)[0] < 5e-2


def test_without_the_last_bits_of_the_radius_the_tails_would_be_too_coarse():
    """What the 32 bits a pair are for: with 63 bits alone the relative error of a cell of the grid is above 1 where u = 2^-62."""
    furthest = math.sqrt(2 * 62 * math.log(2))
    assert 5 * 512 * 2.0**-63 * math.exp(furthest**2 / 2) / furthest > 1
    assert 5 * 512 * 2.0**-95 * math.exp(furthest**2 / 2) / furthest < 1e-6


# what is left: the sum


@pytest.mark.parametrize(("alike", "most"), [(False, 1e-5), (True, 1e-4)], ids=["random", "nearly equal"])
def test_the_last_bits_of_a_single_precision_sum_move_it_by_less_than_a_ten_thousandth(alike, most):
    """512 examples and one more, 26,010 parameters: the move in float32 beside that in doubles, and its length, by C."""
    from tacit.gradients import ClippedGradient

    torch.manual_seed(0)
    first = [torch.nn.Conv2d(1, 16, 8, 2, padding=3), torch.nn.Tanh(), torch.nn.MaxPool2d(2, 1)]
    second = [torch.nn.Conv2d(16, 32, 4, 2), torch.nn.Tanh(), torch.nn.MaxPool2d(2, 1), torch.nn.Flatten()]
    model = torch.nn.Sequential(*first, *second, torch.nn.Linear(512, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    inputs, targets = torch.randn(513, 1, 28, 28), torch.randint(0, 10, (513,))
    if alike:
        inputs, targets = inputs[:1] + 1e-3 * inputs, targets[:1].expand(513).clone()

    def move():
        loss, dtype = torch.nn.CrossEntropyLoss(reduction="none"), next(model.parameters()).dtype
        gradient, examples = ClippedGradient(model, loss=loss, clipping=Flat(0.1)), inputs.to(dtype)
        sums = [gradient(examples[begin:], targets[begin:]).gradients.values() for begin in (0, 1)]
        return torch.cat([(one.double() - other.double()).flatten() for one, other in zip(*sums, strict=True)]) / 0.1

    single = move()
    model.double()
    assert single.numel() == 26_010
    assert 0 < float((single - move()).norm()) < most
    assert float(single.norm()) <= 1 + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_examples_made_for_it_move_a_single_precision_sum_by_some_thousandths_at_most(dtype):
    """Without the first example, the others add up to just below a power of two, with it to just above, where roundings all go
    one way. In double precision the same examples move it by C."""
    from tacit.gradients import ClippedGradient

    step = 2.0**-16
    others = [1.0] * 255 + [0.5] + [2.0**-8 + step + step / 64, -(2.0**-8)] * 127
    values = torch.tensor([1.0, *others], dtype=torch.float64)
    model = torch.nn.Linear(1, 64).to(dtype)
    gradient = ClippedGradient(model, loss=lambda outputs, targets: (outputs * targets).sum(1), clipping=Flat(1.0))
    inputs, targets = torch.zeros(len(values), 1, dtype=dtype), (values[:, None] / 8).expand(-1, 64).to(dtype)
    one, other = (gradient(inputs[begin:], targets[begin:]).gradients["bias"].double() for begin in (0, 1))
    most = 2 * len(others) ** 2 * torch.finfo(dtype).eps / 2
    assert 1 - most <= float((one - other).norm()) <= 1 + min(most, 0.01)
