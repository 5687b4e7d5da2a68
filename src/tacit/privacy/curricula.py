"""Noise curricula: the noise multiplier of every epoch, from one number to another along a curve, fixed before training starts.

With t = 0 .. T-1 the epoch, and s_t the multiplier from a = `first` to b = `last`, as in "Differentially Private Stochastic
Gradient Descent with Curricula":

- linear        a + (b - a) t / (T - 1)
- quadratic     a + (b - a) t^2 / (T - 1)^2
- piecewise     a + (b - a) floor(5 t / T) / 4: five plateaus
- exponential   falling: a + (b - a) (1 - e^-t) / (1 - e^-(T-1));  rising: a + (b - a) (e^t - 1) / (e^(T-1) - 1)
- logarithmic   a + (b - a) log(t + 1) / log(T + 1), which ends a little short of b

They are public functions of the step, like every schedule: the event is the composition of their levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tacit.privacy.validation import UserError, check_choice, check_count, check_not_negative

_PLATEAUS = 5


def _exponential(t: float, epochs: int, falling: bool) -> float:
    last = epochs - 1
    # expm1 of negative numbers alone, which cannot overflow: (e^t - 1) / (e^l - 1) = e^(t-l) (1 - e^-t) / (1 - e^-l)
    early = math.expm1(-t) / math.expm1(-last)
    return early if falling else math.exp(t - last) * early


SHAPES: dict[str, Callable[[float, int, bool], float]] = {
    "linear": lambda t, epochs, falling: t / (epochs - 1),
    "quadratic": lambda t, epochs, falling: (t / (epochs - 1)) ** 2,
    "piecewise": lambda t, epochs, falling: math.floor(_PLATEAUS * t / epochs) / (_PLATEAUS - 1),
    "exponential": _exponential,
    "logarithmic": lambda t, epochs, falling: math.log(t + 1) / math.log(epochs + 1),
}


@dataclass(frozen=True)
class Curriculum:
    """A noise multiplier that goes from `first` to `last` over so many epochs, along one of `SHAPES`: the same at all steps of an
    epoch or, if it is `smooth`, another at every step.

    *Guarantee.* A public function of the step alone; every multiplier lies between `first` and `last`.

    >>> [Curriculum("quadratic", 5.0, 1.0, epochs=5).multiplier(step, steps=10) for step in (0, 1, 2, 8, 9)]
    [5.0, 5.0, 4.75, 1.0, 1.0]
    """

    shape: str
    first: float
    last: float
    epochs: int
    smooth: bool = False

    def __post_init__(self) -> None:
        check_choice("noise curriculum", self.shape, SHAPES)
        for name in ("first", "last"):
            object.__setattr__(self, name, check_not_negative(f"{name} noise multiplier", getattr(self, name)))
        object.__setattr__(self, "epochs", check_count("epochs", self.epochs))

    def multiplier(self, step: int, steps: int) -> float:
        if self.epochs == 1:
            return self.first
        if self.smooth:
            t = (self.epochs - 1) * step / max(steps - 1, 1)
        else:
            t = float(min(step * self.epochs // steps, self.epochs - 1))
        part = min(max(SHAPES[self.shape](t, self.epochs, self.last < self.first), 0.0), 1.0)
        return self.first + (self.last - self.first) * part

    def scaled(self, factor: float) -> Curriculum:
        return replace(self, first=self.first * factor, last=self.last * factor)

    def to_dict(self) -> dict[str, Any]:
        fields = {"shape": self.shape, "first": self.first, "last": self.last, "epochs": self.epochs}
        return {"kind": "curriculum", **fields, "smooth": self.smooth}


@dataclass(frozen=True)
class Table:
    """Noise multipliers of one's own, each for an equal part of the steps: any shape at all.

    *Guarantee.* A public function of the step alone, fixed when the table is made.

    >>> [Table((4.0, 2.0)).multiplier(step, steps=5) for step in range(5)]
    [4.0, 4.0, 4.0, 2.0, 2.0]
    >>> Table.of(lambda part: 5 - 4 * part, 3).multipliers
    (5.0, 3.0, 1.0)
    """

    multipliers: tuple[float, ...]

    def __post_init__(self) -> None:
        values = tuple(check_not_negative("each noise multiplier", value) for value in self.multipliers)
        if not values:
            raise UserError("a table of noise multipliers must hold at least one")
        object.__setattr__(self, "multipliers", values)

    @classmethod
    def of(cls, function: Callable[[float], float], count: int) -> Table:
        """A function of how far the run is, from 0 to 1, taken at so many places."""
        check_count("count", count)
        return cls(tuple(float(function(place / max(count - 1, 1))) for place in range(count)))

    @classmethod
    def joined(cls, parts: Sequence[tuple[Any, int]]) -> Table:
        """Schedules one after the other, each with the number of levels it has.

        >>> from tacit.privacy import Constant, Linear
        >>> Table.joined([(Constant(3.0), 2), (Linear(3.0, 1.0), 3)]).multipliers
        (3.0, 3.0, 3.0, 2.0, 1.0)
        """
        return cls(tuple(schedule.multiplier(step, count) for schedule, count in parts for step in range(count)))

    def multiplier(self, step: int, steps: int) -> float:
        return self.multipliers[min(step * len(self.multipliers) // steps, len(self.multipliers) - 1)]

    def scaled(self, factor: float) -> Table:
        return Table(tuple(value * factor for value in self.multipliers))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "table", "multipliers": list(self.multipliers)}
