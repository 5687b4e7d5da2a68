"""`tacit train` in a process of its own, forked from one that has everything loaded, so that a launch takes about a second."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .injection import Fault, arm

PRELOADED = ["tacit.training.run", "tacit.cli", "sklearn.datasets", "dp_accounting.pld", "torch._dynamo"]
# 23 steps, each an epoch, of all 1495 examples: at such a rate and so small a delta accounting takes no time
CHANGES = (
    "model.name=linear",
    "privacy.epsilon=none",
    "privacy.noise_multiplier=2.0",
    "privacy.batch_size=1495",
    "privacy.epochs=23",
    "privacy.delta=1e-11",
)
LONGEST = 300.0


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit status (below 0: by that signal) and what it said."""

    status: int
    stderr: str

    @property
    def unclear(self) -> str | None:
        """What is wrong with how it ended, if anything: it must finish, say in one sentence why not, or be killed."""
        said = [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("warning: ")]
        if self.status in (0, -9):
            return None if not said else f"status {self.status}, and said: {said[-1][:200]}"
        prefix = {1: "Aborted", 2: "tacit: ", 130: "interrupted"}.get(self.status)
        if prefix is None:
            return f"status {self.status}: {said[-1][:300] if said else 'without a word'}"
        if len(said) != 1 or not said[0].startswith(prefix):
            return f"status {self.status}, in {len(said)} lines: {' / '.join(said)[-400:]}"
        return None


class Launcher:
    """Starts runs; each gets its run directory and witness from the trial's folder."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def start(self, folder: Path, fault: Fault | None = None, name: str = "stderr") -> Any:
        process = self._context.Process(target=_launched, args=(str(folder), fault, name))
        process.start()
        return process

    def ended(self, folder: Path, process: Any, name: str = "stderr") -> Ended:
        process.join(LONGEST)
        if process.is_alive():
            process.kill()
            process.join()
            return Ended(-1, "did not end")
        return Ended(process.exitcode, (folder / name).read_text(errors="replace"))

    def launched(self, folder: Path, fault: Fault | None = None, until: Callable[[], bool] | None = None) -> Ended:
        """One launch from its beginning to its end; it is killed when `until` says so."""
        process = self.start(folder, fault)
        while until is not None and process.is_alive():
            if until():
                process.kill()
            time.sleep(0.01)
        return self.ended(folder, process)


def _launched(folder: str, fault: Fault | None, name: str) -> None:
    import sys

    import torch

    from tacit import cli

    place = Path(folder)
    descriptor = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background takes away
    arm(fault, place / "run", place / "witness")
    changes = [word for change in CHANGES for word in ("--set", change)]
    sys.argv = ["tacit", "train", "digits", *changes, "--out", str(place / "run"), "--resume", "--quiet", "--json"]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cli.main()


def releases_in(run: Path) -> int:
    """Whole lines of the ledger that announce a release."""
    ledger = run / "ledger.jsonl"
    lines = ledger.read_bytes().split(b"\n")[:-1] if ledger.exists() else []
    return sum(b'"kind":"release"' in line for line in lines)


def steps_in(metrics: Path) -> list[int]:
    """The steps of the rows of figures that are stored."""
    found = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            found.append(int(json.loads(line)["step"]))
        except ValueError:
            continue
    return found
