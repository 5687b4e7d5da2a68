"""What a layer's rule answers: the gradient of one parameter through one call, an example at a time, not yet computed.

There are two ways to clip it. *Instantiate*: hold one gradient an example, take norms, add up. *Ghost*: find the norms
without ever holding those gradients, then add up in one pass with every example's output gradient scaled by its factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

# Reading and writing one number of an instantiated gradient (for its norm, and for the sum) costs about this many
# multiplications of a matrix product.
_MEMORY_COST = 8
# The same for the compiled kernels, and what a multiplication of theirs costs in a Gram matrix.
_COMPILED_MEMORY_COST = 24
_COMPILED_GRAM_COST = 1.4


Add = Callable[[Tensor], Tensor]
# A way to clip: called once, it gives the squared norms, [batch], and the function that adds up, given a factor an example. It
# must hold that the norms are not below those of what is added up, whatever cancels.
Way = Callable[[], tuple[Tensor, Add]]
Along = Callable[[], Tensor]


@dataclass(frozen=True)
class Contribution:
    """What one call of one layer adds to each example's gradient of one parameter.

    `ghost` is a way that never holds those gradients, if there is one; `held` one that does and is faster than to take
    `per_example()` and add up. `along`, once one of the two was called, gives each example's inner product of its gradient with
    the parameter itself, and as much more as rounding may have taken from it, [batch] in double precision; only if it was asked
    for. Where `held_decays`, `held` has the decay that was asked for in it already, and where `ghost_decays`, `ghost` has.

    *Guarantee.* Row i of `per_example()` ([batch, *parameter.shape]) depends on example i alone; whichever way is taken, what is
    added up is the same, up to rounding.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> squared_norms(Contribution(lambda: rows).per_example())
    tensor([25.,  1.])
    """

    per_example: Callable[[], Tensor]
    ghost: Way | None = None
    held: Way | None = None
    ghost_is_cheaper: bool = False
    along: Along | None = None
    held_decays: bool = False
    ghost_decays: bool = False


def squared_norms(per_example: Tensor) -> Tensor:
    """The squared norm of each row, all but the first dimension taken together.

    *Guarantee.* Not finite wherever a row holds a number that is not finite.

    >>> squared_norms(torch.tensor([[3.0, 4.0], [float("inf"), 0.0]]))
    tensor([25., inf])
    """
    if not per_example.numel():
        return per_example.new_zeros(len(per_example))
    norms: Tensor
    if per_example.is_contiguous():
        norms = torch.linalg.vector_norm(per_example.flatten(1), dim=1)
    else:
        norms = torch.linalg.vector_norm(_blocks(per_example)[0], dim=(0, 2))
    return norms.square()


def weighted_sum(per_example: Tensor, factors: Tensor) -> Tensor:
    """sum_i factors[i] * per_example[i].

    *Guarantee.* Linear in the rows: row i enters with `factors[i]` and nothing else.

    >>> weighted_sum(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, 0.5]))
    tensor([1., 1.])
    """
    if per_example.is_contiguous():
        return torch.matmul(factors.to(per_example.dtype), per_example.flatten(1)).view(per_example.shape[1:])
    blocks, order = _blocks(per_example)
    added = torch.matmul(factors.to(per_example.dtype), blocks)
    shape = [per_example.shape[axis] for axis in order if axis != 0]
    back = sorted(range(len(shape)), key=[axis for axis in order if axis != 0].__getitem__)
    return added.reshape(shape).permute(back)


def _blocks(per_example: Tensor) -> tuple[Tensor, list[int]]:
    """The same numbers as [outer, batch, inner], in the order in which they lie in memory: a view, where a flattened copy
    would cost as much as the norm itself. Also that order of the axes."""
    order = sorted(range(per_example.dim()), key=per_example.stride().__getitem__, reverse=True)
    outer = math.prod(per_example.shape[axis] for axis in order[: order.index(0)])
    inner = math.prod(per_example.shape[axis] for axis in order[order.index(0) + 1 :])
    return per_example.permute(order).reshape(outer, len(per_example), inner), order


def instantiated(per_example: Callable[[], Tensor]) -> Way:
    """The way that holds one gradient an example.

    *Guarantee.* The norms are those of the very numbers that are added up.

    >>> squares, add = instantiated(lambda: torch.tensor([[3.0, 4.0], [0.0, 1.0]]))()
    >>> squares, add(torch.tensor([1.0, 0.5]))
    (tensor([25.,  1.]), tensor([3.0000, 4.5000]))
    """

    def way() -> tuple[Tensor, Add]:
        gradients = per_example()
        return squared_norms(gradients), partial(weighted_sum, gradients)

    return way


def total(factors: Tensor) -> float:
    """What the factors add up to, in double precision or better.

    *Guarantee.* Exact but for its own rounding.

    >>> total(torch.tensor([1.0, 0.5]))
    1.5
    """
    # a quarter of the time that a tensor's sum and its conversion take
    return math.fsum(factors.tolist())


def by_view(rows: Tensor, views: int) -> Tensor:
    """[batch * views, ...] as [batch, views, ...], without a copy.

    *Guarantee.* Row j of example i is row i * views + j.

    >>> by_view(torch.arange(4), views=2)
    tensor([[0, 1],
            [2, 3]])
    """
    return rows.view(len(rows) // views, views, *rows.shape[1:])


def added_up(rows: Tensor, views: int) -> Tensor:
    """[batch * views, ...] to [batch, ...]: the sum over each example's views, which lie one after the other.

    *Guarantee.* Row i is the sum of rows i * views to (i + 1) * views - 1, and of no others.

    >>> added_up(torch.tensor([1.0, 2.0, 10.0, 20.0]), views=2)
    tensor([ 3., 30.])
    """
    return rows if views == 1 else by_view(rows, views).sum(dim=1)


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better, so that no norm is computed in half precision.

    *Guarantee.* Values are unchanged: widening a floating-point number is exact.

    >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    if tensor.dtype == torch.float32:  # to ask takes longer
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rounding_allowance(activations: Tensor, gradients: Tensor, summands: int) -> Tensor:
    """n eps/2 ||A_i||^2 ||G_i||^2 (Frobenius): how far a squared ghost norm may lie below the truth, an example at a time.

    A ghost norm is a sum of products of inner products. A sum of n products, made in whatever order, is wrong by at most
    n eps/2 times the sum of their sizes; `summands` is how many are added up in all: in an inner product of windows, in one of
    output gradients, and over the positions. When positions cancel, the result can come out far too small although the sum it
    bounds does not vanish. The errors add up to n eps/2 times (sum_t |a_t||g_t|)^2 at most, which Cauchy-Schwarz bounds by the
    product above.

    *Guarantee.* Not negative; adding it can only clip an example more.

    >>> bool(rounding_allowance(torch.ones(1, 2), torch.ones(1, 3), summands=6) > 0)
    True
    """
    eps = torch.finfo(activations.dtype).eps
    return summands * eps / 2 * squared_norms(activations) * squared_norms(gradients)


def not_negative(squares: Tensor) -> Tensor:
    """Squared norms that rounding made negative become 0; those that are not finite stay so, minus infinity as well.

    *Guarantee.* What overflowed never passes for a small norm.

    >>> not_negative(torch.tensor([-1e-9, 2.0, float("-inf")]))
    tensor([0., 2., inf])
    """
    return torch.where(squares.isfinite(), squares.clamp(min=0), torch.inf)


def ghost_is_cheaper(*, positions: int, inputs: int, outputs: int, gram: int, compiled: bool = False) -> bool:
    """The cost model, in multiplications an example; `gram` is what the norm costs by Gram matrices.

    Instantiating costs one product of the size of the weight gradient, and touches the inputs x outputs numbers several
    times. A ghost norm costs its Gram matrices, and a weight-gradient pass of the same size afterwards. Compiled kernels
    instantiate as fast as a weight-gradient pass runs, so that only the touching counts.

    *Guarantee.* A choice of speed and memory alone: both ways give the same sum.

    >>> ghost_is_cheaper(positions=1, inputs=512, outputs=512, gram=1024)
    True
    >>> ghost_is_cheaper(positions=1024, inputs=27, outputs=32, gram=1024 * 1024 * 59)
    False
    """
    if compiled:
        return _COMPILED_GRAM_COST * gram < _COMPILED_MEMORY_COST * inputs * outputs
    return gram < inputs * outputs * (0.5 * positions + _MEMORY_COST)
