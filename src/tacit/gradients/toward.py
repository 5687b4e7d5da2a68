"""Inner products of per-example gradients with the parameter itself, for weight decay before clipping.

An example's gradient with decay is g + lambda theta. Its norm needs <g, theta>, which for a layer y_t = W a_t + b is
sum_t <g_t, W a_t> = sum_t <g_t, y_t - b>, with g_t the output gradient: no per-example gradient is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.gradients.contribution import Add, not_negative, squared_norms


@dataclass(frozen=True)
class Toward:
    """Asks a rule for `Contribution.along`. `outputs` is what the call gave, if it was kept; else it is computed once more.

    *Guarantee.* Plain data.

    >>> Toward().outputs is None
    True
    """

    outputs: Tensor | None = None


def along_outputs(
    outputs: Tensor, gradients: Tensor, weight: Tensor, bias: Tensor | None, inputs_size: Tensor
) -> tuple[Tensor, Tensor]:
    """Of a layer with the channels on axis 1 of its outputs: <G, W> of each example, and by how much rounding may have changed
    it. `bias` is what is in the outputs beside W a_t; `inputs_size` is sum_t |a_t|^2, or more ([batch]).

    A sum of n products is wrong by at most n eps/2 times the sum of their sizes. An output is a sum of K products and a bias, and
    what comes after it is added up in double precision; the sizes together are within |W| sqrt(sum |a_t|^2 sum |g_t|^2) +
    |b| sqrt(T sum |g_t|^2) for T positions.

    *Guarantee.* Row i comes from row i of `outputs` and `gradients` alone.

    >>> y, g = torch.tensor([[3.0]]), torch.tensor([[2.0]])
    >>> along_outputs(y, g, torch.tensor([[1.0]]), torch.tensor([1.0]), torch.tensor([4.0]))[0]
    tensor([4.], dtype=torch.float64)
    """
    values = (gradients * outputs).flatten(1).sum(dim=1, dtype=torch.float64)
    positions = math.prod(gradients.shape[2:])
    own = squared_norms(gradients).double()
    error = torch.linalg.vector_norm(weight).double() * (inputs_size.double() * own).sqrt()
    if bias is not None:
        values = values - gradients.reshape(*gradients.shape[:2], -1).sum(dim=2, dtype=torch.float64) @ bias.double()
        error = error + torch.linalg.vector_norm(bias).double() * (positions * own).sqrt()
    summands = weight[0].numel() + 8
    return values, summands * torch.finfo(gradients.dtype).eps / 2 * error


def decayed(
    squares: Tensor, add: Add, along: tuple[Tensor, Tensor], parameter: Tensor, rate: float
) -> tuple[Tensor, Add]:
    """The way to clip g + rate * parameter, from the way to clip g: |g|^2 + 2 rate <g, p> + rate^2 |p|^2, and what is added up is
    the sum of f_i g_i and the sum of the factors f_i times rate * parameter.

    *Guarantee.* The norm is not below that of what is added up: rounding of the inner product is allowed for, and the rest is
    computed in double precision.

    >>> squares, add = decayed(torch.tensor([9.0]), lambda f: 3 * f, (torch.tensor([6.0]),) * 2, torch.tensor([2.0]), 0.5)
    >>> squares, add(torch.ones(1))  # 3 + 1, squared, and six more that rounding might have taken away
    (tensor([22.], dtype=torch.float64), tensor([4.]))
    """
    values, error = along
    length = torch.linalg.vector_norm(parameter, dtype=torch.float64)
    found = not_negative(squares.double() + 2 * rate * (values + error) + (rate * length) ** 2)

    def add_both(factors: Tensor) -> Tensor:
        return add(factors).add_(parameter, alpha=rate * float(factors.sum(dtype=torch.float64)))

    return found, add_both
