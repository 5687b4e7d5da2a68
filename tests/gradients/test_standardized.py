"""Convolutions with standardised weights: the layer is what it says, and its rule projects exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedGradient, reference
from tacit.gradients.capture import find_units
from tacit.gradients.conv import conv
from tacit.gradients.standardized import WeightStandardizedConv2d, standardized_conv
from tacit.privacy.clipping import Flat, Grouped
from tacit.privacy.validation import UserError

ENGINES = ["rules", "ghost", "instantiate", "vmap", "loop"]
SHAPES = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "stride 2": {"kernel_size": 3, "padding": 1, "stride": 2, "bias": False},
    "1x1": {"kernel_size": 1, "bias": False},
    "1x1 stride 2": {"kernel_size": 1, "stride": 2},
    "groups": {"kernel_size": 3, "groups": 2, "dilation": 2},
    "reflected": {"kernel_size": (2, 3), "padding": 1, "padding_mode": "reflect"},
}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    flat = torch.tanh(outputs).flatten(1)
    return targets * (flat * torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype)).sum(dim=1)


def example_gradients(layer: nn.Conv2d, inputs: Tensor, gradients: Tensor) -> Tensor:
    pairs = zip(inputs.split(1), gradients.split(1))
    return torch.stack([torch.autograd.grad(layer(x), layer.weight, g)[0] for x, g in pairs])


def test_weights_have_mean_zero_and_variance_one_over_fan_in():
    layer = WeightStandardizedConv2d(16, 8, 3)
    nn.init.normal_(layer.weight, mean=5.0, std=3.0)
    weight = layer.standardized_weight().detach().flatten(1)
    torch.testing.assert_close(weight.mean(dim=1), torch.zeros(8), atol=1e-6, rtol=0)
    torch.testing.assert_close(weight.var(dim=1, correction=0), torch.full((8,), 1 / 144), rtol=1e-4, atol=0)
    images = torch.randn(4, 16, 20, 20)
    assert float(layer(images).detach().var()) == pytest.approx(1, abs=0.1), "neither blown up nor vanished"


def test_weights_with_nothing_to_learn_are_refused():
    with pytest.raises(UserError, match="at least 3"):
        WeightStandardizedConv2d(2, 4, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["flat", "grouped"])
def test_the_rule_agrees_with_autograd(shape: str, engine: str, kind: str) -> None:
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(4, 6, **SHAPES[shape]).double()
    inputs, targets = torch.randn(5, 4, 6, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    if shape != "1x1":
        layer, inputs = (thing.to(memory_format=torch.channels_last) for thing in (layer, inputs))
    bound = float(reference.clipped_sum(layer, loss, Flat(1.0), inputs, targets).norms.median())
    clipping = Flat(bound)
    if kind == "grouped" and layer.bias is not None:
        clipping = Grouped((("weight",), ("bias",)), (bound, bound / 2))
    found = ClippedGradient(layer, loss=loss, clipping=clipping, engine=engine)(inputs, targets)
    expected = reference.clipped_sum(layer, loss, clipping, inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-9, atol=1e-9 * bound)


@pytest.mark.parametrize("spread", [1.0, 1e-2, 1e-3, 0.0])
def test_the_derivative_is_exact_where_eps_is_as_large_as_the_variance(spread: float) -> None:
    torch.manual_seed(1)
    layer = WeightStandardizedConv2d(3, 4, 3, padding=1, bias=False).double()
    nn.init.normal_(layer.weight, mean=0.5, std=spread)
    inputs = torch.randn(3, 3, 5, 5, dtype=torch.float64)
    gradients = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    expected = example_gradients(layer, inputs, gradients)
    found = standardized_conv(layer, inputs, gradients)["weight"]
    torch.testing.assert_close(found.per_example(), expected, rtol=1e-9, atol=1e-9)
    for way in (found.ghost, found.held):
        squares, add = way()
        torch.testing.assert_close(squares, expected.flatten(1).square().sum(dim=1), rtol=1e-9, atol=0)
        torch.testing.assert_close(add(torch.ones(3)), expected.sum(dim=0), rtol=1e-9, atol=1e-9)


def test_results_can_be_asked_for_in_any_order_and_again():
    torch.manual_seed(2)
    layer, inputs = WeightStandardizedConv2d(8, 8, 3, padding=1), torch.randn(4, 8, 6, 6)
    gradients, ones = torch.randn(4, 8, 6, 6), torch.ones(4)
    expected = example_gradients(layer, inputs, gradients).sum(dim=0)
    found = standardized_conv(layer, inputs, gradients)["weight"]
    for added in (
        found.per_example().sum(dim=0),
        found.held()[1](ones),
        found.ghost()[1](ones),
        found.per_example().sum(dim=0),
        found.held()[1](ones),
    ):
        torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["ghost", "instantiate"])
@pytest.mark.parametrize("case", ["positions cancel", "all in the mean", "all along the weights"])
def test_a_norm_does_not_fall_short_when_almost_nothing_is_left(case: str, engine: str) -> None:
    """What is added up keeps the bound although its norm comes out of a subtraction of large numbers."""
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(4, 4, 1, bias=False)
    inputs = {
        "positions cancel": 1e6 * torch.randn(6, 4, 1, 1) + torch.randn(6, 4, 4, 4),
        "all in the mean": 1e6 * torch.randn(6, 1, 4, 4) + torch.randn(6, 4, 4, 4),
        "all along the weights": 1e6 * layer.standardized_weight().detach()[:1] + torch.randn(6, 4, 4, 4),
    }[case]
    signs = torch.ones(4, 4, 4)
    if case == "positions cancel":
        signs.view(4, 16)[:, ::2] = -1
    if case == "all along the weights":
        signs[1:] = 0

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (outputs.double() * signs).sum(dim=(1, 2, 3))  # else its own rounding looks as if examples were mixed

    grad = ClippedGradient(layer, loss=loss, clipping=Flat(1e-3), engine=engine)
    for one in inputs.split(1):
        assert float(grad(one, torch.zeros(1)).gradients["weight"].norm()) <= 1e-3 * (1 + 1e-3)


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_no_norm_is_below_the_true_one_in_float32(scale: float) -> None:
    torch.manual_seed(3)
    layer = WeightStandardizedConv2d(16, 16, 3, padding=1, bias=False)
    inputs = torch.randn(32, 16, 8, 8) + scale  # mostly in the mean, as activations are
    gradients = torch.randn(32, 16, 8, 8)
    found = standardized_conv(layer, inputs, gradients)["weight"]
    exact = example_gradients(layer.double(), inputs.double(), gradients.double()).flatten(1).square().sum(dim=1)
    for way in (found.ghost, found.held):
        assert (way()[0].double() >= exact * (1 - 1e-6)).all()
    if scale == 1.0:
        torch.testing.assert_close(found.ghost()[0].double(), exact, rtol=2e-2, atol=0)
        torch.testing.assert_close(found.held()[0].double(), exact, rtol=1e-4, atol=0)


def test_a_held_norm_lies_above_the_true_one_by_its_allowance_and_no_more():
    """Small fan-ins, where the projection may leave almost nothing: 4 n eps |s G|^2 are allowed, and rounding stays below."""
    eps = torch.finfo(torch.float32).eps
    for seed in range(200):
        torch.manual_seed(seed)
        channels, kernel = [(3, 1), (4, 1), (1, 2), (1, 3), (4, 3)][seed % 5]
        layer = WeightStandardizedConv2d(channels, 1 + seed % 3, kernel, bias=False)
        nn.init.normal_(layer.weight)
        inputs = torch.randn(3, channels, kernel + seed % 4, kernel + seed % 4)
        gradients = torch.randn(layer(inputs).shape)
        found = standardized_conv(layer, inputs, gradients)["weight"].held()[0].double()
        layer, inputs, gradients = layer.double(), inputs.double(), gradients.double()
        exact = example_gradients(layer, inputs, gradients).flatten(1).square().sum(dim=1)
        spread = layer.weight.detach().var(dim=(1, 2, 3), correction=0) + layer.eps
        scaled = gradients * (layer.weight[0].numel() * spread).rsqrt().view(-1, 1, 1)
        whole = conv(layer, inputs, scaled)["weight"].per_example().flatten(1).square().sum(dim=1)
        assert (found >= exact).all()
        assert (found <= exact + 2 * 4 * (layer.weight[0].numel() + 16) * eps * whole).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_example_that_is_not_a_number_contributes_nothing(engine: str) -> None:
    torch.manual_seed(0)
    layer, inputs, targets = WeightStandardizedConv2d(3, 4, 3), torch.randn(4, 3, 5, 5), torch.ones(4)
    grad = ClippedGradient(layer, loss=loss, clipping=Flat(0.5), engine=engine)
    expected = grad(inputs[1:], targets[1:])
    inputs[0, 0, 0, 0] = float("nan")
    found = grad(inputs, targets)
    assert found.not_finite == 1
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients))


class Changed(WeightStandardizedConv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


def test_the_rule_is_for_this_layer_and_not_for_one_that_overrides_it():
    plain, changed = WeightStandardizedConv2d(3, 4, 3), Changed(3, 4, 3)
    rules = [find_units(layer, dict(layer.named_parameters()))[0].rule for layer in (plain, changed)]
    assert rules == [standardized_conv, None]


def test_half_precision_agrees_up_to_its_rounding():
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(4, 4, 3, padding=1).bfloat16()
    inputs, targets = torch.randn(4, 4, 6, 6).bfloat16(), torch.ones(4).bfloat16()
    found = ClippedGradient(layer, loss=loss, clipping=Flat(1e6))(inputs, targets)
    exact = reference.clipped_sum(layer.double(), loss, Flat(1e6), inputs.double(), targets.double())
    torch.testing.assert_close(found.norms.double(), exact.norms.double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("engine", ["rules", "ghost", "instantiate"])
def test_numbers_too_large_for_their_squares_never_pass_for_a_small_norm(engine: str) -> None:
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(64, 4, 3, bias=False)
    inputs = 1e18 * (torch.ones(2, 64, 3, 3) + torch.randn(2, 64, 3, 3))
    grad = ClippedGradient(layer, loss=lambda o, _: o.sum(dim=(1, 2, 3)), clipping=Flat(1.0), engine=engine)
    for one in inputs.split(1):
        assert float(grad(one, torch.zeros(1)).gradients["weight"].norm()) <= 1 + 1e-3


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_half_precision_outputs_do_not_shrink_a_ghost_norm(how: str) -> None:
    """A window that lies almost along the weights: nearly all of its gradient is projected away, what is left must be seen."""
    torch.manual_seed(0)
    layer = WeightStandardizedConv2d(64, 1, 1, bias=False)
    u = layer.standardized_weight().detach().flatten()
    aside = torch.randn(64)
    aside = aside - aside.mean() - u * (aside @ u) / (u @ u)
    inputs = torch.stack([k * (u + 0.06 * aside / aside.norm()) for k in torch.linspace(0.5, 2.0, 24)]).view(
        24, 64, 1, 1
    )
    if how == "bfloat16":
        layer, inputs = layer.bfloat16(), inputs.bfloat16()
    grad = ClippedGradient(layer, loss=lambda o, _: o.sum(dim=(1, 2, 3)).float(), clipping=Flat(1e-3), engine="ghost")
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        for one in inputs.split(1):
            assert float(grad(one, torch.zeros(1)).gradients["weight"].norm()) <= 1e-3 * (1 + 1e-2)


def test_another_standardisation_does_not_get_this_rule():
    class Gained(WeightStandardizedConv2d):
        def standardized_weight(self):
            return 2 * super().standardized_weight()

    model, inputs, targets = Gained(4, 2, 1, bias=False), torch.randn(3, 4, 2, 2), torch.ones(3)
    loss_of = lambda o, t: o.sum(dim=(1, 2, 3)) * t  # noqa: E731
    found = ClippedGradient(model, loss=loss_of, clipping=Flat(1.0))(inputs, targets)
    expected = reference.clipped_sum(model, loss_of, Flat(1.0), inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms)
