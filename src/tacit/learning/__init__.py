"""What makes private models accurate: activations and losses (more to come: curricula, averaging, augmentation)."""

from tacit.learning.activations import ACTIVATIONS, TemperedSigmoid, activation_of
from tacit.learning.losses import (
    LOSSES,
    Focal,
    Huber,
    TailoredLoss,
    TemperedLogistic,
    cross_entropy,
    make_loss,
    sum_of_absolutes,
    sum_of_squares,
)

__all__ = [
    "ACTIVATIONS",
    "LOSSES",
    "Focal",
    "Huber",
    "TailoredLoss",
    "TemperedLogistic",
    "TemperedSigmoid",
    "activation_of",
    "cross_entropy",
    "make_loss",
    "sum_of_absolutes",
    "sum_of_squares",
]
