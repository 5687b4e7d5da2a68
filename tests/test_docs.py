"""The pages on guarantee and security cannot rot: each test, command, option and file that they name is there."""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
import typer

from tacit.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["docs/guarantee.md", "docs/security.md"]

NODE = re.compile(r"\b((?:tests|src)/[\w/.-]+?\.py)((?:::\w+)*)")
PATHS = re.compile(r"`((?:src|tests|docs|benchmarks|results)/[\w/.*-]+)`")
FENCED = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:tacit|make|pytest|python -m pytest) [^`\n]+)`")


def code_of(text):
    """The lines of code of a page: in fences, indented, or in line."""
    fenced = [line for block in FENCED.findall(text) for line in block.splitlines()]
    indented = re.findall(r"^    (\S.*)$", FENCED.sub("", text), flags=re.MULTILINE)
    return [line.strip() for line in [*fenced, *indented, *INLINE.findall(text)]]


def commands_of(text):
    """Each simple command of a page, in words: what stands between the operators of a shell."""
    for line in code_of(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a formula
            continue
        command = []
        for word in [*words, ";"]:
            if word in ("&&", "||", "|", ";", "\\"):
                yield command
                command = []
            else:
                command.append(word.rstrip(";"))


@functools.cache
def functions_of(path):
    """The names of the tests of a file, with those of their classes before them."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}::{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return names


def missing(text):
    """What a page names and is not there, in words."""
    for path, name in NODE.findall(text):
        if not (ROOT / path).is_file():
            yield f"there is no {path}"
        elif name and name.removeprefix("::") not in functions_of(path):
            yield f"there is no {path}{name}"
    for pattern in PATHS.findall(text):
        if not list(ROOT.glob(pattern.rstrip("/"))):
            yield f"there is no {pattern}"
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    commands = typer.main.get_command(app).commands
    for words in commands_of(text):
        if words[:1] == ["make"]:
            yield from (f"there is no make {word}" for word in words[1:] if "=" not in word and word not in targets)
        if words[:1] == ["tacit"] and not words[1].startswith("-"):
            if words[1] not in commands:
                yield f"there is no tacit {words[1]}"
                continue
            options = {option for parameter in commands[words[1]].params for option in parameter.opts} | {"--help"}
            for word in words[2:]:
                if word.startswith("-") and not re.match(r"-\d", word) and word.partition("=")[0] not in options:
                    yield f"tacit {words[1]} has no {word}"


@pytest.mark.parametrize("page", PAGES)
def test_every_test_command_option_and_file_that_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    assert list(missing(text)) == []
    assert len(NODE.findall(text)) >= 5, "evidence"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("`tests/privacy/test_nothing.py`", "there is no tests/privacy/test_nothing.py"),
        ("    python -m pytest tests/test_docs.py::test_none", "there is no tests/test_docs.py::test_none"),
        ("see `src/tacit/privacy/nothing.c`", "there is no src/tacit/privacy/nothing.c"),
        ("    tacit prove RUN_DIR", "there is no tacit prove"),
        ("    tacit verify RUN_DIR --trust    # me", "tacit verify has no --trust"),
        ("```\ntacit verify RUN_DIR && tacit sign RUN_DIR --clé\n```", "tacit sign has no --clé"),
        ("as `make believe` does", "there is no make believe"),
    ],
)
def test_what_is_not_there_is_found(text, says):
    assert says in list(missing(text))


def test_what_is_there_is_not_complained_of():
    text = (
        "`src/tacit/privacy/`, `tests/test_docs.py`: run\n\n    make test\n"
        "    python -m pytest tests/test_docs.py::test_what_is_there_is_not_complained_of -q\n"
        "    tacit verify RUN_DIR --json --max-epsilon 3 && ./publish --now; tacit train --set seed=1\n"
    )
    assert list(missing(text)) == []


def test_the_page_on_the_guarantee_names_each_part_of_the_core():
    text = (ROOT / "docs" / "guarantee.md").read_text()
    for name in (
        "sampling",
        "clipping",
        "mechanism",
        "randomness",
        "accounting",
        "plan",
        "ledger",
        "certificate",
        "driven",
    ):
        assert f"src/tacit/privacy/{name}.py" in text
