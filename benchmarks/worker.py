"""One contestant in a process of its own: it reads a command a line, answers a line, and sleeps in between.

Started by the driver as `python -m benchmarks.worker '{"contestant": ..., "network": ..., ...}'`.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.setup import Contestant, Setup
from benchmarks.machine import busy_seconds

CHECKED = 16  # examples on which a clipped sum is compared with the reference
SLOW = 20.0  # seconds a step, beyond which two must do to warm up


class Worker:
    """Holds the contestant between commands."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.entry = CONTESTANTS[spec["contestant"]]
        self.setup = Setup(spec["network"], spec["batch"], spec["layout"], spec["physical"])
        self.contestant: Contestant | None = None

    def prepare(self, examples: int) -> dict[str, Any]:
        """Make the model and the inputs."""
        self.contestant = self.entry.make(self.setup)
        return self.load(examples)

    def load(self, examples: int) -> dict[str, Any]:
        """Exchange the inputs."""
        assert self.contestant is not None
        self.contestant.load(*self.setup.network.examples(examples))
        return {}

    def first(self) -> dict[str, Any]:
        """The first steps: they compile and probe, and show how much memory a step needs beyond model and inputs."""
        before = _start_of_peak()
        seconds = [self._timed()]
        while len(seconds) < 2 or (len(seconds) < 3 and seconds[-1] < SLOW):
            seconds.append(self._timed())
        memory = (_peak() - before) / 2**20
        return {"memory_mb": memory, "first_seconds": seconds[0], "step_seconds": min(seconds[1:])}

    def check(self) -> dict[str, Any]:
        """How far the clipped sum of a small batch is from the reference, relative to its norm."""
        inputs, targets = self.setup.network.examples(CHECKED, seed=3)
        clipping_norm, expected = reference_sum(self.setup, self.entry.options, inputs, targets)
        setup = Setup(self.spec["network"], CHECKED, self.spec["layout"], None, clipping_norm)
        contestant = self.entry.make(setup)
        contestant.load(inputs, targets)
        found = contestant.clipped_sum()
        difference = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
        return {"error": (difference / sum(float(v.double().square().sum()) for v in expected.values())) ** 0.5}

    def turn(self, seconds: float) -> dict[str, Any]:
        """Steps for at least this long: the median time of one, and what part of the processor others had meanwhile."""
        times: list[float] = []
        self._timed()  # not counted: the caches and the operating system have forgotten a process that slept
        load = _Load()
        while sum(times) < seconds:
            times.append(self._timed())
        return {"steps": len(times), "step_seconds": statistics.median(times), "others": load.of_others()}

    def epoch(self) -> dict[str, Any]:
        """One pass over the examples that were prepared."""
        assert self.contestant is not None
        start, load = time.perf_counter(), _Load()
        self.contestant.epoch()
        return {"step_seconds": time.perf_counter() - start, "others": load.of_others()}

    def _timed(self) -> float:
        assert self.contestant is not None
        start = time.perf_counter()
        self.contestant.step()
        return time.perf_counter() - start


def reference_sum(
    setup: Setup, options: dict[str, Any], inputs: Tensor, targets: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """A clipping norm that clips about half of the examples, and tacit's slow reference for it."""
    from benchmarks.contestants.tacit_ import clipping_of, decay_of
    from tacit.gradients import reference
    from tacit.privacy import Flat

    model, loss = setup.network.model(), nn.CrossEntropyLoss(reduction="none")
    rates = decay_of(model, options.get("decay", 0.0))
    norms = reference.clipped_sum(model, loss, Flat(1.0), inputs, targets, rates).norms
    clipping_norm = float(norms.median())
    clipping = clipping_of(model, options.get("groups", 1), clipping_norm)
    summed = reference.clipped_sum(model, loss, clipping, inputs, targets, rates)
    return clipping_norm, dict(summed.gradients)


class _Load:
    """The processor time that other processes take from here on."""

    def __init__(self) -> None:
        self.start = self._now()

    def of_others(self) -> float:
        """Their part of all the processor time there was, from 0 to 1; to about 0.05 in a short turn."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), busy_seconds(), time.process_time()


def _start_of_peak() -> int:
    """Forget the peak so far, and say what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
