"""Clipped sums of per-example gradients, fast: one forward pass, one backward pass, one rule a layer kind.

    from tacit.gradients import ClippedGradient
    grad = ClippedGradient(model, loss=nn.CrossEntropyLoss(reduction="none"), clipping=Flat(1.0))
    summed = grad(inputs, targets)      # a ClippedSum that knows its sensitivity

*Guarantee.* Whatever way a sum was computed, adding or removing one example moves it by at most its sensitivity (up to
the rounding of floating-point arithmetic). `reference` is the slow and obvious way, against which all others are tested.
"""

from __future__ import annotations

from tacit.gradients import reference
from tacit.gradients.engine import ClippedGradient

__all__ = ["ClippedGradient", "reference"]
