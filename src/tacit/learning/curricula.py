"""Sample curricula: which of the examples that were drawn take part in a step, the easy ones first and in the end all of them.

How hard an example is, is its cross-entropy in nats under a model that was released: -log of the probability that this model
gives to its label. An example that the plan's sampler drew takes part only if that is at most the threshold of the step, and the
thresholds are public constants:

- linear        first + (last - first) * epoch / epochs
- step          first
- self-paced    first * growth^epoch

each for so many `epochs`, after which everybody takes part.

Whether an example takes part is thus decided by its own coin, by the example itself and by what is public or released: never by
another example. One that does not take part adds 0 to the sum, which is within every bound. So the sampling rate, the
sensitivity and epsilon are those of the plan without a curriculum. Sorting the examples is another thing: then one more of them
moves all the others, which is why the curriculum of the paper, "Differentially Private Stochastic Gradient Descent with
Curricula", is here only under a name that says what it is.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tacit.privacy.ledger import SORTED
from tacit.privacy.validation import UserError, check_choice, check_positive

CURRICULA = ("linear", "step", "self-paced", SORTED)
DIFFICULTIES = ("network", "logistic")
ORDERS = ("easy", "hard")

# By difficulty and order: where thresholds begin and end, for ten classes. The losses of an untrained network lie around ln 10 =
# 2.3, and those of whole classes above it, whichever the random weights disfavour: a first threshold of 2.3 shuts such classes
# out, nobody teaches the network about them, and their losses run away from any threshold. With 3 (a probability of 5%) nearly
# all take part at first; what the network then learns to find improbable waits. A logistic regression is trained before its
# thresholds are used, and most losses lie below 2 then.
_FIRST_AND_LAST = {
    ("network", "easy"): (3.0, 4.0),
    ("network", "hard"): (1.0, 0.1),
    ("logistic", "easy"): (1.5, 3.0),
    ("logistic", "hard"): (1.0, 0.3),
}
_GROWTH = {"easy": 1.1, "hard": 0.8}
_EPOCHS = 5.0


@dataclass(frozen=True)
class SampleCurriculum:
    """A threshold on difficulty for every step; what is left out gets its default.

    `difficulty` is by the "network" itself, as it is before the step, which costs nothing; or by a "logistic" regression, which
    the plan's first `logistic_epochs` train by its own sampling, clipping and noise. The `order` is "easy" first or, to compare,
    "hard" first: then an example takes part if its difficulty is *at least* the threshold, and thresholds fall.

    "sorted-without-privacy" is the paper's own, for its reproduction alone: no epsilon holds, and the certificate says so.

    *Guarantee.* But for that one: `threshold` is a public function of the epoch, and `admits` looks at each example by itself.

    >>> curriculum = SampleCurriculum("linear", first=2.0, last=4.0, epochs=2)
    >>> [curriculum.threshold(epoch) for epoch in (0, 1, 1.5, 2)]
    [2.0, 3.0, 3.5, inf]
    >>> [SampleCurriculum("self-paced", first=2.0, growth=1.5).threshold(epoch) for epoch in range(3)]
    [2.0, 3.0, 4.5]
    """

    name: str
    difficulty: str | None = None
    order: str | None = None
    first: float | None = None
    last: float | None = None
    growth: float | None = None
    epochs: float | None = None
    logistic_epochs: float | None = None
    logistic_learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_choice("curriculum", self.name, CURRICULA)
        if self.sorted:
            self._take({})
            return
        for key, choices in (("difficulty", DIFFICULTIES), ("order", ORDERS)):
            word = getattr(self, key) or choices[0]
            object.__setattr__(self, key, check_choice(f"curriculum.{key}", word, choices))
        assert self.difficulty is not None
        assert self.order is not None
        first, last = _FIRST_AND_LAST[self.difficulty, self.order]
        defaults = {"first": first, "epochs": _EPOCHS}
        if self.name == "linear":
            defaults["last"] = last
        if self.name == "self-paced":
            defaults["growth"] = _GROWTH[self.order]
        if self.difficulty == "logistic":
            defaults |= {"logistic_epochs": 1.0, "logistic_learning_rate": 2.0}
        self._take(defaults)
        self._check_direction()

    def _take(self, defaults: dict[str, float]) -> None:
        """The options that this curriculum has, checked; any other that was given is refused."""
        allowed = {"name", *defaults} if self.sorted else {"name", "difficulty", "order", *defaults}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in defaults:
                found = defaults[field.name] if value is None else value
                object.__setattr__(self, field.name, check_positive(f"curriculum.{field.name}", found))
            elif value is not None and field.name not in allowed:
                kind = f"{self.name!r}" if self.sorted else f"{self.name!r} by difficulty {self.difficulty!r}"
                taken = ", ".join(sorted(allowed - {"name"})) or "none"
                raise UserError(f"the curriculum {kind} has no option {field.name!r} (it takes: {taken})")

    def _check_direction(self) -> None:
        assert self.first is not None
        rises = self.order == "easy"
        words = ("easy", "at least") if rises else ("hard", "at most")
        for key, bound in (("last", self.first), ("growth", 1.0)):
            value = getattr(self, key)
            if value is not None and (value < bound if rises else value > bound):
                raise UserError(
                    f"with order {words[0]!r}, curriculum.{key} must be {words[1]} {bound:g}, not {value:g}: in the end "
                    "everybody takes part"
                )

    @property
    def sorted(self) -> bool:
        """Whether it is the sorted pass of the paper, without privacy."""
        return self.name == SORTED

    def threshold(self, epoch: float) -> float:
        """Of this moment, in passes over the data since the network began to learn; infinite where everybody takes part.

        >>> SampleCurriculum("step", order="hard", first=1.5).threshold(9)
        -inf
        """
        everybody = -math.inf if self.order == "hard" else math.inf
        if self.sorted or epoch + 1e-9 >= self._number("epochs"):
            return everybody
        first = self._number("first")
        if self.name == "step":
            return first
        if self.name == "linear":
            return first + (self._number("last") - first) * max(epoch, 0.0) / self._number("epochs")
        try:
            return first * math.pow(self._number("growth"), max(epoch, 0.0))
        except OverflowError:
            return everybody

    def admits(self, difficulties: Tensor, threshold: float) -> Tensor:
        """Which examples may take part at this threshold, [examples]; one whose difficulty is not finite may not.

        >>> import torch
        >>> SampleCurriculum("step").admits(torch.tensor([0.1, 3.0, 3.1, float("nan")]), 3.0)
        tensor([ True,  True, False, False])
        """
        within = difficulties >= threshold if self.order == "hard" else difficulties <= threshold
        return within & difficulties.isfinite()

    def logistic_steps(self, sample_rate: float) -> int:
        """How many of the plan's first steps are the logistic regression's.

        >>> SampleCurriculum("step", difficulty="logistic").logistic_steps(0.01), SampleCurriculum("step").logistic_steps(0.01)
        (100, 0)
        """
        return 0 if self.logistic_epochs is None else max(1, round(self.logistic_epochs / sample_rate))

    def to_dict(self) -> dict[str, Any]:
        """Its public constants.

        >>> SampleCurriculum("step").to_dict()
        {'name': 'step', 'difficulty': 'network', 'order': 'easy', 'first': 3.0, 'epochs': 5.0}
        """
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    def _number(self, key: str) -> float:
        return float(getattr(self, key))
