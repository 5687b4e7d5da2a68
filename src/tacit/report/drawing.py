"""What all pictures share: the colours, a figure, and where one may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tacit.privacy.files import expanded
from tacit.privacy.validation import UserError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by everybody
SUFFIXES = (".png", ".svg")


def new_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its grid of axes, without pyplot, which would choose a backend for the whole process.

    >>> figure, grid = new_figure(1, 2, (7, 4))
    >>> grid.shape
    (1, 2)
    """
    # Imported here: it takes a second, and tables do not need it.
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tacit"  # the same picture is the same file
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as its suffix says; the same figure gives the same file."""
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def picture_path(path: str | Path) -> Path:
    """The path, if a picture can be written there.

    >>> picture_path("noise.jpeg")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: a picture is a file that ends in .png or .svg, not 'noise.jpeg'
    """
    given = expanded(path)
    if given.suffix.lower() not in SUFFIXES or given.is_dir():
        raise UserError(f"a picture is a file that ends in {' or '.join(SUFFIXES)}, not {str(path)!r}")
    if not given.parent.is_dir():
        raise UserError(f"there is no folder {str(given.parent)!r} for the picture {given.name!r}; make it first")
    return given
