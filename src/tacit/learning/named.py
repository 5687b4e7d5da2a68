"""Things that a recipe names, made with the options it gives them; a wrong name or option is told in a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tacit.privacy.validation import UserError, check_choice, nearest

Made = TypeVar("Made")


def make_named(what: str, kinds: Mapping[str, Callable[..., Made]], name: str, options: Mapping[str, Any]) -> Made:
    """The one of these kinds that has this name, with its options.

    >>> make_named("number", {"whole": lambda value=1: value}, "whole", {"valu": 3})
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the number 'whole' has no option 'valu'; did you mean 'value'? (it takes: value)
    """
    kind = kinds[check_choice(what, name, kinds)]
    known = inspect.signature(kind).parameters
    for option, value in options.items():
        if option not in known:
            raise UserError(
                f"the {what} {name!r} has no option {option!r}{nearest(option, known)} (it takes: {', '.join(known) or 'none'})"
            )
        wanted = str if isinstance(known[option].default, str) else (int, float)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UserError(f"{what}.{option} must be {'a word' if wanted is str else 'a number'}, not {value!r}")
    return kind(**options)
