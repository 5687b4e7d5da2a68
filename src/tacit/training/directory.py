"""The run directory: `recipe.toml`, `ledger.jsonl`, `certificate.json`, `metrics.jsonl`, `model.safetensors`, `checkpoint/`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tacit.privacy.certificate import certificate_of
from tacit.privacy.files import opened, read_whole
from tacit.privacy.ledger import LONGEST_LINE, Ledger
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError
from tacit.training.checkpoint import write_atomically

LARGEST_METRICS = 2**26
"""Bytes of `metrics.jsonl`: a line an epoch, of some hundred bytes."""


class RunDirectory:
    """The files of one run, and where each lies.

    >>> RunDirectory(Path("runs/digits")).certificate.name
    'certificate.json'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.ledger = path / "ledger.jsonl"
        self.certificate = path / "certificate.json"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint" / "state.safetensors"

    def check(self, *, resume: bool) -> None:
        """Refuse a directory that is not empty, unless it is a run to be resumed. Nothing is made yet."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file; choose another --out")
        if not resume and self.path.is_dir() and any(self.path.iterdir()):
            raise UserError(f"{self.path} exists already; continue that run with --resume or choose another --out")
        if resume and self.path.is_dir() and any(self.path.iterdir()) and not self._is_ours():
            raise UserError(f"{self.path} is not a run directory of tacit; choose another --out")

    def make(self) -> None:
        """The directory itself, once there is something to put into it."""
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path} cannot be made: {error.strerror}; choose another --out") from None

    def open_ledger(self, plan: PrivacyPlan, *, resume: bool, delta: float, facts: Mapping[str, Any]) -> Ledger:
        """A new ledger, or the one that is there, which must be of the same plan and delta, and hold every release of which
        figures are stored."""
        self.make()
        if not (resume and _has_a_line(self.ledger)):
            return Ledger.create(self.ledger, plan, delta=delta, **facts)
        ledger = Ledger.resume(self.ledger)
        opening = ledger.entries[0]
        # The name of the data may change, since a file may move; how many examples there are may not.
        if (ledger.plan, opening["delta"], {**opening["facts"], "data": None}) != (
            plan,
            delta,
            {**facts, "data": None},
        ):
            self.certify_again(ledger)
            ledger.close()
            raise UserError(
                f"the run in {self.path} was started with another plan or other data, curriculum, features or pre-trained "
                "weights; start a new one elsewhere"
            )
        if max((step for step in map(_step_of, read_metrics(self.metrics))), default=0) > ledger.releases:
            ledger.close()
            raise UserError(
                f"{self.metrics} holds figures of releases that are missing in {self.ledger}: the ledger was cut, and what it "
                "lost cannot be counted; start a new run elsewhere"
            )
        return ledger

    def write_certificate(self, ledger: Ledger) -> dict[str, Any]:
        """The certificate of everything in the ledger so far."""
        certificate = certificate_of(ledger.entries)
        write_atomically(self.certificate, (json.dumps(certificate, indent=2) + "\n").encode())
        return certificate

    def certify_again(self, ledger: Ledger) -> None:
        """Bring a certificate that is there up to date: an attempt to resume is in the ledger even if it was refused.

        One that is not of this ledger, or knows of entries that the ledger has lost, is left as it is: it must not come to say
        less than it did.
        """
        try:
            covered = json.loads(self.certificate.read_bytes())["ledger"]
            ours = ledger.entries[covered["entries"] - 1]["hash"] == covered["head"]
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            return
        if ours:
            self.write_certificate(ledger)

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One more line of public measurements. A line cut short by a crash is closed first."""
        try:
            with open(self.metrics, "a+b") as file:
                file.seek(0, 2)
                if file.tell():
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{self.metrics} cannot be written ({error.strerror}); make room and continue with --resume"
            ) from None

    def _is_ours(self) -> bool:
        known = {self.recipe.name, self.ledger.name, "checkpoint", f".{self.recipe.name}.draft"}
        return any(item.name in known for item in self.path.iterdir())


def _step_of(row: Any) -> int:
    step = row.get("step") if isinstance(row, dict) else None
    return step if type(step) is int else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The measurements of a run; lines cut short by a crash are passed over.

    >>> read_metrics(Path("nowhere.jsonl"))
    []
    """
    if not path.exists():
        return []
    try:
        content = read_whole(path, largest=LARGEST_METRICS)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; take it away, or put the run's own there") from None
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _has_a_line(path: Path) -> bool:
    """Whether a ledger was begun; what is no regular file is for the ledger to refuse."""
    try:
        with opened(path) as file:
            return file.readline(LONGEST_LINE).endswith(b"\n")
    except FileNotFoundError:
        return False
    except OSError:
        return True
