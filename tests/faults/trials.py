"""One trial: a run, a fault, whatever is needed to go on, and what must hold of what is left."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tacit.privacy import UserError, read_ledger, verify
from tacit.training.checkpoint import load_tensors

from .injection import Fault, can_mount
from .launching import Launcher, releases_in, steps_in


@dataclass
class Trial:
    """What is known of one trial: how it went, and what was found wrong."""

    kind: str
    number: int
    what: str = ""
    interrupted: bool = False  # the fault kept a launch from ending well
    refused: bool = False  # damage was found, and the run does not go on
    under_counted: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return not (self.under_counted or self.lost or self.unclear)


class Runner:
    """Makes trials in a folder of its own; the n-th of a seed is always the same fault."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.launcher = folder, seed, Launcher()
        self.mounts = can_mount()
        self._reference: Path | None = None

    def trial(self, kind: str, number: int) -> Trial:
        found = Trial(kind, number)
        place = self.folder / f"{kind}-{number}"
        place.mkdir(parents=True)
        KINDS[kind](self, found, place, random.Random(f"{self.seed} {kind} {number}"))
        if found.survived:
            shutil.rmtree(place)
        return found

    def reference(self) -> Path:
        """A whole run without a fault: how many releases it plans is what every other one must end with."""
        if self._reference is None:
            place = self.folder / "reference"
            place.mkdir(parents=True)
            ended = self.launcher.launched(place)
            assert ended.status == 0, ended.stderr
            self._reference = place
        return self._reference

    @property
    def planned(self) -> int:
        return releases_in(self.reference() / "run")

    # what must hold

    def launch(
        self, found: Trial, place: Path, fault: Fault | None = None, until: Callable[[], bool] | None = None
    ) -> int:
        """One launch, after which whatever was saved before it is still there and all noise that was drawn is counted."""
        before = _saved(place / "run")
        ended = self.launcher.launched(place, fault, until)
        if ended.unclear:
            found.unclear.append(ended.unclear)
        found.interrupted |= ended.status != 0
        self.check(found, place, before)
        return ended.status

    def check(self, found: Trial, place: Path, before: tuple[int, list[int]]) -> None:
        run = place / "run"
        drawn = (place / "witness").stat().st_size if (place / "witness").exists() else 0
        if drawn > releases_in(run):  # the linear model's noise is one draw a release
            found.under_counted.append(f"{drawn} draws of noise, {releases_in(run)} releases in the ledger")
        try:
            covered, steps = _saved(run)
        except UserError as error:
            found.lost.append(f"the checkpoint: {error}")
            return
        if covered < before[0] or steps[: len(before[1])] != before[1]:
            found.lost.append(f"a checkpoint or figures of before: {before}, now {(covered, steps)}")
        self.check_certificate(found, place)

    def check_certificate(self, found: Trial, place: Path) -> None:
        """One that passes counts all noise that was ever drawn, whatever became of model and ledger."""
        run, model = place / "run", place / "run" / "model.safetensors"
        try:
            if model.exists():  # whose hash would tell
                model.rename(place / "model")
            certificate = verify(run)
        except UserError:
            return
        finally:
            if (place / "model").exists():
                (place / "model").rename(model)
        if certificate["releases"] < (place / "witness").stat().st_size:
            found.under_counted.append(f"a certificate of {certificate['releases']} releases passes")

    def finish(self, found: Trial, place: Path) -> None:
        """Without a fault the run goes on to its end, verifies, and has paid for everything."""
        status = self.launch(found, place)
        if status != 0:
            found.lost.append(f"it does not go on: {(place / 'stderr').read_text()[-300:]}")
            return
        run = place / "run"
        certificate = verify(run)
        counted = sum(entry["kind"] == "release" for entry in read_ledger(run / "ledger.jsonl"))
        if not certificate["releases"] == counted == self.planned:
            found.under_counted.append(f"certificate {certificate['releases']}, ledger {counted}, plan {self.planned}")
        load_tensors(run / "model.safetensors")

    def amid(self, found: Trial, place: Path, draws: random.Random) -> None:
        """A run that was killed in the middle, after its first checkpoint."""
        after = draws.randrange(1, self.planned)
        run = place / "run"
        self.launch(found, place, until=lambda: releases_in(run) >= after)


def _saved(run: Path) -> tuple[int, list[int]]:
    """How many entries of the ledger the checkpoint covers, and of which steps there are figures."""
    checkpoint = run / "checkpoint" / "state.safetensors"
    covered = load_tensors(checkpoint)[1]["ledger"]["entries"] if checkpoint.exists() else 0
    return covered, steps_in(run / "metrics.jsonl")


def _moment(draws: random.Random, planned: int) -> dict[str, object]:
    """When: at an event of the run, or after a time."""
    event = draws.choice(["time", "open", "write", "fsync", "rename", "noise", "step", "certify"])
    if event == "time":
        return {"seconds": draws.uniform(0.0, 0.4)}
    most = {"open": 2 * planned, "rename": 12, "certify": 1, "write": planned + 3, "fsync": planned + 14}
    return {"event": event, "count": draws.randint(1, most.get(event, planned))}


def _faulty(action: str) -> Callable[[Runner, Trial, Path, random.Random], None]:
    def run(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
        fault = Fault(action, **_moment(draws, runner.planned))  # type: ignore[arg-type]
        found.what = str(fault)
        runner.launch(found, place, fault)
        runner.finish(found, place)

    return run


def _interrupt(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    _faulty(draws.choice(["interrupt", "interrupt", "interrupt-twice", "terminate"]))(runner, found, place, draws)


def _memory(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    if draws.random() < 0.7:
        _faulty("memory")(runner, found, place, draws)
        return
    fault = Fault("address-space", limit=draws.randint(1, 60) * 2**20)
    found.what = str(fault)
    runner.launch(found, place, fault)
    runner.finish(found, place)


def _full_disk(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    if draws.random() < 0.5:
        _faulty(draws.choice(["ENOSPC", "ENOSPC", "EIO"]))(runner, found, place, draws)
        return
    longest = (runner.reference() / "run" / "ledger.jsonl").stat().st_size
    fault = Fault("file-size", limit=draws.randint(0, int(1.1 * longest)))
    found.what = str(fault)
    runner.launch(found, place, fault)
    runner.finish(found, place)


def _read_only(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    if draws.random() < 0.5 or not runner.mounts:
        _faulty("EROFS")(runner, found, place, draws)
        return
    runner.amid(found, place, draws)
    found.what = "a run directory on a disk that is read-only now"
    runner.launch(found, place, Fault("read-only-mount"))
    runner.finish(found, place)


def _checkpoint(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    """Damage to the checkpoint is found, or is none: what goes on is what was saved."""
    runner.amid(found, place, draws)
    path = place / "run" / "checkpoint" / "state.safetensors"
    if not path.exists():
        runner.finish(found, place)
        return
    content = bytearray(path.read_bytes())
    damage = draws.choice(["flip", "flip", "flip", "cut", "delete", "empty", "garbage"])
    found.what = damage
    if damage == "flip":
        place_of = draws.randrange(len(content) * 8)
        content[place_of // 8] ^= 1 << place_of % 8
        found.what = f"bit {place_of} flipped of {len(content) * 8}"
    elif damage == "cut":
        del content[draws.randrange(1, len(content)) :]
    elif damage == "empty":
        content.clear()
    elif damage == "garbage":
        content[:] = draws.randbytes(draws.randint(1, 5000))
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(content)
    _refused_or_finished(runner, found, place, drawn_counts=True, expect_refusal=releases_in(place / "run") > 0)


def _ledger(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    """A ledger that was cut covers all that is saved of the run, or the run does not go on."""
    before = draws.choice(["killed", "interrupted", "finished"])
    if before == "killed":
        runner.amid(found, place, draws)
    else:  # with a certificate
        count = draws.randrange(1, runner.planned) if before == "interrupted" else 10**6
        runner.launch(found, place, Fault("interrupt", "step", count))
    path = place / "run" / "ledger.jsonl"
    content = path.read_bytes() if path.exists() else b""
    if not content:
        runner.finish(found, place)
        return
    last = content[:-1].rfind(b"\n") + 1
    where = draws.choice(["last line", "line feed", "anywhere", "whole lines", "all", "delete"])
    size = {
        "last line": draws.randrange(last, len(content)),
        "line feed": len(content) - 1,
        "anywhere": draws.randrange(len(content)),
        "whole lines": content[: draws.randrange(1, len(content))].rfind(b"\n") + 1,
    }.get(where, 0)
    found.what = f"{before}, then cut at byte {size} of {len(content)} ({where})"
    if where == "delete":
        path.unlink()
    else:
        path.write_bytes(content[:size])
    _refused_or_finished(runner, found, place, drawn_counts=False, expect_refusal=False)


def _refused_or_finished(
    runner: Runner, found: Trial, place: Path, *, drawn_counts: bool, expect_refusal: bool
) -> None:
    run = place / "run"
    ended = runner.launcher.launched(place)
    if ended.unclear:
        found.unclear.append(ended.unclear)
    found.refused = ended.status == 2
    if expect_refusal and not found.refused:
        found.lost.append(f"damage passed unnoticed ({found.what})")
    if found.refused:
        runner.check_certificate(found, place)
    if ended.status == 0:
        releases = verify(run)["releases"]
        drawn = (place / "witness").stat().st_size
        steps = steps_in(run / "metrics.jsonl")
        if releases != runner.planned or max(steps) > releases or (drawn_counts and drawn > releases):
            found.under_counted.append(f"{releases} releases; {drawn} draws; figures of steps {steps}")
        if steps != sorted(set(steps)):
            found.under_counted.append(f"figures are stored of releases that are not in the ledger: {steps}")


def _clock(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    fault = Fault("clock", count=draws.choice([-1, 1]) * draws.choice([1, 3600, 86400 * 400, 86400 * 20_000]))
    found.what = str(fault)
    if draws.random() < 0.5:
        runner.amid(found, place, draws)
    if runner.launch(found, place, fault) != 0:
        found.lost.append("a jump of the clock ended it")
    runner.finish(found, place)


def _two(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    if draws.random() < 0.5:
        runner.amid(found, place, draws)
    before = _saved(place / "run")
    first = runner.launcher.start(place, name="stderr-1")
    first.join(draws.choice([0.0, draws.uniform(0.0, 1.0)]))
    second = runner.launcher.start(place, name="stderr-2")
    ends = [runner.launcher.ended(place, first, "stderr-1"), runner.launcher.ended(place, second, "stderr-2")]
    found.what = f"two at once: {[end.status for end in ends]}"
    found.unclear += [end.unclear for end in ends if end.unclear]
    found.interrupted = any(end.status for end in ends)
    if all(end.status for end in ends):
        found.lost.append(f"neither went on: {[end.stderr[-200:] for end in ends]}")
    runner.check(found, place, before)
    runner.finish(found, place)


def _resumption(runner: Runner, found: Trial, place: Path, draws: random.Random) -> None:
    """Fault upon fault: each launch of a run that was killed has one of its own."""
    runner.amid(found, place, draws)
    for _ in range(draws.randint(1, 3)):
        action = draws.choice(["kill", "interrupt", "memory", "ENOSPC", "EROFS", "EIO"])
        fault = Fault(action, **_moment(draws, max(runner.planned // 3, 1)))  # type: ignore[arg-type]
        found.what += f"{fault}; "
        runner.launch(found, place, fault)
    runner.finish(found, place)


KINDS: dict[str, Callable[[Runner, Trial, Path, random.Random], None]] = {
    "kill": _faulty("kill"),
    "interrupt": _interrupt,
    "memory": _memory,
    "full-disk": _full_disk,
    "read-only": _read_only,
    "checkpoint": _checkpoint,
    "ledger": _ledger,
    "clock": _clock,
    "two-at-once": _two,
    "resumption": _resumption,
}
