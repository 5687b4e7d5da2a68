"""The bugs: which text of which file becomes which other text, what that breaks, and which tests ought to notice."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent


class Rotten(Exception):
    """The catalogue and the tree do not fit each other any more."""


@dataclass(frozen=True)
class Mutant:
    """One bug. `file` is below src/tacit; `builds` is the compiled module that has to be built again, if any.

    >>> bug = Mutant("a-for-b", "letters", "x.py", before="a", after="b", tests=("tests/x.py",))
    >>> bug.applied("cat")
    'cbt'
    """

    name: str
    breaks: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    builds: str | None = None

    def applied(self, text: str) -> str:
        """The text with the bug in it."""
        count = text.count(self.before)
        if count != 1:
            raise Rotten(
                f"{self.name}: the text to be replaced is {count} times in src/tacit/{self.file}, not once; bring "
                "mutants/*.toml up to date"
            )
        return text.replace(self.before, self.after)

    @property
    def digest(self) -> str:
        """Changes when anything about the bug does."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


def catalogue(only: str | None = None) -> list[Mutant]:
    """All bugs, or those whose name matches a pattern such as `noise-*`."""
    found = [
        Mutant(**{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(HERE.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["mutant"]
    ]
    names = [mutant.name for mutant in found]
    if len(set(names)) != len(names):
        raise Rotten(f"two mutants have one name: {sorted(name for name in names if names.count(name) > 1)[0]}")
    return [mutant for mutant in found if only is None or fnmatchcase(mutant.name, only)]
