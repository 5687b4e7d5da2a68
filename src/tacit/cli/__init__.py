"""The command line: one file a command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

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

_OF_THE_DISK = (
    errno.ENOSPC,
    errno.EACCES,
    errno.EROFS,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
)
# what PyTorch, the operating system and its loader of libraries say of it
_OF_MEMORY = ("out of memory", "not enough memory", "allocate memory", "failed to map segment")


class _Commands(TyperGroup):
    """Typer ends a command that is interrupted without a word; here it says so."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="tacit",
    cls=_Commands,
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C: not without a word
    try:
        app()
    except UserError as error:
        sys.exit(_complain(str(error)))
    except BrokenPipeError:
        # Whoever read the output has gone; so do we, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        sentence = _of_the_machine(error)
        if sentence is None:
            raise
        sys.exit(_complain(sentence))
    except BaseException as error:
        if (
            type(error).__module__ != "pyo3_runtime"
        ):  # how a library in Rust ends that was interrupted while it was loaded
            raise
        sentence = "a library stopped midway: interrupted, or out of memory; try again"
        sys.exit(_complain(f"{sentence} (a run that had begun goes on with --resume)"))


def _of_the_machine(error: Exception) -> str | None:
    """What to do about an error that is the machine's and not tacit's; None for any other."""
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}; make room or change the permission, then try again"
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OF_MEMORY):
        return (
            "there is not enough memory; free some, or train with a smaller --physical-batch-size, and try again (a run that had "
            "begun goes on with --resume)"
        )
    return None


def _warn(message: Warning | str, *_: object) -> None:
    """A warning as one line, without the place in the code."""
    print(f"warning: {visible(str(message))}", file=sys.stderr)


def _complain(sentence: str) -> int:
    print(f"tacit: {sentence}", file=sys.stderr)
    return 2
