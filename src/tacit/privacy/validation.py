"""Errors a user can mend, and the checks that raise them.

Every message names the parameter, the value it had and what is allowed, so that the same mistake reads the same in
the recipe, the API and the command line.
"""

from __future__ import annotations

import difflib
import math
import unicodedata
from collections.abc import Iterable
from numbers import Integral, Real

LONGEST_SENTENCE = 2000
"""Characters of a `UserError`: what is wrong with a value of a million digits can be said without repeating them."""


class UserError(ValueError):
    """Something the user can mend: one sentence that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2. What is long is shortened in its middle, and what
    would command a terminal is shown instead (see `visible`), since the sentence may quote a file that somebody else wrote.

    >>> raise UserError("epsilon must be above 0, not -1.0")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: epsilon must be above 0, not -1.0
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(_shortened(visible(_shortened(sentence))))  # what is made visible is longer


def _shortened(sentence: str) -> str:
    half = LONGEST_SENTENCE // 2
    return sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:half]} ... {sentence[-half:]}"


def visible(text: str) -> str:
    """Control and formatting characters as their numbers: what nobody sees cannot deceive a reader, or command a terminal.

    >>> print(visible("abc\\x1b[2Jdef"))
    abc\\u001b[2Jdef
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return f"\\u{ord(character):04x}" if hidden else character


def check_positive(name: str, value: float) -> float:
    """A finite number above zero, as a Python float.

    >>> check_positive("clipping_norm", 1)
    1.0
    """
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise UserError(f"{name} must be a finite number above 0, not {value!r}")
    return number


def check_finite(name: str, value: float) -> float:
    """A finite number, as a Python float.

    >>> check_finite("loss", -1)
    -1.0
    """
    number = _number(name, value)
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, not {value!r}")
    return number


def check_not_negative(name: str, value: float) -> float:
    """A finite number of at least zero, as a Python float.

    >>> check_not_negative("noise_multiplier", 0)
    0.0
    """
    number = _number(name, value)
    if not (math.isfinite(number) and number >= 0):
        raise UserError(f"{name} must be a finite number of at least 0, not {value!r}")
    return number


def check_probability(name: str, value: float) -> float:
    """A sampling rate: above 0, at most 1.

    >>> check_probability("sample_rate", 0.5)
    0.5
    """
    number = _number(name, value)
    if not 0 < number <= 1:
        raise UserError(f"{name} must be above 0 and at most 1, not {value!r}")
    return number


def check_delta(value: float) -> float:
    """The delta of (epsilon, delta): strictly between 0 and 1.

    >>> check_delta(1e-5)
    1e-05
    """
    number = _number("delta", value)
    if not 0 < number < 1:
        raise UserError(f"delta must lie strictly between 0 and 1, not {value!r}; 1e-5 is usual")
    return number


def check_count(name: str, value: int, *, at_least: int = 1) -> int:
    """A whole number of at least `at_least`.

    >>> check_count("steps", 100)
    100
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise UserError(f"{name} must be a whole number of at least {at_least}, not {value!r}")
    return int(value)


MOST_STEPS = 10**15
"""Of a run: more than any, and few enough that an accountant's floats still count them one by one."""


def check_steps(value: int) -> int:
    """The number of steps of a run.

    >>> check_steps(10**18)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: steps must be at most 1e+15, not 1e+18
    """
    steps = check_count("steps", value)
    if steps > MOST_STEPS:
        raise UserError(f"steps must be at most {MOST_STEPS:g}, not {_number('steps', steps):g}")
    return steps


def steps_of(epochs: float, sample_rate: float) -> int:
    """The number of steps of so many passes over the data, at least one.

    >>> steps_of(20, 0.01)
    2000
    """
    steps = check_positive("epochs", epochs) / check_probability("sample_rate", sample_rate)
    if steps > MOST_STEPS:
        raise UserError(
            f"{epochs:g} epochs at a sample_rate of {sample_rate:g} are more than {MOST_STEPS:g} steps; take fewer"
        )
    return max(1, round(steps))


def check_choice(name: str, value: str, choices: Iterable[str]) -> str:
    """One of a few names; a near miss is answered with the nearest.

    >>> check_choice("accountant", "pdl", ["pld", "rdp"])
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: unknown accountant 'pdl'; did you mean 'pld'? (there are: pld, rdp)
    """
    names = list(choices)
    if value in names:
        return value
    raise UserError(f"unknown {name} {value!r}{nearest(value, names)} (there are: {', '.join(names)})")


def nearest(value: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' with the nearest of the names, or nothing when none is near.

    >>> nearest("epsilom", ["epsilon", "delta"])
    "; did you mean 'epsilon'?"
    """
    close = difflib.get_close_matches(str(value), list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{name} must be a number that fits a float, not one of so many digits") from None
