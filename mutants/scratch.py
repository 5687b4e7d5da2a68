"""A copy of the tree, outside of it, in which bugs are made and tests are run."""

from __future__ import annotations

import compileall
import importlib
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NoReturn

import pytest

from mutants.catalogue import Mutant, Rotten

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 1800.0  # seconds of one run of pytest
# What takes long to import; never tacit itself.
_LOADED = (
    *(
        "torch",
        "torch.func",
        "torch._dynamo",
        "hypothesis.strategies",
        "scipy.stats",
        "dp_accounting.pld",
        "dp_accounting.rdp",
    ),
    *(
        "sklearn.datasets",
        "safetensors.torch",
        "pydantic",
        "typer",
        "cryptography.hazmat.primitives.asymmetric.ed25519",
    ),
)
PASSED, FAILED = 0, 1  # exit statuses of pytest; any other says that the tests were not run


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest came to: its exit status, the first test that failed, and how long it took."""

    status: int
    failed: str | None
    seconds: float
    tail: str


class Scratch:
    """The copy: `src` with its compiled modules, `tests`, and what pytest is configured by."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in _LOADED:
            with suppress(ImportError):
                importlib.import_module(name)
        leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for folder in ("src", "tests"):
            shutil.copytree(ROOT / folder, place / folder, ignore=leave)
        shutil.copy(ROOT / "pyproject.toml", place)
        shutil.copy(Path(__file__).parent / "plugin.py", place / "mutants_plugin.py")
        # Bytecode that is taken for the text it was made of, and for no other.
        compileall.compile_dir(place / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)

    def tests(self, targets: Sequence[str]) -> Outcome:
        """Run these tests here until one fails: pytest in a process forked from this one, which has the large libraries."""
        began, output = time.monotonic(), self.place / "output"
        child = os.fork()
        if child == 0:
            self._pytest(targets, output)
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() - began > LONGEST:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
        said = output.read_text(errors="replace")
        failed = re.search(r"^FAILED (.+?)(?: - |$)", said, flags=re.MULTILINE)
        status = os.waitstatus_to_exitcode(ended[1])
        return Outcome(status, failed and failed[1], time.monotonic() - began, "\n".join(said.splitlines()[-12:]))

    def _pytest(self, targets: Sequence[str], output: Path) -> NoReturn:
        """What the forked process does."""
        status = -1
        try:
            os.setpgid(0, 0)
            os.chdir(self.place)
            place = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(place, 1)
            os.dup2(place, 2)
            paths = [str(self.place / "src"), str(self.place)]
            sys.path[:0] = paths
            sys.dont_write_bytecode = True
            os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
            options = [
                "-x",
                "-q",
                "--tb=no",
                "-rfE",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-p",
                "mutants_plugin",
            ]
            status = int(pytest.main([*options, *targets]))
            sys.stdout.flush()
        finally:
            os._exit(status)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """With this bug in the copy, and without it again."""
        path = self.place / "src" / "tacit" / mutant.file
        whole = path.read_text()
        compiled = self._compiled(mutant.builds)
        path.write_text(mutant.applied(whole))
        try:
            if mutant.builds is not None:
                self._build(mutant.builds)
            yield
        finally:
            path.write_text(whole)
            if compiled is not None:
                shutil.copy(ROOT / compiled.relative_to(self.place), compiled)

    def _compiled(self, module: str | None) -> Path | None:
        if module is None:
            return None
        found = list((self.place / "src").glob(f"{module.replace('.', '/')}.*.so"))
        if len(found) != 1:
            raise Rotten(f"{module} is not compiled in this tree; `make install` builds it where there is a C compiler")
        return found[0]

    def _build(self, module: str) -> None:
        """Build one compiled module in the copy, by the settings of pyproject.toml."""
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext

        settings = tomllib.loads((self.place / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
        (found,) = (entry for entry in settings if entry["name"] == module)
        extension = Extension(
            module,
            [str(self.place / source) for source in found["sources"]],
            extra_compile_args=found.get("extra-compile-args", []),
            extra_link_args=found.get("extra-link-args", []),
        )
        distribution = Distribution(
            {"name": "tacit", "ext_modules": [extension], "package_dir": {"": str(self.place / "src")}}
        )
        command = build_ext(distribution)
        command.inplace, command.build_temp = True, str(self.place / "build")
        command.ensure_finalized()
        command.run()
