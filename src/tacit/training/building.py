"""What a recipe names, made: networks with their features and pre-trained weights, optimizers, schedules, augmentation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from tacit.data import Dataset
from tacit.learning import PRIVATE_OPTIMIZERS, Augmentation, SampleCurriculum, activation_of, make_augmentation
from tacit.learning.augmentation import check_options
from tacit.models import Pretrained, build, freeze, load_pretrained
from tacit.models.folding import fold_norms
from tacit.models.published import PUBLISHED
from tacit.models.standardize import Standardize
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError, check_choice, nearest
from tacit.training.features import feature_map
from tacit.training.recipe import (
    AugmentationSection,
    CurriculumSection,
    LearningRateSection,
    ModelSection,
    OptimizerSection,
)


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
        if pretrained.naming in PUBLISHED and section.activation != "silu":
            raise UserError(
                f"the weights of {pretrained.naming} were learned with SiLU, and model.activation is {section.activation!r}; set "
                "model.activation=silu"
            )
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


def _by_layer(model: nn.Module, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """The parameters that learn, in groups: those that no pattern matches, then one group a pattern, with its factor."""
    groups: dict[str | None, list[nn.Parameter]] = {None: [], **{pattern: [] for pattern in factors}}
    names, frozen = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen.append(name)
            continue
        found = [pattern for pattern in factors if fnmatchcase(name, pattern)]
        if len(found) > 1:
            raise UserError(
                f"optimizer.layers: {found[0]!r} and {found[1]!r} both match {name!r}; let only one of them"
            )
        groups[found[0] if found else None].append(parameter)
        names.append(name)
    for pattern in factors:
        if groups[pattern]:
            continue
        still = [name for name in frozen if fnmatchcase(name, pattern)]
        if still:
            raise UserError(
                f"optimizer.layers: {pattern!r} matches only parameters that are frozen ({', '.join(still)}); "
                "leave the pattern out, or do not freeze them"
            )
        raise UserError(f"optimizer.layers: {pattern!r} matches no parameter (there are: {', '.join(names)})")
    return [
        {"params": members, "factor": 1.0 if pattern is None else factors[pattern]}
        for pattern, members in groups.items()
        if members
    ]


def build_augmentation(section: AugmentationSection, data: Dataset) -> Augmentation:
    """The recipe's augmentation, for images normalised by this data set's constants.

    >>> from tacit.data import load
    >>> data = load("digits").train
    >>> build_augmentation(AugmentationSection(names=["crop"], padding=1), data)
    Crop(padding=1)
    """
    if len(data.input_shape) != 3:
        raise UserError(f"augmentation is of images, and an example here has the shape {list(data.input_shape)}")
    options = section.model_extra or {}
    check_options(section.names, options)  # a recipe's mean or std would else be taken for the data's
    return make_augmentation(section.names, data.mean, data.std, views=section.views, **options)


def build_curriculum(section: CurriculumSection) -> SampleCurriculum | None:
    """The recipe's sample curriculum, if it names one.

    >>> build_curriculum(CurriculumSection(name="linear", epochs=3)).threshold(1.5)
    3.5
    """
    return None if section.name is None else SampleCurriculum(**section.model_dump(exclude_none=True))


def build_learning_rate_schedule(
    section: LearningRateSection, optimizer: Optimizer, plan: PrivacyPlan, before: int = 0
) -> lr_scheduler.LRScheduler | None:
    """Any schedule of torch.optim.lr_scheduler, stepped once a step; where it has a length, that is the plan's by default, less
    the steps `before` the network's first.

    It is tried out on these steps first, as what fails in the middle of a run has cost privacy by then.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    >>> plan = PrivacyPlan(sample_rate=0.1, steps=50)
    >>> build_learning_rate_schedule(LearningRateSection(name="CosineAnnealingLR"), optimizer, plan).T_max
    50
    """
    if section.name is None:
        return None
    steps = max(plan.steps - before, 1)
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
            options.setdefault(length, steps)
    factors = [group.get("factor", 1.0) for group in optimizer.param_groups]
    for rate in ("base_lr", "max_lr"):  # set by the schedule where others scale what is there
        if isinstance(options.get(rate), int | float) and len(factors) > 1:
            options[rate] = [options[rate] * factor for factor in factors]
    make = partial(_made, kinds[section.name], section.name, "learning_rate_schedule", options)
    _try_out(section.name, make, optimizer, steps)
    schedule: lr_scheduler.LRScheduler = make(optimizer)
    return schedule


class _Still(Optimizer):
    """An optimizer with the groups of another, and their options, that moves nothing: for a schedule to be tried out on."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        own = [{"params": [nn.Parameter(torch.zeros(1))], **copy.deepcopy(group)} for group in groups]
        super().__init__(own, copy.deepcopy(optimizer.defaults))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing; torch's schedules want it to be called."""


def _try_out(name: str, make: Callable[[Optimizer], Any], optimizer: Optimizer, steps: int) -> None:
    """Take the steps of a plan with a schedule like the one to be made, far from the optimizer that it is made for."""
    try:
        still = _Still(optimizer)
        schedule = make(still)
        for _ in range(steps):
            still.step()
            schedule.step()
    except UserError:
        raise
    except Exception as error:  # of whatever kind: a schedule's options are checked by its arithmetic alone
        reason = str(error) or type(error).__name__
        raise UserError(
            f"learning_rate_schedule: {name} does not last for the {steps} steps of the plan with these options: {reason}"
        ) from None


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
