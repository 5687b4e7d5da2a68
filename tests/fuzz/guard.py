"""What counts as a finding: any error but a `UserError`, too much time, too much memory, or the end of the process."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tacit.privacy.validation import UserError

SECONDS = 5.0
"""Of the processor that one input may take, of a target that does not say otherwise: the parsers need milliseconds for theirs."""
PATIENCE = 24.0
"""How many times as long it may take by the clock, on a machine that has other work, until it is taken to wait for something."""
MEMORY = 2**29
"""Bytes by which one input, of at most a few thousand bytes, may raise the most that the process ever held."""
ADDRESS_SPACE = 2**32
"""Bytes that a campaign may have beyond those it has when it begins: 4 GiB."""
LONGEST_SENTENCE = 4000
"""Characters of an error: it is read by people, and must not repeat a whole file to them."""


class TooSlow(BaseException):
    """Raised by the alarm; not an `Exception`, so that no parser that catches those hides it."""


@dataclass(frozen=True)
class Finding:
    """What an input did that it must not: the kind of error, and where it came from."""

    kind: str
    where: str
    details: str

    @property
    def key(self) -> str:
        """Inputs of one key are taken for the same finding."""
        return f"{self.kind} {self.where}"


def tried(run: Callable[[bytes], None], content: bytes, seconds: float = SECONDS) -> Finding | None:
    """What came of one input: None if it was read, or refused in a sentence."""
    before = most_held()
    begun = time.process_time()
    try:
        with _alarm(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(content)
    except UserError as error:
        if isinstance(error.__cause__, MemoryError):
            return _finding("MemoryError", error.__cause__)
        if len(str(error)) > LONGEST_SENTENCE or "\n" in str(error):
            return _finding("endless sentence", error)
    except TooSlow as error:
        return _finding("too slow", error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return _finding(type(error).__name__, error)
    grown = most_held() - before
    if grown > MEMORY:
        return Finding("memory", "", f"{grown} bytes for an input of {len(content)}")
    taken = time.process_time() - begun  # an alarm waits while C code runs
    return Finding("too slow", "", f"{taken:.1f} seconds") if taken > 2 * seconds else None


def warmed(run: Callable[[bytes], None], seeds: Sequence[bytes]) -> None:
    """Honest inputs first, without an alarm: whatever is imported only then must not be interrupted."""
    for content in seeds:
        with warnings.catch_warnings(), suppress(UserError):
            warnings.simplefilter("ignore")
            run(content)


def limit_address_space(beyond: int = ADDRESS_SPACE) -> None:
    """From now on, whatever asks for more memory than this gets a MemoryError."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + beyond, held + beyond))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise TooSlow

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds), signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE * seconds)}
    before = {number: signal.signal(number, ring) for number in timers}
    try:
        for timer, length in timers.values():
            signal.setitimer(timer, length)
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def most_held() -> int:
    """The most memory that this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finding(kind: str, error: BaseException) -> Finding:
    """With the innermost line of tacit that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}tacit{os.sep}" in frame.filename]
    frame = (ours or list(frames))[-1]
    where = f"{frame.filename.rpartition('tacit' + os.sep)[2]}:{frame.name}"
    return Finding(kind, where, f"{type(error).__name__}: {error}"[:300])
