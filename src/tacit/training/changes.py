"""Changes of a recipe, as a command line has them: `key=value`, one after the other."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from tacit.privacy.validation import UserError
from tacit.training.sections import WithOptions

MOST_NESTED = 16
"""Levels of a recipe's values, of which a sound one has three: what reads them goes down level by level."""

_MOST_DOTS = 100

Change = tuple[list[str], str]  # where, and the text of the value

_PART = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[^\s.='"]+)"""  # of a key: in quotes as in TOML, or bare
_CHANGE = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=(.*)", re.DOTALL)


def changed(
    values: Mapping[str, Any], changes: Iterable[str], named: Mapping[str, type[WithOptions]]
) -> dict[str, Any]:
    """The values of a recipe with these changes, of which later ones win; `none` takes a value out.

    Where a section that is `named` gets another name, the options that stood beside the old one go, since they were its own;
    those among the changes stay.

    >>> from tacit.training.sections import OptimizerSection
    >>> recipe = {"optimizer": {"name": "SGD", "lr": 0.3, "momentum": 0.9}}
    >>> changed(recipe, ["optimizer.lr=0.01", "optimizer.name=Adam"], {"optimizer": OptimizerSection})
    {'optimizer': {'name': 'Adam', 'lr': 0.01}}
    >>> changed({}, ['optimizer.layers."stem.*"=0.1'], {})
    {'optimizer': {'layers': {'stem.*': 0.1}}}
    """
    parsed = [_parsed(change) for change in changes]
    start, end = copy.deepcopy(dict(values)), _applied(values, parsed)
    for section, kind in named.items():
        found = start.get(section)
        if isinstance(found, dict) and _name(found, kind) != _name(end.get(section), kind):
            start[section] = {key: value for key, value in found.items() if key in kind.model_fields}
    return _applied(start, parsed)


def _name(section: Any, kind: type[WithOptions]) -> Any:
    default = kind.model_fields["name"].default
    return section.get("name", default) if isinstance(section, dict) else default


def toml_values(text: str, what: str) -> dict[str, Any]:
    """The values of a text in TOML; `what` it is, for the error.

    >>> toml_values("a = [1, 2]", "the recipe")
    {'a': [1, 2]}
    """
    if any(piece.count(".") > _MOST_DOTS for piece in re.split(r"[=,{}\[\]\n]", text)):
        # the parser takes time with the square of their number
        raise UserError(f"{what} has a name of more than {_MOST_DOTS} parts; no recipe has")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is not a TOMLDecodeError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{what} is not a TOML file: {reason}") from None
    _check_values(values, what)
    return values


def _check_values(values: Any, what: str) -> None:
    """Neither nested deeper than any recipe, nor whole numbers that TOML does not have."""
    inside = [values]
    for _ in range(MOST_NESTED):
        inside = [item for value in inside if isinstance(value, dict | list) for item in _items(value)]
        for value in inside:
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise UserError(f"{what} holds a whole number of more than 64 bits; write a smaller one")
    if inside:
        raise UserError(f"{what} is nested deeper than {MOST_NESTED} levels; no recipe is")


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _parsed(change: str) -> Change:
    match = _CHANGE.fullmatch(change)
    if match is None:
        raise UserError(f"a change is written key=value, such as privacy.epochs=20, not {change!r}")
    parts = re.findall(_PART, match[1])
    try:
        keys = [next(iter(tomllib.loads(f"{part} = 0"))) if part[0] in "\"'" else part for part in parts]
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the key of {change!r} cannot be read: {error}") from None
    if len(keys) > MOST_NESTED:
        raise UserError(f"the key of {change!r} is nested deeper than {MOST_NESTED} levels; no recipe is")
    return keys, match[2].strip()


def _applied(values: Mapping[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    result = copy.deepcopy(dict(values))
    for (*sections, last), text in changes:
        place = result
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"{'.'.join([*sections, last])!r} cannot be set: {section!r} is a value, not a section")
        if text in ("none", ""):
            place.pop(last, None)
        else:
            place[last] = _value(text)
    return result


def _value(text: str) -> Any:
    """A TOML value, or else the text itself, so that words need no quotes on a command line."""
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    _check_values(values, f"the value {text!r}")
    return values["value"]
