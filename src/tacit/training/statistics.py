"""Statistics of the training set for a layer that standardises: released with noise, before the first step."""

from __future__ import annotations

import math

import numpy as np
import torch

from tacit.models.standardize import Standardize
from tacit.privacy.mechanism import GaussianMechanism
from tacit.privacy.statistics import BoundedSum
from tacit.training.examples import Examples

_SUMMED = 1000  # examples at a time


def give_statistics(layer: Standardize, examples: Examples, mechanism: GaussianMechanism, device: torch.device) -> None:
    """Noisy means and mean squares of all examples, paid for by the plan's first release of all of them, go into the layer."""
    count = len(examples)
    chunks = (
        layer.moments(examples.batch(np.arange(start, min(start + _SUMMED, count)), device)[0])
        for start in range(0, count, _SUMMED)
    )
    what = "noisy sums of every channel's mean and mean square"
    noisy = mechanism.release_whole(BoundedSum.over(chunks, layer.bounds), what=what)
    # a variance below the noise of the mean squares is noise
    deviation = mechanism.plan.whole_releases[0] * math.sqrt(2) * layer.bounds[1] / count
    layer.take(noisy / count, smallest_variance=deviation)


def unpaid_statistics(model: torch.nn.Module, paid: Standardize | None) -> bool:
    """Whether a layer of the model has statistics and is not the one that the run pays for.

    >>> unpaid_statistics(torch.nn.Sequential(Standardize(2)), None)
    False
    """
    layers = (layer for layer in model.modules() if isinstance(layer, Standardize) and layer is not paid)
    return any(bool(layer.measured) for layer in layers)
