"""A run directory that somebody else made can be verified: it is read in bounded time and memory, and writes nowhere else."""

import json
import os
import time

import pytest

from tacit.privacy import Ledger, PrivacyPlan, certificate_of, ledger
from tacit.privacy.accounting import epsilon_of, joined
from tacit.privacy.driven import LossDriven
from tacit.privacy.files import opened, read_whole, replace_whole
from tacit.privacy.schedules import Constant, Linear, levels
from tacit.privacy.signature import load_key, new_key, sign, verified
from tacit.privacy.validation import UserError, steps_of

SECONDS = 30  # of the processor


@pytest.fixture
def run(tmp_path):
    """A finished run of three releases."""
    folder = tmp_path / "run"
    folder.mkdir()
    made = Ledger.create(folder / "ledger.jsonl", PrivacyPlan(sample_rate=0.1, steps=3), delta=1e-5)
    for _ in range(3):
        made.record_release(noise_multiplier=1.0, sample_rate=0.1, sampled_by="tacit")
    made.close()
    (folder / "certificate.json").write_text(json.dumps(certificate_of(made.entries)))
    return folder


@pytest.mark.parametrize("name", ["ledger.jsonl", "certificate.json", "certificate.sig", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(run, name, make):
    (run / name).unlink(missing_ok=True)
    make(run / name)
    with pytest.raises(UserError):
        verified(run)


def test_a_ledger_beyond_the_limit_is_refused_before_it_is_read(run, monkeypatch):
    verified(run)
    monkeypatch.setattr(ledger, "LARGEST_LEDGER", 1000)
    with pytest.raises(UserError, match="longer than 1000 bytes"):
        verified(run)


def test_a_link_in_the_place_of_a_draft_is_not_followed(run, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run / ".certificate.sig.draft").symlink_to(precious)
    new_key(tmp_path / "key.pem")
    sign(run, load_key(tmp_path / "key.pem"))
    assert precious.read_text() == "mine"
    assert verified(run).signed_by is not None


def test_a_file_that_grows_is_read_to_its_limit(tmp_path):
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 10)
    assert read_whole(path, largest=10) == b"x" * 10
    with pytest.raises(OSError, match="longer than 9"):
        read_whole(path, largest=9)
    with pytest.raises(OSError, match="not a regular file"), opened(tmp_path):
        pass


def test_a_file_is_replaced_as_a_whole_or_left(tmp_path):
    path = tmp_path / "folder" / "note"
    with pytest.raises(OSError):
        replace_whole(path, b"new")
    path.parent.mkdir()
    replace_whole(path, b"new")
    assert (path.read_bytes(), os.listdir(path.parent)) == (b"new", ["note"])


def resealed(entries):
    """A ledger of these entries whose chain is whole."""
    chained = []
    for entry in entries:
        fields = {key: value for key, value in entry.items() if key != "hash"}
        previous = chained[-1]["hash"] if chained else "0" * 64
        chained.append(ledger._sealed({**fields, "entry": len(chained), "previous": previous}))
    return chained


def claimed(plan, releases):
    """Entries of a plan with these further ones."""
    opening = Ledger.in_memory(plan, delta=1e-5).entries[0]
    return resealed([opening, *releases])


def release(step, sigma):
    kind = {"kind": "release", "step": step, "noise_multiplier": sigma, "sample_rate": 0.1}
    return {**kind, "sampled_by": "tacit", "reproducible": False}


@pytest.mark.parametrize(
    "entries",
    [
        lambda: claimed(PrivacyPlan(sample_rate=0.1, steps=10**12), [release(0, 1.0)]),
        lambda: claimed(PrivacyPlan(sample_rate=0.1, steps=5000), [release(i, 1 + i / 977) for i in range(5000)]),
        lambda: claimed(
            PrivacyPlan(sample_rate=0.1, steps=1),
            [
                {"kind": "whole-release", "noise_multiplier": 8 + i / 7, "what": "means", "reproducible": False}
                for i in range(5000)
            ],
        ),
    ],
    ids=["planned steps", "levels", "releases of all examples"],
)
def test_a_ledger_that_claims_a_lot_is_accounted_in_bounded_time(entries):
    begun = time.process_time()
    assert certificate_of(entries())["epsilon"] > 0
    assert time.process_time() - begun < SECONDS


def test_a_filter_with_more_levels_than_it_knows_is_refused_before_each_is_accounted():
    plan = PrivacyPlan(sample_rate=0.1, steps=5000, noise=LossDriven(1.0, 3.0, order=8.0, budget=100.0))
    with pytest.raises(UserError, match="5000 noise multipliers where its filter knows 16"):
        certificate_of(claimed(plan, [release(i, 1 + i / 977) for i in range(5000)]))


def test_releases_of_all_examples_cost_as_much_joined_as_one_by_one():
    sigmas = [3.0, 4.0, 12.0]
    by_hand = sum(sigma**-2 for sigma in sigmas) ** -0.5
    assert 0 <= 1 - joined(sigmas)[0] / by_hand < 1e-11
    together = epsilon_of(1.0, [(by_hand, 1)], 1e-5)
    assert epsilon_of(1.0, [], 1e-5, whole=sigmas) == pytest.approx(together, rel=1e-3)


def test_many_steps_of_constant_noise_are_one_level_and_a_schedule_of_as_many_is_refused():
    assert levels(Constant(2.0), 10**12) == ((2.0, 10**12),)
    with pytest.raises(UserError, match="at most 2097152 steps"):
        levels(Linear(2.0, 1.0), 10**12)
    with pytest.raises(UserError, match="more than 1e\\+15 steps"):
        steps_of(1e308, 1e-300)


def test_words_of_a_ledger_cannot_command_a_terminal_or_fill_it(run):
    text = (run / "certificate.json").read_text()
    for words in ("\x1b[2J", "x" * 100_000):
        found = json.loads(text)
        del found["digest"]
        found["statement"] = words
        found["digest"] = ledger.hashlib.sha256(ledger.canonical(found)).hexdigest()
        (run / "certificate.json").write_text(json.dumps(found))
        with pytest.raises(UserError, match="the certificate says statement") as caught:
            verified(run)
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 3000
    assert str(UserError("a\x1b[2Jb\nc")) == "a\\u001b[2Jb\\u000ac"


def test_reading_takes_the_memory_of_the_file_not_of_the_longest_that_it_may_be(tmp_path):
    (tmp_path / "short").write_bytes(b"four")
    assert read_whole(tmp_path / "short", largest=2**50) == b"four"
    with pytest.raises(OSError, match="longer than 3 bytes"):
        read_whole(tmp_path / "short", largest=3)


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end_or_refused(tmp_path, monkeypatch):
    (tmp_path / "growing").write_bytes(b"12345678")
    before = os.stat_result((0o100644, 1, 1, 1, 0, 0, 4, 0, 0, 0))
    monkeypatch.setattr("tacit.privacy.files.os.fstat", lambda handle: before)
    assert read_whole(tmp_path / "growing", largest=8) == b"12345678"
    with pytest.raises(OSError, match="longer than 7 bytes"):
        read_whole(tmp_path / "growing", largest=7)
