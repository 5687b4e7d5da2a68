"""`tacit verify`: recompute a certificate from its ledger."""

from __future__ import annotations

from pathlib import Path

import typer

from tacit.cli.shared import print_json


def command(
    run_directory: Path = typer.Argument(..., metavar="RUN_DIR", help="A run directory of `tacit train`."),
    as_json: bool = typer.Option(False, "--json", help="Print the verified certificate as one JSON object."),
) -> None:
    """Is the certificate of a run what its ledger proves?

    Checks the ledger's hash chain byte by byte, recomputes epsilon from every release in it, and compares every field of the
    certificate. Exit status 0 if all of it holds, 2 with a reason if not. Nothing in the run directory is executed.
    """
    from tacit.privacy.certificate import verify

    certificate = verify(run_directory)
    if as_json:
        print_json({**certificate, "verified": True})
        return
    typer.echo(f"verified: {certificate['statement']}")
    for reason in certificate["void_because"]:
        typer.echo(f"not valid for release: {reason}")
    for caveat in certificate["caveats"]:
        typer.echo(f"note: {caveat}")
