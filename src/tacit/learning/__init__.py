"""What makes private models accurate: activations, losses and averages (more to come: curricula, augmentation)."""

from tacit.learning.activations import ACTIVATIONS, TemperedSigmoid, activation_of
from tacit.learning.averaging import AVERAGINGS, AveragedWeights, Averaging, Exponential, Tail, make_averaging
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
    "AVERAGINGS",
    "LOSSES",
    "AveragedWeights",
    "Averaging",
    "Exponential",
    "Focal",
    "Huber",
    "Tail",
    "TailoredLoss",
    "TemperedLogistic",
    "TemperedSigmoid",
    "activation_of",
    "cross_entropy",
    "make_averaging",
    "make_loss",
    "sum_of_absolutes",
    "sum_of_squares",
]
