"""What a layer's rule answers: the gradient of one parameter through one call, an example at a time, not yet computed.

There are two ways to clip it. *Instantiate*: hold one gradient an example, take norms, add up. *Ghost*: find the norms
without ever holding those gradients, then add up in one pass with every example's output gradient scaled by its factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Reading and writing one number of an instantiated gradient (for its norm, and for the sum) costs about this many
# multiplications of a matrix product.
_MEMORY_COST = 8


@dataclass(frozen=True)
class Ghost:
    """Norms and weighted sums that never hold a tensor of [batch, *parameter.shape].

    *Guarantee.* `squared_norms()` is not below the squared norms of what `weighted_sum` adds up, whatever cancels.

    >>> Ghost(lambda: torch.ones(2), lambda factors: factors.sum(), cheaper=True).squared_norms()
    tensor([1., 1.])
    """

    squared_norms: Callable[[], Tensor]
    weighted_sum: Callable[[Tensor], Tensor]
    cheaper: bool


@dataclass(frozen=True)
class Contribution:
    """What one call of one layer adds to each example's gradient of one parameter.

    *Guarantee.* Row i of `per_example()` ([batch, *parameter.shape]) depends on example i alone.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> squared_norms(Contribution(lambda: rows).per_example())
    tensor([25.,  1.])
    """

    per_example: Callable[[], Tensor]
    ghost: Ghost | None = None


def squared_norms(per_example: Tensor) -> Tensor:
    """The squared norm of each row, all but the first dimension taken together.

    *Guarantee.* Not finite wherever a row holds a number that is not finite.

    >>> squared_norms(torch.tensor([[3.0, 4.0], [float("inf"), 0.0]]))
    tensor([25., inf])
    """
    if not per_example.numel():
        return per_example.new_zeros(len(per_example))
    norms: Tensor = torch.linalg.vector_norm(_blocks(per_example)[0], dim=(0, 2))
    return norms.square()


def weighted_sum(per_example: Tensor, factors: Tensor) -> Tensor:
    """sum_i factors[i] * per_example[i].

    *Guarantee.* Linear in the rows: row i enters with `factors[i]` and nothing else.

    >>> weighted_sum(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1.0, 0.5]))
    tensor([1., 1.])
    """
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


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better, so that no norm is computed in half precision.

    *Guarantee.* Values are unchanged: widening a floating-point number is exact.

    >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rounding_allowance(activations: Tensor, gradients: Tensor) -> Tensor:
    """4 eps ||A_i||^2 ||G_i||^2 (Frobenius): how far a squared ghost norm may lie below the truth, an example at a time.

    A ghost norm is a sum of products of inner products, each wrong by about eps |a_t||a_s||g_t||g_s|; when positions
    cancel, the result can come out far too small although the sum it bounds does not vanish. The errors add up to
    at most a few eps times (sum_t |a_t||g_t|)^2, which Cauchy-Schwarz bounds by the product above.

    *Guarantee.* Not negative; adding it can only clip an example more.

    >>> bool(rounding_allowance(torch.ones(1, 2), torch.ones(1, 3)) > 0)
    True
    """
    eps = torch.finfo(activations.dtype).eps
    return 4 * eps * squared_norms(activations) * squared_norms(gradients)


def ghost_is_cheaper(*, positions: int, inputs: int, outputs: int, gram: int) -> bool:
    """The cost model, in multiplications an example; `gram` is what the norm costs by Gram matrices.

    Instantiating costs one product of the size of the weight gradient, and touches the inputs x outputs numbers several
    times. A ghost norm costs its Gram matrices, and a weight-gradient pass of the same size afterwards.

    *Guarantee.* A choice of speed and memory alone: both ways give the same sum.

    >>> ghost_is_cheaper(positions=1, inputs=512, outputs=512, gram=1024)
    True
    >>> ghost_is_cheaper(positions=1024, inputs=27, outputs=32, gram=1024 * 1024 * 59)
    False
    """
    instantiated = inputs * outputs * (0.5 * positions + _MEMORY_COST)
    return gram < instantiated
