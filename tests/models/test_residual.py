"""The deeper networks are the papers' own, and every one of their layers has a fast and exact rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedGradient, reference
from tacit.gradients.capture import find_units
from tacit.models import MODELS, WeightStandardizedConv2d, build, resnet, scatter_cnn, transformer, wide_resnet
from tacit.privacy import Flat, Grouped, UserError

LOSS = nn.CrossEntropyLoss(reduction="none")
TINY = {
    "resnet": lambda: resnet((3, 8, 8), 4, depth=8, groups=4),
    "resnet, convolution": lambda: resnet((3, 8, 8), 4, depth=8, shortcut="convolution"),
    "resnet, pre-activation": lambda: resnet((3, 8, 8), 4, nn.Tanh, depth=8, pre_activation=True),
    "resnet, plain": lambda: resnet((3, 8, 8), 4, depth=8, groups=None, standardized=False),
    "wide": lambda: wide_resnet((3, 8, 8), 4, depth=10, width=2),
    "wide, identity": lambda: wide_resnet((3, 8, 8), 4, depth=10, width=2, shortcut="identity"),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def way(grad: ClippedGradient) -> str:
    (route,) = grad._routes.values()
    return route.engine


def test_they_have_the_papers_number_of_parameters():
    assert count(build("resnet-20", (3, 32, 32), 10)) == 269_722  # 0.27 M
    assert count(resnet((3, 32, 32), 10, shortcut="convolution")) == 272_474
    assert count(resnet((3, 32, 32), 10, depth=56)) == 853_018  # 0.85 M
    assert count(build("wrn-16-4", (3, 32, 32), 10)) == 2_748_890  # 2.75 M
    assert count(wide_resnet((3, 32, 32), 10, depth=28, width=10)) == 36_479_194  # 36.5 M
    assert count(wide_resnet((3, 32, 32), 10, standardized=False)) == 2_748_890


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (4, 9, 17)])
@pytest.mark.parametrize("pre_activation", [True, False])
def test_they_take_images_of_any_size(shape: tuple[int, ...], pre_activation: bool) -> None:
    for shortcut in ("identity", "convolution"):
        for model in (
            resnet(shape, 7, depth=8, pre_activation=pre_activation, shortcut=shortcut),
            wide_resnet(shape, 7, depth=10, width=2, pre_activation=pre_activation, shortcut=shortcut),
        ):
            assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", TINY)
def test_gradients_are_those_of_the_reference_and_no_layer_is_without_a_rule(
    name: str, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = TINY[name]().double().to(memory_format=layout)
    units = find_units(model, dict(model.named_parameters()))
    assert all(unit.rule is not None for unit in units)
    assert sum(len(unit.parameters) for unit in units) == len(list(model.parameters()))
    inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64).to(memory_format=layout)
    targets = torch.tensor([0, 1, 3, 2])
    norms = reference.clipped_sum(model, LOSS, Flat(1.0), inputs, targets).norms
    names = tuple(key for key, _ in model.named_parameters())
    for clipping in (Flat(float(norms.median())), Grouped((names[:5], names[5:]), (1.0, 0.5))):
        grad = ClippedGradient(model, loss=LOSS, clipping=clipping)
        found, expected = grad(inputs, targets), reference.clipped_sum(model, LOSS, clipping, inputs, targets)
        assert way(grad) == "rules"
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-8, atol=0)
        torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["resnet", "wide"])
def test_in_float32_they_agree_as_well(name: str) -> None:
    torch.manual_seed(0)
    model = TINY[name]().to(memory_format=torch.channels_last)
    inputs, targets = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 3, 2])
    for engine in ("rules", "ghost", "instantiate"):
        found = ClippedGradient(model, loss=LOSS, clipping=Flat(1.0), engine=engine)(inputs, targets)
        expected = reference.clipped_sum(model, LOSS, Flat(1.0), inputs, targets)
        loose = 4e-3 if engine == "ghost" else 1e-3  # what a forced ghost norm allows for
        torch.testing.assert_close(found.norms, expected.norms, rtol=loose, atol=0)
        assert (found.norms >= expected.norms * (1 - 1e-5)).all()
        for key, gradient in expected.gradients.items():
            assert float((found.gradients[key] - gradient).abs().max()) <= loose


def test_dropout_has_a_mask_of_its_own_for_each_example_and_keeps_the_rules():
    torch.manual_seed(0)
    model = wide_resnet((3, 8, 8), 4, depth=10, width=1, dropout=0.3)
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 3
    same_image = torch.randn(1, 3, 8, 8).expand(6, 3, 8, 8)
    grad = ClippedGradient(model, loss=LOSS, clipping=Flat(1.0))
    norms = grad(same_image, torch.zeros(6, dtype=torch.long)).norms.flatten()
    assert way(grad) == "rules"
    assert len(set(norms.tolist())) == 6, "the same example six times, with six masks"
    model.eval()
    norms = grad(same_image, torch.zeros(6, dtype=torch.long)).norms.flatten()
    torch.testing.assert_close(norms, norms[:1].expand(6))


def test_dropout_of_nothing_draws_no_random_numbers():
    model = wide_resnet((3, 8, 8), 4, depth=10, width=1)
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_every_switch_does_what_it_says():
    def kinds(model: nn.Module) -> set[type]:
        return {type(module) for module in model.modules()}

    assert nn.Conv2d not in kinds(resnet((3, 8, 8), 2, depth=8))
    assert WeightStandardizedConv2d not in kinds(resnet((3, 8, 8), 2, depth=8, standardized=False))
    assert nn.GroupNorm not in kinds(resnet((3, 8, 8), 2, depth=8, groups=None))
    assert {nn.Tanh} == kinds(resnet((3, 8, 8), 2, nn.Tanh, depth=8)) & {nn.Tanh, nn.SiLU}
    norms = [
        module for module in resnet((3, 8, 8), 2, depth=8, groups=24).modules() if isinstance(module, nn.GroupNorm)
    ]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {(8, 16), (8, 32), (8, 64)}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (resnet, {"depth": 21}, r"6n \+ 2 .*8, 14, 20.* not 21"),
        (resnet, {"depth": 2}, r"n of at least 1"),
        (wide_resnet, {"depth": 20}, r"6n \+ 4 .*10, 16, 22.* not 20"),
        (wide_resnet, {"width": 0}, "width must be a whole number of at least 1, not 0"),
        (wide_resnet, {"dropout": 1.0}, "below 1, not 1.0"),
        (resnet, {"groups": 0}, "groups"),
        (resnet, {"shortcut": "convolutio"}, "did you mean 'convolution'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_words(make, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make((3, 8, 8), 2, **options)


@pytest.mark.parametrize("name", ["resnet-20", "wrn-16-4", "scatter-cnn"])
def test_by_name_they_need_images(name: str) -> None:
    assert name in MODELS
    with pytest.raises(UserError, match="needs images"):
        build(name, (20,), 2)


def test_the_networks_on_scattering_features_are_the_papers():
    def layers(model: nn.Module) -> list[int]:
        return [m.weight.shape[0] for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    assert layers(scatter_cnn((81, 7, 7), 10)) == [16, 32, 32, 10]
    assert layers(scatter_cnn((243, 8, 8), 10)) == [64, 64, 64, 64, 10]


def test_the_transformer_has_a_rule_for_every_parameter_and_exact_gradients():
    torch.manual_seed(0)
    model = transformer(11, 6, 3, width=8, layers=2, heads=2).double()
    assert all(unit.rule is not None for unit in find_units(model, dict(model.named_parameters())))
    tokens, targets = torch.randint(11, (5, 6)), torch.tensor([0, 1, 2, 0, 1])
    for engine in ("rules", "ghost", "instantiate", "vmap"):
        grad = ClippedGradient(model, loss=LOSS, clipping=Flat(1.0), engine=engine)
        found, expected = grad(tokens, targets), reference.clipped_sum(model, LOSS, Flat(1.0), tokens, targets)
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-8, atol=0)
        torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-7, atol=1e-9)
    assert model(tokens[:, :4]).shape == (5, 3), "shorter sequences too"


def test_a_transformer_whose_heads_do_not_divide_its_width_is_refused():
    with pytest.raises(UserError, match="multiple of heads"):
        transformer(10, 4, 2, width=10, heads=4)


def test_attention_sees_other_positions_of_the_same_example_only():
    torch.manual_seed(0)
    model = transformer(9, 5, 2, width=8, heads=2)
    tokens = torch.randint(9, (3, 5))
    other: Tensor = tokens.clone()
    other[2] = 0
    torch.testing.assert_close(model(tokens)[:2], model(other)[:2])
    other[1, 4] = (other[1, 4] + 1) % 9
    assert not torch.allclose(model(tokens)[1], model(other)[1])
