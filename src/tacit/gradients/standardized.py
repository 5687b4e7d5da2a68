"""Convolution with standardised weights, and its rule: the plain convolution's gradients, projected.

With K numbers w_c an output channel, their mean m_c and variance v_c, the convolution is taken with

    u_c = s_c (w_c - m_c),    s_c = 1 / sqrt(K (v_c + eps)),    so that |u_c|^2 = v_c / (v_c + eps) =: r_c.

If G_c is the gradient with respect to u_c, the chain rule gives the gradient with respect to w_c,

    s_c (G_c - mean(G_c) - u_c <u_c, G_c>),    of squared norm    s_c^2 (|G_c|^2 - K mean(G_c)^2 - (2 - r_c) <u_c, G_c>^2).

It is linear in G_c: a weighted sum over examples is projected once, after it was added up. Its inner product with the weight
itself, w_c = u_c / s_c + m_c, is (1 - r_c) <u_c, G_c>, with 1 - r_c = eps / (v_c + eps) = eps K s_c^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import kernels
from tacit.gradients.compiled import CompiledConv, fits
from tacit.gradients.contribution import Add, Contribution, at_least_float32, instantiated, not_negative, squared_norms
from tacit.gradients.conv import conv
from tacit.gradients.toward import Toward
from tacit.gradients.windows import padded
from tacit.privacy.validation import UserError


class WeightStandardizedConv2d(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 / fan_in in every output channel, whatever is learned.

    Smooth in the weights: (w - mean) / sqrt(fan_in (var + eps)), with the biased variance and eps = 1e-5 (Qiao et al., 2019,
    divide by the deviation plus eps, without fan_in). Dividing by sqrt(fan_in) keeps the variance of activations. There is no
    gain: a normalisation that follows would take it out again.

    *Guarantee.* It looks at one example at a time; its statistics are those of the weights, never of the data.

    >>> layer = WeightStandardizedConv2d(8, 4, 3)
    >>> weight = layer.standardized_weight().detach()
    >>> bool(weight.mean(dim=(1, 2, 3)).abs().max() < 1e-6), round(float(weight[0].square().sum()), 2)
    (True, 1.0)
    """

    eps = 1e-5

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        fan_in = self.weight[0].numel()
        if fan_in < 3:
            raise UserError(
                f"weights of fan-in {fan_in} (input channels in a group x kernel size) have nothing left to learn once they are "
                "standardised; use nn.Conv2d there, or a fan-in of at least 3"
            )

    def standardized_weight(self) -> Tensor:
        """The weights that the input is convolved with.

        *Guarantee.* Computed in float32 or better, and then rounded to the type of the weights.
        """
        return _standardized(self.weight, self.eps)[0].to(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._conv_forward(input, self.standardized_weight(), self.bias)
        return output


def standardized_conv(
    module: WeightStandardizedConv2d, inputs: Tensor, gradients: Tensor, views: int = 1, toward: Toward | None = None
) -> dict[str, Contribution]:
    """The rule of the plain convolution, at output gradients times s_c, projected.

    *Guarantee.* Row i of every result comes from example i's rows of `inputs` and `gradients` alone (so many `views`, one after
    the other), and a norm is not below that of what is added up.

    >>> layer = WeightStandardizedConv2d(1, 1, (1, 3), bias=False)
    >>> with torch.no_grad(): layer.weight.copy_(torch.tensor([-1.0, 0.0, 1.0]).view(1, 1, 1, 3))
    Parameter ...
    >>> image, gradient = torch.tensor([1.0, 2.0, 5.0]).view(1, 1, 1, 3), torch.ones(1, 1, 1, 1)
    >>> found = standardized_conv(layer, image, gradient)["weight"].per_example()
    >>> print([round(number, 3) for number in found.flatten().tolist()])  # what is left of 1, 2, 5 beside (1, 1, 1), (-1, 0, 1)
    [0.236, -0.471, 0.236]
    """
    compiled = CompiledConv(module, inputs, gradients, views) if fits(module, inputs, gradients) else None
    weight = module.weight.detach()

    @cache
    def standardized() -> tuple[Tensor, Tensor]:
        u, scale = _standardized(weight, module.eps)
        return u.to(gradients.dtype), scale.to(gradients.dtype)

    def per_example() -> Tensor:
        u, scale = standardized()
        return _projected(conv(module, inputs, gradients, views)["weight"].per_example() * scale.unsqueeze(1), u)

    def held() -> tuple[Tensor, Add]:
        return _held(module, inputs, gradients, views, *standardized()).way()

    def held_compiled() -> tuple[Tensor, Add]:
        assert compiled is not None
        rate = 0.0 if toward is None else toward.rate
        return compiled.held(lambda: kernels.Standardized.of(at_least_float32(weight), module.eps, rate))

    def ghost() -> tuple[Tensor, Add]:
        u, scale = standardized()
        outputs: Tensor = module._conv_forward(inputs, u, None)
        if compiled is None or not compiled.has_ghost:
            return _ghost(module, inputs, gradients, u, scale, outputs).way()
        return _ghost_compiled(compiled, u, scale, outputs).way()

    uses_kernels = compiled is not None and kernels.usable(weight)
    return {
        "weight": Contribution(
            per_example,
            # Held, unless a ghost norm is asked for: that must allow for much more rounding, and needs one more convolution.
            # None on accelerators, where convolutions may run in less than float32.
            ghost if gradients.device.type == "cpu" and views == 1 and toward is None else None,
            held_compiled if uses_kernels else held,
            held_decays=uses_kernels and toward is not None,
        ),
        "bias": Contribution(
            (lambda: conv(module, inputs, gradients, views)["bias"].per_example())
            if compiled is None
            else compiled.bias
        ),
    }


@dataclass(frozen=True)
class _Parts:
    """u; and of the gradients s G of a plain convolution: |s G|^2 an example ([batch]), s sum(G_c) and s <u_c, G_c>
    ([batch, channels]), how much rounding may take from the norm ([batch]), and how they are added up.

    The allowance. Held: a sum of n numbers has a rounding error of at most n eps/2 of their sizes, so each of three squares one
    of n eps |s G|^2, and they are taken once, once and at most twice: 4 n eps |s G|^2. Ghost: u_c and (1, .., 1) / sqrt(K) are at
    most 1 in norm, so that no term of the sums over positions is larger than |s g_tc| |a_t|, and the error of the squares, added
    over c, is within the E = n eps |A|^2 |s G|^2 of a plain ghost norm, where n also counts the K numbers of a window that are
    added up in an output: 4 E in all.
    """

    u: Tensor
    squares: Tensor
    totals: Tensor
    along: Tensor
    allowance: Tensor
    add: Add

    def way(self) -> tuple[Tensor, Add]:
        norms = not_negative(self.squares - _removed(self.u, self.totals, self.along)) + self.allowance
        return norms, lambda factors: _projected(self.add(factors), self.u)


def _held(module: nn.Conv2d, inputs: Tensor, g: Tensor, views: int, u: Tensor, scale: Tensor) -> _Parts:
    gradients = conv(module, inputs, g * scale, views)["weight"].per_example()
    squares, add = instantiated(lambda: gradients)()
    return _Parts(u, squares, *_inner_products(gradients, u), 4 * (u[0].numel() + 4) * _eps(g) * squares, add)


def _ghost(module: nn.Conv2d, inputs: Tensor, gradients: Tensor, u: Tensor, scale: Tensor, outputs: Tensor) -> _Parts:
    """s sum(G_c) = sum_t s g_tc sum(a_t), and s <u_c, G_c> = sum_t s g_tc <u_c, a_t>: the last factor is the output."""
    g = gradients * scale
    ghost = conv(module, inputs, g)["weight"].ghost
    assert ghost is not None
    squares, add = ghost()  # with E already, but for the outputs' K
    sums, sizes = _window_sums(module, inputs)
    totals = (_by_group(module, g) * sums.unsqueeze(2)).sum(dim=(3, 4)).flatten(1)
    summands = module.weight[0].numel() + module.out_channels + math.prod(g.shape[2:]) + 8
    allowance = 3 * summands * _eps(g) * sizes * squared_norms(g)
    return _Parts(u, squares, totals, (g * outputs).sum(dim=(2, 3)), allowance, add)


def _ghost_compiled(compiled: CompiledConv, u: Tensor, scale: Tensor, outputs: Tensor) -> _Parts:
    s = scale.flatten()
    found = compiled.norms(scale=s, outputs=outputs, totals=True)

    def add(factors: Tensor) -> Tensor:
        return compiled.second_pass(factors) * scale.unsqueeze(1)

    summands = compiled.module.weight[0].numel() + s.numel() + math.prod(outputs.shape[2:]) + 8
    allowance = found.allowance + 3 * summands * _eps(s) * found.size
    return _Parts(u, found.squares, s * found.totals, s * found.along, allowance, add)


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _standardized(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """u and s, in float32 or better, s as [channels, 1, 1]."""
    weight = at_least_float32(weight)
    # of one channel both are true; torch 2.13 convolves it wrongly, with unequal strides, if it is said to lie last
    last = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    laid_out = weight.permute(0, 2, 3, 1) if last else weight
    rows = laid_out.reshape(len(weight), -1)  # in the order of the memory: sums over several axes take far longer
    centred = rows - rows.mean(dim=1, keepdim=True)
    variance = centred.square().mean(dim=1, keepdim=True)  # torch.var_mean takes ten times as long
    scale = torch.rsqrt(rows.shape[1] * (variance + eps))
    u = (centred * scale).view(laid_out.shape)
    return (u.permute(0, 3, 1, 2) if last else u), scale.unsqueeze(2)


def _projected(gradients: Tensor, u: Tensor) -> Tensor:
    """G_c - mean(G_c) - u_c <u_c, G_c>, for a gradient or a batch of them."""
    kernel = (-3, -2, -1)
    along = (gradients * u).sum(dim=kernel, keepdim=True)
    return (gradients - gradients.mean(dim=kernel, keepdim=True)).addcmul_(along, u, value=-1)


def _removed(u: Tensor, totals: Tensor, along: Tensor) -> Tensor:
    """sum_c (sum(G_c)^2 / K + (2 - r_c) <u_c, G_c>^2), an example; in double precision, whose range squares do not leave."""
    totals, along = totals.double(), along.double()
    return (totals.square() / u[0].numel() + (2 - u.double().square().sum(dim=(1, 2, 3))) * along.square()).sum(dim=1)


def _inner_products(gradients: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """sum(G_c) and <u_c, G_c>, each [rows, channels].

    Matrix products on views, where the gradients lie so in memory: elementwise operations would take several times as long.
    """
    order = sorted(range(5), key=gradients.stride().__getitem__, reverse=True)
    before = order.index(0)
    if order.index(1) != before + 1 or not gradients.permute(order).is_contiguous():
        return gradients.sum(dim=(2, 3, 4)), (gradients * u).sum(dim=(2, 3, 4))
    outer = math.prod(gradients.shape[axis] for axis in order[:before])

    def blocks(rows: Tensor) -> Tensor:  # [outer, channels, rows, inner]
        return rows.permute(order).reshape(outer, len(rows), len(u), -1).transpose(1, 2)

    directions = blocks(torch.stack([torch.ones_like(u), u]))
    found = sum(block @ direction.mT for block, direction in zip(blocks(gradients), directions))
    assert isinstance(found, Tensor)
    return found[..., 0].t(), found[..., 1].t()


def _by_group(module: nn.Conv2d, maps: Tensor) -> Tensor:
    return maps.reshape(len(maps), module.groups, -1, *maps.shape[2:])


def _window_sums(module: nn.Conv2d, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of every window, [batch, groups, rows, columns], and the squared norm of all windows together, [batch]."""
    channels = _by_group(module, inputs)
    maps = padded(module, torch.cat([channels.sum(dim=2), channels.square().sum(dim=2)], dim=1))
    ones = maps.new_ones(maps.shape[1], 1, *module.kernel_size)
    found = F.conv2d(maps, ones, stride=module.stride, dilation=module.dilation, groups=maps.shape[1])
    return found[:, : module.groups], found[:, module.groups :].sum(dim=(1, 2, 3))
