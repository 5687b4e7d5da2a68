"""Weight decay in each example's gradient before it is clipped: the same as the reference, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import ClippedGradient, kernels, reference
from tacit.gradients.adding import Adding
from tacit.gradients.capture import capture
from tacit.gradients.conv import conv
from tacit.gradients.linear import linear
from tacit.gradients.toward import Decay, Toward
from tacit.learning import MeanOverViews
from tacit.models import build, resnet, transformer
from tacit.privacy.clipping import Clipping, Flat, Grouped
from tacit.privacy.mechanism import ClippedSum
from tacit.privacy.validation import UserError

EXAMPLES = 6
cross_entropy = nn.CrossEntropyLoss(reduction="none")


class Tied(nn.Module):
    """A weight that is used twice, an activation in place on what a layer gave, and a parameter that is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight
        self.head, self.unused = nn.Linear(12, 10), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(torch.tanh(self.a(x))), inplace=True))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x), inplace=True).flatten(1)).mul_(0.5)


MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10)), (12,)),
    "positions": lambda: (nn.Sequential(nn.Linear(12, 8), nn.Flatten(), nn.Linear(40, 10)), (5, 12)),
    "mnist": lambda: (build("mnist-cnn", (1, 28, 28), 10, nn.Tanh), (1, 28, 28)),
    "conv": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16, 10),
        ),
        (3, 8, 8),
    ),
    "residual": lambda: (resnet((3, 8, 8), 10, depth=8), (3, 8, 8)),
    "tokens": lambda: (transformer(20, 6, 10, width=16, heads=2), (6,)),
    "tied": lambda: (Tied(), (12,)),
    "in place": lambda: (InPlace(), (3, 4, 4)),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    inputs = torch.randint(20, (EXAMPLES, *shape)) if name == "tokens" else torch.randn(EXAMPLES, *shape)
    if inputs.dim() == 4:
        model, inputs = (thing.to(memory_format=torch.channels_last) for thing in (model, inputs))
    return model, inputs, torch.arange(EXAMPLES) % 10


def rates_of(model: nn.Module, rate: float) -> dict[str, float]:
    """Of every other parameter another one, and of some none at all."""
    names = [name for name, _ in model.named_parameters()]
    return {name: rate * (1 + i % 2) for i, name in enumerate(names) if i % 5 != 4}


def clipping_of(kind: str, model: nn.Module, bound: float) -> Clipping:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return Flat(bound) if kind == "flat" else Grouped.balanced(sizes, groups=3, clipping_norm=bound)


def assert_same(found: ClippedSum, expected: ClippedSum, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.norms, expected.norms, rtol=10 * tolerance, atol=0)
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).norm())
        assert error <= tolerance * EXAMPLES * expected.sensitivity, (name, error)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap", "loop"])
@pytest.mark.parametrize("kind", ["flat", "grouped"])
@pytest.mark.parametrize("rate", [1e-3, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_reference(
    name: str, rate: float, kind: str, engine: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        if engine in ("vmap", "loop"):
            pytest.skip("does not use them")
        monkeypatch.setattr(kernels, "_kernels", None)
    model, inputs, targets = made(name)
    rates = rates_of(model, rate)
    norms = reference.clipped_sum(model, cross_entropy, Flat(1.0), inputs, targets, rates).norms
    clipping = clipping_of(kind, model, float(norms.median()))
    grad = ClippedGradient(model, loss=cross_entropy, clipping=clipping, engine=engine, weight_decay=rates)
    expected = reference.clipped_sum(model, cross_entropy, clipping, inputs, targets, rates)
    # norms allow for the worst that rounding can do: more in ghost norms of layers they are not made for, or without kernels
    tolerance = 2e-5 if engine != "ghost" and compiled else 1e-4
    assert_same(grad(inputs, targets), expected, tolerance)
    in_chunks = grad.over([(inputs[:2], targets[:2]), (inputs[2:], targets[2:])])
    assert_same(in_chunks, expected, tolerance)


@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap"])
@pytest.mark.parametrize("kind", ["flat", "grouped"])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_reference_in_double_precision(name: str, kind: str, engine: str) -> None:
    model, inputs, targets = made(name)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    model, rates = model.double(), rates_of(model, 1.0)
    clipping = clipping_of(kind, model, 5.0)
    grad = ClippedGradient(model, loss=cross_entropy, clipping=clipping, engine=engine, weight_decay=rates)
    expected = reference.clipped_sum(model, cross_entropy, clipping, inputs, targets, rates)
    assert_same(grad(inputs, targets), expected, 1e-10)


def test_the_reference_adds_the_parameter_to_each_gradient() -> None:
    model, inputs, targets = made("linear")
    rates = rates_of(model, 0.5)
    plain = reference.clipped_sum(model, cross_entropy, Flat(1e9), inputs, targets)
    found = reference.clipped_sum(model, cross_entropy, Flat(1e9), inputs, targets, rates)
    for name, parameter in model.named_parameters():
        added = EXAMPLES * rates.get(name, 0.0) * parameter.detach()
        torch.testing.assert_close(found.gradients[name], plain.gradients[name] + added)


@pytest.mark.parametrize("name", MODELS)
def test_without_clipping_it_is_the_gradient_of_the_regularised_loss(name: str) -> None:
    model, inputs, targets = made(name)
    rates = {key: 0.1 for key, _ in model.named_parameters()}
    found = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1e9), weight_decay=rates)(inputs, targets)
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (cross_entropy(model(inputs), targets).mean() + 0.1 / 2 * penalty).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[key] / EXAMPLES, parameter.grad, rtol=1e-4, atol=1e-5)


def test_views_decay_once_an_example() -> None:
    model, _, targets = made("conv")
    inputs, rates = torch.randn(EXAMPLES, 3, 3, 8, 8), rates_of(model, 0.3)
    views = MeanOverViews(cross_entropy, 3)
    expected = reference.clipped_sum(model, views, Flat(2.0), inputs, targets, rates)
    assert_same(
        ClippedGradient(model, loss=views, clipping=Flat(2.0), weight_decay=rates)(inputs, targets), expected, 2e-5
    )


@given(rate=st.floats(1e-4, 1e3), seed=st.integers(0, 99), name=st.sampled_from(["linear", "conv", "residual", "tied"]))
@settings(max_examples=30, deadline=None)
def test_one_example_more_moves_the_sum_by_at_most_the_bound(rate: float, seed: int, name: str) -> None:
    model, inputs, targets = made(name)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    rates = {key: rate for key, _ in model.named_parameters()}
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates)
    with_it, without = grad(inputs, targets).gradients, grad(inputs[1:], targets[1:]).gradients
    moved = torch.cat([(with_it[key] - without[key]).flatten() for key in with_it]).norm()
    assert float(moved) <= 1 + 1e-5 * EXAMPLES


@pytest.mark.parametrize("way", ["held", "ghost"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), (16, 8, 8)),
        (nn.Conv2d(16, 32, 3, stride=2), (16, 8, 8)),
        (nn.Linear(16, 32), (9, 16)),
        (nn.Linear(16, 32), (16,)),
        (nn.Linear(16, 32, bias=False), (16,)),
    ],
    ids=str,
)
def test_the_norm_of_what_decay_almost_cancels_is_not_too_small(
    layer: nn.Module, shape: tuple[int, ...], compiled: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient is nearly minus the decay: what is left of the two is near rounding, and must not pass for less than it is."""
    if not compiled:
        monkeypatch.setattr(kernels, "_kernels", None)
    rule = linear if isinstance(layer, nn.Linear) else conv
    for seed in range(10):
        torch.manual_seed(seed)
        inputs = torch.randn(4, *shape)
        gradients = torch.randn_like(layer(inputs))
        with torch.no_grad():
            layer.weight.copy_(-rule(layer, inputs, gradients)["weight"].per_example()[2])
            layer.weight += 1e-4 * layer.weight.std() * torch.randn_like(layer.weight)
            outputs = layer(inputs)
        decay = Decay({"weight": layer.weight}, {"weight": 1.0})
        found = rule(layer, inputs, gradients, toward=Toward(decay, "weight", outputs))["weight"]
        if getattr(found, way) is None:
            pytest.skip("this way is not taken")
        adding = Adding({"weight": layer.weight}, Flat(1.0), 4, "ghost" if way == "ghost" else "instantiate", decay)
        adding.take("weight", [found])
        _, norms = adding.finish()
        exact = rule(layer, inputs, gradients)["weight"].per_example().double() + layer.weight.detach().double()
        assert (norms[:, 0].double() >= exact.flatten(1).norm(dim=1) * (1 - 1e-6)).all()
        assert float(norms[2, 0]) <= 0.06 * decay.length("weight"), "nor much too large"


def test_an_empty_batch_does_not_decay() -> None:
    model, inputs, targets = made("conv")
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates_of(model, 1.0))
    found = grad(inputs[:0], targets[:0])
    assert all(not gradient.any() for gradient in found.gradients.values())


def test_examples_that_are_not_finite_do_not_decay_either() -> None:
    model, inputs, targets = made("conv")
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates_of(model, 1.0))
    expected = grad(inputs[2:], targets[2:])
    inputs[:2] = float("nan")
    found = grad(inputs, targets)
    assert found.not_finite == 2
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-4, atol=1e-6)
    nothing = grad(inputs[:2], targets[:2])
    assert all(not gradient.any() for gradient in nothing.gradients.values())


def test_half_precision_is_as_exact_as_its_gradients() -> None:
    model, inputs, targets = made("conv")
    rates = rates_of(model, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates)(inputs, targets)
        expected = reference.clipped_sum(model, cross_entropy, Flat(1.0), inputs, targets, rates)
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-2, atol=0)
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) <= 0.05 * EXAMPLES


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(64, 64, bias=False), (64,)),
        (nn.Linear(32, 64), (5, 32)),
        (nn.Conv2d(32, 64, 1, bias=False), (32, 2, 2)),
        (nn.Conv2d(32, 64, 1), (32, 2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_outputs_in_half_precision_never_stand_for_an_inner_product(
    layer: nn.Module, shape: tuple[int, ...], engine: str
) -> None:
    """They are rounded to eight bits: where decay nearly cancels a gradient, norms made with them could be far too small."""
    layer, rule = layer.bfloat16(), linear if isinstance(layer, nn.Linear) else conv
    grad = ClippedGradient(
        layer,
        loss=lambda outputs, targets: (outputs * targets).flatten(1).sum(dim=1),
        clipping=Flat(1e9),
        engine=engine,
        weight_decay={"weight": 1.0},
    )
    for seed in range(50):
        torch.manual_seed(seed)
        inputs = torch.randn(8, *shape).bfloat16()
        targets = torch.randn_like(layer(inputs)).detach()
        exact = rule(layer, inputs.float(), targets.float())["weight"].per_example()
        with torch.no_grad():
            layer.weight.copy_(-exact[seed % 8])
        norms = grad(inputs, targets).norms[:, 0].double()  # from the second batch on, outputs are kept
        left = (exact.double() + layer.weight.detach().double()).flatten(1).norm(dim=1)
        assert (norms >= left * (1 - 1e-6)).all()


def test_outputs_are_kept_only_where_norms_come_from_them() -> None:
    """Those of linear layers of one position; a convolution's gradients are made with their decay."""
    seen: dict[str, bool] = {}

    def spied(*args: Any, **options: Any) -> Any:
        calls, losses = capture(*args, **options)
        seen.update({call.unit.name: call.kept is not None for call in calls})
        return calls, losses

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32 * 36, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    inputs, targets = torch.randn(EXAMPLES, 3, 8, 8), torch.arange(EXAMPLES) % 3
    rates = {name: 0.1 for name, _ in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tacit.gradients.rules.capture", spied)
        grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates)
        first = grad(inputs, targets)
        assert not any(seen.values()), "the first batch shows which are wanted"
        again = grad(inputs, targets)
    assert torch.equal(first.norms, again.norms)
    assert seen == {"0": False, "3": True, "5": True}


def test_outputs_that_are_of_no_use_are_not_kept_again() -> None:
    """Rounded to half precision, or changed in place."""
    seen: list[bool] = []

    def spied(*args: Any, **options: Any) -> Any:
        calls, losses = capture(*args, **options)
        seen.append(any(call.kept is not None for call in calls))
        return calls, losses

    model, inputs, targets = (
        nn.Sequential(nn.Linear(12, 64), nn.ReLU(inplace=True), nn.Flatten()),
        torch.randn(6, 12),
        None,
    )
    loss = lambda outputs, _: outputs.sum(dim=1)  # noqa: E731
    for autocast in (False, True):
        grad = ClippedGradient(model, loss=loss, clipping=Flat(1.0), weight_decay={"0.weight": 0.1})
        seen.clear()
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            patch.setattr("tacit.gradients.rules.capture", spied)
            norms = [grad(inputs, targets).norms for _ in range(4)]
        assert seen == [False, True, False, False]
        assert all(torch.equal(found, norms[0]) for found in norms)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"0.weigth": 1.0}, "did you mean '0.weight'"),
        ({"0.weight": -1.0}, "weight decay of '0.weight'"),
        ({"0.weight": float("nan")}, "weight decay of '0.weight'"),
        ({"0.weight": float("inf")}, "weight decay of '0.weight'"),
    ],
)
def test_rates_are_checked(rates: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ClippedGradient(made("linear")[0], loss=cross_entropy, clipping=Flat(1.0), weight_decay=rates)


def test_a_parameter_that_is_frozen_later_does_not_decay() -> None:
    model, inputs, targets = made("linear")
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(1e9), weight_decay={"0.weight": 1.0})
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in grad(inputs, targets).gradients
