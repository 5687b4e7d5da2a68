"""What several commands share: fractions on the command line, and one JSON object as output."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import typer

from tacit.privacy.files import expanded
from tacit.privacy.schedules import Constant, NoiseSchedule, schedule_from_text
from tacit.privacy.validation import UserError, check_positive, check_probability, check_steps
from tacit.privacy.validation import steps_of as steps_of_epochs


def sample_rate_of(text: str) -> float:
    """A sampling rate as a number or a fraction.

    >>> sample_rate_of("600/60000")
    0.01
    """
    numerator, slash, denominator = text.partition("/")
    try:
        rate = float(numerator) / float(denominator) if slash else float(numerator)
    except (ValueError, ZeroDivisionError):
        raise UserError(f"--sample-rate must be a number or a fraction such as 600/60000, not {text!r}") from None
    return check_probability("sample_rate", rate)


def steps_of(steps: int | None, epochs: float | None, sample_rate: float) -> int:
    """The number of steps, given as such or as epochs.

    >>> steps_of(None, 20, 0.01)
    2000
    """
    if (steps is None) == (epochs is None):
        raise UserError("give either --steps or --epochs")
    if steps is not None:
        return check_steps(steps)
    assert epochs is not None
    return steps_of_epochs(epochs, sample_rate)


def numbers_of(option: str, text: str) -> list[float]:
    """Numbers with commas between them.

    >>> numbers_of("--clipping-norms", "1, 0.5")
    [1.0, 0.5]
    """
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"{option} must be numbers with commas between them, such as 1,0.5, not {text!r}") from None


def schedule_of(noise_multiplier: float | None, schedule: str | None, epochs: float | None = None) -> NoiseSchedule:
    """The noise schedule of a run of so many epochs, given as one multiplier or as KIND:FROM:TO.

    >>> schedule_of(1.3, None)
    Constant(noise_multiplier=1.3)
    """
    if (noise_multiplier is None) == (schedule is None):
        raise UserError("give either --noise-multiplier or --schedule")
    if noise_multiplier is not None:
        return Constant(check_positive("noise_multiplier", noise_multiplier))
    assert schedule is not None
    return schedule_from_text(schedule, epochs)


def shown_epsilon(epsilon: float | None) -> str:
    """Epsilon for people: four decimals, or three digits if it is tiny, rounded up so as never to claim less.

    >>> shown_epsilon(2.36509), shown_epsilon(1.2e-7), shown_epsilon(None)
    ('2.3651', '1.2e-07', 'none')
    """
    if epsilon is None or not math.isfinite(epsilon):
        return "none"
    unit = 1e-4 if epsilon >= 0.01 or epsilon == 0 else 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    up = math.ceil(epsilon / unit - 1e-9) * unit
    return f"{up:.4f}" if unit == 1e-4 else f"{up:.3g}"


def equal_words(constant: float) -> str:
    """What is said of the constant of equal epsilon.

    >>> equal_words(1.3806)
    'a constant noise multiplier of 1.3806 would cost as much'
    """
    return f"a constant noise multiplier of {constant:.4f} would cost as much"


def data_changes(dataset: str | None, data_dir: Path | None) -> list[str]:
    """Changes of a recipe that say where the data lie; a path is made absolute, so that it holds in every folder.

    >>> data_changes("mnist", None)
    ['data.source="mnist"']
    """
    changes = []
    if dataset is not None:
        path = expanded(dataset)
        source = str(path.absolute()) if os.path.exists(path) else dataset
        changes.append(f"data.source={json.dumps(source)}")
    if data_dir is not None:
        changes.append(f"data.directory={json.dumps(str(expanded(data_dir).absolute()))}")
    return changes


def print_json(value: dict[str, Any]) -> None:
    """One JSON object; what is infinite is null."""
    typer.echo(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
