"""`tacit data`: which data sets there are, and fetching one ahead of time."""

from __future__ import annotations

from pathlib import Path

import typer


def command(
    name: str | None = typer.Argument(None, metavar="[NAME]", help="Fetch this data set now, if it is not here yet."),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Where its files lie, if not in the cache."),
) -> None:
    """List the data sets known by name, or fetch one.

    Your own data need no name: `tacit train --dataset FOLDER` for one sub-folder a class (PNG, JPEG), or an .npz file
    with x and y.
    """
    from tacit.data import catalogue, is_present, load

    if name is not None:
        split = load(name, data_dir=data_dir)
        shape = " x ".join(str(size) for size in split.train.input_shape)
        typer.echo(f"{name}: {len(split.train)} training and {len(split.test)} test examples, {shape}")
        return
    for entry in catalogue():
        here = "here" if is_present(entry.name, data_dir=data_dir) else "not here yet"
        shape = " x ".join(str(size) for size in entry.shape)
        typer.echo(f"{entry.name:<14} {entry.train:>6} + {entry.test:>5}  {shape:<12} {here:<13} {entry.description}")
