"""Inputs standardised by channel, with statistics of the training set that were released with noise and paid for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tacit.privacy.validation import UserError, check_positive

_BOUNDS = (2.0, 8.0)  # of means and mean squares, a channel


class Standardize(nn.Module):
    """(x - mean) / std by channel of [batch, channels, ...]; until `take` was called, x as it is.

    `bounds` are public numbers: at most so large are, for one example, the vector of the channels' means over its positions and
    the vector of their mean squares. What is longer is clipped, which biases the statistics and costs no privacy. By default they
    are 2 and 8 times the root of the number of channels: for inputs whose means and deviations are of the order of 1. (They clip
    one in a hundred images of CIFAR-10, but the mean squares of most of MNIST's, whose strokes are sharper than random images.)

    >>> layer = Standardize(2, bounds=(10.0, 100.0))
    >>> x = torch.tensor([[[1.0, 3.0], [0.0, 4.0]]])
    >>> layer.moments(x)
    tensor([[[2., 2.],
             [5., 8.]]])
    >>> layer.take(layer.moments(x)[0], smallest_variance=1e-6)
    >>> layer(x)
    tensor([[[-1.,  1.],
             [-1.,  1.]]])
    """

    mean: Tensor
    std: Tensor
    measured: Tensor

    def __init__(self, channels: int, bounds: Sequence[float] | None = None) -> None:
        super().__init__()
        if bounds is None:
            bounds = tuple(bound * math.sqrt(channels) for bound in _BOUNDS)
        if len(bounds) != 2:
            raise UserError(
                f"normalization_bounds are two public numbers, of the means and of the mean squares, not {list(bounds)}"
            )
        self.bounds = (
            check_positive("normalization_bounds", bounds[0]),
            check_positive("normalization_bounds", bounds[1]),
        )
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("std", torch.ones(channels))
        self.register_buffer("measured", torch.tensor(False))

    def moments(self, inputs: Tensor) -> Tensor:
        """Each example's means and mean squares by channel, [batch, 2, channels]."""
        if inputs.dim() < 2 or inputs.shape[1] != len(self.mean):
            raise UserError(
                f"this layer standardises {len(self.mean)} channels, not examples of shape {list(inputs.shape[1:])}"
            )
        rows = inputs.reshape(*inputs.shape[:2], -1)
        return torch.stack([rows.mean(dim=2), rows.square().mean(dim=2)], dim=1)

    def take(self, moments: Tensor, *, smallest_variance: float) -> None:
        """Standardise by these means and mean squares, [2, channels], from now on; noise may have made a variance too small."""
        mean, square = moments.double().cpu()
        self.mean.copy_(mean)
        self.std.copy_((square - mean.square()).clamp(min=smallest_variance).sqrt())
        self.measured.fill_(True)

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        return (inputs - self.mean.view(shape)) / self.std.view(shape)

    def extra_repr(self) -> str:
        return f"{len(self.mean)}, bounds={self.bounds}"
