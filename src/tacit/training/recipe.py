"""Recipes: everything that makes a run, in one small TOML file, checked before anything is read or spent.

This file imports neither torch nor the data, so that listing and checking recipes answers at once.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tacit.privacy.beside import Adaptive
from tacit.privacy.clipping import Automatic, Clipping, Flat, Grouped
from tacit.privacy.dice import DicePlan
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.schedules import Constant, NoiseSchedule, schedule_from_text
from tacit.privacy.validation import UserError, check_choice, check_delta, check_positive, nearest

Value = bool | int | float | str | list[int] | list[float] | list[str]


_STATISTICS_NOISE = 8.0  # little is spent on statistics, and less is needed


class Section(BaseModel):
    """A part of a recipe: values of a fixed type under known names, nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(Section):
    """Which examples: a named data set (its files in `directory`, if not in the cache), a folder, or an `.npz` file."""

    source: str = "digits"
    directory: str | None = None
    held_out: float = Field(default=1 / 6, gt=0, lt=1)
    mean: float | list[float] | None = None
    std: float | list[float] | None = None
    resize: int | list[int] | None = None


class ModelSection(Section):
    """Which network, with which activation: a name, `tempered:SCALE:INVERSE_TEMPERATURE:OFFSET`, or a list of one a layer."""

    name: str = "small-cnn"
    activation: str | list[str] = "tanh"
    features: str | None = None  # a fixed map before the network: "scattering"
    # of the features: "group" (the default) and "prior" (by what random images have) are free, "standard" (by statistics of the
    # training set) is paid for; or "none"
    normalization: str | None = None
    # public numbers, for "standard": what an example's vector of means, and of mean squares, by channel, is clipped to, after
    # it was scaled as by "prior"
    normalization_bounds: list[float] | None = None
    # weights to begin with, taken as public: a .safetensors file, or hf://owner/name/file.safetensors
    pretrained: str | None = None
    batch_norm: str | None = None  # of the pre-trained weights: "replace" it by GroupNorm (the default), or "fold" it
    frozen: list[str] | None = None  # name patterns of the network's parameters that stay as they are

    @field_validator("batch_norm")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return None if value is None else check_choice("model.batch_norm", value, ["replace", "fold"])


class PrivacySection(Section):
    """What is guaranteed, and how it is spent.

    Give `epsilon` and the noise is found, or give `noise_multiplier` (or a `schedule` of it) and epsilon follows. Give the
    expected `batch_size`, or the `sample_rate` where the number of examples is not known beforehand.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    schedule: str | None = None
    batch_size: int | None = Field(default=None, ge=1)
    sample_rate: float | None = Field(default=None, gt=0, le=1)
    epochs: float = Field(default=10, gt=0)
    # "fixed"; "automatic" scales every gradient to the norm (with `stability`); "adaptive" follows a `quantile` of the norms
    clipping: str = "fixed"
    stability: float | None = None
    quantile: float | None = None
    clipping_norm: float | list[float] = 1.0  # of each group
    # of parameters that are clipped by themselves: a list of name patterns each, so many of about the same size, or "layers"
    groups: list[list[str]] | int | str | None = None
    noise_shape: list[float] | None = None  # how much noise each group gets, beside the others; or, by name:
    noise_allocation: str | None = None
    # DiceSGD, a baseline for research: what clipping cut off is fed back into later steps, up to this norm of the mean gradient;
    # with noise for which epsilon "holds" (the default), or as the authors' "theorem" has it
    error_norm: float | None = None
    error_noise: str | None = None
    statistics_noise_multiplier: float | None = (
        None  # of the release that model.normalization = "standard" makes; 8 if left out
    )

    @field_validator("epsilon", "noise_multiplier", "statistics_noise_multiplier")
    @classmethod
    def _positive(cls, value: float | None, info: Any) -> float | None:
        return None if value is None else check_positive(info.field_name, value)

    @field_validator("delta")
    @classmethod
    def _delta(cls, value: float) -> float:
        return check_delta(value)

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


class OptimizerSection(WithOptions):
    """Any optimizer of torch.optim by its class name, or PrivateAdam or PrivateRMSprop; other keys are its arguments.

    `layers` has factors of the learning rate, by patterns of parameters' names: `layers = { "stem.*" = 0.1, "head.*" = 2.0 }`.
    """

    name: str = "SGD"
    layers: dict[str, float] | None = None

    @field_validator("layers")
    @classmethod
    def _factors(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        checked = {key: check_positive(f"the factor of {key!r}", factor) for key, factor in (value or {}).items()}
        return checked or None


class AugmentationSection(Section):
    """Other guises of the images at every step: `names` ("flip", "crop", "augmix") in their order, `views` of each example, whose
    gradients are averaged before they are clipped; every other key is an option of one of them."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    names: list[str] = []
    views: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if not self.names and (self.model_extra or self.views > 1):
            raise UserError('names is missing: which augmentation? Such as names = ["flip", "crop"]')
        return self


class AveragingSection(WithOptions):
    """Of the weights along the way, which then are the model: "exponential" (`decay`) or "tail" (`fraction` of the steps)."""


class LearningRateSection(WithOptions):
    """Any schedule of torch.optim.lr_scheduler by its class name, stepped once a step; other keys are its arguments."""


class LossSection(WithOptions):
    """Which loss, one value an example; every other key is one of its options."""

    name: str = "cross-entropy"


class Recipe(Section):
    """Everything that makes a run. A `seed` makes it reproducible, for research, and voids its certificate for release.

    >>> recipe = Recipe.load("digits")
    >>> recipe.data.source, recipe.privacy.delta
    ('digits', 1e-05)
    """

    description: str = ""
    seed: int | None = Field(default=None, ge=0)
    evaluate_every: int | None = Field(default=None, ge=1)  # epochs; as many as cost about 2% of the time if left out
    diagnostics: int | None = Field(
        default=None, ge=1
    )  # training examples that are looked into after every epoch, for research
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    loss: LossSection = LossSection()
    privacy: PrivacySection
    optimizer: OptimizerSection = OptimizerSection()
    learning_rate_schedule: LearningRateSection = LearningRateSection()
    averaging: AveragingSection = AveragingSection()
    augmentation: AugmentationSection = AugmentationSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.batch_norm is not None and self.model.pretrained is None:
            raise UserError("model.batch_norm is of model.pretrained; there is none")
        return self

    @classmethod
    def load(cls, name: str | os.PathLike[str], changes: Iterable[str] = ()) -> Recipe:
        """A named recipe or a TOML file, with `key=value` changes such as `privacy.epochs=20`.

        >>> Recipe.load("digits", ["privacy.epsilon=1.5"]).privacy.epsilon
        1.5
        """
        values, origin = _read(str(name))
        for change in changes:
            _apply(values, change)
        return cls.check(values, origin)

    @classmethod
    def check(cls, values: dict[str, Any], origin: str = "the recipe") -> Recipe:
        """A recipe of these values; an unknown key is an error that suggests the nearest one.

        >>> Recipe.check({"privacy": {"epsilom": 3.0}})
        Traceback (most recent call last):
        ...
        tacit.privacy.validation.UserError: the recipe: unknown key privacy.epsilom; did you mean 'epsilon'?
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(f"{origin}: {_sentence(error)}") from None

    def to_toml(self) -> str:
        """The recipe as the text of a TOML file, without what is not set.

        >>> print(Recipe.check({"privacy": {"epsilon": 3.0, "batch_size": 64}}).to_toml().splitlines()[0])
        [data]
        """
        return tomli_w.dumps(_without_none(self.model_dump(exclude={"description"} if not self.description else None)))

    def plan(self, examples: int, parameters: Mapping[str, int] | None = None) -> PrivacyPlan:
        """The privacy plan of this recipe for so many training examples, its noise calibrated if epsilon is given.

        `parameters` are the sizes of the model's trainable parameters, by name, which groups that are made from them need.

        >>> plan = Recipe.load("digits").plan(examples=1500)
        >>> plan.epsilon(1e-5) <= 3.0
        True
        """
        privacy, plan = self.privacy, self._uncalibrated(examples, parameters)
        if privacy.epsilon is None:
            return plan
        return plan.calibrated(epsilon=privacy.epsilon, delta=privacy.delta)

    def _uncalibrated(self, examples: int, parameters: Mapping[str, int] | None) -> PrivacyPlan:
        privacy = self.privacy
        batch_size = privacy.batch_size if privacy.batch_size is not None else privacy.sample_rate * examples  # type: ignore[operator]
        return PrivacyPlan.for_examples(
            examples,
            batch_size=batch_size,
            epochs=privacy.epochs,
            clipping=self._clipping(parameters),
            noise=self._noise(),
            whole_releases=self._whole_releases(),
        )

    def feedback_plan(self, examples: int) -> DicePlan | None:
        """The plan of a run with error feedback (DiceSGD), if the recipe asks for one.

        >>> Recipe.load("digits").feedback_plan(1500) is None
        True
        >>> changes = ["privacy.error_norm=0.01", "privacy.error_noise=theorem"]
        >>> plan = Recipe.load("digits", changes).feedback_plan(1500)
        >>> round(plan.epsilon_by_theorem(1e-5), 6), plan.epsilon(1e-5) > 3
        (3.0, True)
        """
        privacy = self.privacy
        if privacy.error_norm is None:
            if privacy.error_noise is not None:
                raise UserError("privacy.error_noise is of error feedback; give privacy.error_norm too")
            return None
        noise = check_choice("privacy.error_noise", privacy.error_noise or "holds", ("holds", "theorem"))
        plan = self._uncalibrated(examples, None)
        clipping, size, epsilon = plan.clipping, plan.expected_batch_size, privacy.epsilon
        fits = privacy.schedule is None and not (self.augmentation.names or self.diagnostics or plan.whole_releases)
        if not isinstance(clipping, Flat) or size is None or epsilon is None or not fits:
            raise UserError(
                "error feedback goes with an epsilon, one clipping norm and no schedule, augmentation, diagnostics or statistics"
            )
        found = DicePlan(
            examples=examples,
            batch_size=size,
            steps=plan.steps,
            clipping_norm=clipping.clipping_norm,
            error_norm=privacy.error_norm,
        )
        make = found.by_theorem if noise == "theorem" else found.calibrated
        return make(epsilon=epsilon, delta=privacy.delta)

    def _whole_releases(self) -> list[float]:
        sigma = self.privacy.statistics_noise_multiplier
        if self.model.normalization == "standard":
            return [_STATISTICS_NOISE if sigma is None else sigma]
        if sigma is not None:
            raise UserError('privacy.statistics_noise_multiplier is of model.normalization = "standard"')
        return []

    def _clipping(self, parameters: Mapping[str, int] | None) -> Clipping:
        privacy, norm = self.privacy, self.privacy.clipping_norm
        kind = check_choice("privacy.clipping", privacy.clipping, ("fixed", "automatic", "adaptive"))
        for option, of in (("stability", "automatic"), ("quantile", "adaptive")):
            if getattr(privacy, option) is not None and kind != of:
                raise UserError(f'privacy.{option} is of privacy.clipping = "{of}"')
        if privacy.groups is not None:
            if kind == "adaptive":
                raise UserError(
                    'privacy.clipping = "adaptive" has one norm for the whole gradient; leave privacy.groups out'
                )
            bounds: Flat | Grouped = self._grouped(parameters)
        elif isinstance(norm, list) or privacy.noise_shape is not None or privacy.noise_allocation is not None:
            raise UserError(
                "several clipping norms, a noise_shape or a noise_allocation need privacy.groups, a list of name patterns each"
            )
        elif kind == "adaptive":
            return Adaptive(norm, **({} if privacy.quantile is None else {"quantile": privacy.quantile}))
        else:
            bounds = Flat(norm)
        if kind == "fixed":
            return bounds
        return Automatic(bounds, **({} if privacy.stability is None else {"stability": privacy.stability}))

    def _grouped(self, parameters: Mapping[str, int] | None) -> Grouped:
        groups, norm, shape = self.privacy.groups, self.privacy.clipping_norm, self.privacy.noise_shape
        if not isinstance(groups, list):
            if parameters is None:
                raise UserError(
                    "groups that are made from the model's parameters need the model; give lists of name patterns"
                )
            if isinstance(groups, str):
                check_choice("privacy.groups", groups, ("layers",))
                found = Grouped.by_name(parameters, clipping_norm=1.0)
            else:
                assert groups is not None
                found = Grouped.balanced(parameters, groups=groups, clipping_norm=1.0)
            groups = [list(members) for members in found.groups]
        norms = norm if isinstance(norm, list) else [norm] * len(groups)
        clipping = Grouped(
            tuple(tuple(patterns) for patterns in groups), tuple(norms), None if shape is None else tuple(shape)
        )
        if self.privacy.noise_allocation is None:
            return clipping
        if shape is not None:
            raise UserError("give either noise_shape or noise_allocation, not both")
        if parameters is None:
            raise UserError("a noise_allocation needs the sizes of the model's parameters")
        return clipping.allocated(self.privacy.noise_allocation, parameters)

    def _noise(self) -> NoiseSchedule:
        if self.privacy.schedule is not None:
            return schedule_from_text(self.privacy.schedule)
        return Constant(self.privacy.noise_multiplier or 1.0)


def named_recipes() -> dict[str, str]:
    """The recipes that come with tacit, each with its one-line description.

    >>> "digits" in named_recipes()
    True
    """
    folder = resources.files("tacit") / "recipes"
    found = sorted(item.name for item in folder.iterdir() if item.name.endswith(".toml"))
    return {
        name.removesuffix(".toml"): tomllib.loads((folder / name).read_text()).get("description", "") for name in found
    }


def _read(name: str) -> tuple[dict[str, Any], str]:
    """The values of a named recipe or a file, and what to call it in messages."""
    path = Path(name).expanduser()
    if path.suffix == ".toml" or path.is_file():
        try:
            return tomllib.loads(path.read_text()), str(path)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not a TOML file: {error}") from None
        except OSError as error:
            raise UserError(f"the recipe {path} cannot be read: {error.strerror}") from None
    names = named_recipes()
    if name not in names:
        raise UserError(
            f"unknown recipe {name!r}{nearest(name, names)} (there are: {', '.join(names)}; or name a .toml file of your own, "
            "and your data with --dataset)"
        )
    text = (resources.files("tacit") / "recipes" / f"{name}.toml").read_text()
    return tomllib.loads(text), f"the recipe {name!r}"


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise UserError(f"a change is written key=value, such as privacy.epochs=20, not {change!r}")
    *sections, last = key.strip().split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise UserError(f"{key.strip()!r} cannot be set: {section!r} is a value, not a section")
    if text.strip() in ("none", ""):
        place.pop(last, None)
    else:
        place[last] = _value(text.strip())


def _value(text: str) -> Value:
    """A TOML value, or else the text itself, so that words need no quotes on a command line."""
    try:
        value: Value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    key = ".".join(place)
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{nearest(place[-1], _keys(place[:-1]))}"
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{key}: {message}" if key else message


def _keys(place: Sequence[str]) -> list[str]:
    section: Any = Recipe
    for name in place:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _without_none(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_none(value) for key, value in values.items() if value is not None and value != {}}
    return values
