"""The rule for `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`, with every stride, padding, dilation and grouping.

With a_t the window of the padded input that output position t sees (flattened, K numbers) and g_t its output gradient, an
example's weight gradient is sum_t g_t a_t^T, its bias gradient sum_t g_t. Compiled kernels compute it where they can; what is
here is the same in PyTorch, for everything else.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from tacit.gradients.compiled import CompiledConv, along_conv, fits
from tacit.gradients.contribution import (
    Add,
    Contribution,
    added_up,
    ghost_is_cheaper,
    not_negative,
    rounding_allowance,
)
from tacit.gradients.toward import Toward
from tacit.gradients.windows import Conv, channels_last, padded, weight_gradient, windows


def conv(
    module: Conv, inputs: Tensor, gradients: Tensor, views: int = 1, toward: Toward | None = None
) -> dict[str, Contribution]:
    """Instantiated by matrix products of windows, or clipped by a ghost norm from Gram matrices.

    *Guarantee.* Row i of every result comes from example i's rows of `inputs` and `gradients` alone (so many `views`, one after
    the other), and a ghost norm is not below the norm of what is added up.

    >>> layer = nn.Conv1d(1, 1, kernel_size=2)
    >>> found = conv(layer, torch.tensor([[[1.0, 2.0, 4.0]]]), torch.tensor([[[1.0, 10.0]]]))
    >>> found["weight"].per_example(), found["bias"].per_example()
    (tensor([[[[21., 42.]]]]), tensor([[11.]]))
    """
    cheaper = _ghost_is_cheaper(module, inputs, gradients)
    # The Gram matrix of several views would have as many times as many rows *and* columns.
    ghost = partial(_ghost, module, inputs, gradients) if views == 1 else None
    if isinstance(module, nn.Conv2d) and fits(module, inputs, gradients):
        compiled, asked = CompiledConv(module, inputs, gradients, views, toward), toward is not None
        by_kernel = compiled.has_ghost
        weight = Contribution(
            compiled.per_example,
            compiled.ghost if by_kernel else ghost,
            compiled.held,
            cheaper,
            None if toward is None or by_kernel else partial(along_conv, module, inputs, gradients, toward),
            held_decays=asked,
            ghost_decays=asked and by_kernel,
        )
        return {"weight": weight, "bias": Contribution(compiled.bias)}
    along = None if toward is None else partial(along_conv, module, inputs, gradients, toward)
    return {
        "weight": Contribution(
            lambda: added_up(_per_example(module, inputs, gradients), views), ghost, None, cheaper, along
        ),
        "bias": Contribution(lambda: added_up(gradients.sum(dim=tuple(range(2, gradients.dim()))), views)),
    }


def _ghost_is_cheaper(module: Conv, inputs: Tensor, gradients: Tensor) -> bool:
    positions = math.prod(gradients.shape[2:])
    window, outputs = math.prod(module.weight.shape[1:]), module.out_channels // module.groups
    gram = positions**2 * (outputs + window) * module.groups
    plain = isinstance(module, nn.Conv2d) and _is_plain(module)
    if plain:
        pixels = math.prod(size + k - 1 for size, k in zip(gradients.shape[2:], module.kernel_size))
        gram = pixels**2 * module.in_channels + positions**2 * outputs
    return ghost_is_cheaper(
        positions=positions,
        inputs=window,
        outputs=module.out_channels,
        gram=gram,
        compiled=plain and fits(module, inputs, gradients),
    )


def _per_example(module: Conv, inputs: Tensor, g: Tensor) -> Tensor:
    x = padded(module, inputs)
    if isinstance(module, nn.Conv2d) and _is_plain(module):
        return _row_products(module, x, g)
    if isinstance(module, nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
        return _by_offset(module, x, g)
    found = _by_group(module, g) @ windows(module, x)
    channels, kernel = module.weight.shape[1], module.kernel_size
    if channels_last(module, x):
        return found.view(len(x), module.out_channels, *kernel, channels).movedim(-1, 2)
    return found.view(len(x), module.out_channels, channels, *kernel)


def _ghost(module: Conv, inputs: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    x, positions = padded(module, inputs), math.prod(g.shape[2:])
    if isinstance(module, nn.Conv2d) and _is_plain(module):
        input_gram, h = _gram_of_windows(module, x, g), _pixels(g)
        found = (input_gram * (h @ h.transpose(1, 2))).sum(dim=(1, 2))
        size = torch.diagonal(input_gram, dim1=1, dim2=2).sum(dim=1)
    else:
        w, h = windows(module, x), _by_group(module, g)
        found = (w @ w.transpose(2, 3)).mul_(h.transpose(2, 3) @ h).sum(dim=(1, 2, 3))
        size = w.square().sum(dim=(1, 2, 3))

    def second_pass(factors: Tensor) -> Tensor:
        scaled = g * factors.to(g.dtype).view(-1, *(1,) * (g.dim() - 1))
        return weight_gradient(module, x, scaled, [0] * len(module.kernel_size))

    summands = math.prod(module.weight.shape[1:]) + module.out_channels + positions + 8
    return not_negative(found) + rounding_allowance(size.sqrt().unsqueeze(1), g, summands), second_pass


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


def _by_offset(module: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """Per-example weight gradients of a convolution that takes every channel by itself: at each place of the kernel, products of
    output gradients and the pixels there, added up over the positions. Windows would hold every pixel as often as the kernel is
    large, for one multiplication each."""
    (rows, columns), (down, along), (tall, wide) = g.shape[2:], module.stride, module.dilation
    found = g.new_empty(len(g), module.out_channels, 1, *module.kernel_size)
    for i in range(module.kernel_size[0]):
        strip = x[:, :, i * tall : i * tall + (rows - 1) * down + 1 : down]
        for j in range(module.kernel_size[1]):
            pixels = strip[:, :, :, j * wide : j * wide + (columns - 1) * along + 1 : along]
            found[:, :, 0, i, j] = (g * pixels).sum(dim=(2, 3))
    return found


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
