"""The compiled kernels (`kernels.c`): what each computes, and when it can be used.

They are built when tacit is installed, if there is a C compiler. Without them, or with the environment variable
TACIT_KERNELS=off, the same numbers come from PyTorch, up to rounding; only speed differs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.gradients.buffers import Buffers
from tacit.gradients.contribution import total, weighted_sum

_buffers = Buffers()
_kernels: Any
try:
    from tacit.gradients import _kernels  # type: ignore[attr-defined,no-redef]
except ImportError:
    _kernels = None
if os.environ.get("TACIT_KERNELS") == "off":
    _kernels = None


def instruction_set() -> str | None:
    """Which version of the kernels runs here: "avx512", "avx2", "any", or None without kernels.

    *Guarantee.* A matter of speed alone.

    >>> instruction_set() in ("avx512", "avx2", "any", None)
    True
    """
    return None if _kernels is None else str(_kernels.name())


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32, on the CPU, not empty, and kernels that were built.

    *Guarantee.* A matter of speed alone.

    >>> usable(torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    False
    """
    return _kernels is not None and all(
        t.dtype == torch.float32 and t.device.type == "cpu" and t.numel() > 0 for t in tensors
    )


def keep_memory() -> bool:
    """Tell the C library to keep up to 1 GiB of freed memory for the next step, for the whole process; whether it can be told.

    Otherwise it hands the activations' memory back to the operating system after a step and gets it again, cleared page by
    page, in the next, which can take a fifth of a small step.

    *Guarantee.* A matter of speed and memory alone.

    >>> keep_memory() in (True, False)
    True
    """
    return _kernels is not None and bool(_kernels.keep_memory(2**30))


def trim_memory() -> None:
    """Hand free memory back after something that is done once, so that what stays is what every step needs.

    *Guarantee.* A matter of memory alone.

    >>> trim_memory()
    """
    if _kernels is not None:
        _kernels.trim_memory()


@dataclass(frozen=True)
class Geometry:
    """How the windows of a convolution lie: kernel size, stride, and the padding before the first row and column.

    *Guarantee.* Plain numbers.

    >>> Geometry((3, 3), (1, 1), (1, 1)).windows
    (3, 3, 1, 1, 1, 1)
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def windows(self) -> tuple[int, ...]:
        return (*self.kernel, *self.stride, *self.padding)


@dataclass(frozen=True)
class Standardized:
    """A weight standardised by output channel (`standardized.py` has the formulas): u, in the order in which `conv_gradients`
    works, the scales s, and the coefficients with which the squared norm of a projected gradient, to which `rate` times the
    weight is added, follows from sums over a plain one.

    *Guarantee.* It comes from the weight alone; sums are made in double precision.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     found = Standardized.of(torch.tensor([-1.0, 0.0, 1.0]).view(1, 1, 1, 3), eps=0.0)
    ...     assert [round(float(u), 4) for u in found.u[:, 0]] == [-0.7071, 0.0, 0.7071]
    """

    u: Tensor
    scale: Tensor
    coefficients: Tensor
    across: bool
    weight: Tensor
    rate: float

    @classmethod
    def of(cls, weight: Tensor, eps: float, rate: float = 0.0) -> Standardized:
        weight = _dense(weight)
        out, kernel = len(weight), weight[0].numel()
        across = _across(weight.shape)
        u = weight.new_empty((out, kernel) if across else (kernel, out + -out % 16))
        scale, coefficients = weight.new_empty(out), weight.new_empty(5, out, dtype=torch.float64)
        places = (tensor.data_ptr() for tensor in (weight, u, scale, coefficients))
        _kernels.standardize(*places, out, kernel, eps, rate, across)
        return cls(u, scale, coefficients, across, weight, rate)

    def project(self, gradient: Tensor, factors: Tensor) -> None:
        """Make a sum of gradients of u, with such factors, that of the weight's: in place, laid out like those."""
        assert gradient.is_contiguous()
        assert gradient.dtype == torch.float32
        out = len(self.scale)
        places = (tensor.data_ptr() for tensor in (gradient, self.u, self.scale, self.weight))
        amount = self.rate * float(factors.sum(dtype=torch.float64)) if self.rate else 0.0
        _kernels.project(*places, out, gradient.numel() // out, amount, self.across)


@dataclass(frozen=True)
class ConvGradients:
    """What one pass over a batch gives: per-example weight gradients, [batch, out, in, kernel rows, kernel columns], in whatever
    order in memory; their squared norms ([batch]), with what rounding may have taken from them; and, per example and output
    channel ([batch, out]): the sum of the weight gradient's squares, the sum of the output gradient (the bias's gradient) and,
    if a standardised weight was given, the sum of the weight gradient's entries and its inner product with u. The norms are
    then those of the projected gradients, with their decay, and so is what is added up.

    *Guarantee.* Row i comes from example i alone, and a norm is not below that of what is added up.

    >>> found = ConvGradients(torch.zeros(2, 3, 3, 1, 4), (3, 2, 0, 1), torch.zeros(2, 2, 4), torch.zeros(2))
    >>> found.gradients.shape, found.squares.shape
    (torch.Size([2, 4, 1, 3, 3]), torch.Size([2, 4]))
    """

    rows: Tensor  # the gradients as they lie in memory
    order: tuple[int, ...]  # of the axes of `rows` without the first: out, in, kernel rows, kernel columns
    sums: Tensor
    norms: Tensor
    standardized: Standardized | None = None

    @property
    def gradients(self) -> Tensor:
        return self.rows.permute(0, *(axis + 1 for axis in self.order))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """sum_i factors[i] * gradients[i], projected and with its decay if the weight is standardised"""
        added = weighted_sum(self.rows, factors)
        if self.standardized is not None:
            self.standardized.project(added, factors)
        return added.permute(self.order)

    @property
    def squares(self) -> Tensor:
        return self.sums[:, 0]

    @property
    def bias(self) -> Tensor:
        return self.sums[:, 1]

    @property
    def totals(self) -> Tensor:
        return self.sums[:, 2]

    @property
    def along(self) -> Tensor:
        return self.sums[:, 3]


def conv_gradients(
    x: Tensor,
    g: Tensor,
    geometry: Geometry,
    standardized: Standardized | None = None,
    views: int = 1,
    decaying: Tensor | None = None,
    rate: float = 0.0,
) -> ConvGradients:
    """sum_t g_t a_t^T of each example, with a_t the window of the zero-padded image at output position t.

    So many `views`, images one after the other, are one example: its gradient is the sum of theirs. Of a weight that is
    `decaying`, `rate` times as much is added to every example's gradient; one of a linear layer has two axes.

    *Guarantee.* Row i comes from example i's rows of `x` and `g` alone; sums over positions are made in float32. Norms allow for
    the rounding of their sums: over n numbers it is at most n eps/2 of the squares; a projected gradient's norm consists of three
    such sums, taken once, once and at most twice, of which none exceeds the first.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     x, g = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[10.0]]]])
    ...     assert conv_gradients(x, g, Geometry((1, 2), (1, 1), (0, 0))).gradients.flatten().tolist() == [10.0, 20.0]
    """
    x, g = _dense(x), _dense(g)
    (images, channels, height, width), (same, out, down, along) = x.shape, g.shape
    batch = images // views
    assert images == same == batch * views
    across = _across((out, channels, *geometry.kernel))
    assert standardized is None or (standardized.across == across and len(standardized.scale) == out)
    if decaying is not None:
        assert standardized is None
        assert decaying.dtype == torch.float32
        assert decaying.is_cpu
        if decaying.dim() == 2:
            assert (*decaying.shape, 1, 1) == (out, channels, *geometry.kernel)
            decaying = decaying.contiguous()
        else:
            assert decaying.shape == (out, channels, *geometry.kernel)
            decaying = _dense(decaying)
    shape = (out, *geometry.kernel, channels) if across else (*geometry.kernel, channels, out)
    rows = _buffers.take((batch, *shape))
    sums = x.new_empty(batch, 2 if standardized is None else 4, out)
    norms = x.new_empty(batch, dtype=torch.float64)
    _kernels.conv_gradients(
        x.data_ptr(),
        g.data_ptr(),
        0 if standardized is None else standardized.u.data_ptr(),
        0 if standardized is None else standardized.coefficients.data_ptr(),
        0 if decaying is None else decaying.data_ptr(),
        rows.data_ptr(),
        sums.data_ptr(),
        norms.data_ptr(),
        (batch, views, height, width, channels),
        (down, along, out),
        geometry.windows,
        rate,
        (1 if standardized is None else 4)
        * summands_of(channels * math.prod(geometry.kernel))
        * torch.finfo(torch.float32).eps,
        across,
        torch.get_num_threads(),
    )
    return ConvGradients(rows, (0, 3, 1, 2) if across else (3, 2, 0, 1), sums, norms, standardized)


def summands_of(window: int) -> int:
    """How many numbers are added up one after the other in one of the sums of `conv_gradients`, at most: over tiles of six rows
    or more, for a window of so many numbers.

    *Guarantee.* Not too few.

    >>> summands_of(32 * 9)
    64
    """
    return window // 6 + 16


def _across(shape: tuple[int, ...]) -> bool:
    """Vectors of up to 16 numbers run along the output channels, or along a row of the window if they fill them better."""
    out, channels, _, columns = shape
    return out % 32 != 0 and columns * channels % 16 == 0


@dataclass(frozen=True)
class ConvNorms:
    """What Gram matrices give, an example at a time ([batch]): the squared norm of the weight gradient, `size`, which is
    sum_t |a_t|^2 sum_t |g_t|^2, and `allowance`, by which rounding may have made
    the norm too small: as in `contribution.rounding_allowance`, and what is lost where squares are too small for a float. `sums`
    ([batch, 1 to 3, out]) are sum_t g_t, the bias's gradient; if the outputs y were given, sum_t g_t y_t; and if `totals` were
    asked for, sum_t g_t sum(a_t). `decay` is what the weight's decay adds to the squares, with its own allowance.

    *Guarantee.* Row i comes from example i alone.

    >>> ConvNorms(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1, 4), torch.zeros(2), torch.zeros(2)).bias.shape
    torch.Size([2, 4])
    """

    squares: Tensor
    size: Tensor
    sums: Tensor
    allowance: Tensor
    decay: Tensor

    @property
    def bias(self) -> Tensor:
        return self.sums[:, 0]

    @property
    def along(self) -> Tensor:
        return self.sums[:, 1]

    @property
    def totals(self) -> Tensor:
        return self.sums[:, 2]


def conv_norms(
    x: Tensor,
    g: Tensor,
    geometry: Geometry,
    *,
    scale: Tensor | None = None,
    outputs: Tensor | None = None,
    totals: bool = False,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    rate: float = 0.0,
) -> ConvNorms:
    """Squared norms of the per-example weight gradients without the gradients, for windows one pixel apart.

    `scale` ([out]) multiplies the output gradient of each channel first, for the norms and their rounding alone. `totals` and the
    decay of the `weight`, by `rate`, are only to be had with `outputs`, in which the `bias` is.

    *Guarantee.* Row i comes from row i of `x` and `g` (and `outputs`) alone. An output is a sum of K products and a bias, and
    what is added up over T positions too, with outputs and without, in float32: <G, W> is wrong by at most (K + 2 T + 8) eps/2
    times the sizes of what was added up, |W| sqrt(sum |a_t|^2 sum |g_t|^2) + |b| sqrt(T sum |g_t|^2), by which it is raised;
    channels are added up in double precision.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     x, g = torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[10.0]]]])
    ...     assert conv_norms(x, g, Geometry((1, 2), (1, 1), (0, 0))).squares.tolist() == [500.0]
    """
    assert geometry.stride == (1, 1)
    x, g = _dense(x), _dense(g)
    (batch, channels, height, width), (same_batch, out, down, along) = x.shape, g.shape
    assert batch == same_batch
    norms = x.new_empty(batch, 4, dtype=torch.float64)  # not torch.empty, whose type and device are for others to set
    assert outputs is not None or not (totals or weight is not None)
    if weight is not None:
        assert scale is None
        assert usable(weight)
        assert weight.numel() == out * channels * math.prod(geometry.kernel)
        weight = weight if _without_gaps(weight) else weight.contiguous()
    if bias is not None:
        bias = bias.contiguous()
        assert bias.dtype == torch.float32
        assert bias.shape == (out,)
    sums = x.new_empty(batch, 3 if totals else 1 if outputs is None else 2, out)
    if outputs is not None:
        outputs = _dense(outputs)
        assert outputs.dtype == torch.float32
        assert outputs.shape == g.shape
    if scale is not None:
        scale = scale.to(torch.float32).contiguous()
        assert scale.shape == (out,)
    _kernels.conv_norms(
        x.data_ptr(),
        g.data_ptr(),
        0 if outputs is None else outputs.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        norms.data_ptr(),
        sums.data_ptr(),
        (batch, height, width, channels),
        (down, along, out),
        (*geometry.kernel, *geometry.padding),
        rate,
        (channels * math.prod(geometry.kernel) + 2 * down * along + 8) * torch.finfo(torch.float32).eps / 2,
        totals,
        torch.get_num_threads(),
    )
    real = torch.finfo(torch.float32)
    size = norms[:, 1] * norms[:, 2]
    summands = channels + math.prod(geometry.kernel) + out + down * along // 4 + 8  # positions four at a time, or more
    lost = real.tiny * (height * width * channels + down * along * out)
    allowance = summands * real.eps / 2 * size + lost * (norms[:, 1] + norms[:, 2])
    return ConvNorms(norms[:, 0], size, sums, allowance, norms[:, 3])


def outer_norms(
    a: Tensor,
    g: Tensor,
    outputs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    rate: float = 0.0,
) -> Tensor:
    """|g_i a_i^T|^2 of each example, or, if the `outputs` y_i = W a_i + b were given and the `weight` W, |g_i a_i^T + rate W|^2 =
    |g|^2 |a|^2 + 2 rate <g, y - b> + rate^2 |W|^2. In double precision, [batch].

    *Guarantee.* Row i comes from row i of `a`, `g` and `outputs` alone. An output is a sum of K products and a bias, made in
    float32, so that <g, y - b> is wrong by at most (K + 12) eps/2 |g| (|W| |a| + |b|), by which it is raised; all else is made in
    double precision.

    >>> if usable(torch.zeros(1)):
    ...     a, g, y = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0]]), torch.tensor([[7.0]])  # of a weight of ones
    ...     assert outer_norms(a, g).tolist() == [100.0]
    ...     assert round(outer_norms(a, g, y, weight=torch.ones(1, 2), rate=0.5).item(), 3) == 114.5  # |(6.5, 8.5)|^2
    """
    a, g = a.contiguous(), g.contiguous()
    (batch, inputs), (same, out) = a.shape, g.shape
    assert batch == same
    assert (outputs is None) == (weight is None)
    if outputs is not None and weight is not None:
        outputs, weight = outputs.contiguous(), weight.contiguous()
        assert outputs.dtype == weight.dtype == torch.float32
        assert outputs.shape == g.shape
        assert weight.shape == (out, inputs)
    if bias is not None:
        bias = bias.contiguous()
        assert bias.dtype == torch.float32
        assert bias.shape == (out,)
    norms = a.new_empty(batch, dtype=torch.float64)
    _kernels.outer_norms(
        a.data_ptr(),
        g.data_ptr(),
        0 if outputs is None else outputs.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        norms.data_ptr(),
        (batch, inputs, out),
        rate,
        (inputs + 12) * torch.finfo(torch.float32).eps / 2,
        torch.get_num_threads(),
    )
    return norms


def add_decay(added: Tensor, weight: Tensor, factors: Tensor, rate: float) -> Tensor:
    """To a sum over examples with these factors, `rate` times the weight for each of them: in place, where it lies in one piece.

    *Guarantee.* The factors are added up in double precision.

    >>> if usable(torch.zeros(1)):
    ...     assert add_decay(torch.ones(2), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 1.0]), 2.0).tolist() == [4.0, 7.0]
    """
    added, weight, factors = added.contiguous(), weight.contiguous(), factors.contiguous()
    assert added.dtype == weight.dtype == factors.dtype == torch.float32
    assert added.shape == weight.shape
    _kernels.add_decay(
        added.data_ptr(),
        weight.data_ptr(),
        factors.data_ptr(),
        added.numel(),
        factors.numel(),
        rate,
        torch.get_num_threads(),
    )
    return added


@dataclass(frozen=True)
class EmbeddingSums:
    """Output gradients added up by example and token: rows of `sums` ([batch, positions, width]), as many as an example has
    different tokens, which `tokens` names ([batch, positions], -1 where there are no more); and the squared norms of each
    example's, with `rate` times the `weight` if it was given.

    *Guarantee.* What is added up is `sums` itself, each example with its factor, and the decay.

    >>> if usable(torch.zeros(1)):
    ...     found = embedding_sums(torch.tensor([[2, 2]]), torch.tensor([[[1.0], [3.0]]]), torch.zeros(4, 1))
    ...     assert found.weighted_sum(torch.tensor([0.5])).flatten().tolist() == [0.0, 0.0, 2.0, 0.0]
    """

    sums: Tensor
    tokens: Tensor
    norms: Tensor
    sizes: tuple[int, ...]
    weight: Tensor | None
    rate: float

    def weighted_sum(self, factors: Tensor, together: float | None = None) -> Tensor:
        """Of the whole table. `together` is what the factors add up to, where that is known already."""
        factors = factors.to(torch.float32).contiguous()
        _, _, width, rows, _ = self.sizes
        assert factors.shape == self.norms.shape
        found = self.sums.new_empty(rows, width)
        weight, amount = 0, 0.0
        if self.weight is not None:
            weight, amount = self.weight.data_ptr(), self.rate * (total(factors) if together is None else together)
        places = (tensor.data_ptr() for tensor in (self.sums, self.tokens, factors))
        _kernels.embedding_add(*places, weight, found.data_ptr(), self.sizes, amount, torch.get_num_threads())
        return found


def embedding_sums(
    tokens: Tensor, g: Tensor, table: Tensor, padding: int | None = None, rate: float = 0.0
) -> EmbeddingSums:
    """For `tokens` [batch, positions] and output gradients `g` [batch, positions, width] of a `table` [rows, width], whose row
    `padding` has no gradient and which decays at this `rate`.

    *Guarantee.* Row i comes from row i of `tokens` and `g` alone. An example's sums are made in float32, and are what is added
    up; their norm, with the decay, is made in double precision and raised by what that may have lost.

    >>> if usable(torch.zeros(1)):
    ...     tokens, g = torch.tensor([[2, 1, 2]]), torch.tensor([[[1.0], [5.0], [3.0]]])
    ...     assert embedding_sums(tokens, g, torch.zeros(4, 1)).norms.tolist() == [41.0]  # 4^2 + 5^2
    ...     assert round(embedding_sums(tokens, g, torch.ones(4, 1), rate=1.0).norms.item(), 9) == 63.0  # 1 + 6^2 + 5^2 + 1
    """
    tokens, g, table = tokens.to(torch.int64).contiguous(), g.contiguous(), table.contiguous()
    (batch, positions, width), (rows, same) = g.shape, table.shape
    assert tokens.shape == (batch, positions)
    assert width == same
    assert g.dtype == table.dtype == torch.float32
    sums, held = _buffers.take((batch, positions, width)), tokens.new_empty(batch, positions)
    norms = g.new_empty(batch, dtype=torch.float64)
    sizes = (batch, positions, width, rows, -1 if padding is None else padding)
    weight = table if rate else None
    _kernels.embedding_sums(
        tokens.data_ptr(),
        g.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        sums.data_ptr(),
        held.data_ptr(),
        norms.data_ptr(),
        sizes,
        rate,
        torch.get_num_threads(),
    )
    return EmbeddingSums(sums, held, norms, sizes, weight, rate)


def beside(gradients: Sequence[Tensor], decaying: Sequence[tuple[Tensor, float] | None]) -> tuple[Tensor, Tensor]:
    """Rows of several tensors side by side, [batch, all their numbers], and their squared norms in double precision. Where a
    tensor is `decaying`, so many times that row is added to each of its rows.

    *Guarantee.* Row i comes from row i of the tensors alone; its norm is that of the very numbers in it.

    >>> if usable(torch.zeros(1)):
    ...     rows, squares = beside([torch.ones(1, 2), torch.zeros(1, 1)], [None, (torch.tensor([4.0]), 0.5)])
    ...     assert (rows.tolist(), squares.tolist()) == ([[1.0, 1.0, 2.0]], [6.0])
    """
    batch, wide = gradients[0].shape[0], 0
    parts: list[tuple[int, int, int, float]] = []
    kept = [gradient.contiguous() for gradient in gradients]  # alive until their numbers are read
    for rows, decay in zip(gradients, decaying, strict=True):
        count = rows.numel() // batch
        more, rate = None, 0.0
        if decay is not None:
            more, rate = decay[0].contiguous(), decay[1]
            assert more.dtype == torch.float32
            assert more.shape == rows.shape[1:]
            kept.append(more)
        assert rows.shape[0] == batch
        parts.append((kept[len(parts)].data_ptr(), count, 0 if more is None else more.data_ptr(), rate))
        wide += count
    found, squares = kept[0].new_empty(batch, wide), kept[0].new_empty(batch, dtype=torch.float64)
    _kernels.beside(tuple(parts), found.data_ptr(), squares.data_ptr(), batch, wide)
    return found, squares


def _without_gaps(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def square(numbers: Tensor) -> float:
    """The sum of their squares, in double precision.

    *Guarantee.* It comes from these numbers alone, and does not depend on the number of threads.

    >>> not usable(torch.ones(1)) or square(torch.tensor([3.0, 4.0]))
    25.0
    """
    if not _without_gaps(numbers):
        numbers = numbers.contiguous()
    return float(_kernels.square(numbers.data_ptr(), numbers.numel(), torch.get_num_threads()))


def norm_gradients(x: Tensor, g: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Per-example gradients of the weight and the bias of a group normalisation of images, [batch, channels] each.

    *Guarantee.* Row i comes from row i of `x` and `g` alone.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     x, g = torch.tensor([[[[1.0]], [[3.0]]]]), torch.tensor([[[[5.0]], [[7.0]]]])
    ...     assert norm_gradients(x, g, 1, 0.0)[0].tolist() == [[-5.0, 7.0]]
    """
    return _norm_gradients(_dense(x), _dense(g), _sizes(x, groups), eps)


def norm_backward(
    x: Tensor, g: Tensor, groups: int, eps: float, affine: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and the gradient of the input, in one go; `affine` is the weight, if there is one.

    *Guarantee.* Row i comes from row i of `x` and `g` alone.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     x, g = torch.tensor([[[[1.0, 3.0, 5.0]]]]), torch.tensor([[[[5.0, 7.0, 3.0]]]])
    ...     found = norm_backward(x, g, 1, 0.0, None)[2]  # what is left of g beside (1, 1, 1) and x - 3, by the deviation
    ...     assert [round(float(v), 3) for v in found.flatten()] == [-0.612, 1.225, -0.612]
    """
    x, g = _dense(x), _dense(g)
    if affine is not None:
        affine = affine.contiguous()
        assert affine.shape == x.shape[1:2]
        assert usable(affine)
    inputs = torch.empty_like(x, memory_format=torch.channels_last)
    return *_norm_gradients(x, g, _sizes(x, groups), eps, affine, inputs), inputs


def _sizes(x: Tensor, groups: int) -> tuple[int, ...]:
    assert groups > 0
    assert x.shape[1] % groups == 0
    return len(x), x.shape[2] * x.shape[3], x.shape[1], groups


def layer_norm_gradients(x: Tensor, g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same for a layer normalisation of [batch, positions, features].

    *Guarantee.* Row i comes from row i of `x` and `g` alone.

    >>> if usable(torch.zeros(1, 1, 1, 1)):
    ...     x, g = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[5.0, 7.0]]])
    ...     assert layer_norm_gradients(x, g, 0.0)[0].tolist() == [[-5.0, 7.0]]
    """
    return _norm_gradients(x.contiguous(), g.contiguous(), (*x.shape, 0), eps)


def _norm_gradients(
    x: Tensor,
    g: Tensor,
    sizes: tuple[int, ...],
    eps: float,
    affine: Tensor | None = None,
    inputs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert x.shape == g.shape
    batch, _, channels, _ = sizes
    weight, bias = x.new_empty(batch, channels), x.new_empty(batch, channels)
    places = (0 if tensor is None else tensor.data_ptr() for tensor in (x, g, affine, weight, bias, inputs))
    _kernels.norm_gradients(*places, sizes, eps, torch.get_num_threads())
    return weight, bias


def _dense(image: Tensor) -> Tensor:
    """Pixels one after the other, channels last: [batch, height, width, channels] without gaps."""
    if image.is_contiguous(memory_format=torch.channels_last):
        return image
    return image.contiguous(memory_format=torch.channels_last)
