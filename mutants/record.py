"""What was found so far, kept under build/ by the hash of the sources it was found with.

A bug that a test noticed stays noticed while the sources, the bug and the files of the tests that it names stay the same; one
that survived is tried again when any test has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mutants.catalogue import Mutant
from mutants.scratch import ROOT

_TEXTS = (".py", ".c", ".h", ".toml", ".json", ".css")


def digest_of(*folders: str, root: Path = ROOT) -> str:
    """Changes when any file of these folders does, or one of these files."""
    found = hashlib.sha256((root / "pyproject.toml").read_bytes())
    for folder in folders:
        for path in sorted((root / folder).rglob("*")) if (root / folder).is_dir() else [root / folder]:
            if path.suffix in _TEXTS:
                found.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


class Record:
    """Results by mutant, written after each one, so that an interrupted run goes on where it was."""

    def __init__(self, digest: str, folder: Path = ROOT / "build" / "mutants") -> None:
        self.path = folder / f"{digest}.json"
        self._found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def get(self, key: str) -> Any:
        return self._found.get(key)

    def put(self, key: str, value: Any) -> None:
        self._found[key] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self._found, indent=1))
        draft.replace(self.path)


def key_of(mutant: Mutant, *, survived: bool = False) -> str:
    """A mutant is run again when its own text, or that of its tests, has changed."""
    tests = ["tests"] if survived else [test.partition("::")[0] for test in mutant.tests]
    return f"{mutant.name} {mutant.digest} {digest_of(*sorted(set(tests)))}"
