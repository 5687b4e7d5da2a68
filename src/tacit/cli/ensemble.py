"""`tacit ensemble`: several runs that decide together, and what they cost together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.shared import data_changes, print_json, shown_epsilon
from tacit.privacy.validation import UserError, visible

if TYPE_CHECKING:
    from tacit.training.ensemble import Ensemble, Judgement


def command(
    run_directories: list[Path] = typer.Argument(
        ..., metavar="RUN_DIR...", help="Run directories of `tacit train`, all on the same data."
    ),
    weights: str = typer.Option(
        "equal",
        "--weights",
        metavar="HOW",
        help="equal, accuracy (each member's last on its held-out data), or numbers such as 0.5,0.3,0.2.",
    ),
    voting: str = typer.Option(
        "probabilities",
        "--voting",
        help="probabilities (the weighted mean of the members') or votes (all of a weight for the likeliest class).",
    ),
    delta: float | None = typer.Option(
        None, "--delta", "-d", help="The delta of (epsilon, delta); by default the smallest of the runs' own."
    ),
    dataset: str | None = typer.Option(
        None, "--dataset", metavar="NAME|PATH", help="Other data than the runs', or your own data if they moved."
    ),
    data_dir: Path | None = typer.Option(None, "--data-dir", help="Where a named data set's files lie, if they moved."),
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, mps, ..."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """How accurate are several trained models together, and what do they cost together?

    The members vote, each with its weight. All of them learned from the same examples, so what protects an example is the epsilon
    of all their releases together. It stands beside the ensemble: above each member's own, and as a rule below the sum. To stay
    within an epsilon with several members, train each at a smaller one, and look here what they come to.

    Every run is verified first: one that was interrupted or changed is refused, and one that is void for release voids the whole.

    Examples:
      tacit ensemble runs/a runs/b runs/c
      tacit ensemble runs/a runs/b --weights accuracy --voting votes --json
    """
    how = weights_of(weights)
    from tacit.privacy.composition import composed_certificate

    certificate = composed_certificate(run_directories, delta)
    # Imported only now, so that a run that does not verify is told at once.
    from tacit.training.ensemble import Ensemble, held_out_of

    ensemble = Ensemble.load(run_directories, how, voting=voting, device=device)
    test = held_out_of(run_directories, data_changes(dataset, data_dir))
    judged = ensemble.evaluate(test)
    if as_json:
        print_json(_as_json(ensemble, judged, certificate))
    else:
        _show(ensemble, judged, certificate, test.name)


def weights_of(text: str) -> str | list[float] | None:
    """The weights as `Ensemble.load` takes them.

    >>> weights_of("equal"), weights_of("accuracy"), weights_of("0.5,0.3,0.2")
    (None, 'accuracy', [0.5, 0.3, 0.2])
    """
    if text in ("equal", "accuracy"):
        return None if text == "equal" else text
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise UserError(f"--weights must be equal, accuracy, or numbers such as 0.5,0.3,0.2, not {text!r}") from None


def _as_json(ensemble: Ensemble, judged: Judgement, certificate: dict[str, Any]) -> dict[str, Any]:
    members = [
        {**run, "weight": weight, "test_accuracy": accuracy}
        for run, weight, accuracy in zip(certificate["runs"], ensemble.weights, judged.member_accuracies)
    ]
    return {
        "test_accuracy": judged.accuracy,
        "examples": judged.examples,
        "voting": ensemble.voting,
        **{key: value for key, value in certificate.items() if key not in ("runs", "caveats")},
        "members": members,
        "caveats": _caveats(judged, certificate),
    }


def _show(ensemble: Ensemble, judged: Judgement, certificate: dict[str, Any], data: str) -> None:
    names = [run["run_directory"] for run in certificate["runs"]]
    width = max(len(name) for name in ["ensemble", *names])
    for run, name, weight, accuracy in zip(certificate["runs"], names, ensemble.weights, judged.member_accuracies):
        spent = f"epsilon {shown_epsilon(run['epsilon'])} at delta {run['delta']:g}"
        typer.echo(f"{name:<{width}}  test accuracy {accuracy:7.2%}  {spent}  weight {weight:.3f}")
    together = f"epsilon {shown_epsilon(certificate['epsilon'])} at delta {certificate['delta']:g}"
    typer.echo(f"{'ensemble':<{width}}  test accuracy {judged.accuracy:7.2%}  {together}")
    typer.echo(f"by {ensemble.voting}, on {judged.examples} held-out examples of {data}")
    typer.echo(visible(f"it says: {certificate['statement']}"))
    for caveat in _caveats(judged, certificate):
        typer.echo(visible(f"note: {caveat}"))


def _caveats(judged: Judgement, certificate: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys([*certificate["caveats"], *judged.caveats]))
