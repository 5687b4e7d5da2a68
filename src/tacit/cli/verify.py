"""`tacit verify`: recompute a certificate from its ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tacit.cli.shared import print_json
from tacit.privacy.validation import UserError, check_delta, check_positive, visible

if TYPE_CHECKING:
    from tacit.privacy.signature import Verified


def _schema(wanted: bool) -> None:
    if wanted:
        from tacit.privacy.schema import certificate_schema

        typer.echo(json.dumps(certificate_schema(), indent=2))
        raise typer.Exit


def command(
    run_directory: Path = typer.Argument(..., metavar="RUN_DIR", help="A run directory of `tacit train`."),
    public_key: str | None = typer.Option(
        None,
        "--public-key",
        metavar="KEY",
        help="There must be a signature, by this key: 64 hexadecimal digits, or a PEM file.",
    ),
    require_valid: bool = typer.Option(
        False, "--require-valid", help="Fail unless the certificate is valid for release."
    ),
    max_epsilon: float | None = typer.Option(None, "--max-epsilon", metavar="E", help="Fail above this epsilon."),
    max_delta: float | None = typer.Option(None, "--max-delta", metavar="D", help="Fail above this delta."),
    page: Path | None = typer.Option(
        None, "--page", metavar="FILE.html", help="Write the verified certificate as a page for people."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object, whatever comes out."),
    schema: bool = typer.Option(
        False,
        "--schema",
        callback=_schema,
        is_eager=True,
        help="Print the JSON schema of certificate.json, and no more.",
    ),
) -> None:
    """Is the certificate of a run what its ledger proves?

    Checks the ledger's hash chain byte by byte, recomputes epsilon from every release in it, and compares every field of the
    certificate; if there is a signature (see `tacit sign`), that it is of these bytes; and whatever else the options ask for.
    Exit status 0 if all of it holds, 2 with a reason if not. Nothing in the run directory is executed.

    With --json, there is one object on stdout in both cases: {"verified": true, ...}, with every field of the certificate and
    "signature" (null, or its "public_key" and whether it was the "expected" one), or {"verified": false, "reason": "..."}.

    Examples:
      tacit verify runs/scans
      tacit verify runs/scans --page certificate.html
      tacit verify runs/scans --require-valid --max-epsilon 3 --max-delta 1e-5 --public-key signer.pem && ./publish runs/scans
    """
    try:
        limits = [
            None if max_epsilon is None else check_positive("--max-epsilon", max_epsilon),
            None if max_delta is None else check_delta(max_delta),
        ]
        from tacit.privacy.signature import verified

        found = verified(run_directory, public_key=public_key)
        _check_policy(found, limits[0], limits[1], require_valid)
        if page is not None:
            from tacit.report.certificate_page import write_certificate_page

            page = write_certificate_page(found, page)
    except UserError as error:
        if as_json:
            print_json({"verified": False, "reason": str(error)})
        raise
    if as_json:
        signature = None if found.signed_by is None else {"public_key": found.signed_by, "expected": found.expected}
        print_json({"verified": True, **found.certificate, "signature": signature})
        return
    # What a ledger says was disclosed is somebody else's words.
    typer.echo(visible(f"verified: {found.certificate['statement']}"))
    for reason in found.certificate["void_because"]:
        typer.echo(visible(f"not valid for release: {reason}"))
    for caveat in found.certificate["caveats"]:
        typer.echo(visible(f"note: {caveat}"))
    typer.echo(f"signature: {found.signer}")
    if page is not None:
        typer.echo(f"page: {page}")


def _check_policy(found: Verified, max_epsilon: float | None, max_delta: float | None, require_valid: bool) -> None:
    certificate = found.certificate
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if require_valid and not certificate["valid_for_release"]:
        raise UserError(f"the certificate is true, but not valid for release: {'; '.join(certificate['void_because'])}")
    if max_epsilon is not None and epsilon is None:
        raise UserError(f"the certificate says that no epsilon holds, and --max-epsilon {max_epsilon:g} was asked for")
    if max_epsilon is not None and epsilon > max_epsilon:
        raise UserError(f"the certificate's epsilon {epsilon} is above --max-epsilon {max_epsilon:g}")
    if max_delta is not None and delta > max_delta:
        raise UserError(f"the certificate's delta {delta:g} is above --max-delta {max_delta:g}")
