"""What a run tells while it runs: epoch, test accuracy, epsilon so far and time left. Nothing private among it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Hears of each step and of each measurement."""

    def step(self, step: int) -> None:
        """So many steps are made."""

    def measured(self, row: Mapping[str, Any]) -> None:
        """An epoch was measured."""


class Silent:
    """Tells nothing."""

    def step(self, step: int) -> None: ...

    def measured(self, row: Mapping[str, Any]) -> None: ...


class _Bar:
    def __init__(self, progress: Progress, steps: int, first: int, epochs: float) -> None:
        self._progress, self._epochs = progress, epochs
        self._task = progress.add_task(f"epoch 0/{epochs:.0f}", total=steps, completed=first, figures="")

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def measured(self, row: Mapping[str, Any]) -> None:
        self._progress.update(
            self._task, description=f"epoch {row['epoch']:.0f}/{self._epochs:.0f}", figures=_figures(row)
        )


class _Lines:
    """For a log file: one line an epoch."""

    def __init__(self, console: Console, epochs: float) -> None:
        self._console, self._epochs = console, epochs

    def step(self, step: int) -> None: ...

    def measured(self, row: Mapping[str, Any]) -> None:
        self._console.print(
            f"epoch {row['epoch']:.0f}/{self._epochs:.0f}  {_figures(row)}  {row['seconds']:.0f} s", highlight=False
        )


@contextmanager
def progress_of(steps: int, *, first: int, epochs: float, show: bool) -> Iterator[Reporter]:
    """A progress bar on a terminal, one line an epoch elsewhere, nothing if not wanted.

    >>> with progress_of(10, first=0, epochs=1, show=False) as reporter:
    ...     reporter.step(1)
    """
    console = Console(file=sys.stderr)
    if not show:
        yield Silent()
    elif not console.is_terminal:
        yield _Lines(console, epochs)
    else:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            yield _Bar(progress, steps, first, epochs)


def _figures(row: Mapping[str, Any]) -> str:
    parts = []
    if row.get("test_accuracy") is not None:
        parts.append(f"test {row['test_accuracy']:.2%}")
    if row.get("training_loss") is not None:
        parts.append(f"training loss {row['training_loss']:.3f} (private)")
    if row.get("epsilon") is not None:
        parts.append(f"epsilon {row['epsilon']:.2f}")
    return "  ".join(parts)
