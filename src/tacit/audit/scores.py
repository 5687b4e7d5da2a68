"""Scores of an attack: how strongly it believes of each example that it took part, and whether it did."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.validation import UserError


@dataclass(frozen=True, eq=False)
class Scores:
    """One score an example, and the truth beside it; a higher score says "it took part".

    The order of the examples must say nothing of the truth: `joined` sorts by identity.

    >>> scores = Scores(np.array([2.0, -1.0, 0.5]), np.array([True, False, True]))
    >>> scores.included.tolist(), scores.excluded.tolist()
    ([2.0, 0.5], [-1.0])
    """

    values: NDArray[np.float64]
    took_part: NDArray[np.bool_]

    def __post_init__(self) -> None:
        values, took_part = np.asarray(self.values, dtype=np.float64), np.asarray(self.took_part, dtype=np.bool_)
        if values.ndim != 1 or values.shape != took_part.shape:
            raise UserError(f"there must be one score an example: {values.shape} scores for {took_part.shape} examples")
        if not np.isfinite(values).all():
            raise UserError("the scores of an attack must be finite numbers; one of them is not")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "took_part", took_part)

    @classmethod
    def joined(cls, scores: Mapping[Hashable, float], took_part: Collection[Hashable]) -> Scores:
        """Scores and truth, joined by the identity of each example, whatever order they come in.

        >>> Scores.joined({"b": 0.5, "a": 2.0}, {"a"}).took_part.tolist()
        [True, False]
        """
        unknown = [identity for identity in took_part if identity not in scores]
        if unknown:
            raise UserError(f"the example {unknown[0]!r} took part, but has no score")
        order = sorted(scores, key=repr)
        return cls(np.array([scores[i] for i in order], dtype=float), np.array([i in took_part for i in order]))

    @classmethod
    def together(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several attacks of one kind.

        >>> one = Scores(np.zeros(2), np.array([True, False]))
        >>> len(Scores.together([one, one]))
        4
        """
        return cls(np.concatenate([part.values for part in parts]), np.concatenate([part.took_part for part in parts]))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def included(self) -> NDArray[np.float64]:
        """The scores of those that took part."""
        return self.values[self.took_part]

    @property
    def excluded(self) -> NDArray[np.float64]:
        """The scores of those that did not."""
        return self.values[~self.took_part]

    def halves(self, seed: int = 0) -> tuple[Scores, Scores]:
        """Two halves, by lot: one to choose on, the other to judge by.

        >>> [len(half) for half in Scores(np.arange(5.0), np.arange(5) < 2).halves()]
        [2, 3]
        """
        order = np.random.default_rng(seed).permutation(len(self))
        first, second = order[: len(self) // 2], order[len(self) // 2 :]
        return Scores(self.values[first], self.took_part[first]), Scores(self.values[second], self.took_part[second])


@dataclass(frozen=True, eq=False)
class Roc:
    """True-positive rate over false-positive rate, for every threshold from the highest to the lowest.

    >>> roc = Roc.of(Scores(np.array([3.0, 2.0, 1.0, 0.0]), np.array([True, True, False, False])))
    >>> roc.area, roc.true_positives_at(0.01)
    (1.0, 1.0)
    """

    false_positive_rates: NDArray[np.float64]
    true_positive_rates: NDArray[np.float64]

    @classmethod
    def of(cls, scores: Scores) -> Roc:
        """The curve of these scores; those that are equal are passed together."""
        included, excluded = np.sort(scores.included), np.sort(scores.excluded)
        if not (len(included) and len(excluded)):
            raise UserError("an attack needs examples that took part and examples that did not")
        thresholds = np.unique(scores.values)[::-1]
        true = len(included) - np.searchsorted(included, thresholds)
        false = len(excluded) - np.searchsorted(excluded, thresholds)
        return cls(np.append(0.0, false / len(excluded)), np.append(0.0, true / len(included)))

    @property
    def area(self) -> float:
        """The area under the curve: 0.5 for guessing, 1 for an attack that is never wrong."""
        widths = np.diff(self.false_positive_rates)
        heights = (self.true_positive_rates[1:] + self.true_positive_rates[:-1]) / 2
        return float(widths @ heights)

    def true_positives_at(self, false_positive_rate: float) -> float:
        """The share of those that took part which is found while at most so large a share of the others is accused."""
        return float(self.true_positive_rates[self.false_positive_rates <= false_positive_rate].max())
