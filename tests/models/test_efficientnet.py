"""EfficientNet-B0 is the paper's but for its normalisation, and every one of its layers has an exact rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit.gradients import ClippedGradient, reference
from tacit.gradients.capture import find_units
from tacit.models import MODELS, build, efficientnet_b0
from tacit.privacy import Flat, UserError

LOSS = nn.CrossEntropyLoss(reduction="none")
PAPER = (2, 1, 2, 2, 2, 1, 2, 1)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def sides(model: nn.Module, size: int) -> list[int]:
    """How wide the maps are after the stem and after each stage."""
    x, found = torch.zeros(1, 3, size, size), []
    with torch.no_grad():
        for layer in (model.stem, *model.stages):
            x = layer(x)
            found.append(x.shape[-1])
    return found


def test_it_has_the_papers_number_of_parameters_layer_by_layer():
    model = efficientnet_b0((3, 224, 224), 1000)
    assert count(model) == 5_288_548
    assert count(build("efficientnet-b0", (3, 32, 32), 10)) == 5_288_548 - 990 * 1281
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 1 + 15 * 5 + 4 + 1  # the first block does not expand
    depthwise = [conv for conv in convolutions if conv.groups > 1]
    assert [conv.in_channels for conv in depthwise[:4]] == [32, 96, 144, 144]
    assert [conv.kernel_size[0] for conv in depthwise] == [3] + [3] * 2 + [5] * 2 + [3] * 3 + [5] * 3 + [5] * 4 + [3]
    assert all(conv.groups == conv.in_channels == conv.out_channels for conv in depthwise)
    squeezed = [module.reduce.out_channels for module in model.modules() if hasattr(module, "reduce")]
    assert squeezed == [8, 4, 6, 6, 10, 10, 20, 20, 20, 28, 28, 28, 48, 48, 48, 48]


def test_without_normalisation_every_convolution_has_a_bias():
    plain = efficientnet_b0((3, 32, 32), 10, groups=None)
    assert not any(isinstance(module, nn.GroupNorm) for module in plain.modules())
    assert all(module.bias is not None for module in plain.modules() if isinstance(module, nn.Conv2d))
    assert plain(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_small_images_are_not_reduced_to_one_pixel_and_large_ones_as_in_the_paper():
    assert sides(efficientnet_b0((3, 32, 32), 10), 32) == [32, 32, 32, 16, 8, 8, 4, 4]
    assert sides(efficientnet_b0((3, 63, 90), 10), 64)[-1] == 8
    assert sides(efficientnet_b0((3, 64, 64), 10), 64)[-1] == 2
    assert sides(efficientnet_b0((3, 224, 224), 10), 224) == [112, 112, 56, 28, 14, 14, 7, 7]
    assert sides(efficientnet_b0((3, 32, 32), 10, strides=PAPER), 32)[-1] == 1


def test_weights_fit_whatever_the_strides():
    small, large = efficientnet_b0((3, 32, 32), 10), efficientnet_b0((3, 32, 32), 10, strides=PAPER)
    large.load_state_dict(small.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(small(x), large(x))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 28), (4, 9, 17)])
def test_it_takes_images_of_any_size(shape: tuple[int, ...]) -> None:
    assert efficientnet_b0(shape, 7)(torch.randn(2, *shape)).shape == (2, 7)


def test_no_group_of_channels_is_normalised_away_on_a_map_of_one_pixel():
    norms = [module for module in efficientnet_b0((3, 8, 8), 4).modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 49
    assert {norm.num_groups for norm in norms} == {8}
    assert min(norm.num_channels for norm in norms) == 16
    others = [
        module for module in efficientnet_b0((3, 8, 8), 4, groups=24).modules() if isinstance(module, nn.GroupNorm)
    ]
    assert {(norm.num_groups, norm.num_channels % 3) for norm in others} == {(8, 1), (8, 2), (24, 0)}


def test_blocks_go_around_themselves_where_shapes_allow_it():
    model = efficientnet_b0((3, 32, 32), 10)
    for stage in model.stages:
        assert [block.around for block in stage] == [False] + [True] * (len(stage) - 1)
    block = model.stages[1][1]
    nn.init.zeros_(block.project.norm.weight)
    x = torch.randn(2, 24, 8, 8)
    assert torch.equal(block(x), x + block.project.norm.bias.view(1, -1, 1, 1))


def test_channels_are_excited_by_their_own_examples_means():
    excite = efficientnet_b0((3, 32, 32), 10).stages[0][0].excite
    x = torch.randn(3, 32, 5, 5)
    ratio = excite(x) / x
    assert ((ratio > 0) & (ratio < 1)).all()
    torch.testing.assert_close(ratio, ratio[..., :1, :1].expand_as(ratio))
    hidden = nn.functional.silu(x.mean(dim=(2, 3)) @ excite.reduce.weight[:, :, 0, 0].T + excite.reduce.bias)
    expected = torch.sigmoid(hidden @ excite.restore.weight[:, :, 0, 0].T + excite.restore.bias)
    torch.testing.assert_close(ratio[..., 0, 0], expected)


def test_gradients_are_those_of_the_reference_and_no_layer_is_without_a_rule():
    torch.manual_seed(0)
    model = efficientnet_b0((3, 16, 16), 4).double().to(memory_format=torch.channels_last)
    units = find_units(model, dict(model.named_parameters()))
    assert all(unit.rule is not None for unit in units)
    assert sum(len(unit.parameters) for unit in units) == len(list(model.parameters())) == 213
    inputs = torch.randn(3, 3, 16, 16, dtype=torch.float64).to(memory_format=torch.channels_last)
    targets = torch.tensor([0, 1, 3])
    norms = reference.clipped_sum(model, LOSS, Flat(1.0), inputs, targets).norms
    clipping = Flat(float(norms.median()))
    grad = ClippedGradient(model, loss=LOSS, clipping=clipping, engine="rules")
    found, expected = grad(inputs, targets), reference.clipped_sum(model, LOSS, clipping, inputs, targets)
    (route,) = grad._routes.values()
    assert route.engine == "rules"
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-8, atol=0)
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-7, atol=1e-9)


def test_in_float32_with_compiled_kernels_they_agree_as_well():
    torch.manual_seed(0)
    model = efficientnet_b0((3, 16, 16), 4).to(memory_format=torch.channels_last)
    inputs, targets = torch.randn(3, 3, 16, 16).to(memory_format=torch.channels_last), torch.tensor([0, 1, 3])
    found = ClippedGradient(model, loss=LOSS, clipping=Flat(1.0), engine="rules")(inputs, targets)
    expected = reference.clipped_sum(model, LOSS, Flat(1.0), inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-3, atol=0)
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).abs().max()) <= 1e-3


def test_no_layer_mixes_examples():
    torch.manual_seed(0)
    model = efficientnet_b0((3, 16, 16), 4).double()
    inputs = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    other = inputs.clone()
    other[2] = 100.0
    for depth in range(1, len(model) + 1):
        part = model[:depth]
        torch.testing.assert_close(part(inputs)[:2], part(other)[:2], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part(inputs)[:1], part(inputs[:1]), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(inputs)[2], model(other)[2])


def test_dropout_comes_before_the_last_layer_and_only_if_it_is_wanted():
    assert not any(isinstance(module, nn.Dropout) for module in efficientnet_b0((3, 8, 8), 4).modules())
    dropped = efficientnet_b0((3, 8, 8), 4, dropout=0.2)
    assert [type(layer) for layer in dropped][-2:] == [nn.Dropout, nn.Linear]
    dropped.load_state_dict(efficientnet_b0((3, 8, 8), 4).state_dict())  # names do not depend on it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": (1, 2)}, r"strides are 8 numbers, .* not \[1, 2\]"),
        ({"strides": (0, 1, 1, 1, 1, 1, 1, 1)}, "each of strides must be a whole number of at least 1, not 0"),
        ({"groups": 0}, "groups must be a whole number"),
        ({"dropout": 1.0}, "below 1, not 1.0"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        efficientnet_b0((3, 32, 32), 2, **options)


def test_by_name_it_needs_images():
    assert MODELS["efficientnet-b0"] is efficientnet_b0
    with pytest.raises(UserError, match="needs images"):
        build("efficientnet-b0", (20,), 2)
