"""From a recipe to a finished run directory, and from a run directory back to its model."""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tacit.data import Dataset, Split, load
from tacit.data.dataset import per_channel
from tacit.learning import (
    WeightDecay,
    make_averaging,
    make_loss,
)
from tacit.models import Pretrained
from tacit.models.standardize import Standardize
from tacit.privacy.driven import LossDriven
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError
from tacit.training.building import (
    build_augmentation,
    build_curriculum,
    build_learning_rate_schedule,
    build_model,
    build_optimizer,
    prepare_network,
)
from tacit.training.checkpoint import check_shapes, load_tensors, load_weights, save_tensors, write_atomically
from tacit.training.dice import DiceTrainer
from tacit.training.directory import RunDirectory, read_metrics
from tacit.training.features import fingerprint, with_features
from tacit.training.recipe import ModelSection, Recipe
from tacit.training.trainer import PrivateTrainer

_MODEL_FORMAT = "tacit-model/1"
LARGEST_EXAMPLE = 2**24
"""Numbers of one example of a stored model: an image of 2,300 pixels a side. A network is tried on one when it is built."""
LARGEST_IMAGE = 2**20
"""The same where features are computed first: their filters are as large as the image, and there are dozens."""


@dataclass(frozen=True)
class FinishedRun:
    """What a run ended with: its plan, its certificate, its figures, one row an epoch, and what it began with."""

    directory: Path
    plan: PrivacyPlan
    certificate: dict[str, Any]
    metrics: list[dict[str, Any]]
    pretrained: Pretrained | None = None


def train(
    recipe: Recipe,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    device: str = "auto",
    physical_batch_size: int | None = None,
    show_training_loss: bool = False,
    progress: bool = False,
    on_start: Callable[[PrivacyPlan, Split], None] | None = None,
    split: Split | None = None,
) -> FinishedRun:
    """Train by a recipe in a run directory, or continue the run that is there.

    `on_start` hears of the plan and the data before the first step. A `split` takes the place of the recipe's data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train(Recipe.load("digits", ["privacy.epochs=2"]), Path(folder) / "run")
    >>> run.certificate["epsilon"] <= 3, run.metrics[-1]["epoch"] > 1
    (True, True)
    """
    directory = RunDirectory(Path(out))
    directory.check(resume=resume)
    split = load_data(recipe) if split is None else split
    where = pick_device(device)
    raw = split.train
    torch.manual_seed(secrets.randbits(63) if recipe.seed is None else recipe.seed)
    whole = build_model(recipe.model, raw.input_shape, len(raw.classes))
    model = whole
    pretrained = prepare_network(recipe.model, whole)
    facts: dict[str, Any] = {"data": raw.name, "model": recipe.model.name}
    if recipe.model.features is not None and recipe.augmentation.names:
        raise UserError(
            "features are computed once, so there is nothing to augment; leave [augmentation] or model.features out"
        )
    if pretrained is not None:
        facts["pretrained"] = pretrained.sha256  # a run does not go on with others
        if progress:
            print(pretrained, file=sys.stderr)
    if recipe.model.features is not None:  # only what comes after the features is trained, on features computed once
        assert isinstance(whole, nn.Sequential)
        split, model = with_features(split, whole[0], progress=progress), whole[1]
        facts["features"] = fingerprint(whole[0])  # a run does not go on with others
    # Convolutions are faster with channels last, and an image of one channel does not say which layout it has.
    model = model.to(where).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    feedback = recipe.feedback_plan(len(split.train))
    plan = recipe.plan(len(split.train), sizes) if feedback is None else feedback.accounted()
    optimizer = build_optimizer(recipe.optimizer, model)
    averaging, augmentation = recipe.averaging, recipe.augmentation
    curriculum = build_curriculum(recipe.curriculum)
    before = 0 if curriculum is None else curriculum.logistic_steps(plan.sample_rate)
    common: dict[str, Any] = {
        "optimizer": optimizer,
        "loss": make_loss(recipe.loss.name, **(recipe.loss.model_extra or {})),
        "delta": recipe.privacy.delta,
        "learning_rate_schedule": build_learning_rate_schedule(recipe.learning_rate_schedule, optimizer, plan, before),
        "averaging": None
        if averaging.name is None
        else make_averaging(averaging.name, **(averaging.model_extra or {})),
        "weight_decay": None
        if not recipe.weight_decay.rate
        else WeightDecay(**recipe.weight_decay.model_dump(exclude_none=True)),
        "seed": recipe.seed,
        "run_directory": directory.path,
        "resume": True,
        "physical_batch_size": physical_batch_size,
        "facts": facts,
    }
    if averaging.name == "tail" and isinstance(plan.noise, LossDriven):
        raise UserError(
            "a filter may stop before the tail of the steps begins; average exponentially (averaging.name=exponential) instead"
        )
    if feedback is not None and show_training_loss:
        raise UserError("error feedback does not show the training loss; leave --show-training-loss out")
    if feedback is not None:
        trainer: PrivateTrainer = DiceTrainer(model, plan=feedback, **common)
    else:
        trainer = PrivateTrainer(
            model,
            plan=plan,
            augmentation=build_augmentation(augmentation, raw) if augmentation.names else None,
            curriculum=curriculum,
            show_training_loss=show_training_loss,
            diagnostics=recipe.diagnostics or 0,
            standardize=next((layer for layer in model.modules() if isinstance(layer, Standardize)), None),
            **common,
        )
    directory.make()
    if not directory.recipe.exists():
        write_atomically(directory.recipe, recipe.to_toml().encode())
    if on_start is not None:
        on_start(plan, split)
    try:
        trainer.fit(
            split.train,
            validate_on=split.test,
            evaluate_every=recipe.evaluate_every,
            progress=progress,
            export=lambda path: save_model(path, whole, recipe.model, raw),
        )
        return FinishedRun(directory.path, plan, trainer.certificate(), read_metrics(directory.metrics), pretrained)
    finally:
        trainer.close()


def load_data(recipe: Recipe) -> Split:
    """The recipe's data, train and test.

    >>> len(load_data(Recipe.load("digits")).train.classes)
    10
    """
    data = recipe.data
    if data.source == "?":
        raise UserError("say which data to train on: --dataset FOLDER (one sub-folder a class) or --dataset FILE.npz")
    return load(
        data.source,
        data_dir=data.directory,
        held_out=data.held_out,
        mean=data.mean,
        std=data.std,
        resize=data.resize,
    )


def pick_device(name: str) -> torch.device:
    """The device of this name; `auto` is an accelerator where there is one.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"there is no device {name!r} here; choose auto, cpu, or one that torch has") from None
    return device


def save_model(path: Path, model: nn.Module, section: ModelSection, data: Dataset) -> None:
    """The weights, with all that is needed to use them: network, shape, classes and the constants of normalisation."""
    facts = {
        "format": _MODEL_FORMAT,
        "model": section.model_dump(exclude={"pretrained", "frozen"}),  # which only training needs
        "input_shape": list(data.input_shape),
        "classes": list(data.classes),
        "mean": list(data.mean),
        "std": list(data.std),
        "scaled_bytes": str(data.images.dtype) == "uint8",
    }
    save_tensors(path, model.state_dict(), facts)


def _checked_facts(facts: dict[str, Any]) -> tuple[ModelSection, tuple[int, ...], list[str]]:
    """What a model file says of its network, as far as it can be what tacit wrote."""
    section, shape, classes = ModelSection(**facts["model"]), facts["input_shape"], facts["classes"]
    if not (isinstance(shape, list) and 1 <= len(shape) <= 3 and all(type(size) is int and size > 0 for size in shape)):
        raise ValueError("its input_shape is none")
    largest = LARGEST_EXAMPLE if section.features is None else LARGEST_IMAGE
    if math.prod(shape) > largest:
        raise ValueError(f"an example has more than {largest} numbers")
    if not (isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes)):
        raise ValueError("its classes are none")
    for name in ("mean", "std"):
        per_channel(name, facts[name], shape[0])
    if type(facts["scaled_bytes"]) is not bool:
        raise ValueError("scaled_bytes is neither true nor false")
    return section, tuple(shape), classes


def load_model(run_directory: str | os.PathLike[str], device: str = "cpu") -> tuple[nn.Module, dict[str, Any]]:
    """The model of a run directory, ready to use, and the facts stored with it."""
    path = RunDirectory(Path(run_directory)).model
    if not path.parent.is_dir():
        raise UserError(f"there is no run directory at {run_directory}")
    if not path.exists():
        raise UserError(
            f"{run_directory} holds no model.safetensors; finish the run with `tacit train --resume --out {run_directory}`"
        )
    tensors, facts = load_tensors(path)
    try:
        section, shape, classes = _checked_facts(facts)
        if section.features is None:  # on no device first: what does not fit the file must not take memory
            with torch.device("meta"):
                check_shapes(build_model(section, shape, len(classes)), tensors, path)
        model = build_model(section, shape, len(classes))
    except KeyError as error:
        raise UserError(f"{path} was not written by tacit: {error} is missing") from None
    except UserError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(f"{path} was not written by tacit: {str(error)[:200]}") from None
    load_weights(model, tensors, path)
    return model.to(pick_device(device)).eval(), facts
