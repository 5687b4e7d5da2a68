"""The write-ahead ledger: what is about to be released is on disk before it is released.

One JSON object a line. Each holds the hash of the line before it and its own, and the certificate names the last hash, so that no
byte can change and no line go missing unnoticed, unless all of it is written anew: the chain has no key. A line is written and
flushed to the disk *before* the noise of its release is drawn: a crash can only leave a release in the ledger that was never
made, never the other way round.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.privacy.files import read_whole
from tacit.privacy.validation import UserError, check_delta

if TYPE_CHECKING:
    from tacit.privacy.plan import PrivacyPlan

FORMAT = "tacit-ledger/1"
SORTED = "sorted-without-privacy"  # who chose a batch: not the sampler, but an order that was made from all examples
_ORIGIN = "0" * 64
LONGEST_LINE = 1 << 20
LARGEST_LEDGER = 1 << 29
"""Bytes of a ledger: more than a million and a half releases, which are read into memory, and in about a minute."""

Entry = dict[str, Any]


class Ledger:
    """The releases of one run, append-only, in a file that one process at a time may write.

    Make one with `Ledger.create`, continue one with `Ledger.resume`, read one with `read_ledger`.

    *Guarantee.* When `record_release` returns, the release is on the disk. If it raises, nothing was released.

    >>> from tacit.privacy import PrivacyPlan
    >>> ledger = Ledger.in_memory(PrivacyPlan(sample_rate=0.1, steps=10), delta=1e-5)
    >>> ledger.record_release(noise_multiplier=1.0, sample_rate=0.1)
    >>> ledger.releases
    1
    """

    def __init__(self, entries: list[Entry], descriptor: int | None, path: Path | None) -> None:
        self._entries = entries
        self._descriptor = descriptor
        self._path = path
        self._process = os.getpid()

    @classmethod
    def in_memory(cls, plan: PrivacyPlan, *, delta: float, **facts: Any) -> Ledger:
        """A ledger without a file, for experiments: nothing is left of it when the process ends."""
        ledger = cls([], None, None)
        ledger._open(plan, delta, facts)
        return ledger

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: PrivacyPlan, *, delta: float, **facts: Any) -> Ledger:
        """A new ledger file. `facts` are public: `examples`, `reproducible`, `disclosures` and the like."""
        path = Path(path)
        check_delta(delta)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"the ledger {path} cannot be made: {error.strerror}") from None
        ledger = cls([], descriptor, path)
        ledger._lock()
        # A file without a whole line is one whose opening was cut short by a crash: nothing was released yet.
        try:
            if b"\n" in read_whole(path, largest=LARGEST_LEDGER):
                raise UserError(f"{path} exists already; continue that run with --resume or choose another directory")
            os.ftruncate(descriptor, 0)
            ledger._open(plan, delta, facts)
            _flush_directory(path.parent)
        except OSError as error:
            ledger.close()
            raise UserError(f"the ledger {path} cannot be made: {error.strerror}") from None
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Ledger:
        """Continue a ledger file after a crash or an interruption.

        A last line without its end was being written when the process died, so its release was never made: it is cut off, and
        the entry of the resumption says so. If only the line's end is missing, the release is counted all the same.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            raise UserError(f"there is no ledger at {path}; nothing to resume") from None
        except OSError as error:
            raise UserError(f"the ledger {path} cannot be resumed: {error.strerror}") from None
        ledger = cls([], descriptor, path)
        ledger._lock()
        try:
            content = read_whole(path, largest=LARGEST_LEDGER)
            whole = content[: content.rfind(b"\n") + 1]
            ledger._entries = _checked(whole, path)
            torn = len(content) - len(whole)
            last = _genuine(content[len(whole) :] + b"\n", ledger._entries)
            if last is not None:
                os.write(descriptor, b"\n")
                ledger._entries.append(last)
            elif torn:
                os.ftruncate(descriptor, len(whole))
            ledger._append({"kind": "resume", "time": _now(), "torn_bytes": torn})
        except OSError as error:
            ledger.close()
            raise UserError(f"the ledger {path} cannot be resumed: {error.strerror}") from None
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything recorded so far."""
        return tuple(self._entries)

    @property
    def releases(self) -> int:
        """How many releases are recorded, made or only announced."""
        return _releases(self._entries)

    @property
    def whole_releases(self) -> int:
        """How many releases of all examples at once are recorded, made or only announced."""
        return len(whole_levels(self._entries))

    @property
    def plan(self) -> PrivacyPlan:
        """The plan the ledger was opened with."""
        from tacit.privacy.plan import PrivacyPlan

        return PrivacyPlan.from_dict(self._entries[0]["plan"])

    @property
    def head(self) -> str:
        """The hash of the last entry: whoever knows it can tell whether anything before it changed."""
        return str(self._entries[-1]["hash"])

    @property
    def launches(self) -> int:
        """How often the run was resumed; 0 for a run that was not."""
        return sum(entry["kind"] == "resume" for entry in self._entries)

    def record_release(
        self, *, noise_multiplier: float, sample_rate: float, sampled_by: str = "caller", reproducible: bool = False
    ) -> None:
        """Record one release of a Poisson-sampled Gaussian mechanism, on the disk, before it is made.

        `reproducible` says that its noise comes from a known seed.
        """
        self._append(
            {
                "kind": "release",
                "step": self.releases,
                "noise_multiplier": float(noise_multiplier),
                "sample_rate": float(sample_rate),
                "sampled_by": sampled_by,
                "reproducible": reproducible,
            }
        )

    def record_whole_release(self, *, noise_multiplier: float, what: str, reproducible: bool = False) -> None:
        """Record one release of a Gaussian mechanism in which every example takes part, on the disk, before it is made."""
        self._append(
            {
                "kind": "whole-release",
                "noise_multiplier": float(noise_multiplier),
                "what": what,
                "reproducible": reproducible,
            }
        )

    def record_disclosure(self, what: str) -> None:
        """Record that something computed from the training data without noise is shown or stored from here on."""
        if not any(entry["kind"] == "disclosure" and entry["what"] == what for entry in self._entries):
            self._append({"kind": "disclosure", "what": what, "step": self.releases})

    def record_model(self, sha256: str) -> None:
        """Record the hash of the file in which the model is handed on, so that the certificate is bound to it."""
        if self._entries[-1].get("sha256") != sha256:
            self._append({"kind": "model", "sha256": sha256, "step": self.releases})

    def close(self) -> None:
        """Give the file up for others. The ledger can be resumed later."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, plan: PrivacyPlan, delta: float, facts: dict[str, Any]) -> None:
        entry = {
            "kind": "open",
            "format": FORMAT,
            "run": secrets.token_hex(8),  # so that no two ledgers are alike, and a copy is known for one
            "time": _now(),
            "plan": plan.to_dict(),
            "delta": check_delta(delta),
        }
        self._append({**entry, "facts": facts})

    def _append(self, entry: Entry) -> None:
        if self._path is not None and self._descriptor is None:
            raise UserError(f"the ledger {self._path} was closed; resume the run to continue it")
        if os.getpid() != self._process:
            raise UserError("a forked process cannot write its parent's ledger; open a run of its own there")
        previous = self._entries[-1]["hash"] if self._entries else _ORIGIN
        entry = _sealed({**entry, "entry": len(self._entries), "previous": previous})
        try:
            if self._descriptor is not None:
                self._write(_line(entry))
            self._entries.append(entry)
        except UserError:
            raise
        except BaseException:
            # Ctrl-C: whether the line counts is now for the file alone to say, so only `resume` may go on.
            self.close()
            raise

    def _write(self, line: bytes) -> None:
        assert self._descriptor is not None
        end = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError("the disk took only a part of the line")
            _flush(self._descriptor)
        except OSError as error:
            try:  # nothing was released, and the next line must follow the last whole one
                os.ftruncate(self._descriptor, end)
            except OSError:
                self.close()
            raise UserError(
                f"the ledger {self._path} cannot be written ({error.strerror or error}), so nothing was released; "
                "make room on the disk and continue with --resume"
            ) from None

    def _lock(self) -> None:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(
                f"another process is training in {self._path and self._path.parent}; wait for it or stop it"
            ) from None


def read_ledger(path: str | os.PathLike[str]) -> tuple[Entry, ...]:
    """Every entry of a ledger file, after checking the whole chain.

    *Guarantee.* Returns only if the chain is whole: each line in its one canonical form, numbered without a gap, hashed, and
    holding the hash of the line before. (Whether the last lines are missing only the certificate can tell.)
    """
    path = Path(path)
    try:
        content = read_whole(path, largest=LARGEST_LEDGER)
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} holds no {path.name}: it is not a run directory, or its run never began"
        ) from None
    except OSError as error:
        raise UserError(f"the ledger {path} cannot be read: {error.strerror}") from None
    if not content.endswith(b"\n"):
        raise UserError(
            f"the last line of {path} is not whole: the run was interrupted there; continue it with --resume"
        )
    return tuple(_checked(content, path))


def _checked(content: bytes, path: Path) -> list[Entry]:
    entries: list[Entry] = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        entry = _genuine(line, entries)
        if entry is None:
            raise UserError(f"line {number} of {path} was changed after it was written; this ledger proves nothing")
        entries.append(entry)
    if not entries or entries[0].get("kind") != "open" or entries[0].get("format") != FORMAT:
        raise UserError(f"{path} is not a tacit ledger: it does not begin with a plan")
    return entries


def _genuine(line: bytes, before: list[Entry]) -> Entry | None:
    """The entry of a line that may follow these entries, or None."""
    try:
        if len(line) > LONGEST_LINE:
            return None
        entry: Entry = json.loads(line)
        sealed = _sealed({key: value for key, value in entry.items() if key != "hash"})
        follows = entry["entry"] == len(before) and entry["previous"] == (before[-1]["hash"] if before else _ORIGIN)
        return entry if follows and entry == sealed and _line(entry) == line and _well_formed(entry, before) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _releases(entries: list[Entry]) -> int:
    """The number of releases: each holds how many there were before it."""
    return next((int(entry["step"]) + 1 for entry in reversed(entries) if entry["kind"] == "release"), 0)


def _well_formed(entry: Entry, before: list[Entry]) -> bool:
    """Whether an entry is one that `Ledger` writes: a line not understood may be a release, so it is never passed over."""
    if not before:
        return entry["kind"] == "open" and type(entry["plan"]) is type(entry["facts"]) is dict
    if entry["kind"] == "release":
        return (
            type(entry["noise_multiplier"]) is type(entry["sample_rate"]) is float
            and type(entry["sampled_by"]) is str
            and type(entry["reproducible"]) is bool
            and type(entry["step"]) is int
            and entry["step"] == _releases(before)
        )
    if entry["kind"] == "whole-release":
        return (
            type(entry["noise_multiplier"]) is float
            and type(entry["what"]) is str
            and type(entry["reproducible"]) is bool
        )
    if entry["kind"] == "model":
        return type(entry["sha256"]) is str
    if entry["kind"] == "disclosure":
        return type(entry["what"]) is str and type(entry["step"]) is int
    return bool(entry["kind"] == "resume")


def canonical(value: Any) -> bytes:
    """The one way in which tacit writes a JSON value that is hashed.

    >>> canonical({"b": 1, "a": [0.5, None]})
    b'{"a":[0.5,null],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _sealed(entry: Entry) -> Entry:
    return {**entry, "hash": hashlib.sha256(canonical(entry)).hexdigest()}


def _line(entry: Entry) -> bytes:
    return canonical(entry) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _flush(descriptor: int) -> None:
    """To the disk itself: macOS needs more than fsync for that."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(descriptor, full)
    else:
        os.fsync(descriptor)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def released_levels(entries: Iterable[Entry]) -> list[tuple[float, int]]:
    """How many releases were made with each noise multiplier, the smallest first.

    >>> released_levels([{"kind": "release", "noise_multiplier": 2.0}] * 3)
    [(2.0, 3)]
    """
    sigmas = (float(entry["noise_multiplier"]) for entry in entries if entry["kind"] == "release")
    return sorted(Counter(sigmas).items())


def whole_levels(entries: Iterable[Entry]) -> list[float]:
    """The noise multipliers of the releases in which every example takes part.

    >>> whole_levels([{"kind": "whole-release", "noise_multiplier": 8.0}, {"kind": "release", "noise_multiplier": 2.0}])
    [8.0]
    """
    return [float(entry["noise_multiplier"]) for entry in entries if entry["kind"] == "whole-release"]


def unsampled(entries: Iterable[Entry]) -> bool:
    """Whether a release was made of a batch that was taken from the sorted examples, so that no epsilon holds at all.

    *Guarantee.* False only if the plan's sampler, or the caller, chose every batch.

    >>> unsampled([{"kind": "release", "sampled_by": "tacit"}]), unsampled([{"kind": "release", "sampled_by": SORTED}])
    (False, True)
    """
    return any(entry["kind"] == "release" and entry["sampled_by"] == SORTED for entry in entries)
