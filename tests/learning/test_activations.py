"""Tempered sigmoids are their formula, and tanh exactly at (2, 2, 1)."""

import math

import pytest
import torch
from torch import nn

from tacit.learning import ACTIVATIONS, TemperedSigmoid, activation_of
from tacit.learning.activations import TEMPERED
from tacit.models import build
from tacit.privacy import UserError


@pytest.mark.parametrize("numbers", [*TEMPERED.values(), (2.0, 2.0, 1.0), (1.0, 1.0, 0.0)])
def test_a_tempered_sigmoid_is_its_formula(numbers):
    scale, inverse_temperature, offset = numbers
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    expected = [scale / (1 + math.exp(-inverse_temperature * value)) - offset for value in x.tolist()]
    found = TemperedSigmoid(*numbers)(x)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(TemperedSigmoid(*numbers), x.requires_grad_())


def test_two_two_one_is_tanh_to_the_last_bit():
    x = 10 * torch.randn(10_000)
    assert torch.equal(TemperedSigmoid(2.0, 2.0, 1.0)(x), torch.tanh(x))
    assert torch.equal(TemperedSigmoid()(x), nn.Tanh()(x))


def test_presets_are_the_papers_averages():
    for name, numbers in {
        "tempered-mnist": (1.97, 2.27, 1.15),
        "tempered-fashion-mnist": (2.27, 2.61, 1.28),
        "tempered-cifar10": (1.58, 3.00, 0.71),
    }.items():
        layer = activation_of(name)()
        assert (layer.scale, layer.inverse_temperature, layer.offset) == numbers
    assert set(TEMPERED) <= set(ACTIVATIONS)


def test_activations_can_differ_by_layer():
    model = build("mnist-cnn", (1, 28, 28), 10, activation_of(["relu", "tempered:1:2:0.5", "tanh"]))
    kinds = [type(m) for m in model if isinstance(m, nn.ReLU | nn.Tanh | TemperedSigmoid)]
    assert kinds == [nn.ReLU, TemperedSigmoid, nn.Tanh]


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ("tempered:1:2", "tempered:SCALE"),
        ("tempered:1:x:2", "tempered:SCALE"),
        ("tempered:0:1:2", "scale must be"),
        ("thanh", "did you mean 'tanh'"),
        (["tanh", "relu"], "more hidden layers than the 2"),
        (["tanh"] * 4, "4 activations for 3 hidden layers"),
    ],
)
def test_wrong_activations_are_refused_in_words(description, words):
    with pytest.raises(UserError, match=words):
        build("mnist-cnn", (1, 28, 28), 10, activation_of(description))
