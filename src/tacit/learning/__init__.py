"""What makes private models accurate: activations, losses, optimizers, weight decay, averages, augmentation, sample curricula."""

from tacit.learning.activations import ACTIVATIONS, TemperedSigmoid, activation_of
from tacit.learning.augmentation import (
    AUGMENTATIONS,
    Augmentation,
    Compose,
    Crop,
    Flip,
    MeanOverViews,
    Views,
    make_augmentation,
)
from tacit.learning.augmix import AugMix
from tacit.learning.averaging import AVERAGINGS, AveragedWeights, Averaging, Exponential, Tail, make_averaging
from tacit.learning.curricula import CURRICULA, SampleCurriculum
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
from tacit.learning.weight_decay import WeightDecay

__all__ = [
    "ACTIVATIONS",
    "AUGMENTATIONS",
    "AVERAGINGS",
    "CURRICULA",
    "LOSSES",
    "PRIVATE_OPTIMIZERS",
    "AugMix",
    "Augmentation",
    "AveragedWeights",
    "Averaging",
    "Compose",
    "Crop",
    "Exponential",
    "Flip",
    "Focal",
    "Huber",
    "LearnsNoise",
    "MeanOverViews",
    "PrivateAdam",
    "PrivateRMSprop",
    "SampleCurriculum",
    "Tail",
    "TailoredLoss",
    "TemperedLogistic",
    "TemperedSigmoid",
    "Views",
    "WeightDecay",
    "activation_of",
    "cross_entropy",
    "make_augmentation",
    "make_averaging",
    "make_loss",
    "sum_of_absolutes",
    "sum_of_squares",
]
