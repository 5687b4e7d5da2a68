"""Networks by the name a recipe gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from tacit.models.efficientnet import efficientnet_b0
from tacit.models.networks import (
    Activation,
    all_conv,
    cifar_cnn,
    linear,
    mnist_cnn,
    perceptron,
    pooled_cnn,
    scatter_cnn,
    shallow_scatter_cnn,
    small_cnn,
)
from tacit.models.residual import resnet, wide_resnet
from tacit.privacy.validation import UserError, check_choice

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "mnist-cnn": mnist_cnn,
    "cifar-cnn": cifar_cnn,
    "all-conv": all_conv,
    "pooled-cnn": pooled_cnn,
    "scatter-cnn": scatter_cnn,
    "shallow-scatter-cnn": shallow_scatter_cnn,
    "small-cnn": small_cnn,
    "resnet-20": resnet,
    "resnet-20-plain": partial(resnet, groups=None, standardized=False),
    "resnet-20-norm": partial(resnet, standardized=False),
    "wrn-16-4": wide_resnet,
    "efficientnet-b0": efficientnet_b0,
    "linear": linear,
    "perceptron": perceptron,
}
_OF_ANY_SHAPE = ("linear", "perceptron")


def build(name: str, input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Module:
    """The network of this name for examples of this shape; a `UserError` where the shape does not fit.

    >>> build("small-cnn", (1, 2), 10)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the model 'small-cnn' needs images [channels, height, width], not examples of
        shape [1, 2]; choose 'linear' or 'perceptron'
    """
    check_choice("model", name, MODELS)
    shape = tuple(int(size) for size in input_shape)
    if name not in _OF_ANY_SHAPE and len(shape) != 3:
        raise UserError(
            f"the model {name!r} needs images [channels, height, width], not examples of shape {list(shape)}; "
            "choose 'linear' or 'perceptron'"
        )
    model = MODELS[name](shape, classes, activation)
    left = getattr(activation, "left", 0)  # of a list, one a hidden layer
    if left:
        raise UserError(
            f"model.activation has {activation.given + left} activations for {activation.given} hidden layers of {name!r}"  # type: ignore[attr-defined]
        )
    return model
