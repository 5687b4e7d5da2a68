"""`tacit audit`: does the claim stand against an attack?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.shared import data_changes, print_json, shown_epsilon
from tacit.privacy.validation import UserError, check_choice, check_count, check_not_negative

if TYPE_CHECKING:
    from tacit.audit.audits import Audit
    from tacit.audit.subject import Subject

_ATTACKS = ("mechanism", "canaries", "loss", "lira")


def command(
    run_directory: Path | None = typer.Argument(
        None, metavar="[RUN_DIR]", help="A finished run of `tacit train`. Without: a recipe is audited (--recipe)."
    ),
    attack: str = typer.Option(
        "mechanism",
        "--attack",
        "-a",
        metavar="HOW",
        help="mechanism, canaries, loss or lira; what they are is told above.",
    ),
    recipe: str | None = typer.Option(
        None, "--recipe", metavar="NAME|FILE", help="A recipe to audit, instead of a run. Default: digits."
    ),
    dataset: str | None = typer.Option(None, "--dataset", metavar="NAME|PATH", help="Other data than the recipe's."),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Where a named data set's files lie."),
    changes: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change the recipe, such as --set privacy.epochs=5; may be repeated."
    ),
    canaries: int | None = typer.Option(
        None, "--canaries", help="Canaries in one training: 50000 for mechanism, 1000 for canaries."
    ),
    repeats: int | None = typer.Option(
        None,
        "--repeats",
        help="Trainings with canaries, whose scores are put together: 16 for mechanism, 1 for canaries.",
    ),
    shadows: int | None = typer.Option(
        None, "--shadows", help="Trainings that lira compares with, an even number. Default: 8."
    ),
    confidence: float = typer.Option(0.95, "--confidence", help="The probability with which the bound is to hold."),
    claim: float | None = typer.Option(
        None, "--claim", metavar="E", help="Judge by this epsilon, instead of the certificate's or the recipe's own."
    ),
    times: int = typer.Option(1, "--times", help="So many audits, one after the other, and how many of them stand."),
    seed: int | None = typer.Option(None, "--seed", help="Make the audit reproducible."),
    plot: Path | None = typer.Option(
        None, "--plot", metavar="FILE.png", help="Draw how many the attack finds, at how many wrong accusations."
    ),
    out: Path | None = typer.Option(None, "--out", "-o", metavar="FILE.json", help="Write the result to a file, too."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Attack a training, and see whether its epsilon stands.

    A certificate says that nobody can learn much about one example: epsilon is an upper bound, proved. An audit comes from the
    other side. It plays an attacker who tries to tell which examples took part, counts how often that works, and concludes how
    large epsilon must be at least. If this lower bound is above the claim, something is broken. If it is below, this attack found
    nothing; that is evidence, no proof.

    The attacks, from the strongest to the weakest:

      mechanism   examples made to be seen ("canaries") go through tacit's own sampling, clipping and noise, as the plan has them,
                  and the attacker sees every step. Needs no data; seconds.
      canaries    canaries among the real examples, in a whole training by the recipe; the attacker sees every step. They are
                  extra records: the data stay as they are.
      loss        the finished model alone: those took part of whom it is sure.
      lira        the finished model, and --shadows others, trained to see what taking part changes for each example.

    Exit status 0 if the claim stands, 1 if the lower bound exceeds it, 2 if something is wrong with the arguments.

    Examples:
      tacit audit                                              # the digits recipe: half a minute
      tacit audit runs/scans --attack canaries --plot roc.png
      tacit audit --set privacy.epsilon=1 --times 20           # how often does an honest training fail? Never, or hardly ever
      tacit audit --set privacy.epsilon=6 --claim 1            # somebody claims 1 and gives 6: the audit tells
    """
    check_choice("attack", attack, _ATTACKS)
    for name, value in (("--canaries", canaries), ("--repeats", repeats), ("--shadows", shadows), ("--times", times)):
        if value is not None:
            check_count(name, value)
    if seed is not None:
        check_count("--seed", seed, at_least=0)
    if claim is not None:
        check_not_negative("--claim", claim)
    _check_fits(attack, canaries, repeats, shadows)
    if plot is not None:
        from tacit.report.drawing import picture_path

        plot = picture_path(plot)
    if out is not None and not out.expanduser().parent.is_dir():
        raise UserError(f"there is no folder {str(out.parent)!r} for {out.name!r}; make it first")
    if run_directory is not None and (recipe is not None or changes):
        raise UserError("a finished run has its recipe; leave --recipe and --set out, or leave RUN_DIR out")
    from tacit.audit.audits import audit, trainings_of
    from tacit.audit.subject import Subject
    from tacit.audit.thresholds import check_confidence
    from tacit.training.interruption import Interrupted

    check_confidence(confidence)
    places = data_changes(dataset, data_dir)
    if run_directory is not None:
        subject = Subject.of_run(run_directory, places)
    else:
        subject = Subject.of_recipe(recipe or "digits", [*places, *changes])
    subject = subject if claim is None else subject.claiming(claim)
    if not quiet:
        _announce(subject, attack)
    total = times * trainings_of(attack, subject, repeats=repeats, shadows=shadows)
    try:
        with _progress(total, show=not quiet) as advance:
            options: dict[str, Any] = {"canaries": canaries, "repeats": repeats, "shadows": shadows}
            seeds = [None if seed is None else seed + time for time in range(times)]
            found = [
                audit(subject, attack, confidence=confidence, seed=own, advance=advance, **options) for own in seeds
            ]
    except (Interrupted, KeyboardInterrupt):
        typer.echo("\ninterrupted; an audit keeps nothing, so there is nothing to continue", err=True)
        raise typer.Exit(130) from None
    result = found[0].to_dict() if times == 1 else _summary(found)
    if plot is not None:
        _draw(found[0], plot)
    if out is not None:
        out.expanduser().write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print_json(result)
    elif times == 1:
        _show(found[0])
    else:
        _show_all(found)
    if plot is not None and not as_json:
        typer.echo(f"picture        {plot}")
    if any(one.exceeds for one in found):
        raise typer.Exit(1)


def _check_fits(attack: str, canaries: int | None, repeats: int | None, shadows: int | None) -> None:
    white_box = attack in ("mechanism", "canaries")
    for name, value, fits in (
        ("--canaries", canaries, white_box),
        ("--repeats", repeats, white_box),
        ("--shadows", shadows, attack == "lira"),
    ):
        if value is not None and not fits:
            raise UserError(f"{name} is not for --attack {attack}; leave it out")


def _announce(subject: Subject, attack: str) -> None:
    plan = subject.plan
    print(
        f"auditing {subject.name} by {attack}: {plan.steps} steps, sample rate {plan.sample_rate:.4g}, noise multiplier "
        f"{plan.noise_multiplier(0):.4g}; epsilon {shown_epsilon(subject.claim)} at delta {subject.delta:g} is claimed",
        file=sys.stderr,
    )


@contextmanager
def _progress(trainings: int, *, show: bool) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, nothing elsewhere; what it hands out hears of parts of a training."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not show or not console.is_terminal:
        yield lambda part: None
        return
    columns = (
        TextColumn("training {task.completed:.0f} of {task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=trainings)
        yield lambda part: progress.advance(task, part)


def _show(found: Audit) -> None:
    from tacit.audit.audits import LOW_RATES
    from tacit.audit.scores import Roc

    roc, bound = Roc.of(found.scores), found.bound
    rates = ", ".join(f"{roc.true_positives_at(rate):.2%} at {rate:.1%}" for rate in LOW_RATES)
    typer.echo(f"claimed        epsilon {shown_epsilon(found.claim)} at delta {found.delta:g}")
    typer.echo(f"lower bound    epsilon {bound.epsilon:.4f} with {bound.confidence:g} confidence ({bound.method})")
    typer.echo(f"               if {bound.assumes}")
    for other in found.beside:
        typer.echo(f"beside it      epsilon {other.epsilon:.4f} ({other.method})")
        typer.echo(f"               if {other.assumes}")
    typer.echo(f"found          true-positive rates {rates} false positives; area under the curve {roc.area:.4f}")
    typer.echo(f"it cost        {_trainings(found.trainings)}, {len(found.scores)} scores, {found.seconds:.1f} s")
    for caveat in found.caveats:
        typer.echo(f"note           {caveat}")
    typer.echo(f"it says        {found.sentence}")


def _show_all(found: list[Audit]) -> None:
    for number, one in enumerate(found, 1):
        typer.echo(
            f"audit {number:3d}  epsilon at least {one.bound.epsilon:.4f}  {'ABOVE the claim' if one.exceeds else 'below'}"
        )
    summary = _summary(found)
    typer.echo(
        f"{summary['below']} of {len(found)} audits are below the claimed epsilon {shown_epsilon(summary['epsilon'])} at delta "
        f"{summary['delta']:g}; the smallest bound is {summary['smallest']:.4f}, the largest {summary['largest']:.4f} "
        f"({summary['confidence']:g} confidence each; {_trainings(summary['trainings'])}, {summary['seconds']:.0f} s)"
    )


def _trainings(count: int) -> str:
    return "no training" if count == 0 else "1 training" if count == 1 else f"{count} trainings"


def _summary(found: list[Audit]) -> dict[str, Any]:
    first = found[0]
    bounds = [one.bound.epsilon for one in found]
    return {
        "attack": first.attack,
        "subject": first.subject,
        "epsilon": first.claim,
        "delta": first.delta,
        "confidence": first.bound.confidence,
        "method": first.bound.method,
        "audits": len(found),
        "below": sum(not one.exceeds for one in found),
        "smallest": min(bounds),
        "largest": max(bounds),
        "epsilon_lower_bounds": bounds,
        "scores_each": len(first.scores),
        "trainings": sum(one.trainings for one in found),
        "seconds": round(sum(one.seconds for one in found), 2),
    }


def _draw(found: Audit, path: Path) -> None:
    from tacit.audit.scores import Roc
    from tacit.report.roc import draw_roc

    roc = Roc.of(found.scores)
    draw_roc(
        roc.false_positive_rates,
        roc.true_positive_rates,
        epsilon=found.claim,
        delta=found.delta,
        examples=int((~found.scores.took_part).sum()),
        title=f"{found.attack} on {found.subject}: epsilon at least {found.bound.epsilon:.3f}",
        path=path,
    )
