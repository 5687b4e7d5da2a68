"""Recipes: everything that makes a run, in one small TOML file, checked before anything is read or spent.

This file imports neither torch nor the data, so that listing and checking recipes answers at once.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from tacit.privacy.beside import Adaptive
from tacit.privacy.clipping import Automatic, Clipping, Flat, Grouped
from tacit.privacy.dice import DicePlan
from tacit.privacy.files import expanded, read_whole
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.schedules import Constant, NoiseSchedule, schedule_from_text
from tacit.privacy.validation import UserError, check_choice, nearest
from tacit.training.changes import changed, toml_values
from tacit.training.sections import (
    AugmentationSection,
    AveragingSection,
    CurriculumSection,
    DataSection,
    LearningRateSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    PrivacySection,
    Section,
    WeightDecaySection,
    Whole,
    WithOptions,
    kinds_of,
    listed,
    shown,
)

__all__ = [
    "AugmentationSection",
    "AveragingSection",
    "CurriculumSection",
    "DataSection",
    "LearningRateSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "PrivacySection",
    "Recipe",
    "WeightDecaySection",
    "named_recipes",
]

LARGEST_RECIPE = 2**20
"""Bytes of a recipe: a thousand times as many as any has."""
_STATISTICS_NOISE = 8.0  # little is spent on statistics, and less is needed


class Recipe(Section):
    """Everything that makes a run. A `seed` makes it reproducible, for research, and voids its certificate for release.

    >>> recipe = Recipe.load("digits")
    >>> recipe.data.source, recipe.privacy.delta
    ('digits', 1e-05)
    """

    description: str = Field(default="", description="One line for whoever lists recipes.")
    seed: Whole | None = Field(
        default=None,
        ge=0,
        description="Makes the run reproducible, for research, and voids its certificate for release.",
    )
    evaluate_every: Whole | None = Field(
        default=None,
        ge=1,
        description="So many epochs lie between two measurements of the test accuracy. If left out, as many as keep them to "
        "about 2% of the time.",
    )
    diagnostics: Whole | None = Field(
        default=None,
        ge=1,
        description="So many training examples are looked into after every epoch, for research; voids the "
        "certificate for release.",
    )
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    loss: LossSection = LossSection()
    privacy: PrivacySection
    optimizer: OptimizerSection = OptimizerSection()
    learning_rate_schedule: LearningRateSection = LearningRateSection()
    weight_decay: WeightDecaySection = WeightDecaySection()
    averaging: AveragingSection = AveragingSection()
    augmentation: AugmentationSection = AugmentationSection()
    curriculum: CurriculumSection = CurriculumSection()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model.batch_norm is not None and self.model.pretrained is None:
            raise UserError("model.batch_norm is of model.pretrained; there is none")
        if self.weight_decay.rate and (self.optimizer.model_extra or {}).get("weight_decay"):
            raise UserError("give either weight_decay.rate or optimizer.weight_decay, not both")
        return self

    @classmethod
    def load(cls, name: str | os.PathLike[str], changes: Iterable[str] = ()) -> Recipe:
        """A named recipe or a TOML file, with `key=value` changes such as `privacy.epochs=20`.

        Another `optimizer.name` takes out the file's options of the optimizer, and so with losses, averagings and schedules of
        the learning rate; options among the changes stay.

        >>> Recipe.load("digits", ["privacy.epsilon=1.5"]).privacy.epsilon
        1.5
        """
        values, origin = _read(str(name))
        named = {key: field.annotation for key, field in cls.model_fields.items()}
        with_options = {
            key: kind for key, kind in named.items() if isinstance(kind, type) and issubclass(kind, WithOptions)
        }
        return cls.check(changed(values, changes, with_options), origin)

    @classmethod
    def of(cls, content: bytes, origin: str = "the recipe") -> Recipe:
        """A recipe from the bytes of a TOML file.

        >>> Recipe.of(b"privacy = { epsilon = 3, batch_size = 64 }").privacy.batch_size
        64
        """
        return cls.check(_values(content, origin), origin)

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
            raise UserError(f"{origin}: {_sentence(error, values)}") from None

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
        self._check_feedback()
        plan, epsilon = self._uncalibrated(examples, None), privacy.epsilon
        clipping, size = plan.clipping, plan.expected_batch_size
        assert isinstance(clipping, Flat)
        assert size is not None
        assert epsilon is not None
        found = DicePlan(
            examples=examples,
            batch_size=size,
            steps=plan.steps,
            clipping_norm=clipping.clipping_norm,
            error_norm=privacy.error_norm,
        )
        make = found.by_theorem if noise == "theorem" else found.calibrated
        return make(epsilon=epsilon, delta=privacy.delta)

    def _check_feedback(self) -> None:
        privacy = self.privacy
        against = {
            "privacy.groups": privacy.groups is not None,
            "privacy.noise_shape": privacy.noise_shape is not None,
            "privacy.noise_allocation": privacy.noise_allocation is not None,
            "several norms in privacy.clipping_norm": isinstance(privacy.clipping_norm, list),
            f'privacy.clipping = "{privacy.clipping}"': privacy.clipping != "fixed",
            "privacy.schedule": privacy.schedule is not None,
            "privacy.noise_multiplier": privacy.noise_multiplier is not None,
            "augmentation.names": bool(self.augmentation.names),
            "curriculum.name": self.curriculum.name is not None,
            "diagnostics": self.diagnostics is not None,
            'model.normalization = "standard"': self.model.normalization == "standard",
        }
        for key, given in against.items():
            if given:
                raise UserError(
                    f"error feedback does not go with {key}; leave one of them out "
                    "(error feedback goes with an epsilon and one fixed clipping norm)"
                )

    def _whole_releases(self) -> list[float]:
        sigma = self.privacy.statistics_noise_multiplier
        if self.model.normalization == "standard":
            return [_STATISTICS_NOISE if sigma is None else sigma]
        if sigma is not None:
            raise UserError('privacy.statistics_noise_multiplier is of model.normalization = "standard"')
        return []

    def _clipping(self, parameters: Mapping[str, int] | None) -> Clipping:
        privacy, norm = self.privacy, self.privacy.clipping_norm
        kind = privacy.clipping
        for option, of in (("stability", "automatic"), ("quantile", "adaptive")):
            if getattr(privacy, option) is not None and kind != of:
                raise UserError(f'privacy.{option} is of privacy.clipping = "{of}"')
        given = ("groups", "noise_shape", "noise_allocation")
        of_groups = [f"privacy.{key}" for key in given if getattr(privacy, key) is not None]
        if kind == "adaptive" and (of_groups or isinstance(norm, list)):
            mend = f"leave {of_groups[0]} out" if of_groups else "give one privacy.clipping_norm"
            raise UserError(
                f'privacy.clipping = "adaptive" has one norm for the whole gradient and no allocation of its noise; {mend}'
            )
        if privacy.groups is not None:
            bounds: Flat | Grouped = self._grouped(parameters)
        elif isinstance(norm, list) or of_groups:
            raise UserError(
                "several clipping norms, a noise_shape or a noise_allocation need privacy.groups: a number of groups, "
                '"layers", or a list of name patterns each'
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
            return schedule_from_text(self.privacy.schedule, self.privacy.epochs)
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
    path = expanded(name)
    if path.suffix == ".toml" or os.path.isfile(path):
        try:
            content = read_whole(path, largest=LARGEST_RECIPE)
        except (OSError, ValueError) as error:
            raise UserError(f"the recipe {path} cannot be read: {getattr(error, 'strerror', error)}") from None
        return _values(content, str(path)), str(path)
    names = named_recipes()
    if name not in names:
        raise UserError(
            f"unknown recipe {name!r}{nearest(name, names)} (there are: {', '.join(names)}; or name a .toml file of your own, "
            "and your data with --dataset)"
        )
    text = (resources.files("tacit") / "recipes" / f"{name}.toml").read_text()
    return tomllib.loads(text), f"the recipe {name!r}"


def _values(content: bytes, origin: str) -> dict[str, Any]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not a TOML file: {error}") from None
    return toml_values(text, origin)


def _sentence(error: ValidationError, values: Any) -> str:
    """The first thing that is wrong, in one sentence that names the key and the value."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    message = str(first["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if first["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(place)}{nearest(place[-1], _keys(place[:-1]))}"
    keys, kind = _field(place)
    key, value = ".".join(keys), _at(values, keys)
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "value_error":
        said = not key or message.startswith((key + " ", f"unknown {key} "))
        return message if said else f"{key}: {message}"
    if isinstance(kind, type) and issubclass(kind, Section):
        some = next(iter(kind.model_fields))
        like = "" if not isinstance(value, str) else f"={json.dumps([value]) if some == 'names' else value}"
        return f"{key} is a section, not a value such as {shown(value)}; set a key of it, such as {key}.{some}{like}"
    kinds = kinds_of(kind)
    if len(kinds) == 1 and not first["type"].endswith(("_type", "_parsing", "_from_float")):
        return f"{key}: {message}, not {shown(value)}"
    such_as = ', such as { "stem.*" = 0.1 }' if kinds == ["table of numbers"] else ""
    if kinds == ["list of words"] and isinstance(value, str):
        such_as = f", such as {json.dumps([value])}"
    return f"{key}: input should be a valid {listed(kinds)}{such_as}, not {shown(value)}"


def _field(place: Sequence[str]) -> tuple[list[str], Any]:
    """The key that an error is about, and its type: what comes after it in `place` is inside of the value, or pydantic's own."""
    kind: Any = Recipe
    keys: list[str] = []
    for name in place:
        if not (isinstance(kind, type) and issubclass(kind, Section) and name in kind.model_fields):
            break
        keys.append(name)
        kind = kind.model_fields[name].annotation
    return keys, kind


def _at(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else getattr(values, key, None)
    return values


def _keys(place: Sequence[str]) -> list[str]:
    section: Any = Recipe
    for name in place:
        section = section.model_fields[name].annotation
    return list(section.model_fields)


def _without_none(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _without_none(value) for key, value in values.items() if value is not None and value != {}}
    return values
