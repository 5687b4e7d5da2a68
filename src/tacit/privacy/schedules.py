"""Noise schedules: the noise multiplier of every step, fixed before training starts.

A schedule is a shape with a scale, sigma_t = scale * shape(t). It is a public function of the step alone, so the event is the
composition of its distinct levels, and calibration has one number to find: the factor by which to scale it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tacit.privacy.curricula import SHAPES, Curriculum, Table
from tacit.privacy.driven import LossDriven
from tacit.privacy.validation import UserError, check_choice, check_not_negative, check_positive, check_steps


@runtime_checkable
class NoiseSchedule(Protocol):
    """The noise multiplier of each step, as a function of the step and the number of steps alone.

    *Guarantee.* `multiplier` is deterministic and looks at nothing but its arguments; `scaled(f)` multiplies every level by f.

    >>> isinstance(Constant(1.0), NoiseSchedule)
    True
    """

    def multiplier(self, step: int, steps: int) -> float:
        """sigma_t of step t = 0 .. steps-1."""

    def scaled(self, factor: float) -> NoiseSchedule:
        """The same shape, every level multiplied by `factor`."""

    def to_dict(self) -> dict[str, Any]:
        """A plain description, from which `schedule_from_dict` makes the same schedule."""


@dataclass(frozen=True)
class Constant:
    """The same noise multiplier at every step.

    >>> Constant(1.3).multiplier(7, steps=100)
    1.3
    """

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", check_not_negative("noise_multiplier", self.noise_multiplier))

    def multiplier(self, step: int, steps: int) -> float:
        return self.noise_multiplier

    def scaled(self, factor: float) -> Constant:
        return Constant(self.noise_multiplier * factor)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "constant", "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class Linear:
    """From one noise multiplier at the first step to another at the last, in a straight line.

    >>> [Linear(5.0, 1.0).multiplier(step, steps=5) for step in range(5)]
    [5.0, 4.0, 3.0, 2.0, 1.0]
    """

    first: float
    last: float

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            object.__setattr__(self, name, check_not_negative(f"{name} noise multiplier", getattr(self, name)))

    def multiplier(self, step: int, steps: int) -> float:
        return self.first + (self.last - self.first) * step / max(steps - 1, 1)

    def scaled(self, factor: float) -> Linear:
        return Linear(self.first * factor, self.last * factor)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "linear", "first": self.first, "last": self.last}


MOST_STEPS = 2**21
"""Of a schedule that changes: each of its steps is computed, and no ledger can hold more of them."""

_KINDS: dict[str, Any] = {
    "constant": Constant,
    "linear": Linear,
    "curriculum": Curriculum,
    "table": Table,
    "loss-driven": LossDriven,
}


def levels(schedule: NoiseSchedule, steps: int) -> tuple[tuple[float, int], ...]:
    """The distinct noise multipliers of a schedule and how many steps use each, the smallest first.

    >>> levels(Linear(2.0, 1.0), steps=3)
    ((1.0, 1), (1.5, 1), (2.0, 1))
    """
    check_steps(steps)
    if isinstance(schedule, Constant | LossDriven):
        return ((float(schedule.multiplier(0, steps)), steps),)
    if steps > MOST_STEPS:
        raise UserError(
            f"a noise schedule can be followed for at most {MOST_STEPS} steps, not {steps:.6g}; take fewer, or constant noise"
        )
    counts = Counter(float(schedule.multiplier(step, steps)) for step in range(steps))
    return tuple(sorted(counts.items()))


def schedule_from_dict(description: dict[str, Any]) -> NoiseSchedule:
    """The schedule that `to_dict` described.

    >>> schedule_from_dict({"kind": "constant", "noise_multiplier": 1.3})
    Constant(noise_multiplier=1.3)
    """
    fields = dict(description)
    kind = check_choice("noise schedule", str(fields.pop("kind", None)), _KINDS)
    try:
        schedule: NoiseSchedule = _KINDS[kind](**fields)
    except TypeError as error:
        raise UserError(f"the noise schedule {description!r} cannot be read: {error}") from None
    return schedule


def schedule_from_text(text: str, epochs: float | None = None) -> NoiseSchedule:
    """The schedule of a command line: `constant:SIGMA`, `linear:FROM:TO`, a curriculum such as `exponential:FROM:TO[:EPOCHS]`,
    `loss-driven:FROM:TO[:REFERENCE]`; or a table of one's own, `table:SIGMA,SIGMA,...`, each for an equal part of the steps.

    A curriculum has one level an epoch, of which there are as many as the run has if they are left out; without them, a line goes
    step by step. The third number of the last is its reference loss (ln 10 if left out), at which and above which the noise is
    the smallest; each example's loss is cut at twice that.

    >>> schedule_from_text("linear:5:1")
    Linear(first=5.0, last=1.0)
    >>> schedule_from_text("exponential:5:1", epochs=20)
    Curriculum(shape='exponential', first=5.0, last=1.0, epochs=20, smooth=False)
    >>> schedule_from_text("table:5,2,1")
    Table(multipliers=(5.0, 2.0, 1.0))
    >>> schedule = schedule_from_text("loss-driven:1:3:0.69")
    >>> schedule.reference, schedule.loss_bound
    (0.69, 1.38)
    """
    kind, _, numbers = text.partition(":")
    form = {
        "constant": "SIGMA",
        "table": "SIGMA,SIGMA,...",
        **dict.fromkeys(SHAPES, "FROM:TO[:EPOCHS]"),
        "loss-driven": "FROM:TO[:REFERENCE]",
    }
    check_choice("noise schedule", kind, form)
    try:
        values = [float(number) for number in numbers.split("," if kind == "table" else ":")]
    except ValueError:
        values = []
    lengths = {"constant": range(1, 2), "table": range(1, len(values) + 1)}.get(kind, range(2, 4))
    if len(values) not in lengths:
        raise UserError(f"a {kind} noise schedule is written {kind}:{form[kind]}, not {text!r}")
    if kind == "table":
        return Table(tuple(values))
    if kind in SHAPES and (kind != "linear" or len(values) == 3):
        given = values[2] if len(values) == 3 else epochs
        if given is None or (len(values) == 3 and not (given >= 1 and given.is_integer())):
            raise UserError(f"over how many epochs? A noise curriculum is written {kind}:FROM:TO:EPOCHS, not {text!r}")
        return Curriculum(kind, values[0], values[1], max(1, round(given)))
    if len(values) == 3:
        values.append(2 * check_positive("the reference loss", values[2]))
    schedule: NoiseSchedule = _KINDS[kind](*values)
    return schedule
