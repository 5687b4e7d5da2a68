"""The compiled kernels against PyTorch: every instruction set, every shape of tile, every example by itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import ClippedGradient, kernels, reference
from tacit.models import cifar_cnn, resnet
from tacit.privacy.clipping import Flat

pytestmark = pytest.mark.skipif(kernels._kernels is None, reason="the kernels were not built on this machine")
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["any", "avx2", "avx512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        kernels._kernels.use(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernels._kernels.use(None)


@st.composite
def convolutions(draw: Callable, *, apart: bool = True) -> tuple[nn.Conv2d, Tensor, Tensor]:
    """A layer in double precision, images, and output gradients; channels that fill vectors and that do not, maps of one block
    and of several."""
    channels = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 32, 48]))
    outputs = draw(st.sampled_from([1, 3, 8, 16, 17, 31, 32, 40, 64]))
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (2, 4), (5, 1), (1, 6)]))
    stride = draw(st.sampled_from([(1, 1), (2, 2), (1, 3)])) if apart else (1, 1)
    padding = draw(st.sampled_from([(0, 0), (1, 1), (2, 0), (1, 3)]))
    size = [draw(st.integers(max(1, k - 2 * p), 20 if apart else 9)) for k, p in zip(kernel, padding)]
    layer = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False).double()
    torch.manual_seed(draw(st.integers(0, 1000)))
    images = torch.randn(draw(st.integers(1, 3)), channels, *size, dtype=torch.float64)
    return layer, images, torch.randn_like(layer(images)).detach()


def exact(layer: nn.Conv2d, images: Tensor, gradients: Tensor) -> Tensor:
    rows = [
        torch.autograd.grad(layer(image.unsqueeze(0)), layer.weight, gradient.unsqueeze(0))[0]
        for image, gradient in zip(images, gradients)
    ]
    return torch.stack(rows)


def geometry(layer: nn.Conv2d) -> kernels.Geometry:
    return kernels.Geometry(layer.kernel_size, layer.stride, layer.padding)


def close(found: Tensor, expected: Tensor, size: Tensor | float = 1.0) -> None:
    assert ((found.double() - expected).abs() <= 2e-5 * (size + expected.abs())).all()


@SLOW
@given(case=convolutions(), turned=st.booleans())
def test_gradients_and_their_sums(instructions: str, case: tuple[nn.Conv2d, Tensor, Tensor], turned: bool) -> None:
    layer, images, gradients = case
    expected = exact(layer, images, gradients)
    laid_out = torch.channels_last if turned else torch.contiguous_format
    x, g = (tensor.float().contiguous(memory_format=laid_out) for tensor in (images, gradients))
    plain = kernels.conv_gradients(x, g, geometry(layer))
    size = expected.abs().amax() + 1
    close(plain.gradients, expected, size)
    close(plain.bias, gradients.sum(dim=(2, 3)), size)
    squares = expected.square().sum(dim=(1, 2, 3, 4))
    close(plain.squares, expected.square().sum(dim=(2, 3, 4)), squares.unsqueeze(1) + size)
    held = plain.gradients.double().square().sum(dim=(1, 2, 3, 4))
    assert (held <= plain.norms).all()
    assert (plain.norms <= held * 1.0001).all()


@SLOW
@given(case=convolutions(), turned=st.booleans(), views=st.integers(1, 2))
def test_what_is_added_to_every_gradient(
    instructions: str, case: tuple[nn.Conv2d, Tensor, Tensor], turned: bool, views: int
) -> None:
    """Once an example, however many views it has, and with the norms of what comes out."""
    layer, images, gradients = case
    x, g = (torch.cat([tensor.float()] * views) for tensor in (images, gradients))
    laid_out = torch.channels_last if turned else torch.contiguous_format
    added = layer.weight.detach().float().contiguous(memory_format=laid_out)
    plain = kernels.conv_gradients(x, g, geometry(layer), views=views)
    found = kernels.conv_gradients(x, g, geometry(layer), views=views, decaying=added, rate=0.5)
    expected = plain.gradients.double() + 0.5 * added.double()
    assert torch.equal(found.gradients, plain.gradients + 0.5 * added)
    assert torch.equal(found.bias, plain.bias)
    held = found.gradients.double().square().sum(dim=(1, 2, 3, 4))
    assert (held <= found.norms).all()
    assert (found.norms <= held * 1.0001).all()
    factors = torch.rand(len(expected))
    close(found.weighted_sum(factors), torch.einsum("b...,b->...", expected, factors.double()), expected.abs().amax())


@SLOW
@given(
    inputs=st.sampled_from([1, 7, 16, 33, 512]),
    outputs=st.sampled_from([1, 3, 16, 37]),
    rate=st.sampled_from([0.0, 0.01, 3.0]),
    biased=st.booleans(),
    cancels=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_norms_of_products_with_their_decay(
    instructions: str, inputs: int, outputs: int, rate: float, biased: bool, cancels: bool, seed: int
) -> None:
    """Never below those of what is added up, also where decay and gradient nearly cancel, and hardly above them."""
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs, bias=biased)
    a, g = torch.randn(5, inputs), torch.randn(5, outputs)
    if cancels and rate:  # the third example's gradient is the weight's, turned round
        with torch.no_grad():
            layer.weight.copy_(-g[2].unsqueeze(1) * a[2] / rate)
    weight = layer.weight.detach()
    products = g.double().unsqueeze(2) * a.double().unsqueeze(1)
    plain = kernels.outer_norms(a, g)
    close(plain, products.square().sum(dim=(1, 2)))
    bias = None if layer.bias is None else layer.bias.detach()
    length = float(weight.double().norm())
    found = kernels.outer_norms(a, g, layer(a).detach(), bias, weight=weight, rate=rate)
    expected = (products + rate * weight.double()).square().sum(dim=(1, 2))
    size = products.square().sum(dim=(1, 2)) + (rate * length) ** 2
    if bias is not None:
        size = size + rate * g.double().norm(dim=1) * float(bias.norm())
    assert (found >= expected - 1e-14 * size).all()
    assert (found <= expected + (inputs + 16) * 2**-23 * size).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_products_norm_is_not_finite_where_it_is_not_and_no_other_changes(instructions: str, bad: float) -> None:
    torch.manual_seed(0)
    a, g, y = torch.randn(4, 9), torch.randn(4, 3), torch.randn(4, 3)
    options = {"weight": torch.randn(3, 9), "rate": 0.5}
    before = kernels.outer_norms(a, g, y, **options)
    for tensor in (a, g, y):
        kept = tensor[1, 2].item()
        tensor[1, 2] = bad
        after = kernels.outer_norms(a, g, y, **options)
        assert not after[1].isfinite()
        others = [0, 2, 3]
        assert torch.equal(after[others], before[others])
        tensor[1, 2] = kept


@SLOW
@given(
    shapes=st.lists(st.sampled_from([(1,), (7,), (16,), (33,), (10, 32), (3, 2, 5, 5)]), min_size=1, max_size=5),
    decays=st.lists(st.sampled_from([None, 0.0, 0.01, 3.0]), min_size=5, max_size=5),
    batch=st.integers(1, 4),
    turned=st.booleans(),
)
def test_small_gradients_side_by_side(
    instructions: str, shapes: list[tuple[int, ...]], decays: list[float | None], batch: int, turned: bool
) -> None:
    """Every number in its place with its own decay, and the norms of the very numbers."""
    torch.manual_seed(0)
    gradients = [torch.randn(batch, *shape) for shape in shapes]
    parameters = [torch.randn(shape) for shape in shapes]
    if turned:
        parameters = [p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p for p in parameters]
    decaying = [None if rate is None else (p, rate) for p, rate in zip(parameters, decays)]
    rows, squares = kernels.beside(gradients, decaying)
    expected = [g + (rate or 0.0) * p for g, p, rate in zip(gradients, parameters, decays)]
    torch.testing.assert_close(rows, torch.cat([g.flatten(1) for g in expected], 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(squares, rows.double().square().sum(dim=1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_among_small_gradients_shows_in_its_norm_alone(instructions: str, bad: float) -> None:
    gradients = [torch.ones(3, 5), torch.ones(3, 40)]
    gradients[1][1, 37] = bad
    _, squares = kernels.beside(gradients, [None, (torch.ones(40), 0.5)])
    assert not squares[1].isfinite()
    assert squares[[0, 2]].tolist() == [5 + 40 * 1.5**2] * 2


@pytest.mark.parametrize("count", [1, 15, 16, 31, 32, 33, 1 << 14, (1 << 14) + 1, 200_003])
def test_lengths_of_rows_of_numbers(instructions: str, count: int) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(count)
    exact = float(numbers.double().square().sum())
    assert kernels.square(numbers) == pytest.approx(exact, rel=1e-13)
    numbers[count // 2] = float("nan")
    assert math.isnan(kernels.square(numbers))


def test_lengths_where_numbers_do_not_lie_side_by_side(instructions: str) -> None:
    numbers = torch.randn(2, 3, 4, 4)
    assert kernels.square(numbers[:, ::2]) == pytest.approx(float(numbers[:, ::2].double().square().sum()), rel=1e-13)


def embedded(
    rows: int, width: int, batch: int, positions: int, padding: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, output gradients, a table, and each example's gradient of it in double precision."""
    torch.manual_seed(0)
    tokens, g = torch.randint(rows, (batch, positions)), torch.randn(batch, positions, width)
    exact = torch.zeros(batch, rows, width, dtype=torch.float64)
    for i in range(batch):
        for t in range(positions):
            if tokens[i, t] != padding:
                exact[i, tokens[i, t]] += g[i, t].double()
    return tokens, g, torch.randn(rows, width), exact


@SLOW
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    batch=st.integers(1, 9),
    positions=st.integers(1, 20),
    padded=st.booleans(),
    rate=st.sampled_from([0.0, 0.01, 3.0]),
    threads=st.integers(1, 3),
)
def test_gradients_of_an_embedding(
    instructions: str, rows: int, width: int, batch: int, positions: int, padded: bool, rate: float, threads: int
) -> None:
    """Sums by example and token, their norms with decay, and what is added up."""
    padding = rows // 2 if padded else None
    tokens, g, table, exact = embedded(rows, width, batch, positions, padding)
    exact = exact + rate * table.double()
    factors = torch.rand(batch)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = kernels.embedding_sums(tokens, g, table, padding, rate)
        added = found.weighted_sum(factors)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.norms, exact.square().sum(dim=(1, 2)), rtol=2e-6, atol=1e-9)
    expected = (factors.double()[:, None, None] * exact).sum(dim=0)
    torch.testing.assert_close(added.double(), expected, rtol=1e-5, atol=1e-5 * (1 + rate) * batch)


@pytest.mark.parametrize("rate", [0.5, 1e-3])
def test_an_embedding_whose_gradient_and_decay_cancel(instructions: str, rate: float) -> None:
    """The norm is never below that of what is added up for an example alone."""
    torch.manual_seed(0)
    table, tokens = torch.randn(30, 20), torch.arange(30).repeat(4, 1)
    g = (-rate * table).repeat(4, 1, 1)
    g[1] += 1e-6 * torch.randn(30, 20)
    g[2, 3, 4] += 1e-3
    g[3] *= 1 + 1e-5
    found = kernels.embedding_sums(tokens, g, table, None, rate)
    for i in range(4):
        alone = kernels.embedding_sums(tokens[i : i + 1], g[i : i + 1], table, None, rate)
        exact = float((alone.sums[0].double() + rate * table.double()).square().sum())
        assert float(found.norms[i]) >= exact
        assert float(found.norms[i]) <= exact + 1e-10 * rate**2 * float(table.double().square().sum())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_what_is_not_finite_in_an_embedding_shows_in_its_norm_alone(instructions: str, bad: float, rate: float) -> None:
    tokens, g, table, _ = embedded(6, 20, 4, 5, 0)
    before = kernels.embedding_sums(tokens, g, table, 0, rate)
    g[1][tokens[1] != 0] = bad
    g[2][tokens[2] == 0] = bad  # the padding row has no gradient
    after = kernels.embedding_sums(tokens, g, table, 0, rate)
    assert not after.norms[1].isfinite()
    assert torch.equal(after.norms[[0, 2, 3]], before.norms[[0, 2, 3]])


def test_an_example_of_padding_alone_adds_nothing(instructions: str) -> None:
    tokens, g = torch.tensor([[2, 2, 2], [0, 1, 2]]), torch.randn(2, 3, 5)
    found = kernels.embedding_sums(tokens, g, torch.ones(3, 5), 2)
    assert found.norms[0] == 0
    assert not found.weighted_sum(torch.tensor([1.0, 0.0])).any()


@pytest.mark.parametrize("token", [-1, 3, 2**40])
def test_tokens_outside_the_table_are_refused(instructions: str, token: int) -> None:
    with pytest.raises(IndexError, match="not in the table"):
        kernels.embedding_sums(torch.tensor([[0, token]]), torch.ones(1, 2, 4), torch.ones(3, 4))


@SLOW
@given(case=convolutions(), turned=st.booleans(), rate=st.sampled_from([0.0, 0.01, 3.0]))
def test_gradients_of_a_standardised_weight(
    instructions: str, case: tuple[nn.Conv2d, Tensor, Tensor], turned: bool, rate: float
) -> None:
    """The norms are those of the projected gradients with their decay, never less, and so is what is added up."""
    layer, images, gradients = case
    weight, eps, kernel = layer.weight.detach().double(), 1e-2, (2, 3, 4)
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    scale = (centred.square().sum(dim=(1, 2, 3), keepdim=True) + weight[0].numel() * eps).rsqrt()
    u = centred * scale
    x, g = images.float(), gradients.float()
    laid_out = torch.channels_last if turned else torch.contiguous_format
    standardized = kernels.Standardized.of(weight.float().contiguous(memory_format=laid_out), eps, rate)
    found, plain = (kernels.conv_gradients(x, g, geometry(layer), given) for given in (standardized, None))
    assert torch.equal(plain.gradients, found.gradients)
    assert torch.equal(plain.squares, found.squares)
    assert torch.equal(plain.bias, found.bias)
    exactly = found.gradients.double()
    along, totals = (exactly * u).sum(dim=kernel), exactly.sum(dim=kernel)
    size = exactly.square().sum(dim=kernel).sqrt() * weight[0].numel() ** 0.5
    close(found.along, along, size)
    close(found.totals, totals, size)
    projected = scale * (exactly - exactly.mean(dim=kernel, keepdim=True) - u * along[..., None, None, None])
    projected += rate * weight.float().double()
    squares = projected.square().sum(dim=(1, 2, 3, 4))
    sizes = (scale.square() * exactly.square()).sum(dim=(1, 2, 3, 4)) + (rate * weight).square().sum()
    assert (squares <= found.norms).all()
    assert (found.norms <= squares + 1e-3 * sizes).all()
    factors = torch.rand(len(x))
    expected = (factors.double().view(-1, 1, 1, 1, 1) * projected).sum(dim=0)
    bound = sizes.sqrt().sum() + 1e-12
    assert ((found.weighted_sum(factors).double() - expected).abs() <= 1e-5 * bound).all()


def test_a_norm_that_overflows_is_infinite_and_never_small(instructions: str) -> None:
    """Squares of 1e30 leave the range of a float: such an example is left out, not clipped by a small norm."""
    x, g = torch.ones(2, 1, 4, 4), torch.ones(2, 3, 2, 2)
    g[0] = 1e30
    where = kernels.Geometry((3, 3), (1, 1), (0, 0))
    ways = [None, kernels.Standardized.of(torch.randn(3, 1, 3, 3), 1e-5)]
    for way in ways:
        norms = kernels.conv_gradients(x, g, where, way).norms
        assert norms[0] == torch.inf
        assert norms[1].isfinite()
    x[1] = torch.nan
    for way in ways:
        assert (kernels.conv_gradients(x, g, where, way).norms == torch.inf).all()


@SLOW
@given(case=convolutions(apart=False), scaled=st.booleans())
def test_norms_without_gradients(instructions: str, case: tuple[nn.Conv2d, Tensor, Tensor], scaled: bool) -> None:
    layer, images, gradients = case
    scale = torch.rand(layer.out_channels) + 0.5 if scaled else torch.ones(layer.out_channels)
    expected = exact(layer, images, gradients)
    outputs = layer(images).detach()
    found = kernels.conv_norms(
        images.float(),
        gradients.float(),
        geometry(layer),
        scale=scale if scaled else None,
        outputs=outputs.float(),
        totals=True,
    )
    fewer = kernels.conv_norms(images.float(), gradients.float(), geometry(layer), outputs=outputs.float())
    assert torch.equal(fewer.sums, found.sums[:, :2])
    norms = (expected * scale.double().view(-1, 1, 1, 1)).square().sum(dim=(1, 2, 3, 4))
    assert ((found.squares - norms).abs() <= 4 * torch.finfo(torch.float32).eps * found.size + 1e-6 * norms).all()
    sizes = F.conv2d(
        images.square().sum(dim=1, keepdim=True), images.new_ones(1, 1, *layer.kernel_size), padding=layer.padding
    )
    weights = (gradients * scale.view(-1, 1, 1)).square().sum(dim=(1, 2, 3))
    close(found.size, sizes.sum(dim=(1, 2, 3)) * weights, sizes.amax())
    size = expected.abs().amax() * layer.weight[0].numel() + 1
    close(found.bias, gradients.sum(dim=(2, 3)), size)
    close(found.totals, expected.sum(dim=(2, 3, 4)), size)
    close(found.along, (gradients * outputs).sum(dim=(2, 3)), size)


@SLOW
@given(
    channels=st.sampled_from([1, 2, 6, 16, 20, 48, 64]), size=st.integers(1, 9), far=st.sampled_from([0.0, 30.0]),
    divide=st.booleans(),
)  # fmt: skip
def test_normalisation_gradients(instructions: str, channels: int, size: int, far: float, divide: bool) -> None:
    torch.manual_seed(channels * size)
    groups = channels // 2 if divide and channels % 2 == 0 else 1
    if channels // groups * size * size == 1:
        return  # a single number has no spread
    images = torch.randn(3, channels, size, size) + far * torch.randn(1, channels, 1, 1)
    gradients = torch.randn(3, channels, size, size)
    weight, bias = kernels.norm_gradients(images, gradients, groups, 1e-5)
    normalised = F.group_norm(images.double(), groups, eps=1e-5)
    close(weight, (gradients * normalised).sum(dim=(2, 3)), 10 * size)
    close(bias, gradients.double().sum(dim=(2, 3)), 10 * size)
    for affine in (None, torch.randn(channels)):
        *same, inputs = kernels.norm_backward(images, gradients, groups, 1e-5, affine)
        assert torch.equal(same[0], weight)
        assert torch.equal(same[1], bias)
        exactly = images.double().requires_grad_()
        output = F.group_norm(exactly, groups, None if affine is None else affine.double(), eps=1e-5)
        (expected,) = torch.autograd.grad(output, exactly, gradients.double())
        # where the numbers of a group are nearly equal, 1 / deviation is large
        close(inputs, expected, 10 * float(expected.abs().max()) + 10)


@SLOW
@given(width=st.sampled_from([2, 5, 16, 31, 64]), positions=st.integers(1, 9), far=st.sampled_from([0.0, 30.0]))
def test_layer_normalisation_gradients(instructions: str, width: int, positions: int, far: float) -> None:
    torch.manual_seed(width * positions)
    inputs, gradients = torch.randn(3, positions, width) + far, torch.randn(3, positions, width)
    weight, bias = kernels.layer_norm_gradients(inputs, gradients, 1e-5)
    normalised = F.layer_norm(inputs.double(), [width], eps=1e-5)
    close(weight, (gradients * normalised).sum(dim=1), 10 * positions)
    close(bias, gradients.double().sum(dim=1), 10 * positions)


def test_an_example_that_is_not_finite_stays_in_its_row(instructions: str) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(3, 16, 6, 6), torch.randn(3, 32, 6, 6)
    where = kernels.Geometry((3, 3), (1, 1), (1, 1))
    clean = kernels.conv_gradients(x, g, where), kernels.conv_norms(x, g, where), kernels.norm_gradients(x, x, 4, 1e-5)
    x[1, 3, 2, 2] = float("nan")
    dirty = kernels.conv_gradients(x, g, where), kernels.conv_norms(x, g, where), kernels.norm_gradients(x, x, 4, 1e-5)
    for row in (0, 2):
        assert torch.equal(clean[0].gradients[row], dirty[0].gradients[row])
        assert torch.equal(clean[1].squares[row], dirty[1].squares[row])
        assert torch.equal(clean[2][0][row], dirty[2][0][row])
    assert not dirty[0].squares[1].isfinite().all()
    assert not dirty[1].squares[1].isfinite()
    assert not dirty[2][0][1].isfinite().all()
    through = kernels.norm_backward(x, x, 4, 1e-5, None)[2]
    assert through[[0, 2]].isfinite().all()
    assert not through[1].isfinite().all()


def test_results_do_not_depend_on_threads_or_neighbours(instructions: str) -> None:
    """Row i of a batch is bit for bit what example i gives alone."""
    torch.manual_seed(0)
    x, g, where = torch.randn(5, 16, 18, 18), torch.randn(5, 16, 18, 18), kernels.Geometry((3, 3), (1, 1), (1, 1))
    together = kernels.conv_gradients(x, g, where)
    norms = kernels.conv_norms(x, g, where)
    through = kernels.norm_backward(x, g, 4, 1e-5, x[0, :, 0, 0])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernels.conv_gradients(x, g, where).gradients, together.gradients)
    finally:
        torch.set_num_threads(threads)
    for i in range(5):
        alone = kernels.conv_gradients(x[i : i + 1], g[i : i + 1], where)
        assert torch.equal(alone.gradients[0], together.gradients[i])
        assert torch.equal(kernels.conv_norms(x[i : i + 1], g[i : i + 1], where).squares[0], norms.squares[i])
        alone_through = kernels.norm_backward(x[i : i + 1], g[i : i + 1], 4, 1e-5, x[0, :, 0, 0])
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone_through, through))


@pytest.mark.parametrize("engine", ["rules", "ghost", "instantiate"])
@pytest.mark.parametrize("net", ["plain", "residual"])
def test_whole_nets_give_the_same_with_and_without_kernels(
    net: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = cifar_cnn((3, 16, 16), 10, widths=(16, 32)) if net == "plain" else resnet((3, 16, 16), 10)
    model = model.to(memory_format=torch.channels_last)
    inputs, targets = torch.randn(6, 3, 16, 16).contiguous(memory_format=torch.channels_last), torch.arange(6)
    loss = nn.CrossEntropyLoss(reduction="none")
    expected = reference.clipped_sum(model, loss, Flat(0.5), inputs, targets)
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(kernels, "_kernels", None)
        found = ClippedGradient(model, loss=loss, clipping=Flat(0.5), engine=engine)(inputs, targets)
        # what ghost norms allow for, most of all for standardised weights
        loose = 0.02 if net == "residual" and engine == "ghost" else 1e-3
        assert (found.norms >= expected.norms * (1 - 1e-4)).all()
        torch.testing.assert_close(found.norms, expected.norms, rtol=loose, atol=0)
        torch.testing.assert_close(
            dict(found.gradients), dict(expected.gradients), rtol=1e-3, atol=1e-3 if loose > 1e-3 else 2e-4
        )


def test_the_kernels_can_be_turned_off() -> None:
    script = "from tacit.gradients import kernels; print(kernels.instruction_set())"
    for value, expected in (("off", "None"), ("", kernels.instruction_set())):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "TACIT_KERNELS": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_of_others_does_not_matter(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, g, where = torch.randn(2, 8, 5, 5), torch.randn(2, 8, 5, 5), kernels.Geometry((3, 3), (1, 1), (1, 1))
    expected = (
        kernels.conv_gradients(x, g, where),
        kernels.conv_norms(x, g, where),
        kernels.norm_gradients(x, g, 2, 1e-5),
    )
    torch.set_default_dtype(dtype)
    try:
        found = (
            kernels.conv_gradients(x, g, where),
            kernels.conv_norms(x, g, where),
            kernels.norm_gradients(x, g, 2, 1e-5),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0].sums, expected[0].sums)
    assert torch.equal(found[1].squares, expected[1].squares)
    assert torch.equal(found[1].sums, expected[1].sums)
    assert all(torch.equal(a, b) for a, b in zip(found[2], expected[2]))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_ghost_norm_survives_what_a_long_sum_loses(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two positions whose gradients cancel but for numbers too small to count in a sum of 4096."""
    if not compiled:
        monkeypatch.setattr(kernels, "_kernels", None)
    layer, small = nn.Linear(4096, 64, bias=False), (0.99 * 2.0**-25) ** 0.5
    inputs = torch.full((1, 2, 4096), small)
    inputs[0, 1] *= -1
    inputs[0, :, 0] = 1
    signs = torch.tensor([1.0, -1.0]).view(1, 2, 1)
    grad = ClippedGradient(layer, loss=lambda o, _: (o * signs).sum(dim=(1, 2)), clipping=Flat(1e-2), engine="ghost")
    assert float(grad(inputs, torch.zeros(1)).gradients["weight"].norm()) <= 1e-2 * (1 + 1e-3)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_overflow_never_passes_for_a_small_norm(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "_kernels", None)
    inputs = torch.full((1, 1, 1, 51), 1e18)
    inputs[..., 0] = -1e19
    layer = nn.Conv2d(1, 1, 1, bias=False)
    grad = ClippedGradient(layer, loss=lambda o, _: o.sum(dim=(1, 2, 3)), clipping=Flat(1.0), engine="ghost")
    assert float(grad(inputs, torch.zeros(1)).gradients["weight"].norm()) <= 1 + 1e-3


def test_normalisation_of_a_large_map_whose_first_pixel_is_unlike_the_rest(instructions: str) -> None:
    torch.manual_seed(0)
    images, gradients = torch.randn(1, 16, 120, 120) * 1e-3, torch.randn(1, 16, 120, 120)
    images[..., 0, 0] = 1.0
    weight, _ = kernels.norm_gradients(images, gradients, 16, 1e-5)
    expected = (gradients * F.group_norm(images.double(), 16, eps=1e-5)).sum(dim=(2, 3))
    assert float((weight - expected).abs().max() / expected.abs().max()) < 1e-3
