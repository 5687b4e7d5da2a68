"""What makes private models accurate: activations, losses, optimizers and averages (more to come: curricula, augmentation)."""

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
from tacit.learning.optimizers import PRIVATE_OPTIMIZERS, LearnsNoise, PrivateAdam, PrivateRMSprop

__all__ = [
    "ACTIVATIONS",
    "AVERAGINGS",
    "LOSSES",
    "PRIVATE_OPTIMIZERS",
    "AveragedWeights",
    "Averaging",
    "Exponential",
    "Focal",
    "Huber",
    "LearnsNoise",
    "PrivateAdam",
    "PrivateRMSprop",
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
