"""`tacit predict`: the classes of new images or vectors."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from tacit.privacy.validation import visible


def command(
    run_directory: Path = typer.Argument(..., metavar="RUN_DIR", help="A run directory of `tacit train`."),
    files: list[Path] = typer.Argument(..., metavar="FILE...", help="Images (PNG, JPEG), or .npz files with x."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, mps, ..."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: a list of predictions a file."),
) -> None:
    """Which class does the model give new examples?

    One line an example: the file (with the row, for an .npz), the class, and its probability. Images of another size than the
    model's are resized.
    """
    from tacit.training.prediction import predict

    predictions = predict(run_directory, files, device=device)
    if as_json:
        typer.echo(json.dumps({"predictions": [vars(prediction) for prediction in predictions]}))
        return
    for prediction in predictions:
        # A tab parts them, so there is none in a name.
        example, label = visible(prediction.example), visible(prediction.label)
        typer.echo(f"{example}\t{label}\t{prediction.probability:.4f}")
