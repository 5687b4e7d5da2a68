"""Diagnostics are what they say, and a run that shows them says so on its certificate."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tacit.learning import TailoredLoss, cross_entropy
from tacit.privacy import Flat
from tacit.training.diagnostics import (
    BINS,
    class_spread,
    confusion,
    diagnosed,
    gradient_figures,
    layer_norms,
    sharpness,
)
from tacit.training.examples import as_examples
from tacit.training.recipe import Recipe
from tacit.training.run import train


def test_layer_norms_are_those_of_the_layers():
    torch.manual_seed(0)
    first, last = nn.Linear(3, 4), nn.Linear(4, 2)
    inputs = torch.randn(6, 3)
    found = layer_norms(nn.Sequential(first, nn.ReLU(), last), inputs)
    hidden = first(inputs)
    assert found["0"]["weight"] == pytest.approx(float(first.weight.norm()))
    assert found["0"]["preactivation"] == pytest.approx(float(hidden.norm(dim=1).mean()))
    assert found["0"]["activation"] == pytest.approx(float(hidden.relu().norm(dim=1).mean()))
    assert "activation" not in found["2"]


def test_the_cosine_falls_as_clipping_turns_the_sum():
    torch.manual_seed(1)
    model, inputs, targets = (
        nn.Linear(4, 3),
        torch.randn(50, 4) * torch.logspace(-2, 2, 50).unsqueeze(1),
        torch.arange(50) % 3,
    )
    loose, tight = (gradient_figures(model, cross_entropy, Flat(c), inputs, targets) for c in (1e6, 0.01))
    assert loose["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert tight["cosine"] < 0.999
    assert sum(loose["gradient_norms"]) == 50
    assert loose["gradient_norms"] == tight["gradient_norms"]
    assert len(loose["gradient_norms"]) == len(BINS) - 1


def test_sharpness_is_the_largest_singular_value_of_the_hessian():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    inputs, targets = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(model(inputs), targets).mean(), parameters, create_graph=True)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)]) for value in flat
    ]
    largest = float(torch.linalg.svdvals(torch.stack(rows))[0])
    assert sharpness(model, cross_entropy, inputs, targets, iterations=200) == pytest.approx(largest, rel=1e-3)


def test_the_confusion_matrix_counts_every_example_once():
    torch.manual_seed(3)
    model, data = nn.Linear(4, 3), as_examples((torch.randn(1100, 4), torch.arange(1100) % 3))
    matrix = np.array(confusion(model, data, 3))
    assert matrix.sum() == 1100
    assert matrix.sum(axis=1).tolist() == [367, 367, 366]
    taken = model(data.inputs).argmax(dim=1)
    assert int(np.trace(matrix)) == int((taken == data.targets).sum())
    assert class_spread([[1, 0], [0, 1]]) == 0.0


def test_all_of_it_with_a_loss_that_wants_hidden_layers():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3))
    data = as_examples((torch.randn(40, 1, 8, 8), torch.arange(40) % 3))
    found = diagnosed(model, TailoredLoss(), Flat(0.1), data, 16, data)
    assert set(found) == {
        "layers",
        "gradient_norms",
        "median_gradient_norm",
        "cosine",
        "sharpness",
        "confusion",
        "class_spread",
    }
    assert all(math.isfinite(found[key]) for key in ("median_gradient_norm", "cosine", "sharpness"))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_that_shows_them_says_so_on_its_certificate(tmp_path):
    changes = ["privacy.epochs=1", "diagnostics=32"]
    run = train(Recipe.load("digits", changes), tmp_path / "run")
    assert "sharpness" in run.metrics[-1]["diagnostics"]
    assert not run.certificate["valid_for_release"]
    assert any("diagnostics of 32 training examples" in str(value) for value in run.certificate.values())
    plain = train(Recipe.load("digits", changes[:1]), tmp_path / "plain")
    assert "diagnostics" not in plain.metrics[-1]
    assert plain.certificate["valid_for_release"]
