"""A few faults of every kind that takes little time; `python -m tests.faults` makes hundreds."""

import pytest

from .injection import Fault
from .launching import Ended
from .trials import Runner, Trial


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("faults"), seed=0)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", "noise", 12),  # after the ledger's line, before its noise
        Fault("interrupt", "open", 2),  # while the first checkpoint is written
        Fault("memory", "step", 9),
        Fault("ENOSPC", "write", 15),
    ],
    ids=lambda fault: fault.action,
)
def test_after_a_fault_nothing_is_lost_nothing_uncounted_and_the_error_is_a_sentence(runner, tmp_path, fault):
    found = Trial(fault.action, 0)
    runner.launch(found, tmp_path, fault)
    assert found.interrupted
    runner.finish(found, tmp_path)
    assert found.survived, found


@pytest.mark.parametrize("kind", ["checkpoint", "ledger"])
def test_what_was_damaged_is_told_and_nothing_of_it_goes_uncounted(runner, kind):
    found = runner.trial(kind, 0)
    assert found.survived, found
    assert found.refused


@pytest.mark.parametrize(
    ("status", "said", "clear"),
    [
        (0, "", True),
        (2, "tacit: the disk is full; make room\n", True),
        (2, "Traceback (most recent call last):\ntacit: no\n", False),
        (1, "MemoryError\n", False),
        (2, "", False),
        (130, "\ninterrupted; everything up to here is saved.\n", True),
        (-11, "", False),
    ],
)
def test_an_error_is_clear_if_it_is_one_sentence_and_has_its_status(status, said, clear):
    assert (Ended(status, said).unclear is None) == clear


def test_noise_that_is_not_in_the_ledger_and_a_lost_checkpoint_are_found(runner, tmp_path):
    found = Trial("none", 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "witness").write_bytes(b"x")
    runner.check(found, tmp_path, (3, []))
    assert found.under_counted
    assert found.lost
