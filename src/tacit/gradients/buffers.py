"""Memory for per-example gradients that is used again in the next step.

The operating system hands out fresh memory page by page, each cleared first; for gradients of some megabytes that takes as
long as computing them.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LARGE = 2**18  # numbers: a mebibyte
_WASTE = 16  # times: an array of a whole chunk also serves for what is left of a batch, but not for a small layer
_FREE = 2  # references to an array that nobody uses: the list's, and the argument of getrefcount


class Buffers:
    """Hands out float32 tensors on the CPU whose values are not set, from memory that nobody uses any more.

    When more than `limit` bytes are free, they are given back.

    *Guarantee.* No two living tensors share memory: an array is handed out again only when every tensor that lies in it, views
    included, is gone, which its count of references tells.

    >>> buffers = Buffers()
    >>> first = buffers.take((2, 3))
    >>> place, view = first.data_ptr(), first[0]
    >>> del first
    >>> buffers.take((2, 3)).data_ptr() == place  # a view is left
    False
    >>> del view
    >>> buffers.take((2, 3)).data_ptr() == place
    True
    """

    def __init__(self, limit: int = 2**30) -> None:
        self._limit = limit
        self._arrays: list[NDArray[np.float32]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape."""
        count = math.prod(shape)
        with self._lock:
            tensor = torch.from_numpy(self._array(count))[:count].view(shape)
            free = self._free()
            if sum(self._arrays[i].nbytes for i in free) > self._limit:
                self._arrays = [array for i, array in enumerate(self._arrays) if i not in free]
            return tensor

    def _free(self) -> list[int]:
        # By index: a loop variable would be one more reference.
        return [i for i in range(len(self._arrays)) if sys.getrefcount(self._arrays[i]) == _FREE]

    def _array(self, count: int) -> NDArray[np.float32]:
        fitting = [i for i in self._free() if count <= self._arrays[i].size <= _WASTE * count]
        if fitting:
            return self._arrays[min(fitting, key=lambda i: self._arrays[i].size)]
        # One that is a little too small will not be needed any more, since batches differ in size, not layers.
        outgrown = [i for i in self._free() if count / 2 < self._arrays[i].size < count]
        if outgrown:
            del self._arrays[max(outgrown, key=lambda i: self._arrays[i].size)]
        self._arrays.append(_fresh(count + count // 16))
        return self._arrays[-1]


def _fresh(count: int) -> NDArray[np.float32]:
    """Memory of its own from the operating system, if it is much: among activations, which come and go, it would leave gaps."""
    if count < _LARGE:
        return np.empty(count, dtype=np.float32)
    return np.frombuffer(mmap.mmap(-1, 4 * count), dtype=np.float32)
