"""From a recipe to a finished run directory, and from a run directory back to its model."""

from __future__ import annotations

import inspect
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from tacit.data import Dataset, Split, load
from tacit.learning import (
    PRIVATE_OPTIMIZERS,
    Augmentation,
    activation_of,
    make_augmentation,
    make_averaging,
    make_loss,
)
from tacit.models import Pretrained, build, freeze, load_pretrained
from tacit.models.folding import fold_norms
from tacit.models.standardize import Standardize
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError, check_choice, nearest
from tacit.training.checkpoint import load_tensors, load_weights, save_tensors, write_atomically
from tacit.training.directory import RunDirectory, read_metrics
from tacit.training.features import feature_map, fingerprint, with_features
from tacit.training.recipe import AugmentationSection, LearningRateSection, ModelSection, OptimizerSection, Recipe
from tacit.training.trainer import PrivateTrainer

_MODEL_FORMAT = "tacit-model/1"


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
) -> FinishedRun:
    """Train by a recipe in a run directory, or continue the run that is there.

    `on_start` hears of the plan and the data before the first step.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train(Recipe.load("digits", ["privacy.epochs=2"]), Path(folder) / "run")
    >>> run.certificate["epsilon"] <= 3, run.metrics[-1]["epoch"] > 1
    (True, True)
    """
    directory = RunDirectory(Path(out))
    directory.check(resume=resume)
    split = load_data(recipe)
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
    plan = recipe.plan(len(split.train), {name: p.numel() for name, p in model.named_parameters() if p.requires_grad})
    optimizer = build_optimizer(recipe.optimizer, model)
    averaging, augmentation = recipe.averaging, recipe.augmentation
    trainer = PrivateTrainer(
        model,
        optimizer=optimizer,
        loss=make_loss(recipe.loss.name, **(recipe.loss.model_extra or {})),
        plan=plan,
        delta=recipe.privacy.delta,
        learning_rate_schedule=build_learning_rate_schedule(recipe.learning_rate_schedule, optimizer, plan),
        averaging=None if averaging.name is None else make_averaging(averaging.name, **(averaging.model_extra or {})),
        augmentation=build_augmentation(augmentation, raw) if augmentation.names else None,
        seed=recipe.seed,
        run_directory=directory.path,
        resume=True,
        physical_batch_size=physical_batch_size,
        show_training_loss=show_training_loss,
        diagnostics=recipe.diagnostics or 0,
        standardize=next((layer for layer in model.modules() if isinstance(layer, Standardize)), None),
        facts=facts,
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


def build_model(section: ModelSection, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The recipe's network for examples of this shape, not trained: no file is read for it.

    >>> build_model(ModelSection(name="linear"), (5,), 2)[1]
    Linear(in_features=5, out_features=2, bias=True)
    """
    if section.features is None:
        if section.normalization is not None or section.normalization_bounds is not None:
            raise UserError("model.normalization and its bounds are of model.features; there are none")
        return _network(section, input_shape, classes)
    normalization = section.normalization or "group"
    if section.normalization_bounds is not None and normalization != "standard":
        raise UserError('model.normalization_bounds is of model.normalization = "standard"')
    features, shape = feature_map(section.features, normalization, input_shape)
    network = _network(section, shape, classes)
    if normalization == "standard":
        network = nn.Sequential(Standardize(shape[0], section.normalization_bounds), network)
    return nn.Sequential(features, network)


def _network(section: ModelSection, shape: tuple[int, ...], classes: int) -> nn.Module:
    network = build(section.name, shape, classes, activation_of(section.activation))
    if section.batch_norm == "fold":
        fold_norms(network)
    return network


def prepare_network(section: ModelSection, model: nn.Module) -> Pretrained | None:
    """Give the network of a model, which comes after its features, the recipe's pre-trained weights, and freeze what it freezes.

    >>> model = build_model(ModelSection(name="small-cnn"), (1, 8, 8), 2)
    >>> prepare_network(ModelSection(name="small-cnn", frozen=["0.*"]), model)
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['4.weight', '4.bias']
    """
    network = model
    if section.features is not None:
        network = model.get_submodule("1.1" if section.normalization == "standard" else "1")
    pretrained = None
    if section.pretrained is not None:
        pretrained = load_pretrained(network, section.pretrained, batch_norm=section.batch_norm or "replace")
    if section.frozen is not None:
        freeze(network, section.frozen)
    return pretrained


def build_optimizer(section: OptimizerSection, model: nn.Module) -> Optimizer:
    """Any optimizer of torch.optim or of `tacit.learning`, with the section's factors of the learning rate by layer.

    >>> type(build_optimizer(OptimizerSection(name="Adam", lr=0.001), nn.Linear(2, 2))).__name__
    'Adam'
    >>> section = OptimizerSection(name="PrivateAdam", lr=0.5, layers={"bias": 2.0})
    >>> [group["lr"] for group in build_optimizer(section, nn.Linear(2, 2)).param_groups]
    [0.5, 1.0]
    """
    kinds = {
        name: kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and name not in ("Optimizer", "LBFGS", "SparseAdam")
    } | dict(PRIVATE_OPTIMIZERS)
    kind = kinds[check_choice("optimizer", section.name, kinds)]
    options = section.model_extra or {}
    subject = model.parameters() if section.layers is None else _by_layer(model, section.layers)
    optimizer: Optimizer = _made(kind, section.name, "optimizer", options, subject)
    for group in optimizer.param_groups:
        group["lr"] *= group.get("factor", 1.0)
    return optimizer


def build_augmentation(section: AugmentationSection, data: Dataset) -> Augmentation:
    """The recipe's augmentation, for images normalised by this data set's constants.

    >>> data = load_data(Recipe.load("digits")).train
    >>> build_augmentation(AugmentationSection(names=["crop"], padding=1), data)
    Crop(padding=1)
    """
    if len(data.input_shape) != 3:
        raise UserError(f"augmentation is of images, and an example here has the shape {list(data.input_shape)}")
    return make_augmentation(section.names, data.mean, data.std, views=section.views, **(section.model_extra or {}))


def build_learning_rate_schedule(
    section: LearningRateSection, optimizer: Optimizer, plan: PrivacyPlan
) -> lr_scheduler.LRScheduler | None:
    """Any schedule of torch.optim.lr_scheduler, stepped once a step; where it has a length, that is the plan's by default.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    >>> plan = PrivacyPlan(sample_rate=0.1, steps=50)
    >>> build_learning_rate_schedule(LearningRateSection(name="CosineAnnealingLR"), optimizer, plan).T_max
    50
    """
    if section.name is None:
        return None
    kinds = {
        name: kind
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and name.endswith(("LR", "Restarts"))
    }
    check_choice("learning-rate schedule", section.name, kinds)
    options = dict(section.model_extra or {})
    known = inspect.signature(kinds[section.name]).parameters
    for length in ("T_max", "total_iters", "total_steps"):
        if length in known:
            options.setdefault(length, plan.steps)
    factors = [group.get("factor", 1.0) for group in optimizer.param_groups]
    for rate in ("base_lr", "max_lr"):  # set by the schedule where others scale what is there
        if isinstance(options.get(rate), int | float) and len(factors) > 1:
            options[rate] = [options[rate] * factor for factor in factors]
    schedule: lr_scheduler.LRScheduler = _made(
        kinds[section.name], section.name, "learning_rate_schedule", options, optimizer
    )
    return schedule


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
        section, shape = ModelSection(**facts["model"]), tuple(int(size) for size in facts["input_shape"])
        model = build_model(section, shape, len(facts["classes"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} was not written by tacit: {error} is missing") from None
    load_weights(model, tensors, path)
    return model.to(pick_device(device)).eval(), facts


def _by_layer(model: nn.Module, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The model's parameters in groups: those that no pattern matches, then one group a pattern, with its factor."""
    groups: dict[str | None, list[nn.Parameter]] = {None: [], **{pattern: [] for pattern in factors}}
    names = []
    for name, parameter in model.named_parameters():
        found = [pattern for pattern in factors if fnmatchcase(name, pattern)]
        if len(found) > 1:
            raise UserError(
                f"optimizer.layers: {found[0]!r} and {found[1]!r} both match {name!r}; let only one of them"
            )
        groups[found[0] if found else None].append(parameter)
        names.append(name)
    for pattern in factors:
        if not groups[pattern]:
            raise UserError(f"optimizer.layers: {pattern!r} matches no parameter (there are: {', '.join(names)})")
    return [
        {"params": members, "factor": 1.0 if pattern is None else factors[pattern]}
        for pattern, members in groups.items()
        if members
    ]


def _made(kind: Callable[..., Any], name: str, section: str, options: dict[str, Any], subject: Any) -> Any:
    """`kind(subject, **options)`, with wrong options named in a sentence."""
    known = [key for key in inspect.signature(kind).parameters if key not in ("params", "optimizer", "self")]
    for key in options:
        if key not in known:
            raise UserError(f"{name} has no argument {key!r}{nearest(key, known)} (it takes: {', '.join(known)})")
    try:
        return kind(subject, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"{section}: {name} cannot be made: {error}") from None
