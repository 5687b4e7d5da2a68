"""`tacit train`: train by a recipe and certify the result."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.shared import data_changes, print_json, shown_epsilon
from tacit.privacy.validation import UserError

if TYPE_CHECKING:
    from tacit.data import Split
    from tacit.privacy.plan import PrivacyPlan
    from tacit.training.recipe import Recipe
    from tacit.training.run import FinishedRun

_NAMED = ("digits", "mnist", "fashion-mnist", "cifar10")


def command(
    recipe: str | None = typer.Argument(
        None, metavar="[RECIPE]", help="A name from `tacit recipes`, or a TOML file. Default: digits."
    ),
    dataset: str | None = typer.Option(
        None, "--dataset", metavar="NAME|PATH", help="digits, mnist, fashion-mnist, cifar10, a folder, or an .npz file."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Where a named data set's files lie."),
    epsilon: float | None = typer.Option(None, "--epsilon", "-e", help="The epsilon not to exceed."),
    delta: float | None = typer.Option(None, "--delta", "-d", help="The delta of (epsilon, delta)."),
    epochs: float | None = typer.Option(None, "--epochs", help="Passes over the data."),
    seed: int | None = typer.Option(
        None, "--seed", help="Make the run reproducible, for research. Voids the certificate for release."
    ),
    changes: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change the recipe, such as --set optimizer.lr=0.5; may be repeated."
    ),
    out: Path | None = typer.Option(None, "--out", "-o", metavar="RUN_DIR", help="Where to write; must not exist yet."),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in --out, if there is one."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, mps, ..."),
    physical_batch_size: int | None = typer.Option(
        None, "--physical-batch-size", help="Examples in memory at once; by default as many as fit. Changes no result."
    ),
    show_training_loss: bool = typer.Option(
        False, "--show-training-loss", help="Show it, though it is private. Goes on the certificate and voids it."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object at the end."),
) -> None:
    """Train a classifier privately, and certify what is guaranteed.

    Without arguments: the embedded digits, epsilon 3, under a minute. A run that was interrupted, even by a power failure,
    goes on with --resume --out RUN_DIR; what it had released stays paid for.

    Examples:
      tacit train fashion-mnist --data-dir DIR
      tacit train images --dataset ./scans --set data.resize=32 --epsilon 2 --out runs/scans
    """
    places = data_changes(dataset, data_dir)
    chosen = _chosen(recipe, dataset, places, [*_as_changes(epsilon, delta, epochs, seed), *changes], out, resume)
    directory = out or Path("runs") / f"{_title(recipe, chosen)}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        # Imported only now, so that a wrong recipe is told at once.
        from tacit.training.interruption import Interrupted
        from tacit.training.run import train
    except KeyboardInterrupt:
        raise _interrupted(directory) from None
    try:
        run = train(
            chosen,
            directory,
            resume=resume,
            device=device,
            physical_batch_size=physical_batch_size,
            show_training_loss=show_training_loss,
            progress=not quiet,
            on_start=None if quiet else lambda plan, split: _announce(chosen, plan, split, directory),
        )
        _conclude(run, as_json)
    except (Interrupted, KeyboardInterrupt):
        raise _interrupted(directory) from None


def _interrupted(directory: Path) -> typer.Exit:
    """Say how to go on, and end as a command does that Ctrl-C has ended."""
    if (directory / "ledger.jsonl").exists():
        again = f"tacit train --resume --out {shlex.quote(str(directory))}"
        typer.echo(f"\ninterrupted; everything up to here is saved. Continue: {again}", err=True)
    else:
        typer.echo("\ninterrupted before the first step; nothing was spent", err=True)
    return typer.Exit(130)


def _as_changes(epsilon: float | None, delta: float | None, epochs: float | None, seed: int | None) -> list[str]:
    given = {"privacy.epsilon": epsilon, "privacy.delta": delta, "privacy.epochs": epochs, "seed": seed}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    # An epsilon asked for replaces whatever noise the recipe fixes.
    return changes if epsilon is None else [*changes, "privacy.noise_multiplier=none"]


def _chosen(
    recipe: str | None, dataset: str | None, places: list[str], changes: list[str], out: Path | None, resume: bool
) -> Recipe:
    """The recipe of the arguments or, on resuming, of the run directory, which the arguments may not contradict.

    Where the data lie is not part of what must stay the same.
    """
    from tacit.training.recipe import Recipe

    name = recipe or _recipe_for(dataset)
    if not resume:
        return Recipe.load(name, [*places, *changes])
    if out is None:
        raise UserError("say which run to continue: --resume --out RUN_DIR")
    stored = out / "recipe.toml"
    if not stored.exists():
        if recipe is None and dataset is None:
            raise UserError(
                f"there is no run to continue in {out}; check the name, or say what to train to start one there"
            )
        return Recipe.load(name, [*places, *changes])
    found = Recipe.load(stored, places)
    if (recipe or changes) and Recipe.load(name, [*places, *changes]).model_copy(update={"data": found.data}) != found:
        raise UserError(
            f"the run in {out} was started with other settings; leave them out to continue it, or choose another --out"
        )
    return found


def _recipe_for(dataset: str | None) -> str:
    """The recipe for data whose recipe was not named."""
    if dataset is None or dataset in _NAMED:
        return dataset or "digits"
    if Path(dataset).suffix == ".npz":
        from tacit.data import read_inputs

        return "table" if read_inputs(dataset).ndim == 2 else "images"
    return "images"


def _title(recipe: str | None, chosen: Recipe) -> str:
    """A name for the run directory: the recipe's, or that of the data."""
    return Path(recipe or chosen.data.source).stem.replace(" ", "-") or "run"


def _announce(recipe: Recipe, plan: PrivacyPlan, split: Split, directory: Path) -> None:
    train, delta = split.train, recipe.privacy.delta
    if delta >= 1 / len(train):
        print(
            f"warning: delta {delta:g} is not below 1/n = {1 / len(train):.2g}; such a delta allows one example to be exposed",
            file=sys.stderr,
        )
    print(
        f"{train.name}: {len(train)} training and {len(split.test)} held-out examples; {recipe.model.name}; "
        f"{plan.steps} steps of about {plan.expected_batch_size:g} examples, {_noise(recipe, plan)}\nwriting to {directory}",
        file=sys.stderr,
    )


def _noise(recipe: Recipe, plan: PrivacyPlan) -> str:
    """How much noise there is, and for what."""
    from tacit.privacy.driven import LossDriven
    from tacit.privacy.ledger import SORTED

    wanted, delta = recipe.privacy.epsilon, recipe.privacy.delta
    target = "" if wanted is None else f" for epsilon {wanted:g} at delta {delta:g}"
    if recipe.privacy.error_noise == "theorem":
        target += f" by the authors' formula; epsilon {shown_epsilon(plan.epsilon(delta))} holds"
    if recipe.curriculum.name == SORTED:
        target += ", if batches were sampled; but they come from a sorted pass: no epsilon holds"
    if isinstance(plan.noise, LossDriven):
        return (
            f"noise multiplier from {plan.noise.smallest:.4g} to {plan.noise.largest:.4g} as the released loss falls{target}; "
            "a filter may stop it before the last step"
        )
    return f"noise multiplier {plan.noise_multiplier(0):.4g}{target}"


def _conclude(run: FinishedRun, as_json: bool) -> None:
    certificate = run.certificate
    last: dict[str, Any] = run.metrics[-1] if run.metrics else {}
    if as_json:
        print_json(
            {
                "epsilon": certificate["epsilon"],
                "delta": certificate["delta"],
                "test_accuracy": last.get("test_accuracy"),
                "releases": certificate["releases"],
                "planned_releases": certificate["planned_releases"],
                "valid_for_release": certificate["valid_for_release"],
                "seconds": last.get("seconds"),
                "run_directory": str(run.directory),
            }
        )
        return
    if certificate["releases"] < certificate["planned_releases"]:
        typer.echo(
            f"stopped        after {certificate['releases']} of {certificate['planned_releases']} steps, by its filter"
        )
    typer.echo(f"test accuracy  {last.get('test_accuracy', float('nan')):.2%}")
    typer.echo(f"epsilon        {shown_epsilon(certificate['epsilon'])} at delta {certificate['delta']:g}")
    typer.echo(f"certificate    {run.directory / 'certificate.json'}")
    typer.echo(f"it says        {certificate['statement']}")
    typer.echo(f"check it with  tacit verify {shlex.quote(str(run.directory))}")
