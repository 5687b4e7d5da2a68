"""The rule for `nn.Linear`, with any number of positions between the example axis and the features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import kernels
from tacit.gradients.contribution import (
    Add,
    Along,
    Contribution,
    ghost_is_cheaper,
    not_negative,
    rounding_allowance,
    squared_norms,
)
from tacit.gradients.toward import Toward, along_outputs


def linear(
    module: nn.Linear, inputs: Tensor, gradients: Tensor, toward: Toward | None = None
) -> dict[str, Contribution]:
    """An example's weight gradient is sum_t g_t a_t^T over its positions t, its bias gradient sum_t g_t.

    Ghost norm: ||sum_t g_t a_t^T||^2 = sum_{t,s} (a_t . a_s)(g_t . g_s), which for one position is |a|^2 |g|^2.

    *Guarantee.* Row i of every result comes from row i of `inputs` and `gradients` alone, and a ghost norm is not below the
    norm of what is added up.

    >>> layer = nn.Linear(2, 1)
    >>> found = linear(layer, torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]))
    >>> found["weight"].per_example(), found["bias"].per_example()
    (tensor([[[6., 8.]]]), tensor([[2.]]))
    >>> squares, _ = found["weight"].ghost()
    >>> squares.item()
    100.0
    """
    along = None if toward is None else partial(_along, module, inputs, gradients, toward)
    if inputs.dim() == 2:
        return _one_position(inputs, gradients, along)
    a, g = inputs.flatten(1, -2), gradients.flatten(1, -2)
    positions = a.shape[1]
    # Several positions are a row of pixels, and the layer a convolution with a kernel of one.
    compiled = positions > 1 and kernels.usable(a, g)
    cheaper = ghost_is_cheaper(
        positions=positions,
        inputs=module.in_features,
        outputs=module.out_features,
        gram=positions**2 * (module.in_features + module.out_features),
        compiled=compiled,
    )
    ghost = partial(_ghost_compiled if compiled else _ghost, a, g)
    held = partial(_held_compiled, a, g) if compiled else None
    return {
        "weight": Contribution(lambda: g.transpose(1, 2) @ a, ghost, held, cheaper, along),
        "bias": Contribution(lambda: g.sum(dim=1)),
    }


def _along(module: nn.Linear, a: Tensor, g: Tensor, toward: Toward) -> tuple[Tensor, Tensor]:
    bias = None if module.bias is None else module.bias.detach().to(g.dtype)
    outputs = toward.outputs
    if outputs is None:
        outputs = F.linear(a, module.weight.detach().to(g.dtype), bias)
    return along_outputs(outputs.movedim(-1, 1), g.movedim(-1, 1), toward, bias, squared_norms(a), a.shape[-1])


def _one_position(a: Tensor, g: Tensor, along: Along | None) -> dict[str, Contribution]:
    """One product an example: what most classifiers end with."""
    return {
        "weight": Contribution(
            lambda: g.unsqueeze(2) * a.unsqueeze(1),
            partial(_product_of_norms, a, g),
            ghost_is_cheaper=True,
            along=along,
        ),
        "bias": Contribution(lambda: g),
    }


def _product_of_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    """Exact, since nothing can cancel."""
    norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(g, dim=1)
    # not a product of squares, one of which may leave the range of a float
    return norms.square(), lambda factors: torch.mm((g * factors.to(g.dtype).unsqueeze(1)).t(), a)


def _ghost(a: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    gram = (a @ a.transpose(1, 2)).mul_(g @ g.transpose(1, 2)).sum(dim=(1, 2))
    squares = not_negative(gram) + rounding_allowance(a, g, a.shape[1] + a.shape[2] + g.shape[2] + 8)
    return squares, partial(_second_pass, a, g)


def _second_pass(a: Tensor, g: Tensor, factors: Tensor) -> Tensor:
    scaled = g * factors.to(g.dtype)[:, None, None]
    return torch.mm(scaled.flatten(0, 1).t(), a.flatten(0, 1))


_ONE = kernels.Geometry((1, 1), (1, 1), (0, 0))


def _row(a: Tensor) -> Tensor:
    return a.unsqueeze(1).permute(0, 3, 1, 2)


def _held_compiled(a: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    found = kernels.conv_gradients(_row(a), _row(g), _ONE)

    def add(factors: Tensor) -> Tensor:
        return found.weighted_sum(factors)[:, :, 0, 0]

    return found.norms, add


def _ghost_compiled(a: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    found = kernels.conv_norms(_row(a), _row(g), _ONE)
    return not_negative(found.squares) + found.allowance, partial(_second_pass, a, g)
