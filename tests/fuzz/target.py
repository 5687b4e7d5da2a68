"""What a target is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .guard import SECONDS


@dataclass(frozen=True)
class Target:
    """One parser: how it is given bytes, honest inputs to begin with, and words of its format.

    `repair` makes what a mutation broke and the parser checks first (sums, lengths, hashes) right again; it is applied to every
    other input, so that what comes after these checks is tried, too.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    tokens: tuple[bytes, ...] = ()
    repair: Callable[[bytes], bytes] | None = None
    seconds: float = SECONDS
    inputs: int = 100  # that the suite tries


@cache
def workshop() -> Path:
    """A folder of this process for the files that parsers read: in memory where there is such a place."""
    memory = "/dev/shm"
    folder = Path(tempfile.mkdtemp(prefix="tacit-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    _remove_at_exit(folder, os.getpid())
    return folder


def _remove_at_exit(folder: Path, process: int) -> None:
    import atexit

    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == process else None)


def written(name: str, content: bytes) -> Path:
    """A file with these bytes, in the place of the one before."""
    path = workshop() / name
    path.write_bytes(content)
    return path
