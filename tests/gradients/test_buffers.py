"""Memory that is used again: no more of it than the largest chunk needs, however batches vary."""

import random

import pytest

from tacit.gradients.buffers import Buffers

LAYERS = [432, *[2304] * 6, 4608, *[9216] * 5, 18432]


@pytest.mark.parametrize("mean", [70, 128, 500])
def test_what_is_left_of_a_batch_takes_no_memory_of_its_own(mean: int) -> None:
    generator, buffers, chunk = random.Random(0), Buffers(), 64
    for _ in range(200):
        left = max(1, round(generator.gauss(mean, mean**0.5)))
        while left > 0:
            size = min(chunk, left)
            left -= size
            held = [buffers.take((size, width)) for width in reversed(LAYERS)]
            del held
    needed = 4 * chunk * sum(LAYERS)
    assert sum(array.nbytes for array in buffers._arrays) <= 1.25 * needed
