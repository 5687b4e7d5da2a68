"""Attacks on a finished model from outside: who was in the training data, by what the model says of each example.

`loss` believes of examples on which the model is sure that they were in. `lira` (Carlini et al., "Membership Inference Attacks
From First Principles", 2022) asks how sure models are of *this* example that were trained with it, and without: it trains shadow
models by the same recipe, each on a random half of the data, and takes the likelihood ratio of two normal distributions.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tacit.audit.mechanism import seed_of
from tacit.audit.scores import Scores
from tacit.audit.subject import Subject
from tacit.data import Dataset, Split
from tacit.privacy.validation import UserError, check_count
from tacit.training.recipe import Recipe
from tacit.training.run import load_data, load_model, train

_BATCH = 512
_SMALLEST_STD = 1e-3


@dataclass(frozen=True, eq=False)
class Target:
    """The model under attack, all examples it may have seen, and which of them it has.

    `by_coin` says whether each example took part by a fair coin of its own, and `claim` is the epsilon of this very model.
    """

    model: nn.Module
    pool: Dataset
    took_part: NDArray[np.bool_]
    by_coin: bool
    claim: float


def pooled(split: Split) -> tuple[Dataset, NDArray[np.bool_]]:
    """Training and test examples as one data set, and which of them are for training.

    >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0,), (1,))
    >>> pooled(Split(data.take([0, 1]), data.take([2])))[1].tolist()
    [True, True, False]
    """
    parts = (split.train, split.test)
    images, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", "labels"))
    whole = dataclasses.replace(split.train, images=images, labels=labels)
    return whole, np.arange(len(whole)) < len(split.train)


@torch.no_grad()
def confidences(model: nn.Module, data: Dataset) -> NDArray[np.float64]:
    """log(p / (1 - p)) of the probability p that a model gives each example's own class: nearly normal over models.

    >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0,), (1,))
    >>> confidences(nn.Linear(5, 2, bias=False), data)
    array([0., 0., 0.])
    """
    where = next(model.parameters()).device
    found = []
    for start in range(0, len(data), _BATCH):
        inputs, targets = data.batch(slice(start, start + _BATCH), where)
        logits = model.eval()(inputs).double()
        own = logits.gather(1, targets[:, None]).squeeze(1)
        others = logits.scatter(1, targets[:, None], -torch.inf).logsumexp(dim=1)
        found.append((own - others).cpu().numpy())
    return np.concatenate(found)


def target_of(
    subject: Subject, *, seed: int | None, advance: Callable[[float], Any] = lambda trainings: None
) -> Target:
    """The model of the subject's run; for a recipe, one that is trained on a half of all examples, each in by a fair coin."""
    split = load_data(subject.recipe)
    pool, in_training = pooled(split)
    if subject.run_directory is not None:
        model, facts = load_model(subject.run_directory)
        if list(facts["input_shape"]) != list(pool.input_shape) or facts["classes"] != list(pool.classes):
            raise UserError(
                f"{pool.name} is not what the model in {subject.run_directory} was trained on; see --dataset"
            )
        return Target(model, pool, in_training, by_coin=False, claim=subject.claim)
    took_part = np.random.default_rng(seed_of(seed, 0)).random(len(pool)) < 0.5
    model, claim = _trained(subject.recipe, pool, took_part, seed_of(seed, 0))
    advance(1)
    return Target(model, pool, took_part, by_coin=True, claim=claim)


def attack_loss(target: Target) -> Scores:
    """The scores of the simplest attack: those were in of whom the model is sure."""
    return Scores(confidences(target.model, target.pool), target.took_part)


def attack_lira(
    subject: Subject,
    target: Target,
    *,
    shadows: int = 8,
    seed: int | None = None,
    advance: Callable[[float], Any] = lambda trainings: None,
) -> Scores:
    """The scores of the likelihood-ratio attack with so many shadow models, an even number of them.

    Shadows come in pairs, the one with the examples that the other is without, so that each example is in half of them.
    """
    check_pairs(shadows)
    generator = np.random.default_rng(None if seed is None else [seed, 1])
    seen, was_in = [], []
    for pair in range(shadows // 2):
        first = generator.random(len(target.pool)) < 0.5
        for member, half in enumerate((first, ~first)):
            model, _ = _trained(subject.recipe, target.pool, half, seed_of(seed, 1 + 2 * pair + member))
            seen.append(confidences(model, target.pool))
            was_in.append(half)
            advance(1)
    ratios = likelihood_ratios(confidences(target.model, target.pool), np.array(seen), np.array(was_in))
    return Scores(ratios, target.took_part)


def check_pairs(shadows: int) -> int:
    """An even number of shadow models.

    >>> check_pairs(8)
    8
    """
    if check_count("shadows", shadows, at_least=2) % 2:
        raise UserError(f"shadows come in pairs: choose an even number of them, not {shadows}")
    return shadows


def likelihood_ratios(
    found: NDArray[np.float64], seen: NDArray[np.float64], was_in: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """log N(x; mean_in, s_in^2) - log N(x; mean_out, s_out^2) of each example, from shadows' confidences [shadows, examples].

    The means are the example's own; the deviations are of all examples together, as there are too few shadows to tell them apart.

    >>> seen = np.array([[2.0, 0.0], [0.0, 2.0], [2.2, 0.2], [0.2, 2.2]])
    >>> was_in = np.array([[True, False], [False, True], [True, False], [False, True]])
    >>> likelihood_ratios(np.array([2.1, 0.1]), seen, was_in).round(0)
    array([ 100., -100.])
    """

    def side(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
        count = chosen.sum(axis=0)
        mean = np.where(chosen, seen, 0.0).sum(axis=0) / count
        squares = np.where(chosen, (seen - mean) ** 2, 0.0).sum()
        free = max(int((count - 1).sum()), 1)
        return mean, max(float(np.sqrt(squares / free)), _SMALLEST_STD)

    (mean_in, std_in), (mean_out, std_out) = side(was_in), side(~was_in)
    first, second = (found - mean_in) / std_in, (found - mean_out) / std_out
    ratios: NDArray[np.float64] = (second**2 - first**2) / 2 + np.log(std_out / std_in)
    return ratios


def _trained(recipe: Recipe, pool: Dataset, took_part: NDArray[np.bool_], seed: int | None) -> tuple[nn.Module, float]:
    """A model trained by the recipe on these examples, measured on the others, and its epsilon."""
    split = Split(pool.take(np.flatnonzero(took_part)), pool.take(np.flatnonzero(~took_part)))
    own = recipe.model_copy(update={"seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        run = train(own, Path(folder) / "run", split=split)
        model, _ = load_model(run.directory)
    return model, run.certificate["epsilon"]
