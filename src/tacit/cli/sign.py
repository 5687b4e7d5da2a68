"""`tacit sign`: vouch for a certificate with a key of one's own."""

from __future__ import annotations

import getpass
import os
import shlex
import sys
from pathlib import Path

import typer

from tacit.cli.shared import print_json
from tacit.privacy.validation import UserError, visible

PASSPHRASE = "TACIT_KEY_PASSPHRASE"


def command(
    run_directory: Path | None = typer.Argument(None, metavar="[RUN_DIR]", help="A run directory of `tacit train`."),
    key: Path | None = typer.Option(
        None, "--key", metavar="KEY.pem", help="The private key (Ed25519, PEM) to sign with."
    ),
    new_key: Path | None = typer.Option(
        None, "--new-key", metavar="KEY.pem", help="Make a private key, print its public key, and sign nothing."
    ),
    encrypt: bool = typer.Option(
        False, "--encrypt", help="With --new-key: ask for a passphrase, and encrypt the key with it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Sign the certificate of a run, so that others can tell who vouches for it.

    The run is verified first; only what its ledger proves is signed. The signature is certificate.sig beside certificate.json,
    which stays as it is. If the run goes on, sign again. Give the public key to whoever is to check, by a way that they trust: a
    signature by a key that nobody knows says nothing. The passphrase of an encrypted key is asked for, or taken from the
    environment variable TACIT_KEY_PASSPHRASE (with which --new-key encrypts, too).

    Examples:
      tacit sign --new-key signer.pem
      tacit sign runs/scans --key signer.pem
      tacit verify runs/scans --public-key PUBLIC_KEY
    """
    from tacit.privacy import signature

    if new_key is not None:
        if run_directory is not None or key is not None:
            raise UserError(
                "--new-key makes a key and signs nothing; leave RUN_DIR and --key out, and sign with it then"
            )
        encrypted = encrypt or PASSPHRASE in os.environ
        public_key = signature.new_key(new_key, _passphrase(str(new_key), new=True) if encrypted else None)
        if as_json:
            print_json({"key": str(new_key), "public_key": public_key})
        else:
            typer.echo(f"private key  {new_key} (keep it to yourself)\npublic key   {public_key}")
        return
    if run_directory is None or key is None or encrypt:
        raise UserError(
            "say what to sign and with which key: tacit sign RUN_DIR --key KEY.pem; --new-key KEY.pem makes one"
        )
    private_key = signature.load_key(key, lambda: _passphrase(str(key)))
    found = signature.sign(run_directory, private_key)
    if as_json:
        print_json({"public_key": found.signed_by, "signature": str(run_directory / "certificate.sig")})
        return
    typer.echo(visible(f"signed         {found.certificate['statement']}"))
    typer.echo(f"by             {found.signed_by}")
    typer.echo(f"check it with  tacit verify {shlex.quote(str(run_directory))} --public-key {found.signed_by}")


def _passphrase(path: str, *, new: bool = False) -> str:
    """Of a key, from the environment or from whoever sits there."""
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE]
    if not sys.stdin.isatty():
        raise UserError(f"{path} needs a passphrase, and there is nobody to ask; set {PASSPHRASE}")
    given = getpass.getpass(f"passphrase of {path}: ")
    if new and getpass.getpass("once more: ") != given:
        raise UserError("the two passphrases differ; no key was made")
    return given
