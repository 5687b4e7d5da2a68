"""One race: everybody is started, checked and warmed up, then takes turns, round after round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks.cases import Case
from benchmarks.contestants import CONTESTANTS, Entry
from benchmarks.machine import wait_for_quiet
from benchmarks.models import NETWORKS
from benchmarks.process import Failed, OutOfMemory, Process

TOLERANCE = 1e-3  # relative error of the clipped sum that float32 may have
TURN_SECONDS = 0.15
SLOW_STEP = 20.0
FEWEST_ROUNDS = 3
FEWEST_SLOW_ROUNDS = 2  # of an epoch, or of one that needs SLOW_STEP seconds a step
SHORT_EPOCH = 1024
LARGE_BATCH = 512
SAME_LAYOUT = {"wrn-16-4": "resnet-20"}  # to try every layout again would take too long
DISTURBED = 0.1  # part of the processor that others had during a turn
RETRIES = 2

Say = Callable[[str], None]
Result = dict[str, Any]


@dataclass
class Race:
    """The driver of one case.

    It waits up to `patience` seconds for others to be quiet; `layouts` remembers, over all races, which layout suited a
    contestant on a network.
    """

    case: Case
    rounds: int
    seconds: float
    patience: float
    layouts: dict[tuple[str, str], str] = field(default_factory=dict)
    say: Say = print

    def run(self) -> dict[str, Result]:
        """Measure everybody; those that cannot take part get a `reason` instead of times."""
        results: dict[str, Result] = {}
        running: dict[str, Process] = {}
        try:
            for key in self.case.contestants:
                self.say(f"{CONTESTANTS[key].title.strip('*')}: starts")
                results[key] = {"title": CONTESTANTS[key].title, "private": CONTESTANTS[key].private}
                try:
                    running[key] = self._started(key, results[key])
                except Failed as reason:
                    results[key]["reason"] = str(reason)
            self._all_rounds(running, results)
        finally:
            for process in running.values():
                process.stop()
        return results

    def _started(self, key: str, result: Result) -> Process:
        """The contestant in the way that suits it best: every variant makes a few steps, and the fastest right one is kept."""
        entry, best, tried = CONTESTANTS[key], None, []
        failures: list[Failed] = []
        for layout, physical in self._variants(key, entry):
            try:
                process, facts = self._warm(key, entry, layout, physical)
            except Failed as failure:
                failures.append(failure)
                continue
            tried.append(facts)
            if best is None or _rank(facts) < _rank(best[1]):
                if best is not None:
                    best[0].stop()
                best = (process, facts)
            else:
                process.stop()
        if best is None:
            raise failures[0]
        process, facts = best
        result.update(facts)
        others = [facts for facts in tried if facts is not best[1]]
        result["also_tried"] = [
            {name: facts.get(name) for name in ("layout", "physical", "step_seconds", "error")} for facts in others
        ] + [{"reason": str(failure)} for failure in failures]
        if facts["agrees"] is not False:
            self.layouts[key, self.case.network] = process.layout
        return process

    def _variants(self, key: str, entry: Entry) -> list[tuple[str, int | None]]:
        layouts = entry.layouts if NETWORKS[self.case.network].images else entry.layouts[:1]
        for network in (self.case.network, SAME_LAYOUT.get(self.case.network, "")):
            if (key, network) in self.layouts:
                layouts = (self.layouts[key, network],)
                break
        split = entry.splits and self.case.batch > LARGE_BATCH and self.case.examples is None
        return list(product(layouts, (None, LARGE_BATCH) if split else (None,)))

    def _warm(self, key: str, entry: Entry, layout: str, physical: int | None) -> tuple[Process, Result]:
        """A process after its first steps; with smaller micro-batches if it ran out of memory."""
        case = self.case
        process = Process(key, case.network, case.batch, layout, physical)
        try:
            if case.examples is None:
                process.ask("prepare", examples=case.batch)
                facts = process.ask("first")
            else:  # a short epoch, not timed in the race, compiles for the batch sizes that occur
                process.ask("prepare", examples=min(case.examples, SHORT_EPOCH))
                seconds = process.ask("epoch")["step_seconds"]
                facts = {"first_seconds": seconds, "step_seconds": seconds}
                process.ask("load", examples=case.examples)
            facts |= {"layout": layout, "physical": physical, "error": None, "agrees": None}
            if entry.private:
                facts["error"] = process.ask("check")["error"]
                facts["agrees"] = facts["error"] < TOLERANCE
        except OutOfMemory:
            smaller = (physical or case.batch) // 4
            if not entry.micro_batches or smaller < 1 or case.examples is not None:
                raise
            return self._warm(key, entry, layout, smaller)
        except Failed:
            process.stop()
            raise
        return process, facts

    def _all_rounds(self, running: dict[str, Process], results: dict[str, Result]) -> None:
        """Rounds until there are enough or the time is up, each begun by another contestant."""
        for key in running:
            results[key] |= {"rounds_ms": [], "others": []}
        started, done = time.monotonic(), 0
        fewest = FEWEST_ROUNDS if self.case.examples is None else FEWEST_SLOW_ROUNDS
        while done < self.rounds and running:
            elapsed = time.monotonic() - started
            if done >= fewest and elapsed + elapsed / done > self.seconds:
                break
            order = list(running)
            shift = done % len(order)
            for key in order[shift:] + order[:shift]:
                times = results[key]["rounds_ms"]
                if results[key]["step_seconds"] > SLOW_STEP and len(times) >= FEWEST_SLOW_ROUNDS:
                    times.append(None)
                    continue
                self.say(f"round {done + 1}: {CONTESTANTS[key].title.strip('*')}")
                try:
                    answer = self._turn(running[key])
                    times.append(1000 * answer["step_seconds"])
                    results[key]["others"].append(round(answer["others"], 3))
                except Failed as reason:
                    results[key]["reason"] = str(reason)
                    running.pop(key).stop()
            done += 1

    def _turn(self, process: Process) -> Result:
        """One turn; again, after waiting for quiet, if other processes disturbed it. The quietest counts."""
        if self.case.examples is not None:
            return process.ask("epoch")
        answer = process.ask("turn", seconds=TURN_SECONDS)
        for _ in range(RETRIES):
            if answer["others"] < DISTURBED or answer["step_seconds"] > SLOW_STEP:
                break
            wait_for_quiet(self.patience)
            answer = min(answer, process.ask("turn", seconds=TURN_SECONDS), key=lambda found: found["others"])
        return answer


def _rank(facts: Result) -> tuple[bool, float]:
    """Right before fast."""
    return facts["agrees"] is False, facts["step_seconds"]
