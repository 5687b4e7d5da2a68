"""The convolution rule by compiled kernels: for `nn.Conv2d` in float32 on the CPU, without groups or dilation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.contribution import Add, added_up, at_least_float32, not_negative, squared_norms
from tacit.gradients.toward import Toward, along_outputs
from tacit.gradients.windows import Conv, padded, sides, weight_gradient


def fits(module: nn.Module, inputs: Tensor, gradients: Tensor) -> bool:
    """Whether the kernels can take this call.

    *Guarantee.* A choice of speed alone.

    >>> import torch
    >>> fits(nn.Conv2d(2, 2, 1, groups=2), torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1))
    False
    """
    plain = isinstance(module, nn.Conv2d) and module.groups == 1 and set(module.dilation) == {1}
    return plain and inputs.dim() == 4 and kernels.usable(inputs, gradients)


def along_conv(module: Conv, inputs: Tensor, gradients: Tensor, toward: Toward) -> Tensor:
    """Inner products of the gradients of any convolution with its weight, from its outputs: see `toward.along_outputs`.

    *Guarantee.* Row i comes from row i alone.

    >>> import torch
    >>> layer = nn.Conv1d(1, 1, 1, bias=False)
    >>> with torch.no_grad(): layer.weight.fill_(3.0)
    Parameter ...
    >>> from tacit.gradients.toward import Decay
    >>> toward = Toward(Decay(dict(layer.named_parameters()), {"weight": 0.1}), "weight")
    >>> round(float(along_conv(layer, torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 5.0), toward)), 3)
    30.0
    """
    # no pixel is in more windows than the kernel has places
    size = math.prod(module.kernel_size) * squared_norms(padded(module, inputs))
    _, bias = _weights(module, gradients)
    window = module.weight[0].numel()
    return along_outputs(_outputs(module, inputs, toward), gradients, toward, bias, size, window)


def _weights(module: Conv, like: Tensor) -> tuple[Tensor, Tensor | None]:
    return module.weight.detach().to(like.dtype), None if module.bias is None else module.bias.detach().to(like.dtype)


def _outputs(module: Conv, inputs: Tensor, toward: Toward) -> Tensor:
    return toward.outputs(lambda: module._conv_forward(inputs, *_weights(module, inputs)))


class CompiledConv:
    """One call of a convolution, for the kernels: what came in, and the gradient of what came out.

    So many `views`, rows one after the other, are one example.

    *Guarantee.* Row i of every result comes from example i's rows of `inputs` and `gradients` alone, and a ghost norm is not
    below the norm of what is added up: it has the allowance for rounding of `contribution.rounding_allowance`.

    >>> import torch
    >>> layer = nn.Conv2d(1, 1, (1, 2))
    >>> x, g = torch.tensor([[[[1.0, 2.0, 4.0]]]]), torch.tensor([[[[1.0, 10.0]]]])
    >>> if fits(layer, x, g):
    ...     assert CompiledConv(layer, x, g).per_example().tolist() == [[[[[21.0, 42.0]]]]]
    """

    def __init__(
        self, module: nn.Conv2d, inputs: Tensor, gradients: Tensor, views: int = 1, toward: Toward | None = None
    ) -> None:
        (top, bottom), (left, right) = sides(module)
        self.module, self.inputs, self.gradients, self.views, self.toward = module, inputs, gradients, views, toward
        self.images, zeros = inputs, (top, left)
        if module.padding_mode != "zeros" or zeros != (bottom, right):
            self.images, zeros = padded(module, inputs), (0, 0)
        (rows, columns), (down, along) = module.kernel_size, module.stride
        self.geometry = kernels.Geometry((rows, columns), (down, along), zeros)
        self._bias: Tensor | None = None

    def instantiated(
        self, standardized: kernels.Standardized | None = None, decaying: Tensor | None = None, rate: float = 0.0
    ) -> kernels.ConvGradients:
        """The gradients, with their norms."""
        found = kernels.conv_gradients(
            self.images, self.gradients, self.geometry, standardized, self.views, decaying, rate
        )
        self._bias = found.bias
        return found

    def norms(self, **options: Any) -> kernels.ConvNorms:
        """What Gram matrices tell of the gradients (options of `kernels.conv_norms`); only if windows lie one pixel apart."""
        found = kernels.conv_norms(self.images, self.gradients, self.geometry, **options)
        self._bias = found.bias
        return found

    @property
    def has_ghost(self) -> bool:
        return self.geometry.stride == (1, 1) and self.views == 1

    def per_example(self) -> Tensor:
        """[batch, *weight.shape]"""
        return self.instantiated().gradients

    def bias(self) -> Tensor:
        """A by-product of whatever was computed for the weight."""
        if self._bias is None:
            self._bias = added_up(self.gradients.sum(dim=(2, 3)), self.views)
        return self._bias

    def second_pass(self, factors: Tensor) -> Tensor:
        """The ordinary weight gradient, with every example scaled by its factor."""
        scaled = self.gradients * factors.to(self.gradients.dtype).view(-1, 1, 1, 1)
        return weight_gradient(self.module, self.images, scaled, self.geometry.padding)

    def held(self, standardized: Callable[[], kernels.Standardized] | None = None) -> tuple[Tensor, Add]:
        """The way that holds the gradients, with their norms taken while they were made; those of a standardised weight if it
        is given, which knows of its decay, else with the decay that was asked for."""
        if standardized is not None:
            found = self.instantiated(standardized())
        elif self.toward is not None:
            found = self.instantiated(None, self.toward.weight, self.toward.rate)
        else:
            found = self.instantiated()
        return found.norms, found.weighted_sum

    def ghost(self) -> tuple[Tensor, Add]:
        """The way by Gram matrices, with the decay that was asked for."""
        toward = self.toward
        if toward is None:
            found = self.norms()
            return not_negative(found.squares) + found.allowance, self.second_pass
        bias = None if self.module.bias is None else at_least_float32(self.module.bias.detach())
        outputs = _outputs(self.module, self.inputs, toward)
        found = self.norms(outputs=outputs, weight=toward.weight, bias=bias, rate=toward.rate)

        def add(factors: Tensor) -> Tensor:
            return toward.decay.add_to(self.second_pass(factors), toward.name, toward.decay.total(factors))

        return not_negative(found.squares) + found.allowance + found.decay, add
