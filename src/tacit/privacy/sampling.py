"""Who takes part in a step: Poisson sampling, each example by its own coin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.randomness import Randomness
from tacit.privacy.validation import check_count, check_probability


@dataclass(frozen=True)
class PoissonSampler:
    """Draws batches in which every example takes part independently with probability `sample_rate`.

    *Guarantee.* Whether an example takes part depends on no other example and on no other step. Batches vary in size and may be
    empty; their size is private, so nothing may divide by it.

    >>> sampler = PoissonSampler(examples=1000, sample_rate=0.1, randomness=Randomness.from_seed(0))
    >>> batch = sampler.draw()
    >>> 50 < len(batch) < 150
    True
    """

    examples: int
    sample_rate: float
    randomness: Randomness

    def __post_init__(self) -> None:
        check_count("examples", self.examples)
        check_probability("sample_rate", self.sample_rate)

    def draw(self) -> NDArray[np.int64]:
        """The indices of one batch, in increasing order."""
        return np.flatnonzero(self.randomness.bernoulli(self.examples, self.sample_rate))
