"""From random words to normal numbers, and from a clipped sum to a noisy mean: the arithmetic of noise, in double precision.

Both are compiled (`normals.c`) when tacit is installed, if there is a C compiler. Without, or with the environment variable
TACIT_KERNELS=off, PyTorch and NumPy give the same numbers up to the last digits.
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


def box_muller(words: NDArray[np.uint64], normals: NDArray[np.float64]) -> None:
    """Overwrite `normals` with as many standard normal numbers as there are words, an even count; the words may be used up.

    *Guarantee.* Words i and n/2 + i become the pair r cos t and r sin t, with r = sqrt(-2 log u), u the middle of one of 2^63
    cells of (0, 1) that the first word names, and t one of 2^64 angles that the second names. Rounding moves a number by less
    than 1e-14.

    >>> normals = np.empty(2)
    >>> box_muller(np.array([2**62, 0], dtype=np.uint64), normals)  # u = 1/2, t = 0
    >>> normals.round(6).tolist()
    [1.17741, 0.0]
    """
    if _compiled is not None:
        _compiled.normals(words, normals)
        return
    import torch

    pairs = words.size // 2
    bits, numbers = torch.from_numpy(words.view(np.int64)), torch.from_numpy(normals)
    bits[:pairs].bitwise_and_(2**63 - 1)  # not the absolute value, which -2^63 does not have
    uniform = bits.double()
    radius, angle = uniform[:pairs].add_(0.5), uniform[pairs:]
    uniform.mul_(2.0**-63)
    radius.log_().mul_(-2.0).sqrt_()
    angle.mul_(math.pi)
    torch.cos(angle, out=numbers[:pairs]).mul_(radius)
    torch.sin(angle, out=numbers[pairs:]).mul_(radius)


def noisy_mean(
    clipped: NDArray[Any], normals: NDArray[np.float64], std: float, divisor: float, private: NDArray[Any]
) -> None:
    """Overwrite `private` with (clipped + std * normals) / divisor.

    *Guarantee.* In double precision, and rounded to the type of `private` once.

    >>> private = np.empty(2, dtype=np.float32)
    >>> noisy_mean(np.float32([1, 2]), np.array([0.5, -1.0]), std=4.0, divisor=10.0, private=private)
    >>> private.tolist()
    [0.30000001192092896, -0.20000000298023224]
    """
    if _compiled is not None and clipped.dtype == private.dtype == np.float32:
        _compiled.noisy_mean(clipped, normals, std, divisor, private)
    else:
        private[:] = (clipped.astype(np.float64) + std * normals) / divisor
