"""The rule for `nn.Linear`, with any number of positions between the example axis and the features."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients import kernels
from tacit.gradients.contribution import (
    Add,
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
    if inputs.dim() == 2:
        return _one_position(module, inputs, gradients, toward)
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

    def per_example() -> Tensor:
        return g.transpose(1, 2) @ a

    if compiled:
        row, asked = _Row(module, a, g, toward), toward is not None
        weight = Contribution(per_example, row.ghost, row.held, cheaper, held_decays=asked, ghost_decays=asked)
    else:
        along = None if toward is None else partial(_along, module, inputs, gradients, toward)
        weight = Contribution(per_example, partial(_ghost, a, g), None, cheaper, along)
    return {"weight": weight, "bias": Contribution(lambda: g.sum(dim=1))}


def _along(module: nn.Linear, a: Tensor, g: Tensor, toward: Toward) -> Tensor:
    outputs, bias = _outputs(module, a, toward)
    bias = None if bias is None else bias.detach()
    return along_outputs(outputs.movedim(-1, 1), g.movedim(-1, 1), toward, bias, squared_norms(a), a.shape[-1])


def _one_position(module: nn.Linear, a: Tensor, g: Tensor, toward: Toward | None) -> dict[str, Contribution]:
    """One product an example: what most classifiers end with. Its norm is exact, since nothing can cancel."""

    def add(factors: Tensor) -> Tensor:
        return torch.mm((g * factors.to(g.dtype).unsqueeze(1)).t(), a)

    def add_decaying(factors: Tensor) -> Tensor:
        assert toward is not None
        return toward.decay.add_to(add(factors), toward.name, toward.decay.total(factors))

    def add_by_kernel(factors: Tensor) -> Tensor:
        assert toward is not None
        return kernels.add_decay(add(factors), toward.weight, factors.to(g.dtype), toward.rate)

    def ghost() -> tuple[Tensor, Add]:
        if kernels.usable(a, g):
            return kernels.outer_norms(a, g), add
        return _lengths(a, g)[0].square(), add

    def ghost_decaying() -> tuple[Tensor, Add]:
        assert toward is not None
        outputs, bias = _outputs(module, a, toward)
        if kernels.usable(a, g, outputs):
            return kernels.outer_norms(a, g, outputs, bias, weight=toward.weight, rate=toward.rate), add_by_kernel
        length, of_gradient = _lengths(a, g)
        error = length * toward.length
        if bias is not None:
            bias = bias.detach()
            outputs = outputs - bias
            error.add_(of_gradient, alpha=float(torch.linalg.vector_norm(bias)))
        along = (g * outputs).sum(dim=1, dtype=torch.float64)
        # as many roundings of |W| |a| |g| + |b| |g| as `along_outputs` has, and a few for the error itself
        along.add_(error, alpha=(a.shape[1] + 12) * torch.finfo(g.dtype).eps / 2)
        return length.double().square().add_(along, alpha=2 * toward.rate).add_(toward.square), add_decaying

    return {
        "weight": Contribution(
            lambda: g.unsqueeze(2) * a.unsqueeze(1),
            ghost if toward is None else ghost_decaying,
            ghost_is_cheaper=True,
            ghost_decays=toward is not None,
        ),
        "bias": Contribution(lambda: g),
    }


def _lengths(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of the products, and of the gradients alone; not squares, of which one may leave the range of a float."""
    of_gradient = torch.linalg.vector_norm(g, dim=1)
    return torch.linalg.vector_norm(a, dim=1) * of_gradient, of_gradient


def _outputs(module: nn.Linear, a: Tensor, toward: Toward) -> tuple[Tensor, Tensor | None]:
    """What the layer gave, and the bias that is in it, which may be the parameter itself."""
    bias: Tensor | None = module.bias
    if bias is not None and bias.dtype != a.dtype:
        bias = bias.detach().to(a.dtype)

    def again() -> Tensor:
        with torch.no_grad():
            return F.linear(a, module.weight.to(a.dtype), bias)

    return toward.outputs(again), bias


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


class _Row:
    """One call with several positions, for the kernels: a row of pixels, under a convolution with a kernel of one."""

    def __init__(self, module: nn.Linear, a: Tensor, g: Tensor, toward: Toward | None) -> None:
        self.module, self.a, self.g, self.toward = module, a, g, toward

    def held(self) -> tuple[Tensor, Add]:
        weight, rate = None, 0.0
        if self.toward is not None:
            weight, rate = self.toward.weight, self.toward.rate
        found = kernels.conv_gradients(_row(self.a), _row(self.g), _ONE, decaying=weight, rate=rate)

        def add(factors: Tensor) -> Tensor:
            return found.weighted_sum(factors)[:, :, 0, 0]

        return found.norms, add

    def ghost(self) -> tuple[Tensor, Add]:
        toward, add = self.toward, partial(_second_pass, self.a, self.g)
        if toward is None:
            found = kernels.conv_norms(_row(self.a), _row(self.g), _ONE)
            return not_negative(found.squares) + found.allowance, add
        outputs, bias = _outputs(self.module, self.a, toward)
        found = kernels.conv_norms(
            _row(self.a),
            _row(self.g),
            _ONE,
            outputs=_row(outputs.reshape(self.g.shape)),
            weight=toward.weight,
            bias=bias,
            rate=toward.rate,
        )

        def add_decaying(factors: Tensor) -> Tensor:
            return toward.decay.add_to(add(factors), toward.name, toward.decay.total(factors))

        return not_negative(found.squares) + found.allowance + found.decay, add_decaying
