"""`tacit evaluate`: the accuracy of a finished run on its held-out data."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from tacit.cli.shared import data_changes, print_json
from tacit.privacy.validation import UserError


def command(
    run_directory: Path = typer.Argument(..., metavar="RUN_DIR", help="A run directory of `tacit train`."),
    dataset: str | None = typer.Option(
        None, "--dataset", metavar="NAME|PATH", help="Other data than the run's, or your own data if they moved."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Where a named data set's files lie, if they moved."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, mps, ..."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """How accurate is a trained model on held-out data?"""
    from tacit.learning import make_loss
    from tacit.training.evaluation import evaluate
    from tacit.training.recipe import Recipe
    from tacit.training.run import load_data, load_model

    model, facts = load_model(run_directory, device)
    recipe = Recipe.load(run_directory / "recipe.toml", data_changes(dataset, data_dir))
    test = load_data(recipe).test
    if list(test.classes) != facts["classes"] and len(test.classes) == len(facts["classes"]):
        raise UserError(
            f"{test.name} has the classes {', '.join(test.classes)}; the model knows {', '.join(facts['classes'])}: it learned "
            "something else"
        )
    if [*test.input_shape] != facts["input_shape"] or len(test.classes) != len(facts["classes"]):
        raise UserError(
            f"{test.name} has examples of shape {list(test.input_shape)} in {len(test.classes)} classes; the model takes "
            f"{facts['input_shape']} in {len(facts['classes'])}"
        )
    criterion = make_loss(recipe.loss.name, **(recipe.loss.model_extra or {}))
    if hasattr(criterion, "begin_epoch"):  # as it was at the end of the run
        criterion.begin_epoch(max(math.ceil(recipe.privacy.epochs) - 1, 0))
    accuracy, loss = evaluate(model, test, criterion)
    if as_json:
        print_json(
            {"test_accuracy": accuracy, "test_loss": loss, "examples": len(test), "classes": len(facts["classes"])}
        )
    else:
        typer.echo(f"test accuracy {accuracy:.2%} (loss {loss:.4f}) on {len(test)} held-out examples of {test.name}")
