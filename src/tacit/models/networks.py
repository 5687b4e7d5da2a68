"""Small networks, for any input shape and number of classes, with any activation.

No layer mixes examples. The CNNs of the papers are those of "Losing Less" and "Tempered Sigmoid Activations".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tacit.privacy.validation import UserError

Activation = Callable[[], nn.Module]


def mnist_cnn(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The papers' network for MNIST and Fashion-MNIST: 26,010 parameters at 1 x 28 x 28.

    >>> sum(p.numel() for p in mnist_cnn((1, 28, 28), 10).parameters())
    26010
    """
    body = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 8, stride=2, padding=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    features = _features(body, input_shape)
    return nn.Sequential(*body, nn.Linear(features, 32), activation(), nn.Linear(32, classes))


def cifar_cnn(
    input_shape: Sequence[int],
    classes: int,
    activation: Activation = nn.Tanh,
    widths: Sequence[int] = (32, 64, 128),
) -> nn.Sequential:
    """The papers' network for CIFAR-10: two 3x3 convolutions and a pool for each width; 550,570 parameters at 3 x 32 x 32.

    >>> sum(p.numel() for p in cifar_cnn((3, 32, 32), 10).parameters())
    550570
    """
    body = nn.Sequential(*_pairs(input_shape[0], widths, activation), nn.Flatten())
    features = _features(body, input_shape)
    return nn.Sequential(*body, nn.Linear(features, 128), activation(), nn.Linear(128, classes))


def scatter_cnn(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The papers' networks on ScatterNet features: one for grey images (81 channels or fewer), one for colour (243).

    >>> sum(p.numel() for p in scatter_cnn((81, 7, 7), 10).parameters())
    20778
    >>> sum(p.numel() for p in scatter_cnn((243, 8, 8), 10).parameters())
    253386
    """
    channels = input_shape[0]
    if channels <= 81:
        body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 3, padding=1),
            activation(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
        )
        features = _features(body, input_shape)
        return nn.Sequential(*body, nn.Linear(features, 32), activation(), nn.Linear(32, classes))
    body = nn.Sequential(*_pairs(channels, (64, 64), activation), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(_features(body, input_shape), classes))


def shallow_scatter_cnn(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """The networks of "Differentially Private Learning Needs Better Features" on ScatterNet features, as its code has them.

    Two convolutions: for grey images (81 channels or fewer) as `scatter_cnn`, without its pools; for colour (243), with one pool
    between them.

    >>> sum(p.numel() for p in shallow_scatter_cnn((81, 7, 7), 10).parameters())
    33066
    >>> sum(p.numel() for p in shallow_scatter_cnn((243, 8, 8), 10).parameters())
    187210
    """
    channels = input_shape[0]
    if channels <= 81:
        body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            activation(),
            nn.Conv2d(16, 32, 3, padding=1),
            activation(),
            nn.Flatten(),
        )
        features = _features(body, input_shape)
        return nn.Sequential(*body, nn.Linear(features, 32), activation(), nn.Linear(32, classes))
    body = nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        activation(),
        nn.Flatten(),
    )
    return nn.Sequential(*body, nn.Linear(_features(body, input_shape), classes))


def all_conv(
    input_shape: Sequence[int],
    classes: int,
    activation: Activation = nn.Tanh,
    widths: Sequence[int] = (32, 64, 128),
) -> nn.Sequential:
    """The all-convolutional network of "Tempered Sigmoid Activations" for CIFAR-10: average pools, a mean over space at the end.

    >>> sum(p.numel() for p in all_conv((3, 32, 32), 10).parameters())
    605226
    """
    body = nn.Sequential(*_pairs(input_shape[0], widths, activation, pool=nn.AvgPool2d))
    layers = [nn.Conv2d(widths[-1], 2 * widths[-1], 3, padding=1), activation()]
    layers += [nn.Conv2d(2 * widths[-1], classes, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    _features(nn.Sequential(*body, nn.Flatten()), input_shape)  # which refuses images that are too small
    return nn.Sequential(*body, *layers)


def pooled_cnn(input_shape: Sequence[int], classes: int, activation: Activation = nn.ReLU) -> nn.Sequential:
    """Four 3x3 convolutions, each with an average pool after it, the last over the whole image, and one linear layer: the network
    of Opacus's example for CIFAR-10, which "weight decay before clipping" was tried on.

    >>> sum(p.numel() for p in pooled_cnn((3, 32, 32), 10).parameters())
    131466
    """
    layers: list[nn.Module] = []
    channels = input_shape[0]
    for width in (32, 64, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), activation(), nn.AvgPool2d(2)]
        channels = width
    body = nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(_features(body, input_shape), classes))


def small_cnn(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """One convolution, one pool, one linear layer: for small images such as the 8 x 8 digits.

    >>> small_cnn((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    body = nn.Sequential(
        nn.Conv2d(input_shape[0], 16, 3, padding=1),
        activation(),
        nn.AvgPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*body, nn.Linear(_features(body, input_shape), classes))


def linear(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """Softmax regression on the flattened input; it has no activation.

    >>> linear((5,), 3)(torch.zeros(2, 5)).shape
    torch.Size([2, 3])
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(input_shape).numel(), classes))


def perceptron(input_shape: Sequence[int], classes: int, activation: Activation = nn.Tanh) -> nn.Sequential:
    """One hidden layer of 64 units: for tables of features.

    >>> perceptron((5,), 3)(torch.zeros(2, 5)).shape
    torch.Size([2, 3])
    """
    features = torch.Size(input_shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 64), activation(), nn.Linear(64, classes))


def _pairs(
    channels: int, widths: Sequence[int], activation: Activation, pool: Callable[[int], nn.Module] = nn.MaxPool2d
) -> list[nn.Module]:
    """Two 3x3 convolutions and a pool for each width."""
    layers: list[nn.Module] = []
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), activation()]
            channels = width
        layers.append(pool(2))
    return layers


def _features(body: nn.Module, input_shape: Sequence[int]) -> int:
    """How many numbers the convolutional part gives for one example."""
    try:
        with torch.no_grad():
            return int(body(torch.zeros(1, *input_shape)).shape[1])
    except RuntimeError:
        raise UserError(
            f"images of {input_shape[1]} x {input_shape[2]} pixels are too small for this network; "
            "choose 'small-cnn', or enlarge them with data.resize"
        ) from None
