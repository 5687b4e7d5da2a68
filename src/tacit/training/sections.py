"""The sections of a recipe: every key with its type, its default and what it says.

`tacit recipes --keys` and docs/recipes.md are made from what stands here. Like `recipe`, this file does not import torch.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from tacit.privacy.validation import UserError, check_choice, check_delta, check_positive, nearest


def _as_whole(value: Any) -> Any:
    """1e3 is a float in TOML, and a whole number all the same."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Number = Annotated[float, Field(strict=True)]  # strict: true is not 1, and "1" is not; 1 is a float
Whole = Annotated[int, Field(strict=True), BeforeValidator(_as_whole)]


class Section(BaseModel):
    """A part of a recipe: values of a fixed type under known names, nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class WithOptions(Section):
    """The name of something; every other key is one of its options."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str | None = None

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        options = self.model_extra or {}
        for key, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{key} must be a finite number, not {value}")
        if options and self.name is None:
            raise UserError(f"name is missing: {next(iter(options))} is an argument of what?")
        return self


class DataSection(Section):
    """Which examples, and how they are prepared."""

    source: str = Field(
        default="digits",
        description="A named data set (digits, mnist, fashion-mnist, cifar10), a folder with one sub-folder of images a class, "
        "or an .npz file.",
    )
    directory: str | None = Field(default=None, description="Where a named data set's files lie, if not in the cache.")
    held_out: Number = Field(
        default=1 / 6,
        gt=0,
        lt=1,
        description="The part that is kept for testing, of data that come without a test set.",
    )
    mean: Number | list[Number] | None = Field(
        default=None,
        description="What is subtracted from the inputs: one public number, or one a channel. If left out, the published one "
        "of a benchmark, 0.5 for bytes of your own, 0 for floats.",
    )
    std: Number | list[Number] | None = Field(
        default=None,
        description="What the inputs are divided by afterwards: one public number, or one a channel. If left out, the "
        "published one of a benchmark, 0.5 for bytes of your own, 1 for floats.",
    )
    resize: Whole | list[Whole] | None = Field(
        default=None,
        description="The size in pixels that every image is brought to: of both sides, or [height, width].",
    )


class ModelSection(Section):
    """Which network, on which features, and what it begins with."""

    name: str = Field(default="small-cnn", description="The network, one of those below.")
    activation: str | list[str] = Field(
        default="tanh",
        description="One of the names below, tempered:SCALE:INVERSE_TEMPERATURE:OFFSET, or a list of one a hidden layer.",
    )
    features: str | None = Field(default=None, description='A fixed map before the network: "scattering".')
    normalization: str | None = Field(
        default=None,
        description='Of the features: "group" (what is taken if this is left out) and "prior" (by what random images have) '
        'are free, "standard" (by statistics of the training set) is paid for; or "none", whose quotes a command line needs '
        "too: --set 'model.normalization=\"none\"'.",
    )
    normalization_bounds: list[Number] | None = Field(
        default=None,
        description='Two public numbers, for normalization "standard": what the vector of an example\'s means by channel, and '
        'that of its mean squares, is clipped to, after it was scaled as by "prior". If left out, 2 and 8 times the root of '
        "the number of channels.",
    )
    pretrained: str | None = Field(
        default=None,
        description="Weights to begin with, taken as public: a .safetensors file, or hf://owner/name/file.safetensors.",
    )
    batch_norm: str | None = Field(
        default=None,
        description='Of a network with pre-trained weights: "replace" BatchNorm by GroupNorm (what is done if this is left '
        'out), or "fold" it into the layer before.',
    )
    frozen: list[str] | None = Field(
        default=None, description="Name patterns of the network's parameters that stay as they are."
    )

    @field_validator("batch_norm")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return None if value is None else check_choice("model.batch_norm", value, ["replace", "fold"])


class LossSection(WithOptions):
    """Which loss, one value an example; every other key is one of its options."""

    name: str = Field(default="cross-entropy", description="One of the losses below.")


class PrivacySection(Section):
    """What is guaranteed, and how it is spent.

    Give `epsilon` and the noise is found, or give `noise_multiplier` (or a `schedule` of it) and epsilon follows. Give the
    expected `batch_size`, or the `sample_rate` where the number of examples is not known beforehand.
    """

    epsilon: Number | None = Field(default=None, description="The epsilon not to exceed; the noise is found for it.")
    delta: Number = Field(default=1e-5, description="The delta of (epsilon, delta), strictly between 0 and 1.")
    noise_multiplier: Number | None = Field(
        default=None,
        description="The noise's standard deviation as a multiple of the sensitivity, in the place of epsilon.",
    )
    schedule: str | None = Field(
        default=None,
        description="How the noise multiplier goes, scaled as a whole if epsilon is given: constant:SIGMA; linear:FROM:TO, "
        "step by step; exponential, piecewise, quadratic or logarithmic:FROM:TO, or linear:FROM:TO:EPOCHS, one "
        "level an epoch; table:SIGMA,SIGMA,..., each for an equal part of the steps; or "
        "loss-driven:FROM:TO:REFERENCE, which follows the released loss from FROM, at the "
        "reference loss and above, to TO at a loss of 0. REFERENCE may be left out: it is ln 10, the loss of a "
        "guess among ten classes. Each example's loss is cut at twice that.",
    )
    batch_size: Whole | None = Field(default=None, ge=1, description="The expected size of a batch.")
    sample_rate: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The probability with which each example takes part in a step, for batch_size.",
    )
    epochs: Number = Field(default=10, gt=0, description="Passes over the data, on average.")
    clipping: str = Field(
        default="fixed",
        description='"fixed" cuts every gradient to clipping_norm; "automatic" scales every gradient to it (with stability); '
        '"adaptive" begins with it and follows a quantile of the norms.',
    )
    stability: Number | None = Field(
        default=None,
        description='Of clipping "automatic": a gradient is scaled to clipping_norm * norm / (norm + stability). If left out, '
        "0.01.",
    )
    quantile: Number | None = Field(
        default=None,
        description='Of clipping "adaptive": the part of the gradients that the norm is to leave whole, strictly between 0 '
        "and 1. If left out, 0.5.",
    )
    clipping_norm: Number | list[Number] = Field(
        default=1.0, description="What an example's gradient is clipped to: one number, or one for each of the groups."
    )
    groups: Whole | Literal["layers"] | list[list[str]] | None = Field(
        default=None,
        description='Parameters that are clipped by themselves: so many groups of about the same size, "layers" for one a '
        'layer, or a list of name patterns for each: [["stem.*"], ["head.*"]].',
    )
    noise_shape: list[Number] | None = Field(
        default=None, description="How much noise each group gets, beside the others: one number for each."
    )
    noise_allocation: str | None = Field(
        default=None,
        description='The same by name: "equal", "bound" (by the clipping norms), "dimension" (for the least noise in all) or '
        '"depth" (less from group to group).',
    )
    error_norm: Number | None = Field(
        default=None,
        description="DiceSGD, a baseline for research: what clipping cut off is fed back into later steps, up to this norm of "
        "the mean gradient.",
    )
    error_noise: str | None = Field(
        default=None,
        description='Of error_norm: noise for which epsilon "holds" (what is taken if this is left out), or as the authors\' '
        '"theorem" has it.',
    )
    statistics_noise_multiplier: Number | None = Field(
        default=None, description='Of the release that model.normalization "standard" makes. If left out, 8.'
    )

    @field_validator("epsilon", "noise_multiplier", "statistics_noise_multiplier")
    @classmethod
    def _positive(cls, value: float | None, info: Any) -> float | None:
        return None if value is None else check_positive(info.field_name, value)

    @field_validator("delta")
    @classmethod
    def _delta(cls, value: float) -> float:
        return check_delta(value)

    @field_validator("clipping")
    @classmethod
    def _clipping(cls, value: str) -> str:
        return check_choice("privacy.clipping", value, ("fixed", "automatic", "adaptive"))

    @field_validator("groups", mode="before")
    @classmethod
    def _groups(cls, value: Any) -> Any:
        value = _as_whole(value)
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        patterns = isinstance(value, list) and all(
            isinstance(group, list) and all(isinstance(pattern, str) for pattern in group) for group in value
        )
        if value is None or number or patterns or value == "layers":
            return value
        raise UserError(
            'privacy.groups must be a number of groups, "layers", or a list of name patterns each such as '
            f'[["stem.*"], ["head.*"]], not {shown(value)}{nearest(str(value), ["layers"])}'
        )

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySection:
        if (self.epsilon is None) == (self.noise_multiplier is None) and not (self.schedule and self.epsilon is None):
            raise UserError(
                "give either epsilon (and the noise is found) or noise_multiplier, not both or neither; "
                "--set privacy.epsilon=none takes the recipe's out"
            )
        if self.schedule is not None and self.noise_multiplier is not None:
            raise UserError("give either schedule or noise_multiplier, not both")
        if (self.batch_size is None) == (self.sample_rate is None):
            raise UserError(
                "give either batch_size or sample_rate, not both or neither; "
                "--set privacy.batch_size=none takes the recipe's out"
            )
        return self


class OptimizerSection(WithOptions):
    """Which optimizer; every other key is one of its arguments."""

    name: str = Field(
        default="SGD", description="Any optimizer of torch.optim by its class name, PrivateAdam or PrivateRMSprop."
    )
    layers: dict[str, Number] | None = Field(
        default=None,
        description='Factors of the learning rate, by patterns of parameters\' names: { "stem.*" = 0.1, "head.*" = 2.0 }. On a '
        "command line, a pattern with a dot stands in quotes: --set 'optimizer.layers.\"0.*\"=0.1'.",
    )

    @field_validator("layers")
    @classmethod
    def _factors(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        checked = {key: check_positive(f"the factor of {key!r}", factor) for key, factor in (value or {}).items()}
        return checked or None

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        for key in ("lr", "momentum", "weight_decay"):  # which torch takes for 1 if they are true
            value = (self.model_extra or {}).get(key)
            if isinstance(value, bool):
                raise UserError(f"{key} must be a number, not {shown(value)}")
        return self


class WeightDecaySection(Section):
    """Decay of the weights: in each example's gradient before it is clipped, or of the weights by themselves."""

    rate: Number | None = Field(
        default=None, ge=0, description="So many times the weights are added to a gradient. If left out, there is none."
    )
    when: str | None = Field(
        default=None,
        description='"before-clipping", in each example\'s gradient (what is done if this is left out), or "after-noise": the '
        "weights are multiplied by 1 - learning rate * rate in every step.",
    )
    parameters: list[str] | None = Field(
        default=None,
        description='Name patterns of the parameters that decay, such as ["*weight"]. If left out, all do.',
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.when is not None:
            check_choice("weight_decay.when", self.when, ("before-clipping", "after-noise"))
        if self.rate is None and (self.when is not None or self.parameters is not None):
            raise UserError("weight_decay.rate is missing: how much decay?")
        return self


class LearningRateSection(WithOptions):
    """How the learning rate goes, a step at a time; every other key is one of the schedule's arguments."""

    name: str | None = Field(
        default=None, description="Any schedule of torch.optim.lr_scheduler by its class name, stepped once a step."
    )


class AveragingSection(WithOptions):
    """An average of the weights along the way, which then is the model; every other key is one of its options."""

    name: str | None = Field(
        default=None, description='"exponential" (with decay) or "tail" (the last fraction of the steps).'
    )


class CurriculumSection(Section):
    """Which of the examples that were drawn take part in a step: easy ones first, and in the end all. Epsilon stays the same.

    An example takes part if its difficulty, a cross-entropy in nats, is at most the threshold of the step.
    """

    name: str | None = Field(
        default=None,
        description='How the threshold goes: "linear" from first to last, "step" (first), "self-paced" (first * growth^epoch), '
        'each for so many epochs. "sorted-without-privacy" is a paper\'s own, for its reproduction: the examples sorted by the '
        "loss of a logistic regression, in every epoch alike; no epsilon holds, and the certificate says so.",
    )
    difficulty: str | None = Field(
        default=None,
        description='By the "network" itself, as it is before the step (what is taken if this is left out), or by a "logistic" '
        "regression, which the first epochs of the plan train privately.",
    )
    order: str | None = Field(
        default=None,
        description='"easy" first (what is taken if this is left out), or "hard": then a difficulty must be at least the '
        "threshold, and thresholds fall.",
    )
    first: Number | None = Field(
        default=None,
        description="The first threshold. If left out, 3 by the network, 1.5 by a logistic regression, and 1 for hard first: for "
        "ten classes, where a guess has a loss of 2.3. By the network, keep it above that: an untrained one disfavours whole "
        "classes.",
    )
    last: Number | None = Field(
        default=None,
        description="Of linear: the threshold at the end of its epochs. If left out, 4 (for hard first 0.1) by the network, 3 "
        "(for hard first 0.3) by a logistic regression.",
    )
    growth: Number | None = Field(
        default=None,
        description="Of self-paced: the factor of the threshold from epoch to epoch. If left out, 1.1, or 0.8 for hard first.",
    )
    epochs: Number | None = Field(
        default=None,
        description="Of the network: so long there is a threshold, then everybody takes part. If left out, 5.",
    )
    logistic_epochs: Number | None = Field(
        default=None,
        description="Of difficulty logistic: so many of the plan's epochs are the logistic regression's. If left out, 1.",
    )
    logistic_learning_rate: Number | None = Field(
        default=None,
        description="Of difficulty logistic: its learning rate, for gradients measured in clipping norms. If left out, 2.",
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        given = self.model_dump(exclude_none=True)
        if given and self.name is None:
            raise UserError(f'name is missing: {next(iter(given))} is of which curriculum? Such as name = "linear"')
        return self


class AugmentationSection(Section):
    """Other guises of the images at every step; every other key is an option of one of those that are named."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    names: list[str] = Field(default=[], description="Which, in their order, of those below.")
    views: Whole = Field(
        default=1,
        ge=1,
        le=64,
        description="So many of each example, whose gradients are averaged before they are clipped.",
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not self.names and (self.model_extra or self.views > 1):
            raise UserError('names is missing: which augmentation? Such as names = ["flip", "crop"]')
        return self


def kinds_of(annotation: Any) -> list[str]:
    """What a value of this type may be, in plain words without an article; None, which is left out, is none of them.

    >>> kinds_of(Number | list[Number] | None), kinds_of(Literal["layers"]), kinds_of(dict[str, float])
    (['number', 'list of numbers'], ['"layers"'], ['table of numbers'])
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kinds_of(inside[0])
    if origin in (Union, types.UnionType):
        return [kind for part in inside if part is not type(None) for kind in kinds_of(part)]
    if origin is Literal:
        return [f'"{word}"' for word in inside]
    if origin in (list, dict):
        several = ["lists" + kind[4:] if kind.startswith("list ") else kind + "s" for kind in kinds_of(inside[-1])]
        return [f"{'list' if origin is list else 'table'} of {' or '.join(several)}"]
    return [{float: "number", int: "whole number", str: "word"}[annotation]]


def type_in_words(field: FieldInfo) -> str:
    """What a key takes, with its limits.

    >>> type_in_words(PrivacySection.model_fields["sample_rate"])
    'a number, above 0 and at most 1'
    >>> type_in_words(PrivacySection.model_fields["groups"])
    'a whole number, "layers" or a list of lists of words'
    """
    kinds = [kind if kind.startswith('"') else f"a {kind}" for kind in kinds_of(field.annotation)]
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = [
        f"{word} {getattr(limit, name)}"
        for name, word in words.items()
        for limit in field.metadata
        if hasattr(limit, name)
    ]
    return listed(kinds) + (f", {' and '.join(limits)}" if limits else "")


def listed(kinds: Sequence[str]) -> str:
    """Alternatives, as they are said.

    >>> listed(["red", "green", "blue"])
    'red, green or blue'
    """
    *most, last = kinds
    return f"{', '.join(most)} or {last}" if most else last


def shown(value: Any) -> str:
    """A value in a message, as a recipe has it where Python's word is another.

    >>> shown(True), shown("one")
    ('true', "'one'")
    """
    try:
        return str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:
        return "a number of so many digits"
