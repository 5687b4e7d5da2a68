"""The rules for normalisations of one example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm.

Their parameters are few, so that per-example gradients are always instantiated: with the normalised input n and the
output gradient g, the weight's is the sum of g * n over the positions that share a weight, the bias's the sum of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import kernels
from tacit.gradients.contribution import Contribution


def layer_norm(module: nn.LayerNorm | nn.RMSNorm, inputs: Tensor, gradients: Tensor) -> dict[str, Contribution]:
    """Weights are shared by the positions between the example axis and the normalised dimensions.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone.

    >>> layer = nn.LayerNorm(2, eps=0.0)
    >>> found = layer_norm(layer, torch.tensor([[1.0, 3.0]]), torch.tensor([[5.0, 7.0]]))
    >>> found["weight"].per_example(), found["bias"].per_example()
    (tensor([[-5.,  7.]]), tensor([[5., 7.]]))
    """
    shape = list(module.normalized_shape)
    if isinstance(module, nn.LayerNorm) and kernels.usable(inputs, gradients):
        x, g = (tensor.reshape(len(inputs), -1, math.prod(shape)) for tensor in (inputs, gradients))
        found = cache(lambda: kernels.layer_norm_gradients(x, g, module.eps))
        return {
            "weight": Contribution(lambda: found()[0].view(-1, *shape)),
            "bias": Contribution(lambda: found()[1].view(-1, *shape)),
        }

    def normalised() -> Tensor:
        if isinstance(module, nn.RMSNorm):
            # with eps=None the layer takes that of its input's type, which may be narrower than ours
            eps = torch.finfo(module.weight.dtype).eps if module.eps is None else module.eps
            return F.rms_norm(inputs, shape, eps=eps)
        return F.layer_norm(inputs, shape, eps=module.eps)

    def shared(values: Tensor) -> Tensor:
        return values.reshape(len(values), -1, *shape).sum(dim=1)

    return {
        "weight": Contribution(lambda: shared(gradients * normalised())),
        "bias": Contribution(lambda: shared(gradients)),
    }


def group_norm(module: nn.GroupNorm, inputs: Tensor, gradients: Tensor) -> dict[str, Contribution]:
    """One weight and bias a channel, shared by all positions of its map.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone.

    >>> layer = nn.GroupNorm(1, 2, eps=0.0)
    >>> group_norm(layer, torch.tensor([[1.0, 3.0]]), torch.tensor([[5.0, 7.0]]))["weight"].per_example()
    tensor([[-5.,  7.]])
    """
    if inputs.dim() == 4 and kernels.usable(inputs, gradients):
        found = cache(lambda: kernels.norm_gradients(inputs, gradients, module.num_groups, module.eps))
        return {"weight": Contribution(lambda: found()[0]), "bias": Contribution(lambda: found()[1])}
    return _by_channel(gradients, lambda: F.group_norm(inputs, module.num_groups, eps=module.eps))


class GroupNormBackward:
    """The backward pass of one call of a `nn.GroupNorm`, ours instead of PyTorch's: the gradients of weight, bias and input come
    from the same reading of memory, and with channels last in a fraction of the time. A pass that somebody else makes, in the
    model or in the loss, gets the gradient of the input alone; one that is to be differentiated again, PyTorch's own.

    *Guarantee.* Row i of every result comes from row i of the inputs and of `gradients` alone; the output's values are those the
    module computed.

    >>> layer, x = nn.GroupNorm(1, 2), torch.randn(3, 2, 4, 4, requires_grad=True)
    >>> backward = GroupNormBackward(layer, x.detach())
    >>> if GroupNormBackward.fits(x, layer(x)):
    ...     output = backward.passed_by(x, layer(x))
    ...     (ours,) = torch.autograd.grad(output.square().sum(), x)
    ...     (theirs,) = torch.autograd.grad(layer(x).square().sum(), x)
    ...     torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    """

    def __init__(self, module: nn.GroupNorm, inputs: Tensor) -> None:
        self._module = module
        self._inputs: Tensor | None = inputs
        self._found: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def passed(self) -> bool:
        """Whether the backward pass has gone through already, and nothing is kept any more."""
        return self._inputs is None

    @staticmethod
    def fits(inputs: Tensor, output: Tensor) -> bool:
        """Whether the kernels can take it, a gradient goes further than here, and no hook has changed the output already."""
        return (
            inputs.dim() == 4
            and inputs.requires_grad
            and output.grad_fn is not None
            and output.grad_fn.name() == "NativeGroupNormBackward0"
            and kernels.usable(inputs, output)
        )

    def passed_by(self, inputs: Tensor, output: Tensor) -> Tensor:
        """The output, with this as its way back to the inputs."""
        found: Tensor = _PassedBy.apply(inputs, output.detach(), self)  # type: ignore[no-untyped-call]
        return found

    def contributions(self, gradients: Tensor) -> dict[str, Contribution]:
        """As `group_norm` has them; the same pass over memory then serves `input_gradient`, and nothing is kept after it."""
        found = cache(self._computed(gradients))
        self._found = found
        return {"weight": Contribution(lambda: found()[0]), "bias": Contribution(lambda: found()[1])}

    def input_gradient(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """For the layers before."""
        if torch.is_grad_enabled():  # it is to be differentiated again
            module = self._module
            output = F.group_norm(inputs, module.num_groups, module.weight, module.bias, module.eps)
            return torch.autograd.grad(output, inputs, gradients, create_graph=True)[0]
        if self._found is None:
            return self._computed(gradients)()[2]
        found = self._found()[2]
        self._found = self._inputs = None
        return found

    def _computed(self, gradients: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        module, inputs = self._module, self._inputs
        assert inputs is not None
        weight = None if module.weight is None else module.weight.detach()
        return lambda: kernels.norm_backward(inputs, gradients, module.num_groups, module.eps, weight)


class _PassedBy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, output: Tensor, backward: GroupNormBackward) -> Tensor:
        ctx.of = backward
        ctx.save_for_backward(inputs)
        # no view: what follows may change it in place
        place = output.untyped_storage(), output.storage_offset(), output.shape, output.stride()
        return inputs.new_empty(0).set_(*place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of.input_gradient(*ctx.saved_tensors, gradients[0]), None, None


def instance_norm(module: nn.InstanceNorm2d, inputs: Tensor, gradients: Tensor) -> dict[str, Contribution]:
    """One weight and bias a channel; each map is normalised by its own mean and variance.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone.

    >>> layer = nn.InstanceNorm1d(1, affine=True, eps=0.0)
    >>> instance_norm(layer, torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]]))["weight"].per_example()
    tensor([[2.]])
    """
    return _by_channel(gradients, lambda: F.instance_norm(inputs, eps=module.eps))


def _by_channel(gradients: Tensor, normalised: Callable[[], Tensor]) -> dict[str, Contribution]:
    def shared(values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], -1).sum(dim=2)

    return {
        "weight": Contribution(lambda: shared(gradients * normalised())),
        "bias": Contribution(lambda: shared(gradients)),
    }
