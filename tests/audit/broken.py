"""Trainings that are broken on purpose, so that an audit has something to find: each is a context in which tacit is so."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from tacit.gradients import ClippedGradient
from tacit.privacy.randomness import Randomness
from tacit.privacy.sampling import PoissonSampler

_normal, _over = Randomness.normal, ClippedGradient.over


@contextmanager
def half_noise():
    """The mechanism adds half of the noise that it claims."""
    with patch.object(Randomness, "normal", lambda self, shape: _normal(self, shape) / 2):
        yield


@contextmanager
def repeated_noise():
    """Each release has the noise of the one before."""
    kept = {}

    def normal(self, shape):
        if shape not in kept:
            kept[shape] = _normal(self, shape)
        return kept[shape].copy()

    with patch.object(Randomness, "normal", normal):
        yield


@contextmanager
def double_rate():
    """Examples take part twice as often as claimed."""

    def draw(self):
        return np.flatnonzero(self.randomness.bernoulli(self.examples, 2 * self.sample_rate))

    with patch.object(PoissonSampler, "draw", draw):
        yield


@contextmanager
def twice_the_bound():
    """Clipping lets through twice the norm that it says."""

    def over(self, chunks):
        summed = _over(self, chunks)
        for gradient in summed.gradients.values():
            gradient.mul_(2)
        return summed

    with patch.object(ClippedGradient, "over", over):
        yield


MUTANTS = {
    "half the noise": half_noise,
    "noise that repeats": repeated_noise,
    "twice the sampling rate": double_rate,
    "twice the clipping norm": twice_the_bound,
}
