"""The convolution rule by compiled kernels: for `nn.Conv2d` in float32 on the CPU, without groups or dilation."""

from __future__ import annotations

from collections.abc import Callable

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.contribution import Add, added_up, not_negative
from tacit.gradients.windows import padded, sides, weight_gradient


def fits(module: nn.Module, inputs: Tensor, gradients: Tensor) -> bool:
    """Whether the kernels can take this call.

    *Guarantee.* A choice of speed alone.

    >>> fits(nn.Conv2d(2, 2, 1, groups=2), torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1))
    False
    """
    plain = isinstance(module, nn.Conv2d) and module.groups == 1 and set(module.dilation) == {1}
    return plain and inputs.dim() == 4 and kernels.usable(inputs, gradients)


class CompiledConv:
    """One call of a convolution, for the kernels: what came in, and the gradient of what came out.

    So many `views`, rows one after the other, are one example.

    *Guarantee.* Row i of every result comes from example i's rows of `inputs` and `gradients` alone, and a ghost norm is not
    below the norm of what is added up: it has the allowance for rounding of `contribution.rounding_allowance`.

    >>> layer = nn.Conv2d(1, 1, (1, 2))
    >>> x, g = torch.tensor([[[[1.0, 2.0, 4.0]]]]), torch.tensor([[[[1.0, 10.0]]]])
    >>> if fits(layer, x, g):
    ...     assert CompiledConv(layer, x, g).per_example().tolist() == [[[[[21.0, 42.0]]]]]
    """

    def __init__(self, module: nn.Conv2d, inputs: Tensor, gradients: Tensor, views: int = 1) -> None:
        (top, bottom), (left, right) = sides(module)
        self.module, self.inputs, self.gradients, self.views = module, inputs, gradients, views
        self.images, zeros = inputs, (top, left)
        if module.padding_mode != "zeros" or zeros != (bottom, right):
            self.images, zeros = padded(module, inputs), (0, 0)
        (rows, columns), (down, along) = module.kernel_size, module.stride
        self.geometry = kernels.Geometry((rows, columns), (down, along), zeros)
        self._bias: Tensor | None = None

    def instantiated(self, standardized: kernels.Standardized | None = None) -> kernels.ConvGradients:
        """The gradients, with their norms."""
        found = kernels.conv_gradients(self.images, self.gradients, self.geometry, standardized, self.views)
        self._bias = found.bias
        return found

    def norms(self, *, scale: Tensor | None = None, outputs: Tensor | None = None) -> kernels.ConvNorms:
        """What Gram matrices tell of the gradients; only if windows lie one pixel apart."""
        found = kernels.conv_norms(self.images, self.gradients, self.geometry, scale=scale, outputs=outputs)
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
        is given."""
        found = self.instantiated(None if standardized is None else standardized())
        return found.norms, found.weighted_sum

    def ghost(self) -> tuple[Tensor, Add]:
        """The way by Gram matrices."""
        found = self.norms()
        return not_negative(found.squares) + found.allowance, self.second_pass
