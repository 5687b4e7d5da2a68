"""Several privately trained models that decide together, and what all of them cost.

A vote is computed from released models alone, so it costs nothing beyond them; but they all learned from the same examples, and
what each of them cost adds up (`tacit.privacy.composed_certificate`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.data import Dataset
from tacit.privacy.certificate import HELD_OUT
from tacit.privacy.composition import composed_certificate
from tacit.privacy.validation import UserError, check_choice, check_not_negative
from tacit.training.directory import RunDirectory, read_metrics
from tacit.training.prediction import as_trained_on, probabilities
from tacit.training.recipe import Recipe
from tacit.training.run import load_data, load_model

VOTINGS = ("probabilities", "votes")
_WEIGHTED = (
    "the weights are the members' accuracies on held-out examples: exact figures, which this guarantee does not protect; and on "
    "those same examples the ensemble looks a little better than it is"
)


@dataclass(frozen=True)
class Member:
    """One model of an ensemble, with the facts stored beside it and the weight of its vote.

    >>> Member(Path("runs/a"), nn.Linear(2, 2), {"classes": ["a", "b"]}, 0.5).weight
    0.5
    """

    run_directory: Path
    model: nn.Module
    facts: dict[str, Any]
    weight: float


@dataclass(frozen=True)
class Judgement:
    """How often an ensemble, and each of its members, is right, and what must be said with these figures.

    >>> Judgement(0.9, (0.8, 0.85), 300, ("exact figures",)).accuracy
    0.9
    """

    accuracy: float
    member_accuracies: tuple[float, ...]
    examples: int
    caveats: tuple[str, ...]


class Ensemble:
    """Models of the same classes and shape of examples that vote, each with its weight (they sum to 1).

    `voting` is over "probabilities", sum_k w_k * softmax(z_k), or by "votes", in which each member gives all of its weight to the
    class it finds most probable.

    >>> facts = {"input_shape": [2], "classes": ["a", "b"], "mean": [0.0], "std": [1.0], "scaled_bytes": False}
    >>> sure, unsure = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> for model, weight in ((sure, [[4.0, 0.0], [0.0, 0.0]]), (unsure, [[0.0, 0.0], [1.0, 0.0]])):
    ...     _ = model.weight.data.copy_(torch.tensor(weight))
    >>> members = [Member(Path("a"), sure, facts, 1.0), Member(Path("b"), unsure, facts, 2.0)]
    >>> Ensemble(members).predict(torch.tensor([[1.0, 0.0]]))
    tensor([[0.5066, 0.4934]], dtype=torch.float64)
    >>> Ensemble(members, voting="votes").predict(torch.tensor([[1.0, 0.0]]))
    tensor([[0.3333, 0.6667]], dtype=torch.float64)
    """

    def __init__(
        self, members: Iterable[Member], *, voting: str = "probabilities", caveats: Sequence[str] = ()
    ) -> None:
        self.members, self.caveats = tuple(members), tuple(caveats)
        self.voting = check_choice("voting", voting, VOTINGS)
        if not self.members:
            raise UserError("an ensemble needs at least one run directory")
        first = self.members[0]
        for member in self.members[1:]:
            for what in ("classes", "input_shape", "scaled_bytes"):
                if member.facts[what] != first.facts[what]:
                    raise UserError(
                        f"{first.run_directory} and {member.run_directory} cannot vote together: {what} is "
                        f"{first.facts[what]} there and {member.facts[what]} here"
                    )
        weights = [check_not_negative("each weight", member.weight) for member in self.members]
        if sum(weights) <= 0:
            raise UserError("at least one weight must be above 0")
        self.weights = tuple(weight / sum(weights) for weight in weights)

    @classmethod
    def load(
        cls,
        run_directories: Sequence[str | os.PathLike[str]],
        weights: str | Sequence[float] | None = None,
        *,
        voting: str = "probabilities",
        device: str = "cpu",
    ) -> Ensemble:
        """The models of these run directories, weighted equally, by numbers, or by "accuracy": each one's last on held-out data.

        Accuracies on held-out data are exact figures, which no guarantee protects; `caveats` then say so.
        """
        directories = [Path(directory) for directory in run_directories]
        loaded = [load_model(directory, device) for directory in directories]
        numbers: Sequence[float]
        if weights is None:
            numbers = [1.0] * len(directories)
        elif isinstance(weights, str):
            check_choice("weights", weights, ["accuracy"])
            numbers = [_last_accuracy(directory) for directory in directories]
        else:
            numbers = weights
        if len(numbers) != len(directories):
            raise UserError(f"there are {len(numbers)} weights for {len(directories)} runs; give one each")
        members = [
            Member(directory, model, facts, weight)
            for directory, (model, facts), weight in zip(directories, loaded, numbers, strict=True)
        ]
        return cls(members, voting=voting, caveats=[_WEIGHTED] if isinstance(weights, str) else [])

    def predict(self, examples: Dataset | Tensor | np.ndarray) -> Tensor:
        """What the ensemble gives each class of each example, [examples, classes]; a row sums to 1, its largest is the answer.

        Examples are as a data set stores them, not normalised: bytes 0..255, or floating-point numbers. Each member normalises
        them by its own constants.
        """
        return self._combined(self._opinions(examples))

    def evaluate(self, dataset: Dataset) -> Judgement:
        """How often the ensemble and its members are right on these examples, exactly. On training data, that is private."""
        classes = len(self.members[0].facts["classes"])
        if len(dataset.classes) != classes:
            raise UserError(f"{dataset.name} has {len(dataset.classes)} classes; the ensemble knows {classes}")
        opinions, labels = self._opinions(dataset), torch.from_numpy(np.array(dataset.labels))

        def accuracy(scores: Tensor) -> float:
            return int((scores.argmax(dim=1) == labels).sum()) / len(labels)

        return Judgement(
            accuracy=accuracy(self._combined(opinions)),
            member_accuracies=tuple(accuracy(opinion) for opinion in opinions),
            examples=len(labels),
            caveats=(HELD_OUT, *self.caveats),
        )

    def certificate(self, delta: float | None = None) -> dict[str, Any]:
        """What is guaranteed of all members together: `tacit.privacy.composed_certificate` of their runs."""
        return composed_certificate([member.run_directory for member in self.members], delta)

    def _opinions(self, examples: Dataset | Tensor | np.ndarray) -> Tensor:
        """Each member's probabilities, [members, examples, classes]."""
        name = examples.name if isinstance(examples, Dataset) else "the batch"
        if isinstance(examples, Dataset):
            images = examples.images
        else:
            images = torch.as_tensor(examples).detach().cpu().numpy()
            images = images.astype(np.float32) if np.issubdtype(images.dtype, np.floating) else images
        found = [probabilities(m.model, as_trained_on(images, m.facts, name)) for m in self.members]
        return torch.stack(found).double()

    def _combined(self, opinions: Tensor) -> Tensor:
        if self.voting == "votes":
            opinions = nn.functional.one_hot(opinions.argmax(dim=2), opinions.shape[2]).double()
        return torch.einsum("m,mec->ec", torch.tensor(self.weights, dtype=torch.float64), opinions)


def held_out_of(run_directories: Sequence[str | os.PathLike[str]], changes: Sequence[str] = ()) -> Dataset:
    """The examples that all these runs held out; runs on other data, or on another part of them, are refused.

    What one run holds out another may have trained on, and then an exact accuracy would tell of training examples. `changes` of
    the recipes say where the data lie now.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "recipe.toml").write_text(Recipe.load("digits").to_toml())
    ...     len(held_out_of([folder]))
    302
    """
    directories = [Path(directory) for directory in run_directories]
    found = [Recipe.load(directory / "recipe.toml").data for directory in directories]
    for directory, data in zip(directories, found, strict=True):
        for what in ("source", "held_out", "resize"):
            ours, theirs = getattr(found[0], what), getattr(data, what)
            if ours != theirs:
                raise UserError(
                    f"{directories[0]} and {directory} were trained on different data: data.{what} is {ours} there and {theirs} "
                    "here; an ensemble is of runs on the same data"
                )
    return load_data(Recipe.load(directories[0] / "recipe.toml", changes)).test


def _last_accuracy(run_directory: Path) -> float:
    rows = read_metrics(RunDirectory(run_directory).metrics)
    measured = [row["test_accuracy"] for row in rows if row.get("test_accuracy") is not None]
    if not measured:
        raise UserError(f"{run_directory} has no test accuracy in its metrics.jsonl; give the weights as numbers")
    return float(measured[-1])
