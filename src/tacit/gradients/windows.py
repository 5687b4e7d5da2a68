"""Where the windows of a convolution lie: padding, unfolding, and the ordinary weight gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def sides(module: Conv) -> list[tuple[int, int]]:
    """How much is padded before and after, in each dimension.

    *Guarantee.* As PyTorch pads.

    >>> sides(nn.Conv2d(1, 1, (2, 3), padding="same"))
    [(0, 1), (1, 1)]
    """
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(p), int(p)) for p in module.padding]


def padded(module: Conv, inputs: Tensor) -> Tensor:
    """The input with its padding written out: zeros, or what `padding_mode` says.

    *Guarantee.* The same convolution without padding gives the same output on it.

    >>> padded(nn.Conv1d(1, 1, 2, padding="same"), torch.ones(1, 1, 3))
    tensor([[[1., 1., 1., 0.]]])
    """
    amounts = [side for pair in reversed(sides(module)) for side in pair]  # F.pad begins with the last dimension
    if not any(amounts):
        return inputs
    if module.padding_mode == "zeros":
        return F.pad(inputs, amounts)
    return F.pad(inputs, amounts, mode=module.padding_mode)


def windows(module: Conv, x: Tensor) -> Tensor:
    """What each output position sees of the padded input: [batch, groups, positions, K].

    The K numbers of a window are in the order in which they lie in memory, so that copying them goes in long runs: channels
    last if the input has them last, else first.

    *Guarantee.* A rearrangement of each example's own numbers.

    >>> windows(nn.Conv1d(1, 1, 2, stride=2), torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    tensor([[[[1., 2.],
              [3., 4.]]]])
    """
    last, spatial = channels_last(module, x), len(module.kernel_size)
    for axis, (k, s, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    batch, channels, *rest = x.shape
    x = x.reshape(batch, module.groups, channels // module.groups, *rest)
    positions, kernel = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    x = x.permute(0, 1, *positions, *((*kernel, 2) if last else (2, *kernel)))
    return x.reshape(batch, module.groups, math.prod(rest[:spatial]), -1)


def channels_last(module: Conv, x: Tensor) -> bool:
    """Whether the numbers of a window lie in memory with the channels last.

    *Guarantee.* It bears on the order in which `windows` gives them alone.

    >>> channels_last(nn.Conv1d(1, 1, 2), torch.zeros(1, 1, 4))
    False
    """
    return x.stride(1) == 1 and module.in_channels > module.groups


def weight_gradient(module: Conv, x: Tensor, g: Tensor, padding: Sequence[int]) -> Tensor:
    """The ordinary weight gradient of the whole batch, with this much padding of zeros on both sides.

    *Guarantee.* A sum over the examples, linear in `g`.

    >>> weight_gradient(nn.Conv1d(1, 1, 2), torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor([[[1.0, 10.0]]]), [0])
    tensor([[[21., 42.]]])
    """
    weight = module.weight.detach().to(x.dtype)
    nothing = [0] * len(module.kernel_size)
    _, found, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, module.stride, padding, module.dilation, False, nothing, module.groups, (False, True, False)
    )
    assert isinstance(found, Tensor)
    return found
