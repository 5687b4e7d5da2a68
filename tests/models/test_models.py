"""The networks are the papers' own, and BatchNorm can be had out of any model."""

import pytest
import torch
from torch import nn

from tacit.gradients import ClippedGradient, reference
from tacit.learning import ACTIVATIONS, LOSSES, make_loss
from tacit.models import MODELS, build, without_batch_norm
from tacit.privacy import Flat, UserError


def test_the_papers_networks_have_the_papers_number_of_parameters():
    counts = {
        name: sum(p.numel() for p in build(name, shape, 10).parameters())
        for name, shape in (("mnist-cnn", (1, 28, 28)), ("cifar-cnn", (3, 32, 32)))
    }
    assert counts == {"mnist-cnn": 26_010, "cifar-cnn": 550_570}


DEEPEST = "efficientnet-b0"  # its 213 tensors take seconds each time: with one activation and two losses
PAIRS = [(name, activation) for name in MODELS for activation in ACTIVATIONS if name != DEEPEST or activation == "silu"]


@pytest.mark.parametrize(("name", "activation"), PAIRS)
def test_every_network_trains_privately_with_every_activation(name, activation):
    shape = (3, 8, 8) if name in ("resnet-20", "wrn-16-4", DEEPEST) else (3, 32, 32)  # the deep ones take their time
    model = build(name, shape, 4, ACTIVATIONS[activation])
    for loss in LOSSES if name != DEEPEST else ("cross-entropy", "tailored"):
        if loss == "tailored" and name == "linear":
            continue  # it has no hidden layer
        gradient = ClippedGradient(model, loss=make_loss(loss), clipping=Flat(1.0))
        summed = gradient(torch.randn(3, *shape), torch.tensor([0, 1, 3]))
        assert summed.norms.shape == (3, 1)
        assert all(torch.isfinite(gradient).all() for gradient in summed.gradients.values())


@pytest.mark.parametrize("name", ["scatter-cnn", "shallow-scatter-cnn"])
@pytest.mark.parametrize("shape", [(81, 7, 7), (243, 8, 8)])
def test_networks_on_features_have_the_gradients_of_the_reference(name, shape):
    torch.manual_seed(0)
    model = build(name, shape, 10)
    loss, clipping = make_loss("tailored"), Flat(0.1)
    inputs, targets = torch.randn(4, *shape), torch.tensor([0, 1, 3, 9])
    found = ClippedGradient(model, loss=loss, clipping=clipping)(inputs, targets)
    expected = reference.clipped_sum(model, loss, clipping, inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-6)
    for parameter, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[parameter], gradient, rtol=1e-3, atol=1e-5)


def test_a_shape_that_does_not_fit_is_refused_in_words():
    with pytest.raises(UserError, match="needs images"):
        build("cifar-cnn", (20,), 2)
    with pytest.raises(UserError, match="too small"):
        build("mnist-cnn", (1, 8, 8), 2)
    with pytest.raises(UserError, match="did you mean 'cifar-cnn'"):
        build("cifar-cn", (3, 32, 32), 2)


def test_replacing_batch_norm_leaves_none_and_keeps_the_rest():
    block = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), block, nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(2, 3, 8, 8))
    nn.init.constant_(model[1].weight, 1.5)
    replaced = without_batch_norm(model)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in replaced.modules())
    assert isinstance(model[1], nn.BatchNorm2d), "the original is left as it is"
    assert torch.equal(replaced[1].weight, model[1].weight)
    assert torch.equal(replaced[0].weight, model[0].weight)
    ClippedGradient(replaced, loss=make_loss("cross-entropy"), clipping=Flat(1.0))(
        torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    )


def test_a_lone_batch_norm_of_vectors_is_replaced_too():
    replaced = without_batch_norm(nn.BatchNorm1d(6), groups=4)
    assert isinstance(replaced, nn.GroupNorm)
    assert replaced(torch.randn(2, 6)).shape == (2, 6)
