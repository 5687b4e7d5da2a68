"""Clipping bounds each example by itself, and its noise keeps the multiplier that is accounted."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.privacy import Adaptive, Automatic, Flat, Grouped, UserError, clip_factors, effective_multiplier
from tacit.privacy.clipping import Clipping, clipping_from_dict

positive = st.floats(1e-6, 1e6)
norm = st.one_of(
    st.floats(0, 2.0**100, width=32), st.sampled_from([0.0, 1e-45, 1e-30, 3.4e38, math.inf, -math.inf, math.nan])
)


@st.composite
def groupings(draw, *, bounds=positive):
    count = draw(st.integers(1, 5))
    some = st.lists(bounds, min_size=count, max_size=count).map(tuple)
    return Grouped(tuple((f"layer{j}.*",) for j in range(count)), draw(some), draw(st.none() | some))


bounds = st.one_of(st.builds(Flat, positive), groupings())
automatic = st.builds(Automatic, bounds, st.floats(1e-4, 10))
adaptive = st.builds(Adaptive, st.floats(1e-6, 1e6), st.floats(0.01, 0.99), st.floats(0.01, 1), st.floats(1e-4, 0.5))
clippings = st.one_of(bounds, automatic, adaptive)


@st.composite
def clippings_with_norms(draw):
    clipping = draw(clippings)
    rows = st.lists(norm, min_size=len(clipping.clipping_norms), max_size=len(clipping.clipping_norms))
    return clipping, draw(st.lists(rows, min_size=1, max_size=6))


@given(clippings_with_norms(), st.sampled_from([torch.float32, torch.float64]))
def test_factor_times_norm_never_exceeds_the_bound(drawn, dtype):
    """Up to three roundings: of the bound, of the quotient and of the product."""
    clipping, rows = drawn
    norms = torch.tensor(rows, dtype=dtype)
    factors = clip_factors(norms, clipping)
    bounds = torch.tensor(clipping.clipping_norms, dtype=torch.float64)
    finite = torch.isfinite(norms).all(dim=1)
    assert (factors >= 0).all()
    assert clipping.stability is not None or (factors <= 1).all()
    assert (factors[finite].double() * norms[finite].double() <= bounds * (1 + 3 * torch.finfo(dtype).eps)).all()
    assert (factors[~finite] == 0).all()


@given(clippings_with_norms())
def test_an_example_within_every_bound_is_left_as_it_is(drawn):
    clipping, _ = drawn
    if clipping.stability is not None:
        return  # then every gradient is scaled
    norms = torch.tensor([clipping.clipping_norms], dtype=torch.float64) * torch.tensor([[0.0], [0.5], [0.999]])
    assert (clip_factors(norms, clipping) == 1).all()


@given(clippings_with_norms(), st.randoms())
def test_an_examples_factor_does_not_depend_on_the_others(drawn, random):
    clipping, rows = drawn
    norms = torch.tensor(rows)
    together = clip_factors(norms, clipping)
    order = random.sample(range(len(rows)), len(rows))
    assert torch.equal(torch.cat([clip_factors(norms[i : i + 1], clipping) for i in range(len(rows))]), together)
    assert torch.equal(clip_factors(norms[order], clipping), together[order])
    assert torch.equal(clip_factors(norms[:1], clipping), together[:1])


def test_one_group_that_is_not_finite_silences_the_whole_example_and_nobody_else():
    clipping = Grouped((("a",), ("b",)), (1.0, 2.0))
    norms = torch.tensor([[0.5, math.nan], [math.inf, 0.5], [4.0, 4.0]])
    assert clip_factors(norms, clipping).tolist() == [[0, 0], [0, 0], [0.25, 0.5]]


def test_no_examples_have_no_factors():
    assert clip_factors(torch.zeros(0, 1), Flat(1.0)).shape == (0, 1)


@given(clippings, st.lists(st.lists(st.floats(-1e3, 1e3), min_size=5, max_size=5), min_size=1, max_size=6))
def test_adding_one_example_moves_the_sum_by_at_most_its_sensitivity(clipping, examples):
    count = len(clipping.clipping_norms)
    gradients = torch.tensor(examples, dtype=torch.float64)[:, :count].unsqueeze(2).repeat(1, 1, 3)
    clipped = gradients * clip_factors(gradients.norm(dim=2), clipping).unsqueeze(2)
    moved = (clipped.sum(dim=0) - clipped[:-1].sum(dim=0)).norm()
    assert moved <= clipping.sensitivity * (1 + 1e-9) + 1e-9


@given(clippings, st.floats(1e-3, 1e3))
def test_noise_stds_keep_the_effective_multiplier(clipping, sigma):
    assert effective_multiplier(clipping.clipping_norms, clipping.noise_stds(sigma)) == pytest.approx(sigma, rel=1e-9)


@given(groupings(bounds=st.floats(1e-150, 1e150)), st.floats(1e-3, 1e3))
def test_noise_stds_keep_the_effective_multiplier_for_bounds_whose_squares_are_no_floats(clipping, sigma):
    stds = clipping.noise_stds(sigma)
    ratios = np.array([bound / std for bound, std in zip(clipping.clipping_norms, stds)])
    assert 1 / math.hypot(*ratios) == pytest.approx(sigma, rel=1e-9)


@given(groupings())
def test_noise_keeps_its_shape(clipping):
    stds = clipping.noise_stds(1.3)
    shape = clipping.noise_shape or (1.0,) * len(stds)
    assert [std / stds[0] for std in stds] == pytest.approx([relative / shape[0] for relative in shape])
    if clipping.noise_shape is None:
        assert stds[0] == pytest.approx(1.3 * math.sqrt(sum(bound**2 for bound in clipping.clipping_norms)))


def test_forty_groups_with_noise_of_their_own_are_worth_far_less():
    assert effective_multiplier([0.7] * 40, [2.8 * 0.7] * 40) == pytest.approx(2.8 / math.sqrt(40))


@pytest.mark.parametrize("stds", [[0.0, 1.0], [1.0, 0.0], [-1.0, 1.0]])
def test_a_group_without_noise_is_no_privacy(stds):
    assert effective_multiplier([1.0, 1.0], stds) == 0


def test_a_noise_std_for_every_bound_or_none():
    with pytest.raises(ValueError):
        effective_multiplier([1.0, 1.0], [1.0])


@pytest.mark.parametrize(
    ("groups", "names", "complaint"),
    [
        ([["a*"], ["b*"]], ["a1", "b1", "c1"], "'c1' is in no group"),
        ([["a*"], ["*1"]], ["a1", "b1"], "'a1' is in 2 groups"),
        ([["a*"], ["b*"]], ["a1"], "matches no parameter"),
        ([["A*"]], ["a1"], "'a1' is in no group"),
    ],
)
def test_every_parameter_is_in_exactly_one_group_and_no_group_is_empty(groups, names, complaint):
    with pytest.raises(UserError, match=complaint):
        Grouped(groups, [1.0] * len(groups)).group_of(names)


def test_flat_clipping_has_one_group():
    assert Flat(1.0).group_of(["x", "y"]) == (0, 0)


layer_names = st.lists(
    st.from_regex(r"[a-z]{1,3}(\.[a-z0-9]{1,3}){0,2}", fullmatch=True), min_size=1, max_size=8, unique=True
)


@given(layer_names, positive)
def test_clipping_by_name_puts_each_layer_in_a_group_of_its_own_and_keeps_the_sensitivity(names, bound):
    clipping = Grouped.by_name(names, clipping_norm=bound)
    groups = dict(zip(names, clipping.group_of(names)))
    for one in names:
        for other in names:
            assert (groups[one] == groups[other]) == (one.rpartition(".")[0] == other.rpartition(".")[0])
    assert clipping.sensitivity == pytest.approx(bound)


@given(clippings)
def test_a_clipping_survives_its_description(clipping):
    assert clipping_from_dict(clipping.to_dict()) == clipping
    assert isinstance(clipping, Clipping)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Flat(0.0),
        lambda: Flat(-1.0),
        lambda: Flat(math.nan),
        lambda: Flat(math.inf),
        lambda: Flat("1"),
        lambda: Flat(True),
        lambda: Flat(10**400),
        lambda: Grouped((), ()),
        lambda: Grouped("ab", (1.0, 1.0)),
        lambda: Grouped(("a", "b"), (1.0, 1.0)),
        lambda: Grouped((("a",), ("b",)), (1.0,)),
        lambda: Grouped((("a",), ("b",)), (1.0, 0.0)),
        lambda: Grouped((("a",), ("b",)), (1.0, 1.0), noise_shape=(1.0,)),
        lambda: Grouped((("a",), ("b",)), (1.0, 1.0), noise_shape=(1.0, 0.0)),
        lambda: Grouped((("a",),), (1e300,), noise_shape=(1e-300,)),
        lambda: Grouped.by_name([], clipping_norm=1.0),
        lambda: Grouped.balanced({"a": 3}, groups=2, clipping_norm=1.0),
        lambda: Grouped.balanced({"a": 3}, groups=0, clipping_norm=1.0),
        lambda: Grouped((("a",), ("b",)), (1.0, 1.0)).allocated("deep", {"a": 1, "b": 1}),
        lambda: Grouped((("a",), ("b",)), (1.0, 1.0)).allocated("depth", {"a": 1}),
        lambda: Automatic(Flat(1.0), stability=0.0),
        lambda: Automatic(Flat(1.0), stability=1e-30),
        lambda: Adaptive(1.0, rate=2.0),
        lambda: Automatic(Automatic(Flat(1.0))),
        lambda: Adaptive(1.0, quantile=1.0),
        lambda: Adaptive(1.0, share=0.0),
        lambda: Adaptive(1.0, share=0.6),
        lambda: clipping_from_dict({"kind": "automatic"}),
        lambda: Grouped.by_name(["a"], clipping_norm=-1.0),
        lambda: clipping_from_dict({"kind": "flt", "clipping_norm": 1.0}),
        lambda: clipping_from_dict({"clipping_norm": 1.0}),
        lambda: clipping_from_dict({"kind": "flat"}),
        lambda: clipping_from_dict({"kind": "flat", "clipping_norm": 1.0, "more": 1}),
    ],
)
def test_a_clipping_that_makes_no_sense_is_refused(make):
    with pytest.raises(UserError):
        make()


@settings(max_examples=20)
@given(st.integers(1, 1000))
def test_bounds_given_as_whole_numbers_or_numpy_scalars_are_plain_floats(value):
    for given_as in (value, np.int64(value), np.float64(value)):
        assert type(Flat(given_as).clipping_norm) is float
        assert Flat(given_as) == Flat(float(value))


parameters = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}\.[a-z]{1,3}", fullmatch=True), st.integers(1, 10_000), min_size=1, max_size=12
)


@given(parameters, st.data(), positive)
def test_balanced_groups_hold_every_parameter_once_and_differ_by_at_most_one_of_them(sizes, data, bound):
    count = data.draw(st.integers(1, len(sizes)))
    clipping = Grouped.balanced(sizes, groups=count, clipping_norm=bound)
    assert sorted(name for members in clipping.groups for name in members) == sorted(sizes)
    assert clipping.sensitivity == pytest.approx(bound)
    assert len(set(clipping.clipping_norms)) == 1
    assert len(set(clipping.group_of(list(sizes)))) == count
    totals = [sum(sizes[name] for name in members) for members in clipping.groups]
    assert max(totals) - min(totals) <= max(sizes.values())


@given(parameters, st.sampled_from(["equal", "bound", "dimension", "depth"]), st.floats(0.1, 10), st.data())
def test_every_allocation_keeps_the_multiplier_and_the_dimensions_one_makes_the_least_noise(sizes, name, sigma, data):
    norms = tuple(data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes))))
    clipping = Grouped(tuple((name,) for name in sizes), norms)

    def energy(allocation):
        stds = clipping.allocated(allocation, sizes).noise_stds(sigma)
        return sum(width * std**2 for width, std in zip(sizes.values(), stds))

    stds = clipping.allocated(name, sizes).noise_stds(sigma)
    assert effective_multiplier(norms, stds) == pytest.approx(sigma, rel=1e-9)
    assert energy("dimension") <= energy(name) * (1 + 1e-9)


def test_noise_by_depth_and_by_bound():
    clipping = Grouped((("a",), ("b",), ("c",)), (1.0, 2.0, 3.0))
    sizes = {"a": 1, "b": 1, "c": 1}
    depth, bound = (clipping.allocated(name, sizes).noise_stds(1.0) for name in ("depth", "bound"))
    assert [depth[0] / std for std in depth] == pytest.approx([1, 2, 3])
    assert [std / bound[0] for std in bound] == pytest.approx([1, 2, 3])
    assert clipping.allocated("bound", sizes).allocated("equal", sizes) == clipping


@given(st.floats(1e-6, 1e6), st.floats(1e-4, 1.0))
def test_automatic_clipping_scales_every_gradient_to_almost_the_bound(norm, stability):
    factor = float(clip_factors(torch.tensor([[norm]], dtype=torch.float64), Automatic(Flat(3.0), stability)))
    assert factor * norm == pytest.approx(3.0 * norm / (norm + stability))


@given(adaptive, st.lists(st.floats(-10, 10), min_size=1, max_size=50))
def test_an_adaptive_norm_moves_against_the_fraction_within_and_never_far(clipping, released):
    for within in released:
        moved = clipping.moved(within)
        assert (moved.clipping_norm <= clipping.clipping_norm) == (min(max(within, 0), 1) >= clipping.quantile) or (
            moved.clipping_norm == clipping.clipping_norm
        )
        assert abs(math.log(moved.clipping_norm / clipping.clipping_norm)) <= clipping.rate * (1 + 1e-9)
        clipping = moved


@pytest.mark.parametrize("bound", [1.0, 1e39])
def test_a_gradient_of_zeros_never_gets_a_factor_that_is_not_finite(bound):
    """0 times infinity would make the whole sum nan, and no noise hides that."""
    factors = clip_factors(torch.tensor([[0.0], [1e-30], [2.0]]), Automatic(Flat(bound), 1e-6))
    assert factors.isfinite().all()
