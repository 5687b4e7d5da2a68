"""One target, for so many seconds: by coverage where atheris is installed, else by chance.

Both count what they tried and note what they found in `Log`, which is on the disk once a second: if an input ends the process,
the one who started it finds there which.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from .guard import Finding, limit_address_space, tried, warmed
from .mutation import LONGEST, mutated
from .target import Target

CORPUS = Path(__file__).parent / "corpus"  # what was found worth keeping, from campaign to campaign
_MOST_FINDINGS = 20  # of one target in one session: whoever has so many should mend some first


@dataclass
class Log:
    """What one session did, in the folder that it works in."""

    folder: Path
    driver: str
    inputs: int = 0
    began: float = 0.0
    began_working: float = 0.0
    done: bool = False
    findings: dict[str, dict[str, str]] = field(default_factory=dict)
    _written: float = 0.0

    def __post_init__(self) -> None:
        self._current = open(self.folder / "current", "w+b")  # noqa: SIM115 (as long as the session)
        self._current.truncate(8 + LONGEST)
        self._map = mmap.mmap(self._current.fileno(), 8 + LONGEST)

    def begin(self) -> None:
        """From here on, time counts."""
        self.began, self.began_working = time.monotonic(), time.process_time()
        self.write()

    def about_to_try(self, content: bytes) -> None:
        """What is being tried is in a file that outlives the process."""
        self._map[:8] = len(content).to_bytes(8, "little")
        self._map[8 : 8 + len(content)] = content
        self.inputs += 1
        if time.monotonic() - self._written > 1:
            self.write()

    def note(self, content: bytes, finding: Finding | None) -> None:
        """Keep the shortest input of each finding."""
        if finding is None:
            return
        known = self.findings.get(finding.key)
        if known is None or len(content) < len(bytes.fromhex(known["input"])):
            self.findings[finding.key] = {"details": finding.details, "input": content.hex()}
            self.write()

    def write(self) -> None:
        """The log as it stands."""
        self._written = time.monotonic()
        values = {
            "driver": self.driver,
            "inputs": self.inputs,
            "seconds": self._written - self.began,
            "processor_seconds": time.process_time() - self.began_working,
            "findings": self.findings,
            "done": self.done,
        }
        draft = self.folder / "log.draft"
        draft.write_text(json.dumps(values))
        draft.replace(self.folder / "log.json")


def last_input(folder: Path) -> bytes:
    """What was being tried when a session ended without a word."""
    content = (folder / "current").read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def by_chance(target: Target, log: Log, seconds: float, corpus: Path, seed: int) -> None:
    """Seeds and the corpus, spoiled by chance. What brings another kind of answer is kept, and spoiled further."""
    chance = random.Random(seed)
    pool = [*target.seeds(), *(path.read_bytes() for path in sorted(corpus.iterdir()))]
    answers: set[str] = set()
    warmed(target.run, target.seeds())
    limit_address_space()
    log.begin()
    while time.monotonic() - log.began < seconds and len(log.findings) < _MOST_FINDINGS:
        content = mutated(chance.choice(pool), pool, target.tokens, chance)
        if target.repair is not None and chance.random() < 0.5:
            content = target.repair(content)[:LONGEST]
        log.about_to_try(content)
        answer = _Answer()
        log.note(content, tried(answer.of(target), content, target.seconds))
        if answer.text not in answers and len(pool) < 4096:
            answers.add(answer.text)
            pool.append(content)
            (corpus / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    log.done = True
    log.write()


class _Answer:
    """The words of an error, without what is in them of the input: our stand-in for coverage."""

    text = "read"

    def of(self, target: Target):
        def run(content: bytes) -> None:
            try:
                target.run(content)
            except Exception as error:
                self.text = "".join(c for c in f"{type(error).__name__} {error}"[:160] if c.isalpha() or c == " ")[:80]
                raise

        return run


def by_coverage(name: str, log: Log, seconds: float, corpus: Path, seed: int) -> None:
    """libFuzzer, through atheris: new lines of tacit reached decide what is kept. Ends the process, with status 0 when time is
    up, and without a chance for the log to say that it is done."""
    import atheris

    with atheris.instrument_imports(include=["tacit", "zipfile", "tarfile", "tomllib"], enable_loader_override=False):
        from .targets import target_of

        target = target_of(name)
    for number, content in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(content)
    words = log.folder / "words"  # libFuzzer refuses a dictionary without any
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word[:60]) + '"\n' for word in target.tokens))
    chance = random.Random(seed)

    def one(content: bytes) -> None:
        if target.repair is not None and chance.random() < 0.5:
            content = target.repair(content)[:LONGEST]
        log.about_to_try(content)
        log.note(content, tried(target.run, content, target.seconds))

    def spoiled(content: bytes, longest: int, seed: int) -> bytes:
        here = random.Random(seed)
        found = mutated(content, (), target.tokens, here) if here.random() < 0.5 else atheris.Mutate(content, longest)
        return found[:longest]

    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={max(int(seconds), 1)}",
        f"-max_len={LONGEST}",
        f"-seed={seed or 1}",
    ]
    arguments += [f"-dict={words}"] if target.tokens else []
    arguments += [
        "-rss_limit_mb=0",
        f"-timeout={int(10 * target.seconds)}",
        "-verbosity=0",
        "-len_control=0",
    ]
    arguments += [f"-artifact_prefix={log.folder}/"]
    atheris.Setup(arguments, one, custom_mutator=spoiled)
    warmed(target.run, target.seeds())
    limit_address_space()
    log.begin()
    atheris.Fuzz()
