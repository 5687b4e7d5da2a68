"""A campaign: targets in turn, each in a process of its own, and what came of it added to `results/trust/fuzz.json`.

A finding is made as small as it can be, and becomes a case in `tests/fuzz/cases/`, which the suite tries ever after.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .drivers import CORPUS, last_input
from .targets import NAMES

HERE = Path(__file__).parent
CASES = HERE / "cases"
RESULTS = HERE.parent.parent / "results" / "trust" / "fuzz.json"
_GRACE = (
    90.0  # seconds beyond its time that a session may take: to import torch, and for an input that takes its own time
)
_LATE = 10.0  # seconds that the last line of a log may be older than the end of its session
_MOST_TRIES = 400  # of making a finding smaller


def campaign(names: Sequence[str], minutes: float, driver: str, seed: int) -> int:
    """Run the targets, for so many minutes in all; returns the number of findings."""
    total, seconds = 0, minutes * 60 / len(names)
    for number, group in enumerate(_groups(names, driver)):
        for name, session in _sessions(group, seconds, driver, seed + 1000 * number).items():
            total += len(session["findings"])
            speed = session["inputs"] / max(session["processor_seconds"], 1e-9)
            counted = f"{session['inputs']:10,} inputs  {speed:9,.0f} a second of the processor"
            print(f"{name:16} {counted}  {len(session['findings'])} findings", flush=True)
            for key, found in session["findings"].items():
                case = kept(name, bytes.fromhex(found["input"]), key)
                print(f"    {key}: {found['details']}\n    {case.relative_to(HERE)}", flush=True)
            _add(name, session)
    return total


def _groups(names: Sequence[str], driver: str) -> list[list[str]]:
    """Targets that one process tries in turn: those of one module, since much is to be imported; atheris takes one alone."""
    if driver == "atheris":
        return [[name] for name in names]
    groups = [[name for name in names if name in members] for members in NAMES.values()]
    return [group for group in groups if group]


def _sessions(names: list[str], seconds: float, driver: str, seed: int) -> dict[str, dict[str, Any]]:
    """Targets in another process; if that ends by itself or never does, the input it was at is the finding, and others go on."""
    logs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="tacit-fuzz-") as temporary:
        while left := [name for name in names if name not in logs]:
            trouble, words = _process(left, seconds, driver, seed + len(logs), Path(temporary))
            for name in left:
                path = Path(temporary, name, "log.json")
                if not path.exists():
                    break
                logs[name] = json.loads(path.read_text())
                in_time = driver == "atheris" and not trouble and logs[name]["seconds"] > seconds - _LATE
                if not logs[name]["done"] and not in_time:
                    content = last_input(path.parent)
                    logs[name]["findings"][trouble or "the process ended early"] = {
                        "details": words,
                        "input": content.hex(),
                    }
            if len(left) == len([name for name in names if name not in logs]):
                raise RuntimeError(f"the session of {left[0]} did not begin ({trouble}): {words}")
    return logs


def _process(names: list[str], seconds: float, driver: str, seed: int, folder: Path) -> tuple[str | None, str]:
    """What went wrong with the process, if anything, and the last it said."""
    command = [sys.executable, "-m", __package__, "--session", ",".join(names), "--seconds", str(seconds)]
    command += ["--driver", driver, "--seed", str(seed), "--folder", str(folder)]
    for name in names:
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir(exist_ok=True)
    with open(folder / "said", "wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            status = process.wait(len(names) * (seconds + _GRACE))
            trouble = f"the process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            trouble = "the process did not end"
    return trouble, (folder / "said").read_text(errors="replace")[-600:]


def kept(name: str, content: bytes, key: str) -> Path:
    """The input as a case of the suite, as small as it can be."""
    small = (
        minimised(content, lambda shorter: _same(name, shorter, key)) if not key.startswith("the process") else content
    )
    folder = CASES / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(small).hexdigest()[:12]
    path.write_bytes(small)
    return path


def _same(name: str, content: bytes, key: str) -> bool:
    from .guard import tried
    from .targets import target_of

    target = target_of(name)
    found = tried(target.run, content, target.seconds)
    return found is not None and found.key == key


def minimised(content: bytes, same: Callable[[bytes], bool], most: int = _MOST_TRIES) -> bytes:
    """A shorter input that does the same: pieces are left out, ever smaller ones, for so many tries or half a minute.

    >>> minimised(b"some long input with an x in it", lambda shorter: b"x" in shorter)
    b'x'
    """
    tries, size, end = 0, max(len(content) // 2, 1), time.monotonic() + 30
    while size and tries < most and time.monotonic() < end:
        at, smaller = 0, False
        while at < len(content) and tries < most and time.monotonic() < end:
            shorter = content[:at] + content[at + size :]
            tries += 1
            if same(shorter):
                content, smaller = shorter, True
            else:
                at += size
        size = size if smaller and size > 1 else size // 2
    return content


def _add(name: str, session: dict[str, Any]) -> None:
    """Add a session to what earlier ones did."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    row = results.setdefault("targets", {}).setdefault(name, {})
    row["inputs"] = row.get("inputs", 0) + session["inputs"]
    for key in ("seconds", "processor_seconds"):
        row[key] = round(row.get(key, 0.0) + session[key], 1)
    row["findings"] = row.get("findings", 0) + len(session["findings"])
    row["drivers"] = sorted({*row.get("drivers", []), session["driver"]})
    targets = dict(sorted(results["targets"].items()))
    counted = ("inputs", "seconds", "processor_seconds", "findings")
    total = {key: round(sum(row[key] for row in targets.values()), 1) for key in counted}
    RESULTS.write_text(json.dumps({"total": total, "targets": targets}, indent=1) + "\n")
