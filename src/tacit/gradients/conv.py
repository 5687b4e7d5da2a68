"""The rule for `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`, with every stride, padding, dilation and grouping.

The input is padded first, so that what follows knows no padding. With a_t the window of the padded input that output
position t sees (flattened, K numbers) and g_t its output gradient, an example's weight gradient is sum_t g_t a_t^T.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients.contribution import Contribution, Ghost, ghost_is_cheaper, rounding_allowance

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


def conv(module: Conv, inputs: Tensor, gradients: Tensor) -> dict[str, Contribution]:
    """Instantiated by matrix products of windows, or clipped by a ghost norm from Gram matrices.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone, and a ghost norm is not below the
    norm of what is added up.

    >>> layer = nn.Conv1d(1, 1, kernel_size=2)
    >>> found = conv(layer, torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor([[[1.0, 10.0]]]))
    >>> found["weight"].per_example(), found["bias"].per_example()
    (tensor([[[[21., 42.]]]]), tensor([[11.]]))
    """
    x, g = padded(module, inputs), gradients
    positions = math.prod(g.shape[2:])
    window, outputs = math.prod(module.weight.shape[1:]), module.out_channels // module.groups
    plain = isinstance(module, nn.Conv2d) and _is_plain(module)
    pixels = math.prod(x.shape[2:])
    gram = pixels**2 * module.in_channels if plain else positions**2 * window * module.groups
    cheaper = ghost_is_cheaper(
        positions=positions,
        inputs=window,
        outputs=module.out_channels,
        gram=gram + positions**2 * (outputs + window // module.in_channels) * module.groups,
    )

    def per_example() -> Tensor:
        if plain:
            return _row_products(module, x, g)
        found = _by_group(module, g) @ windows(module, x)
        channels, kernel = module.weight.shape[1], module.kernel_size
        if _channels_last(module, x):
            return found.view(len(x), module.out_channels, *kernel, channels).movedim(-1, 2)
        return found.view(len(x), module.out_channels, channels, *kernel)

    def squared_norms() -> Tensor:
        if plain:
            input_gram, h = _gram_of_windows(module, x, g), _pixels(g)
            found = (input_gram * (h @ h.transpose(1, 2))).sum(dim=(1, 2))
            size = torch.diagonal(input_gram, dim1=1, dim2=2).sum(dim=1)
        else:
            w, h = windows(module, x), _by_group(module, g)
            found = (w @ w.transpose(2, 3)).mul_(h.transpose(2, 3) @ h).sum(dim=(1, 2, 3))
            size = w.square().sum(dim=(1, 2, 3))
        return found.clamp(min=0) + rounding_allowance(size.sqrt().unsqueeze(1), g)

    def weighted_sum(factors: Tensor) -> Tensor:
        return _weight_gradient(module, x, g * factors.to(g.dtype).view(-1, *(1,) * (g.dim() - 1)))

    return {
        "weight": Contribution(per_example, Ghost(squared_norms, weighted_sum, cheaper=cheaper)),
        "bias": Contribution(lambda: g.sum(dim=tuple(range(2, g.dim())))),
    }


def padded(module: Conv, inputs: Tensor) -> Tensor:
    """The input with its padding written out: zeros, or what `padding_mode` says.

    *Guarantee.* The same convolution without padding gives the same output on it.

    >>> padded(nn.Conv1d(1, 1, 2, padding="same"), torch.ones(1, 1, 3))
    tensor([[[1., 1., 1., 0.]]])
    """
    if module.padding == "valid":
        return inputs
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(int(p), int(p)) for p in module.padding]
    amounts = [side for pair in reversed(sides) for side in pair]  # F.pad begins with the last dimension
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
    last, spatial = _channels_last(module, x), len(module.kernel_size)
    for axis, (k, s, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    batch, channels, *rest = x.shape
    x = x.reshape(batch, module.groups, channels // module.groups, *rest)
    positions, kernel = range(3, 3 + spatial), range(3 + spatial, 3 + 2 * spatial)
    x = x.permute(0, 1, *positions, *((*kernel, 2) if last else (2, *kernel)))
    return x.reshape(batch, module.groups, math.prod(rest[:spatial]), -1)


def _channels_last(module: Conv, x: Tensor) -> bool:
    return x.stride(1) == 1 and module.in_channels > module.groups


def _by_group(module: Conv, g: Tensor) -> Tensor:
    return g.reshape(len(g), module.groups, module.out_channels // module.groups, -1)


def _is_plain(module: nn.Conv2d) -> bool:
    """Windows one pixel apart, nothing left out: shifted views of the input can take the place of windows."""
    return set(module.stride) == set(module.dilation) == {1} and module.groups == 1


def _pixels(x: Tensor) -> Tensor:
    """[batch, positions, channels]: a view, whether channels come first or last in memory."""
    return x.movedim(1, -1).flatten(1, -2)


def _row_products(module: Conv, x: Tensor, g: Tensor) -> Tensor:
    """Per-example weight gradients of a plain convolution, with windows of one row instead of whole ones.

    The windows of row i of the kernel, at all output positions, are a shifted view of the windows one row high at all rows
    of the padded input: each kernel row is one batched matrix product.
    """
    batch, channels, height, _ = x.shape
    (kernel_rows, kernel_columns), columns, positions = module.kernel_size, g.shape[3], g.shape[2] * g.shape[3]
    strips = x.unfold(3, kernel_columns, 1)  # [batch, channels, height, columns, kernel_columns]
    # Copied in the order in which the input lies in memory; a few channels would make too short runs.
    channels_last = channels >= 8 and x.stride(1) == 1
    order = (0, 2, 3, 4, 1) if channels_last else (0, 1, 4, 2, 3)
    strips = strips.permute(order).reshape(
        batch, *((height * columns, -1) if channels_last else (-1, height * columns))
    )
    by_position = strips if channels_last else strips.transpose(1, 2)
    gradients = _pixels(g).transpose(1, 2)
    found = g.new_empty(kernel_rows, batch, g.shape[1], channels * kernel_columns)
    for i in range(kernel_rows):
        torch.bmm(gradients, by_position[:, i * columns : i * columns + positions], out=found[i])
    if channels_last:
        return found.view(*found.shape[:3], kernel_columns, channels).permute(1, 2, 4, 0, 3)
    return found.view(*found.shape[:3], channels, kernel_columns).permute(1, 2, 3, 0, 4)


def _gram_of_windows(module: Conv, x: Tensor, g: Tensor) -> Tensor:
    """Inner products of all pairs of windows of a plain convolution, [batch, positions, positions].

    Two windows' inner product is the sum, over kernel offsets, of the inner products of the two pixels there: one Gram matrix
    of the pixels, added up along shifted views of itself, for columns first and then for rows.
    """
    height, width = x.shape[2:]
    rows, columns = g.shape[2:]
    pixels = _pixels(x)
    gram = (pixels @ pixels.transpose(1, 2)).view(len(x), height, width, height, width)
    found = sum(gram[:, :, j : j + columns, :, j : j + columns] for j in range(module.kernel_size[1]))
    assert isinstance(found, Tensor)
    found = sum(found[:, i : i + rows, :, i : i + rows] for i in range(module.kernel_size[0]))
    assert isinstance(found, Tensor)
    return found.reshape(len(x), rows * columns, rows * columns)


def _weight_gradient(module: Conv, x: Tensor, g: Tensor) -> Tensor:
    """The ordinary weight gradient of the whole batch."""
    nothing = [0] * len(module.kernel_size)
    weight = module.weight.detach().to(x.dtype)
    _, found, _ = torch.ops.aten.convolution_backward(
        g, x, weight, None, module.stride, nothing, module.dilation, False, nothing, module.groups, (False, True, False)
    )
    assert isinstance(found, Tensor)
    return found
