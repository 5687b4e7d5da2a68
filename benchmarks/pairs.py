"""Two contestants in one process, a step of each in turn: for a difference of a few percent.

Where its memory falls is worth a percent or two to a process, for as long as it lives, so that two processes cannot tell such a
difference however long they race. Here both share one process, and there are several, one after the other. Others' work on
the machine comes and goes within seconds, so times are compared among four steps that follow one another, in the order A B B A.

Each is started as `python -m benchmarks.pairs '{"contestants": [...], "network": ..., ...}'`, and prints its median times.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.contestants import CONTESTANTS
from benchmarks.contestants.setup import Setup
from benchmarks.machine import wait_for_quiet

PROCESSES = 7
FEWEST_STEPS = 4
WARM_UP = 3


def run(case: Case, seconds: float, patience: float, say: Callable[[str], None] = print) -> dict[str, dict[str, Any]]:
    """For about so many seconds in each of several processes; a round of the result is a process. Of each but the first, its time
    to the first's is there too."""
    first = case.contestants[0]
    found: dict[str, dict[str, Any]] = {
        key: {"title": CONTESTANTS[key].title, "private": CONTESTANTS[key].private, "rounds_ms": [], "steps": []}
        for key in case.contestants
    }
    for number in range(PROCESSES):
        wait_for_quiet(patience)
        say(f"process {number + 1} of {PROCESSES}")
        spec = json.dumps({**asdict(case), "seconds": seconds, "turned": number % 2 == 1})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.pairs", spec],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        taken = json.loads(done.stdout)
        for key in case.contestants:
            found[key]["rounds_ms"].append(1000 * statistics.median(taken[key]))
            found[key]["steps"].append(len(taken[key]))
            if key != first:
                found[key].setdefault("to_first", []).append(ratio(taken[key], taken[first]))
    return found


def ratio(own: list[float], other: list[float]) -> float:
    """Of each two steps of one to the two of the other beside which they were taken: the median.

    >>> ratio([2.0, 2.0, 20.0, 20.0, 2.0, 2.0, 9.0], [1.0, 1.0, 10.0, 10.0, 1.0, 9.0, 1.0])
    2.0
    """
    return statistics.median(sum(own[i : i + 2]) / sum(other[i : i + 2]) for i in range(0, len(own) - 1, 2))


def times_of(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of every step of each, which take turns; who goes first changes from turn to turn."""
    setup = Setup(spec["network"], spec["batch"])
    keys = spec["contestants"][::-1] if spec["turned"] else spec["contestants"]
    examples = setup.network.examples(spec["batch"])
    contestants = {key: CONTESTANTS[key].make(setup) for key in keys}
    for contestant in contestants.values():
        contestant.load(*examples)
        for _ in range(WARM_UP):
            contestant.step()
    times: dict[str, list[float]] = {key: [] for key in keys}
    end = time.monotonic() + spec["seconds"]
    while time.monotonic() < end or len(times[keys[0]]) < FEWEST_STEPS or len(times[keys[0]]) % 2:
        keys = keys[::-1]
        for key in keys:
            start = time.perf_counter()
            contestants[key].step()
            times[key].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    print(json.dumps(times_of(json.loads(sys.argv[1]))))
