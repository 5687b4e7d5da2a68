"""Paper D: noise that falls or rises from epoch to epoch, and easy examples first, on MNIST.

The paper has a CNN of two convolutions with ReLU, batches of 600, 20 epochs and a learning rate of 0.15; of the clipping norm it
says nothing (here 1). Its equal epsilons are equal by RDP, which exceeds the true ones by more for some schedules than for
others; here a schedule's constant is the one of equal PLD epsilon. Its sample curriculum has no privacy at all, and is run as it
was, once for each noise; beside it stand two that keep the guarantee.
"""

from __future__ import annotations

import math
from typing import Any

from tacit.studies.study import Comparison, Printed, Study, Variant, merged

_BASE: dict[str, dict[str, Any]] = {
    "data": {"source": "mnist"},
    "model": {"name": "mnist-cnn", "activation": "relu"},
    "loss": {"name": "cross-entropy"},
    "privacy": {"delta": 1e-5, "batch_size": 600, "epochs": 20, "clipping_norm": 1.0},
    "optimizer": {"name": "SGD", "lr": 0.15},
}
_SHAPES = ("exponential", "piecewise", "linear", "quadratic")
# what it prints: accuracy at an epsilon by RDP, falling and rising
_FALLING = {
    "exponential": (95.72, 2.61),
    "piecewise": (95.17, 1.64),
    "linear": (94.63, 1.40),
    "quadratic": (94.25, 1.32),
}
_RISING = {
    "exponential": (94.42, 2.61),
    "piecewise": (92.52, 1.64),
    "linear": (92.36, 1.40),
    "quadratic": (93.13, 1.69),
}
_CONSTANT = {"exponential": 95.29, "piecewise": 95.65, "linear": 94.34, "quadratic": 94.19}
# by `tacit account --schedule SHAPE:5:1:20 --sample-rate 600/60000 --epochs 20`: the constant of equal epsilon, by PLD and RDP
EQUAL = {"exponential": 1.0515, "piecewise": 1.5088, "linear": 1.8368, "quadratic": 2.0350}
EQUAL_BY_RDP = {"exponential": 1.0473, "piecewise": 1.3806, "linear": 1.5391, "quadratic": 1.6042}
_ONE = "one run, epsilon by RDP"
# by noise multiplier, without a sample curriculum and with its own
_SAMPLES = {
    0: (95.77, 94.70),
    1: (95.57, 94.69),
    2: (95.14, 93.32),
    3: (93.89, 92.60),
    4: (91.58, 90.75),
    5: (90.91, 90.03),
}
_SIGMAS = (1, 2, 3, 4, 5)
_NO_NOISE = 1e-9
_FOR_EPSILON = {0: math.inf, 1: 2.59, 2: 0.91, 3: 0.56, 4: 0.40, 5: 0.31}  # what holds for them, by PLD


def _noise(**privacy: Any) -> dict[str, dict[str, Any]]:
    return merged(_BASE, privacy=privacy)


def _falling(shape: str) -> Variant:
    values = _noise(schedule=f"{shape}:5:1:20")
    return Variant(f"noise/falling-{shape}", values, 5, Printed(*_FALLING[shape], _ONE))


def _rising(shape: str) -> Variant:
    printed = Printed(*_RISING[shape], _ONE) if shape in _RISING else None
    return Variant(f"noise/rising-{shape}", _noise(schedule=f"{shape}:1:5:20"), 5, printed)


def _constant(shape: str) -> Variant:
    printed = Printed(_CONSTANT[shape], _FALLING[shape][1], _ONE)
    return Variant(f"noise/constant-for-{shape}", _noise(noise_multiplier=EQUAL[shape]), 5, printed)


def _constant_by_rdp(shape: str) -> Variant:
    return Variant(f"noise/constant-for-{shape}-by-rdp", _noise(noise_multiplier=EQUAL_BY_RDP[shape]), 1)


_DYNAMIC = {"name": "linear", "difficulty": "network"}
_LOGISTIC = {"name": "linear", "difficulty": "logistic"}
_SORTED = {"name": "sorted-without-privacy"}


def _samples(sigma: int) -> list[Variant]:
    values = _noise(noise_multiplier=float(sigma) or _NO_NOISE)
    without, with_it = _SAMPLES[sigma]
    many = 5 if sigma else 1
    end = "" if sigma else "-not-private"
    name, epsilon = f"samples/sigma-{sigma}", _FOR_EPSILON[sigma]
    found = [
        Variant(f"{name}-all{end}", values, many, Printed(without, epsilon, "one run")),
        Variant(
            f"{name}-sorted{end}",
            {**values, "curriculum": _SORTED},
            1,
            Printed(with_it, epsilon, "one run; no epsilon holds"),
        ),
    ]
    if sigma:
        found += [
            Variant(f"{name}-dynamic", {**values, "curriculum": _DYNAMIC}, many),
            Variant(f"{name}-logistic", {**values, "curriculum": _LOGISTIC}, 1),
        ]
    return found


_BOTH = Variant("samples/falling-linear-dynamic", {**_noise(schedule="linear:5:1:20"), "curriculum": _DYNAMIC}, 5)

STUDY = Study(
    name="curricula",
    paper="An and Shi, Differentially Private Stochastic Gradient Descent with Curricula, 2021",
    variants=[
        *map(_falling, _SHAPES),
        *map(_constant, _SHAPES),
        *map(_rising, (*_SHAPES, "logarithmic")),
        *map(_constant_by_rdp, _SHAPES),
        *(variant for sigma in _SAMPLES for variant in _samples(sigma)),
        _BOTH,
    ],
    comparisons=[
        *(
            Comparison(
                f"noise/falling-{shape}",
                f"noise/constant-for-{shape}",
                "noise that falls does better than constant noise of equal epsilon",
            )
            for shape in _SHAPES
        ),
        *(
            Comparison(f"noise/falling-{shape}", f"noise/rising-{shape}", "noise that falls does better than rising")
            for shape in _SHAPES
        ),
        *(
            Comparison(
                f"samples/sigma-{sigma}-dynamic",
                f"samples/sigma-{sigma}-all",
                "a dynamic order, by the network's own loss, could help",
            )
            for sigma in _SIGMAS
        ),
        Comparison(
            "samples/falling-linear-dynamic", "noise/falling-linear", "the two curricula could complement each other"
        ),
    ],
    fits={
        "noise": [
            *(f"noise/{kind}-{shape}" for kind in ("falling", "constant-for") for shape in _SHAPES),
            *(f"samples/sigma-{sigma}-all" for sigma in _SIGMAS),
        ]
    },
)
