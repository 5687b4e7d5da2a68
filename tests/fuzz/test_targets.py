"""Every parser is given its honest inputs, every case that was ever found, and some hundred inputs of fixed chance."""

import random

import pytest

from .campaign import CASES, minimised
from .guard import MEMORY, most_held, tried, warmed
from .mutation import mutated
from .targets import TARGETS, target_of


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_the_bytes_a_parser_reads_them_or_refuses_them_in_a_sentence(name):
    target = target_of(name)
    seeds, chance = list(target.seeds()), random.Random(name)
    warmed(target.run, seeds)
    for _ in range(target.inputs):
        content = mutated(chance.choice(seeds), seeds, target.tokens, chance)
        if target.repair is not None and chance.random() < 0.5:
            content = target.repair(content)
        assert tried(target.run, content, target.seconds) is None, content


@pytest.mark.parametrize("name", TARGETS)
def test_honest_inputs_are_read_by_at_least_one_seed(name):
    target = target_of(name)
    assert any(_is_read(target, content) for content in target.seeds())


def _is_read(target, content):
    try:
        target.run(content)
    except ValueError:
        return False
    return True


CASE_FILES = sorted(path for path in CASES.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", CASE_FILES, ids=[f"{path.parent.name}-{path.name}" for path in CASE_FILES])
def test_what_was_once_found_is_refused_now(path):
    target = target_of(path.parent.name)
    warmed(target.run, target.seeds())
    assert tried(target.run, path.read_bytes(), target.seconds) is None


def test_the_guard_finds_errors_bombs_and_what_never_ends():
    def endless(content):
        while True:
            pass

    def waiting(content):
        import time

        time.sleep(60)

    assert tried(lambda content: [][1], b"").kind == "IndexError"
    assert tried(endless, b"", 0.05).kind == "too slow"
    assert tried(waiting, b"", 0.01).kind == "too slow"
    assert tried(lambda content: len(b"1" * (most_held() + MEMORY)), b"", 60.0).kind == "memory"
    assert tried(lambda content: None, b"") is None


def test_a_finding_is_made_smaller_and_stays_one():
    assert minimised(b"[" * 1000 + b"needle" + b"]" * 1000, lambda shorter: b"needle" in shorter) == b"needle"
