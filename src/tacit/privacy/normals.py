"""From random words to normal numbers, and from a sum to a noisy mean on a public grid: the arithmetic of noise, in doubles.

Both are compiled (`normals.c`) when tacit is installed, if there is a C compiler. Without, or with the environment variable
TACIT_KERNELS=off, PyTorch and NumPy give the same numbers up to the last digits.

Why a grid: which doubles a sum plus noise can be depends on the sum, down to its last bits (Mironov, 2012). Rounded to a grid
that is much coarser than the errors of doubles, and that depends on the noise alone, the outcomes are those of exact real noise,
rounded, in all but a tiny part of their probability; docs/security.md has the bound.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

_compiled: Any
try:
    from tacit.privacy import _normals as _compiled  # type: ignore[no-redef]
except ImportError:
    _compiled = None
if os.environ.get("TACIT_KERNELS") == "off":
    _compiled = None

_GRID_BITS = 8  # the grid is between a 512th and a 256th of the noise: it adds less than 2e-6 to its variance


def box_muller(words: NDArray[np.uint64], finer: NDArray[np.uint32], normals: NDArray[np.float64]) -> None:
    """Overwrite `normals` with as many standard normal numbers as there are words, an even count; the words may be used up.

    *Guarantee.* Words i and n/2 + i become the pair r cos t and r sin t, with r = sqrt(-2 log u), u the middle of one of 2^95
    cells of (0, 1) that the first word and half word i of `finer` name, and t one of 2^64 angles that the second names. Rounding
    moves a number by less than 2^-50 r.

    >>> normals = np.empty(2)
    >>> box_muller(np.array([2**62, 0], dtype=np.uint64), np.zeros(1, dtype=np.uint32), normals)  # u = 1/2, t = 0
    >>> normals.round(6).tolist()
    [1.17741, 0.0]
    """
    if _compiled is not None:
        _compiled.normals(words, finer, normals)
        return
    import torch

    pairs = words.size // 2
    bits, numbers = torch.from_numpy(words.view(np.int64)), torch.from_numpy(normals)
    first = bits[:pairs].bitwise_and_(2**63 - 1)  # not the absolute value, which -2^63 does not have
    last = torch.from_numpy((finer + 0.5) * 2.0**-32)
    uniform = first.double().add_(last).mul_(2.0**-63)
    below = first.bitwise_xor_(2**63 - 1).double().add_(1 - last).mul_(2.0**-63)  # 1 - u, with digits that u has not
    radius = torch.where(uniform > 0.5, below.neg_().log1p_(), uniform.log()).mul_(-2.0).sqrt_()
    angle = bits[pairs:].double().mul_(math.pi * 2.0**-63)
    torch.cos(angle, out=numbers[:pairs]).mul_(radius)
    torch.sin(angle, out=numbers[pairs:]).mul_(radius)


def grid_of(std: float, divisor: float) -> float:
    """The distance of the values that a mean with noise of this standard deviation on its sum can take; 0 without noise.

    *Guarantee.* A power of two, at most a 256th and more than a 512th of std / divisor wherever that is from 1e-178 to 1e273,
    and a function of these two public numbers alone.

    >>> grid_of(4.0, 16.0) == 1 / 1024
    True
    """
    if std == 0:
        return 0.0
    exponent = math.frexp(std / divisor)[1] - 1 - _GRID_BITS if std / divisor else -math.inf
    return math.ldexp(1.0, int(min(max(exponent, -600), 900)))  # so that nothing below overflows


def noisy_mean(
    clipped: NDArray[Any], normals: NDArray[np.float64], std: float, divisor: float, private: NDArray[Any]
) -> None:
    """Overwrite `private` with (clipped + std * normals) / divisor, rounded to the nearest multiple of `grid_of(std, divisor)`.

    *Guarantee.* In double precision, and a multiple of the grid of `private`'s type: where float32 is coarser than the grid, from
    2^24 grids on, a multiple of its own digits.

    >>> private = np.empty(2, dtype=np.float32)
    >>> noisy_mean(np.float32([1, 2]), np.array([0.5, -1.0]), std=4.0, divisor=10.0, private=private)
    >>> private.tolist(), (private / grid_of(4.0, 10.0)).tolist()
    ([0.2998046875, -0.2001953125], [307.0, -205.0])
    """
    grid = grid_of(std, divisor)
    if _compiled is not None and clipped.dtype == private.dtype == np.float32:
        _compiled.noisy_mean(clipped, normals, std, divisor, grid, private)
        return
    mean = (clipped.astype(np.float64) + std * normals) / divisor
    private[:] = np.rint(mean / grid) * grid if grid else mean
