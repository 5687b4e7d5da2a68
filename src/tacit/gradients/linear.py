"""The rule for `nn.Linear`, with any number of positions between the example axis and the features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tacit.gradients.contribution import Add, Contribution, ghost_is_cheaper, rounding_allowance, squared_norms


def linear(module: nn.Linear, inputs: Tensor, gradients: Tensor) -> dict[str, Contribution]:
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
    a, g = inputs.flatten(1, -2) if inputs.dim() > 2 else inputs.unsqueeze(1), gradients
    g = g.flatten(1, -2) if g.dim() > 2 else g.unsqueeze(1)
    positions = a.shape[1]
    cheaper = ghost_is_cheaper(
        positions=positions,
        inputs=module.in_features,
        outputs=module.out_features,
        gram=positions**2 * (module.in_features + module.out_features),
    )
    return {
        "weight": Contribution(lambda: g.transpose(1, 2) @ a, partial(_ghost, a, g), ghost_is_cheaper=cheaper),
        "bias": Contribution(lambda: g.sum(dim=1)),
    }


def _ghost(a: Tensor, g: Tensor) -> tuple[Tensor, Add]:
    if a.shape[1] == 1:  # exact: one product of two norms, nothing can cancel
        squares = squared_norms(a) * squared_norms(g)
    else:
        gram = (a @ a.transpose(1, 2)).mul_(g @ g.transpose(1, 2)).sum(dim=(1, 2))
        squares = gram.clamp(min=0) + rounding_allowance(a, g)

    def second_pass(factors: Tensor) -> Tensor:
        scaled = g * factors.to(g.dtype)[:, None, None]
        return torch.mm(scaled.flatten(0, 1).t(), a.flatten(0, 1))

    return squares, second_pass
