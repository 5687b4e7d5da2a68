"""What a study is: data. A paper, its variants as recipes, and the numbers it printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tacit.privacy.validation import UserError, nearest
from tacit.training.recipe import Recipe


@dataclass(frozen=True)
class Printed:
    """A number a paper prints: a test accuracy in per cent, at an epsilon, and of what it is.

    >>> Printed(98.2, 3.0, "best of 5 runs").accuracy
    98.2
    """

    accuracy: float
    epsilon: float
    what: str


@dataclass(frozen=True)
class Variant:
    """One way to train: recipe values by section, how many seeds it is worth, what the paper prints for it, and what epsilon it
    claims where another one holds.

    >>> variant = Variant("digits/plain", {"privacy": {"epsilon": 3.0, "batch_size": 256}}, seeds=2)
    >>> variant.recipe(seed=1).seed, variant.group
    (1, 'digits')
    """

    name: str
    values: Mapping[str, Mapping[str, Any]]
    seeds: int = 1
    printed: Printed | None = None
    claimed: float | None = None  # the epsilon that the paper claims for these very settings, if another one holds
    diagnostics: int = 0  # training examples that are looked into after every epoch, for the figures

    @property
    def group(self) -> str:
        """What is compared with each other: the part of the name before the slash."""
        return self.name.partition("/")[0]

    def recipe(self, seed: int, epochs: float | None = None, data_dir: str | None = None) -> Recipe:
        """The recipe of one run, measured after every epoch."""
        values: dict[str, Any] = {section: dict(entries) for section, entries in self.values.items()}
        if epochs is not None:
            values["privacy"]["epochs"] = epochs
        if data_dir is not None:
            values.setdefault("data", {})["directory"] = data_dir
        if self.diagnostics:
            values["diagnostics"] = self.diagnostics
        return Recipe.check({**values, "seed": seed, "evaluate_every": 1}, f"the variant {self.name!r}")


@dataclass(frozen=True)
class Comparison:
    """Two variants whose final accuracies are compared, and what the paper (or `whose` claim it is) says of them; `alike` if it
    says that they are.

    >>> Comparison("mnist/a", "mnist/b", "a is better").better
    'mnist/a'
    """

    better: str
    worse: str
    claim: str
    alike: bool = False
    whose: str = "The paper"


@dataclass(frozen=True)
class Sweep:
    """Final accuracies over one number that the variants vary: by line, the variants and where they lie; the axis is logarithmic.

    >>> Sweep("weight decay", {"before": {"mnist/before-1": 1.0}}).names
    ['mnist/before-1']
    """

    axis: str
    lines: Mapping[str, Mapping[str, float]]

    @property
    def names(self) -> list[str]:
        """All variants."""
        return [name for line in self.lines.values() for name in line]


@dataclass(frozen=True)
class Example:
    """A small experiment that is no classifier's: `run` gives its curves, by panel and line, and sentences on how they end.

    >>> Example("scalar", lambda: {"panels": {}, "sentences": []}).name
    'scalar'
    """

    name: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """A paper reproduced: `comparisons` are put to a test; `curves` are drawn as accuracy against epsilon, and `inside` as what
    happens inside the networks, one picture a group; `surface` are variants drawn as accuracy over what they vary, given by the
    coordinates of each, and `sweeps` those that vary one number; `fits` are variants through whose accuracies, against the
    logarithm of epsilon, a line is laid; `examples` are small experiments of another kind.

    >>> study = Study("toy", "A Paper", [Variant("digits/a", {"privacy": {"epsilon": 3.0, "batch_size": 256}})])
    >>> [variant.name for variant in study.chosen(["digits"])]
    ['digits/a']
    """

    name: str
    paper: str
    variants: Sequence[Variant]
    comparisons: Sequence[Comparison] = ()
    curves: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    surface: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    axes: Sequence[str] = ()  # the names of the surface's coordinates
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    fits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    examples: Sequence[Example] = ()

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        mentioned = [name for comparison in self.comparisons for name in (comparison.better, comparison.worse)]
        mentioned += [
            name for some in (self.curves, self.inside, self.fits) for group in some.values() for name in group
        ]
        mentioned += [*self.surface, *(name for sweep in self.sweeps.values() for name in sweep.names)]
        for name in mentioned:
            if name not in names:
                raise UserError(f"the study {self.name!r} has no variant {name!r}{nearest(name, names)}")
        if len(set(names)) < len(names):
            raise UserError(f"two variants of the study {self.name!r} have the same name")

    def variant(self, name: str) -> Variant:
        """The variant of this name."""
        return next(variant for variant in self.variants if variant.name == name)

    def chosen(self, only: Sequence[str] = ()) -> list[Variant]:
        """The variants whose name, group or pattern (`mnist/*-tanh`) is among these; all without any. Names of examples are
        passed over."""
        examples = [example.name for example in self.examples]
        for pattern in only:
            if pattern in examples:
                continue
            if not any(_fits(variant, pattern) for variant in self.variants):
                known = [variant.name for variant in self.variants]
                groups = list(dict.fromkeys(variant.group for variant in self.variants))
                raise UserError(
                    f"the study {self.name!r} has no variant {pattern!r}{nearest(pattern, known + groups + examples)} "
                    f"(--list shows them; the groups are: {', '.join(groups + examples)})"
                )
        return [variant for variant in self.variants if not only or any(_fits(variant, p) for p in only)]


def _fits(variant: Variant, pattern: str) -> bool:
    return variant.group == pattern or fnmatchcase(variant.name, pattern)


def dp_sgd(
    source: str, model: str, lr: float, batch: int, epochs: float, noise_multiplier: float
) -> dict[str, dict[str, Any]]:
    """The recipe values that papers A and B share: tanh, cross-entropy, SGD with momentum 0.9, clipped at 0.1.

    >>> dp_sgd("mnist", "mnist-cnn", 0.5, 512, 40, 1.23)["privacy"]["clipping_norm"]
    0.1
    """
    return {
        "data": {"source": source},
        "model": {"name": model, "activation": "tanh"},
        "loss": {"name": "cross-entropy"},
        "privacy": {
            "noise_multiplier": noise_multiplier,
            "delta": 1e-5,
            "batch_size": batch,
            "epochs": epochs,
            "clipping_norm": 0.1,
        },
        "optimizer": {"name": "SGD", "lr": lr, "momentum": 0.9},
    }


def merged(base: Mapping[str, Mapping[str, Any]], **sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Recipe values with some exchanged, section by section; another loss or optimizer keeps nothing of the old one.

    >>> merged({"model": {"name": "linear", "activation": "tanh"}}, model={"activation": "relu"})
    {'model': {'name': 'linear', 'activation': 'relu'}}
    """
    found = {section: dict(entries) for section, entries in base.items()}
    for section, entries in sections.items():
        kept = {} if "name" in entries and section in ("loss", "optimizer") else found.get(section, {})
        found[section] = {**kept, **entries}
    return found
