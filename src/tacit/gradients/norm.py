"""The rules for normalisations of one example: LayerNorm, RMSNorm, GroupNorm, InstanceNorm.

Their parameters are few, so that per-example gradients are always instantiated: with the normalised input n and the
output gradient g, the weight's is the sum of g * n over the positions that share a weight, the bias's the sum of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

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
