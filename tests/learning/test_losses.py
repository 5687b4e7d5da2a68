"""Every loss is its formula, its gradient that of finite differences, and its limits are the losses they should be."""

import math

import pytest
import torch
from torch import nn

from tacit.gradients import ClippedGradient, reference
from tacit.gradients.batches import Batch, LayerOutput, outputs_and_losses
from tacit.learning import (
    Focal,
    Huber,
    TailoredLoss,
    TemperedLogistic,
    cross_entropy,
    make_loss,
    sum_of_absolutes,
    sum_of_squares,
)
from tacit.learning.losses import PreactivationPenalty
from tacit.models import build
from tacit.privacy import Flat, Grouped, UserError


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return 3 * torch.randn(20, 7, dtype=torch.float64)


@pytest.fixture
def targets():
    torch.manual_seed(1)
    return torch.randint(0, 7, (20,))


def by_hand(formula, logits, targets):
    """A formula of (logits of one example, its label, its softmax), in plain Python."""
    rows = []
    for row, label in zip(logits.tolist(), targets.tolist()):
        total = math.fsum(math.exp(h) for h in row)
        rows.append(formula(row, label, [math.exp(h) / total for h in row]))
    return torch.tensor(rows, dtype=torch.float64)


def errors(row, label):
    return [h - (d == label) for d, h in enumerate(row)]


def huber(e, beta):
    return e * e / (2 * beta) if abs(e) < beta else abs(e) - beta / 2


FORMULAS = {
    "cross-entropy": (cross_entropy, lambda h, y, p: -math.log(p[y])),
    "sum of squares": (sum_of_squares, lambda h, y, p: 0.5 * math.fsum(e * e for e in errors(h, y))),
    "sum of absolutes": (sum_of_absolutes, lambda h, y, p: math.fsum(abs(e) for e in errors(h, y))),
    "huber 0.1": (Huber(0.1), lambda h, y, p: math.fsum(huber(e, 0.1) for e in errors(h, y))),
    "huber 1.0": (Huber(1.0), lambda h, y, p: math.fsum(huber(e, 1.0) for e in errors(h, y))),
    "focal 0.5": (Focal(0.5), lambda h, y, p: -((1 - p[y]) ** 0.5) * math.log(p[y])),
    "focal 5": (Focal(5.0), lambda h, y, p: -((1 - p[y]) ** 5) * math.log(p[y])),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_is_its_formula(name, logits, targets):
    loss, formula = FORMULAS[name]
    torch.testing.assert_close(loss(logits, targets), by_hand(formula, logits, targets), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_losss_gradient_is_that_of_finite_differences(name, logits, targets):
    loss = FORMULAS[name][0]
    assert torch.autograd.gradcheck(lambda h: loss(h, targets), logits.requires_grad_())


@pytest.mark.parametrize("threshold", [0.0, 3.0])
def test_the_tailored_loss_is_its_formula_at_every_epoch(threshold, logits, targets):
    torch.manual_seed(2)
    shapes = ((4, 3, 3), (5,), (7,))  # the last is no hidden layer
    layers = [LayerOutput(torch.randn(20, *shape, dtype=torch.float64), torch.zeros(1)) for shape in shapes]
    for norm in ("plain", "squared"):
        loss = TailoredLoss(threshold, beta=11.0, gamma=5.0, norm=norm)
        for epoch in (0, 1, 7, 2000):
            loss.begin_epoch(epoch)
            alpha = 1 / (1 + math.exp(threshold - epoch))
            power = 2 if norm == "squared" else 1
            penalty = sum(h.output.flatten(1).norm(dim=1) ** power / h.output[0].numel() for h in layers[:2])
            expected = (
                alpha * Focal(5.0)(logits, targets)
                + (1 - alpha) * sum_of_squares(logits, targets)
                + (1 - alpha) / 11.0 * penalty
            )
            torch.testing.assert_close(loss(logits, targets, layers), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", ["plain", "squared"])
def test_the_penaltys_gradient_is_that_of_finite_differences(norm):
    torch.manual_seed(3)
    first, second = (torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4,)))

    def penalty(*outputs):
        return PreactivationPenalty(norm)([LayerOutput(output, output) for output in (*outputs, outputs[0])])

    assert torch.autograd.gradcheck(penalty, (first, second))


def test_a_penalty_of_zero_pre_activations_has_a_finite_gradient():
    output = torch.zeros(2, 3, requires_grad=True)
    PreactivationPenalty("plain")([LayerOutput(output, output)] * 2).sum().backward()
    assert output.grad.isfinite().all()


def test_focal_without_focus_is_the_cross_entropy(logits, targets):
    torch.testing.assert_close(Focal(0.0)(logits, targets), cross_entropy(logits, targets))


@pytest.mark.parametrize("gamma", [0.5, 2.0, 5.0])
def test_focals_gradient_is_the_cross_entropys_times_a_number(gamma, logits, targets):
    """So that clipping, where it clips both, makes them the same."""

    def gradient(loss):
        leaf = logits.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf, targets).sum(), leaf)
        return found

    p = logits.softmax(dim=1).gather(1, targets.unsqueeze(1))
    factor = (1 - p) ** (gamma - 1) * (1 - p - gamma * p * p.log())
    assert (factor > 0).all()
    torch.testing.assert_close(gradient(Focal(gamma)), factor * gradient(cross_entropy))


def test_focal_stays_finite_with_its_gradient_for_hopeless_and_for_certain_examples():
    for gamma in (0.0, 0.5, 2.0, 5.0):
        logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
        losses = Focal(gamma)(logits, torch.tensor([0, 0]))
        losses.sum().backward()
        assert losses.isfinite().all()
        assert logits.grad.isfinite().all()


def test_huber_goes_from_absolutes_to_squares(logits, targets):
    small = Huber(1e-9)(logits, targets)
    torch.testing.assert_close(small, sum_of_absolutes(logits, targets), rtol=1e-7, atol=1e-7)
    large = 1e6 * Huber(1e6)(logits, targets)
    torch.testing.assert_close(large, sum_of_squares(logits, targets), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("early", "late", "alone"),
    [("sum-of-squares", "none", sum_of_squares), ("none", "cross-entropy", cross_entropy)],
)
def test_an_ablation_is_a_combination_of_the_same_parts(early, late, alone, logits, targets):
    loss = TailoredLoss(4.0, early=early, late=late, penalty="none")
    assert not loss.wants_hidden
    loss.begin_epoch(2)
    weight = loss.alpha if early == "none" else 1 - loss.alpha
    torch.testing.assert_close(loss(logits, targets), weight * alone(logits, targets))


def features(count=200):
    torch.manual_seed(4)
    z = torch.randn(count, 6, dtype=torch.float64)
    return z / z.norm(dim=1, keepdim=True) * torch.rand(count, 1, dtype=torch.float64), torch.randint(0, 2, (count,))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_tempered_logistic_losss_gradient_is_at_most_t_times_the_features(temperature):
    """Paper B's theorem: whatever the weights, |gradient| <= T |z|."""
    z, y = features()
    loss = TemperedLogistic(temperature)
    for scale in (0.0, 1.0, 100.0):
        model = nn.Linear(6, 1, bias=False).double()
        nn.init.normal_(model.weight, std=scale)
        norms = reference.clipped_sum(model, loss, Flat(1.0), z, y).norms[:, 0]
        assert (norms <= temperature * z.norm(dim=1) * (1 + 1e-12)).all()
        if scale == 0.0:  # and half of the bound is reached
            torch.testing.assert_close(norms, temperature / 2 * z.norm(dim=1))


def test_clipping_at_t_or_above_changes_no_step_and_below_it_does():
    z, y = features()
    model = nn.Linear(6, 1, bias=False).double()
    loss = TemperedLogistic(2.0)
    expected = torch.autograd.grad(loss(model(z), y).sum(), model.weight)[0]
    for bound in (2.0, 3.0):
        found = ClippedGradient(model, loss=loss, clipping=Flat(bound))(z, y).gradients["weight"]
        torch.testing.assert_close(found, expected)
    clipped = ClippedGradient(model, loss=loss, clipping=Flat(0.5))(z, y).gradients["weight"]
    assert not torch.allclose(clipped, expected, rtol=1e-2)


def test_the_tempered_logistic_loss_is_its_formula():
    scores, y = torch.linspace(-3, 3, 20, dtype=torch.float64), torch.arange(20) % 2
    expected = [math.log(1 + math.exp(-1.7 * (2 * t - 1) * s)) for s, t in zip(scores.tolist(), y.tolist())]
    torch.testing.assert_close(
        TemperedLogistic(1.7)(scores.unsqueeze(1), y), torch.tensor(expected, dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(lambda s: TemperedLogistic(1.7)(s, y), scores.requires_grad_())
    with pytest.raises(UserError, match="one score"):
        TemperedLogistic()(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


def clipping_of(model, grouped):
    names = [name for name, _ in model.named_parameters()]
    return Grouped.by_name(names, clipping_norm=0.05) if grouped else Flat(0.05)


@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap", "loop"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("norm", ["plain", "squared"])
def test_the_regularisers_clipped_gradients_equal_the_references(engine, grouped, norm):
    torch.manual_seed(5)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.Tanh(), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, targets = torch.randn(9, 1, 8, 8), torch.randint(0, 3, (9,))
    loss = TailoredLoss(1.0, beta=0.05, gamma=2.0, norm=norm)
    clipping = clipping_of(model, grouped)
    found = ClippedGradient(model, loss=loss, clipping=clipping, engine=engine)(inputs, targets)
    expected = reference.clipped_sum(model, loss, clipping, inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-3, atol=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=5e-3, atol=1e-5)
    without = reference.clipped_sum(model, TailoredLoss(1.0, gamma=2.0, penalty="none"), clipping, inputs, targets)
    assert (without.norms - expected.norms).abs().max() > 0.05 * expected.norms.max(), "the penalty must be felt here"


def test_residual_nets_get_their_pre_activations_too_from_the_same_forward_pass():
    torch.manual_seed(6)
    model = build("resnet-20", (3, 8, 8), 4)
    inputs, targets = torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 3])
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    loss = TailoredLoss(1.0, beta=0.1)
    grad = ClippedGradient(model, loss=loss, clipping=Flat(0.1))
    grad(inputs, targets)
    passes.clear()
    found = grad(inputs, targets)
    assert len(passes) == 1
    expected = reference.clipped_sum(model, loss, Flat(0.1), inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-3, atol=1e-6)
    assert next(iter(grad._routes.values())).engine == "rules"


def test_a_loss_is_given_all_layers_in_their_order():
    seen = []

    class Loss:
        wants_hidden = True

        def __call__(self, outputs, targets, layers):
            seen.extend(layers)
            return outputs.sum(dim=1)

    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 5))
    outputs_and_losses(model, Loss(), Batch.of(torch.ones(6, 2), None))
    assert [tuple(layer.output.shape) for layer in seen] == [(6, 3), (6, 4), (6, 5)]
    assert seen[0].weight is model[0].weight
    assert not any(module._forward_hooks for module in model.modules())


def test_the_weights_penalty_adds_the_same_to_every_example():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
    loss = TailoredLoss(0.0, beta=0.5, penalty="weights")
    expected = reference.clipped_sum(model, loss, Flat(0.1), inputs, targets)
    found = ClippedGradient(model, loss=loss, clipping=Flat(0.1))(inputs, targets)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    # by hand: without the penalty, its gradient added to each example's, the last layer's too
    plain = TailoredLoss(0.0, penalty="none")
    names = [name for name, _ in model.named_parameters()]
    total = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for example, label in zip(inputs.split(1), targets.split(1)):
        found_one = torch.autograd.grad(plain(model(example), label).sum(), list(model.parameters()))
        one = dict(zip(names, found_one))
        for name in ("0.weight", "2.weight"):
            weight = model.get_parameter(name).detach()
            one[name] = one[name] + (1 - loss.alpha) / 0.5 * 2 * weight / weight.numel()
        norm = math.sqrt(sum(float(g.square().sum()) for g in one.values()))
        for name, g in one.items():
            total[name] += g * min(1.0, 0.1 / norm)
    for name, gradient in total.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_loss_that_looks_at_other_examples_pre_activations_is_refused():
    class Mixing:
        wants_hidden = True

        def __call__(self, outputs, targets, layers):
            return outputs.sum(dim=1) + layers[0].output.mean()

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(UserError):
        ClippedGradient(model, loss=Mixing(), clipping=Flat(1.0))(torch.randn(5, 3), torch.zeros(5, dtype=torch.long))


def test_a_layer_whose_output_is_changed_in_place_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    with pytest.raises(UserError, match="not in place"):
        ClippedGradient(model, loss=TailoredLoss(), clipping=Flat(1.0))(
            torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
        )


def test_a_model_without_hidden_layers_cannot_be_penalised():
    with pytest.raises(UserError, match="no hidden layer"):
        ClippedGradient(nn.Linear(3, 2), loss=TailoredLoss(), clipping=Flat(1.0))(
            torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "tailord"}, "did you mean 'tailored'"),
        ({"name": "tailored", "gama": 1.0}, "did you mean 'gamma'"),
        ({"name": "tailored", "beta": 0.0}, "beta must be"),
        ({"name": "tailored", "beta": "much"}, "must be a number"),
        ({"name": "tailored", "norm": "cubed"}, "unknown norm"),
        ({"name": "tailored", "early": "none", "late": "none"}, "nothing is learned"),
        ({"name": "focal", "gamma": -1.0}, "at least 0"),
        ({"name": "cross-entropy", "gamma": 1.0}, "no option"),
    ],
)
def test_wrong_options_are_refused_in_words(options, words):
    with pytest.raises(UserError, match=words):
        make_loss(**options)
