"""`tacit recipes`: what can be trained by name, and the keys of a recipe."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from tacit.privacy.validation import UserError, check_choice

_TOP = "top"  # of the keys that stand above all sections
_WIDTH = 80
# Arguments that are not a recipe's to give: what is trained, where to resume, functions, and other schedules.
_NOT_OPTIONS = {"self", "params", "optimizer", "last_epoch", "scale_fn", "mean", "std"}
_NOT_NAMED = {"Optimizer", "LBFGS", "SparseAdam", "LambdaLR", "MultiplicativeLR", "SequentialLR"}
_OF_THE_RUN = {"T_max", "total_iters", "total_steps"}  # which are as long as the run if left out


def command(
    name: str | None = typer.Argument(
        None,
        metavar="[NAME]",
        help="Show this recipe's TOML instead of the list; with --keys, only this section's keys.",
    ),
    keys: bool = typer.Option(False, "--keys", help="Show every key that a recipe can have."),
    markdown: bool = typer.Option(False, "--markdown", help="With --keys: as the page docs/recipes.md."),
) -> None:
    """List the recipes that come with tacit, show one, or show all keys of a recipe.

    Save one to a file of your own (`tacit recipes mnist > my.toml`), edit it, and train with `tacit train my.toml`.

    Examples:
      tacit recipes --keys privacy
    """
    if keys:
        chapters = reference(name)
        typer.echo(as_markdown(chapters) if markdown else as_text(chapters), nl=False)
        return
    if markdown:
        raise UserError("--markdown is of --keys; write tacit recipes --keys --markdown")
    from tacit.training.recipe import Recipe, named_recipes

    if name is not None:
        typer.echo(Recipe.load(name).to_toml(), nl=False)
        return
    recipes = named_recipes()
    width = max(len(key) for key in recipes)
    for key, description in recipes.items():
        typer.echo(f"{key:<{width}}  {description}")


@dataclass(frozen=True)
class Key:
    """A key of a recipe, in words.

    >>> Key("epochs", "a number above 0", "10", "Passes over the data.").default
    '10'
    """

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class Chapter:
    """A section of a recipe: its keys, and lists of what they can name, each with the options it takes.

    >>> Chapter("averaging", "An average of the weights.", [], {"Averagings": {"tail": "fraction = 0.25"}}).section
    'averaging'
    """

    section: str
    about: str
    keys: Sequence[Key]
    named: Mapping[str, Mapping[str, str]]


def reference(section: str | None = None) -> list[Chapter]:
    """What a recipe can say, by section: all of it, or the keys of one.

    >>> [key.name for key in reference("averaging")[0].keys], reference("averaging")[0].named["Averagings"]["tail"]
    (['name'], 'fraction = 0.25')
    """
    from tacit.training.recipe import Recipe
    from tacit.training.sections import Section

    kinds: dict[str, Any] = {_TOP: Recipe}
    for key, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            kinds[key] = field.annotation
    chosen = list(kinds) if section is None else [check_choice("section", section, kinds)]
    named = _named()
    return [
        Chapter(
            key,
            "Above all sections." if key == _TOP else inspect.cleandoc(kinds[key].__doc__).partition("\n\n>>>")[0],
            _keys(kinds[key], set(kinds)),
            named.get(key, {}),
        )
        for key in chosen
    ]


def as_text(chapters: Sequence[Chapter]) -> str:
    """For a terminal of 80 columns.

    >>> print(as_text([Chapter("data", "Which.", [Key("source", "a word", '"digits"', "A name.")], {})]))
    [data]
    Which.
    <BLANKLINE>
    source = "digits"  (a word)
        A name.
    <BLANKLINE>
    """
    lines: list[str] = []
    for chapter in chapters:
        lines += [f"[{chapter.section}]" if chapter.section != _TOP else chapter.section]
        lines += [*_filled(chapter.about), ""]
        for key in chapter.keys:
            lines += [*_filled(f"{key.name} = {key.default}  ({key.type})", then=8), *_filled(key.description, 4)]
        for what, entries in chapter.named.items():
            lines += ["", f"{what}:"]
            if not any(entries.values()):
                lines += _filled(", ".join(entries), 2)
                continue
            for name, options in entries.items():
                unbroken = options.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
                lines += _filled(f"{name}: {unbroken}" if options else name, 2, then=6)
        lines += [""]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def as_markdown(chapters: Sequence[Chapter]) -> str:
    """The page docs/recipes.md.

    >>> print(as_markdown([Chapter("data", "Which.", [Key("source", "a word", '"digits"', "A name.")], {})]))
    # The keys of a recipe
    ...
    ## [data]
    ...
    | `source` | a word | `"digits"` | A name. |
    <BLANKLINE>
    """
    lines = [
        "# The keys of a recipe",
        "",
        "Made by `tacit recipes --keys --markdown`. A recipe is a TOML file. `tacit train RECIPE --set section.key=value`",
        "changes one key, and `--set section.key=none` takes it out. Where a change gives another name to `optimizer`, `loss`,",
        "`learning_rate_schedule` or `averaging`, the recipe's options of the old one go. Lists of what can be named have the",
        "options of each, with what they are if left out.",
        "",
    ]
    for chapter in chapters:
        lines += [f"## {'Above all sections' if chapter.section == _TOP else f'[{chapter.section}]'}", ""]
        if chapter.section != _TOP:
            lines += [chapter.about, ""]
        lines += ["| key | what it is | if left out | what it says |", "|---|---|---|---|"]
        for key in chapter.keys:
            lines.append(f"| `{key.name}` | {key.type} | `{key.default}` | {_escaped(key.description)} |")
        lines.append("")
        for what, entries in chapter.named.items():
            if not any(entries.values()):
                lines += [f"{what}: {', '.join(f'`{name}`' for name in entries)}.", ""]
                continue
            lines += [f"{what}:", ""]
            lines += [f"- `{name}`" + (f": `{options}`" if options else "") for name, options in entries.items()]
            lines.append("")
    return "\n".join(lines)


def _keys(kind: Any, sections: set[str]) -> list[Key]:
    from tacit.training.sections import type_in_words

    return [
        Key(name, type_in_words(field), _shown(field.default), field.description or "")
        for name, field in kind.model_fields.items()
        if name not in sections
    ]


def _named() -> dict[str, dict[str, dict[str, str]]]:
    """By section: what its keys can name, and the options of each."""
    import torch

    from tacit.learning import ACTIVATIONS, AUGMENTATIONS, AVERAGINGS, CURRICULA, LOSSES, PRIVATE_OPTIMIZERS
    from tacit.models import MODELS

    schedulers = torch.optim.lr_scheduler
    optimizers = {**_classes(torch.optim, torch.optim.Optimizer), **PRIVATE_OPTIMIZERS}
    schedules = {
        name: kind
        for name, kind in _classes(schedulers, schedulers.LRScheduler).items()
        if name.endswith(("LR", "Restarts"))
    }
    return {
        "model": {"Networks": dict.fromkeys(MODELS, ""), "Activations": dict.fromkeys(ACTIVATIONS, "")},
        "loss": {"Losses": _with_options(LOSSES)},
        "optimizer": {"Optimizers": _with_options(optimizers)},
        "learning_rate_schedule": {"Schedules": _with_options(schedules)},
        "averaging": {"Averagings": _with_options(AVERAGINGS)},
        "augmentation": {"Augmentations": _with_options(AUGMENTATIONS)},
        "curriculum": {"Curricula": dict.fromkeys(CURRICULA, "")},
    }


def _classes(module: Any, base: type) -> dict[str, type]:
    return {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and not name.startswith("_") and name not in _NOT_NAMED
    }


def _with_options(kinds: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    return {name: ", ".join(_options(kind)) for name, kind in kinds.items()}


def _options(kind: Callable[..., Any]) -> list[str]:
    found = []
    for name, parameter in inspect.signature(kind).parameters.items():
        if name in _OF_THE_RUN:
            found.append(f"{name} = the run's steps")
        elif parameter.default is inspect.Parameter.empty and name not in _NOT_OPTIONS:
            found.append(f"{name} (needed)")
        elif name not in _NOT_OPTIONS:
            found.append(f"{name} = {_shown(parameter.default)}")
    return found


def _shown(value: Any) -> str:
    """As TOML has it, and short."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:.5g}"


def _filled(text: str, indent: int = 0, then: int | None = None) -> list[str]:
    """The lines of a text, paragraph by paragraph."""
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        first, later = " " * indent, " " * (indent if then is None else then)
        found = textwrap.fill(paragraph, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
        lines += ["", found] if lines else [found]
    return lines


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
