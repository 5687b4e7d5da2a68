"""`tacit reproduce`: a paper's experiments again, with what really holds beside what was claimed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tacit.privacy.files import expanded
from tacit.privacy.validation import UserError, check_count, check_positive

if TYPE_CHECKING:
    from tacit.studies import Study
    from tacit.studies.runner import Task
    from tacit.studies.study import Example


def command(
    study: str | None = typer.Argument(None, metavar="[STUDY]", help="A name from --list."),
    show: bool = typer.Option(False, "--list", help="Show the studies, or the variants of one, and stop."),
    only: list[str] = typer.Option(
        [],
        "--only",
        metavar="V",
        help="These variants alone: a group such as mnist, a name, or a pattern; may be repeated.",
    ),
    seeds: int | None = typer.Option(None, "--seeds", help="Runs a variant; by default as many as the study asks for."),
    epochs: float | None = typer.Option(
        None, "--epochs", help="Another number of epochs than the paper's, to try it out; kept apart from the rest."
    ),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", help="Where the data sets' files lie, if not in the cache."
    ),
    out: Path = typer.Option(
        Path("results"), "--out", "-o", metavar="DIR", help="Where results, table and figures go."
    ),
    keep: bool = typer.Option(False, "--keep-runs", help="Keep the run directories (in runs/), with their models."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
) -> None:
    """Run a paper's experiments again, and put ours beside the paper's.

    A finished run is not run again, and an interrupted one goes on where it stopped: press Ctrl-C and come back another day.
    Every run has a seed, for research, so that its certificate is void for release.

    Examples:
      tacit reproduce --list
      tacit reproduce losing-less --only mnist --seeds 1
    """
    from tacit.studies import STUDIES, study_of

    if study is None:
        if not show:
            raise UserError(f"say which study to run: {', '.join(STUDIES)} (--list tells what they are)")
        for name, found in STUDIES.items():
            typer.echo(f"{name:20s} {found.paper}")
        return
    chosen = study_of(study)
    if show:
        _list(chosen, only)
        return
    from tacit.studies.runner import run_examples, run_study, tasks_of
    from tacit.training.interruption import Interrupted

    epochs = None if epochs is None else check_positive("--epochs", epochs)
    count = None if seeds is None else check_count("--seeds", seeds)
    tasks = tasks_of(chosen, out, only=only, seeds=count, epochs=epochs)
    if only and set(only) <= {example.name for example in chosen.examples}:
        tasks = []
    directory = None if data_dir is None else str(expanded(data_dir).absolute())
    try:
        if epochs is None:
            run_examples(chosen, out, only, _silent if quiet else _began)
        run_study(
            tasks,
            data_dir=directory,
            runs=Path("runs"),
            keep=keep,
            started=_started if not quiet else _silent,
            progress=not quiet,
        )
    except (Interrupted, KeyboardInterrupt):
        _conclude(chosen, out, epochs, only)
        typer.echo("\ninterrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    _conclude(chosen, out, epochs, only)


def _list(study: Study, only: list[str]) -> None:
    typer.echo(study.paper)
    names = [example.name for example in study.examples]
    for name in names:
        if not only or name in only:
            typer.echo(f"  {name:36s} a small experiment, without data")
    for variant in [] if only and set(only) <= set(names) else study.chosen(only):
        printed = (
            ""
            if variant.printed is None
            else f"  paper: {variant.printed.accuracy:g}% at epsilon {variant.printed.epsilon:g}"
            + (", which does not hold" if "does not hold" in variant.printed.what or variant.claimed else "")
        )
        typer.echo(f"  {variant.name:36s} {variant.seeds} seed{'s' if variant.seeds > 1 else ' '}{printed}")


def _started(task: Task, done: int, total: int, left: float | None) -> None:
    filled = round(20 * done / total)
    rest = "" if left is None else f", about {left / 60:.0f} min left"
    bar = "━" * filled + "╌" * (20 - filled)
    print(f"{bar} run {done + 1} of {total}{rest}: {task.variant.name}, seed {task.seed}", file=sys.stderr)


def _began(example: Example) -> None:
    print(f"the small experiment {example.name}", file=sys.stderr)


def _silent(*what: object) -> None: ...


def _conclude(study: Study, out: Path, epochs: float | None, only: list[str]) -> None:
    """The table and the sentences of the groups asked for on the screen; of all that is finished, today or before, in a file,
    with the figures."""
    from rich.console import Console
    from rich.table import Table

    from tacit.report.figures import all_figures
    from tacit.report.tables import for_screen, markdown, rows, sentences
    from tacit.studies.runner import finished_examples, finished_of, folder_of

    results, examples = finished_of(study, out, epochs), {} if epochs is not None else finished_examples(study, out)
    if not results and not examples:
        return
    folder = folder_of(study, out, epochs)
    own = {example.name for example in study.examples}
    groups = set() if only and set(only) <= own else {variant.group for variant in study.chosen(only)}
    shown = [result for result in results if study.variant(result["variant"]).group in groups]
    table = Table(title=study.paper)
    table.add_column("variant", no_wrap=True)
    table.add_column("accuracy: min, median, max", no_wrap=True)
    table.add_column("epsilon", no_wrap=True)
    table.add_column("paper")
    for row in rows(study, shown):
        table.add_row(*for_screen(row).values())
    if table.rows:
        Console().print(table)
    asked = {name: found for name, found in examples.items() if not only or name in only}
    for sentence in sentences(study, shown, asked):
        typer.echo(sentence)
    page = folder / "README.md"
    page.write_text(markdown(study, results, examples))
    figures = all_figures(study, results, folder, examples)
    typer.echo(f"table    {page}")
    for figure in figures:
        if not only or any(figure.name.startswith(f"{study.name}-{group}-") for group in groups | set(asked)):
            typer.echo(f"figure   {figure}")
