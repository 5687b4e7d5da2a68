"""The command line: one file a command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import os
import sys
import warnings

import typer

from tacit.cli import (
    account,
    audit,
    calibrate,
    data,
    ensemble,
    evaluate,
    predict,
    recipes,
    reproduce,
    sign,
    train,
    verify,
)
from tacit.privacy.validation import UserError, visible

app = typer.Typer(
    name="tacit",
    help="Train accurate classifiers under differential privacy, and show what is guaranteed.\n\n"
    "Start with `tacit train`: it trains on the embedded digits and writes a certificate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in (train, evaluate, predict, ensemble, verify, sign, audit, account, calibrate, reproduce, recipes, data):
    app.command(name=_module.__name__.rpartition(".")[2])(_module.command)


def _version(wanted: bool) -> None:
    if wanted:
        from tacit import __version__

        typer.echo(f"tacit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None: ...


def main() -> None:
    """Run the command line: an error the user can mend is one sentence on stderr and exit status 2."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        app()
    except UserError as error:
        sys.exit(_complain(str(error)))
    except BrokenPipeError:
        # Whoever read the output has gone; so do we, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        sys.exit(_complain(f"{error.strerror}{where}; make room or change the permission, then try again"))


def _warn(message: Warning | str, *_: object) -> None:
    """A warning as one line, without the place in the code."""
    print(f"warning: {visible(str(message))}", file=sys.stderr)


def _complain(sentence: str) -> int:
    print(f"tacit: {sentence}", file=sys.stderr)
    return 2
