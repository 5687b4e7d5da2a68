"""No byte of a ledger changes unnoticed, one process writes it, and a torn end is the only thing a resumption mends."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tacit.privacy import Flat, Ledger, PrivacyPlan, UserError, read_ledger
from tacit.privacy.ledger import canonical, released_levels

PLAN = PrivacyPlan(sample_rate=0.1, steps=5, clipping=Flat(1.0), expected_batch_size=4)


@pytest.fixture
def path(tmp_path):
    """A ledger of five lines: opened, two releases, a disclosure, another release."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, PLAN, delta=1e-5, examples=40)
    for _ in range(2):
        ledger.record_release(noise_multiplier=1.5, sample_rate=0.1, sampled_by="tacit")
    ledger.record_disclosure("the training loss")
    ledger.record_release(noise_multiplier=2.5, sample_rate=0.1, sampled_by="caller")
    ledger.close()
    return path


def rejected(path, content):
    path.write_bytes(content)
    try:
        read_ledger(path)
    except UserError:
        return True
    return False


def short(path):
    """The first three lines, which are a ledger too."""
    return b"".join(path.read_bytes().splitlines(keepends=True)[:3])


def forged(entries):
    """The lines of these entries with numbers, links and hashes made anew: anybody can do that."""
    lines, previous = [], "0" * 64
    for number, entry in enumerate(entries):
        entry = {key: value for key, value in entry.items() if key != "hash"} | {"entry": number, "previous": previous}
        previous = hashlib.sha256(canonical(entry)).hexdigest()
        lines.append(canonical({**entry, "hash": previous}) + b"\n")
    return b"".join(lines)


def test_a_ledger_reads_back_as_it_was_written(path):
    entries = read_ledger(path)
    assert [entry["kind"] for entry in entries] == ["open", "release", "release", "disclosure", "release"]
    assert [entry["entry"] for entry in entries] == list(range(5))
    assert released_levels(entries) == [(1.5, 2), (2.5, 1)]
    assert PrivacyPlan.from_dict(entries[0]["plan"]) == PLAN


def test_changing_any_single_byte_is_noticed(path):
    content = short(path)
    for position, byte in enumerate(content):
        for other in {byte ^ 1, byte ^ 0x20, ord("\n")} - {byte}:
            changed = content[:position] + bytes([other]) + content[position + 1 :]
            assert rejected(path, changed), (position, chr(byte), chr(other))
    assert not rejected(path, content)


def test_removing_or_inserting_any_single_byte_is_noticed(path):
    content = short(path)
    for position in range(len(content)):
        assert rejected(path, content[:position] + content[position + 1 :])
        assert rejected(path, content[:position] + (b" ", b"0", b"\n")[position % 3] + content[position:])


def test_removing_repeating_or_swapping_lines_is_noticed(path):
    lines = path.read_bytes().splitlines(keepends=True)
    last = len(lines) - 1
    for i in range(len(lines)):
        assert rejected(path, b"".join([*lines[: i + 1], *lines[i:]]))
        if i != last:  # the last lines only the certificate can miss
            assert rejected(path, b"".join([*lines[:i], *lines[i + 1 :]]))
        for j in range(i):
            swapped = lines.copy()
            swapped[i], swapped[j] = lines[j], lines[i]
            assert rejected(path, b"".join(swapped))


@pytest.mark.parametrize(
    "garbage", [b"\n", b" \n", b"{}\n", b"null\n", b"\x00", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"x"]
)
def test_garbage_at_the_end_is_noticed(path, garbage):
    assert rejected(path, path.read_bytes() + garbage)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"{}\n", b"[]\n", b"7\n", b'{"hash":1}\n', b"NaN\n", b"9" * 5000 + b"\n"]
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path, content):
    assert rejected(tmp_path / "ledger.jsonl", content)


def test_a_missing_ledger_is_a_users_error(tmp_path):
    for ask in (read_ledger, Ledger.resume):
        with pytest.raises(UserError):
            ask(tmp_path / "ledger.jsonl")
        with pytest.raises(UserError):
            ask(tmp_path)
    with pytest.raises(UserError, match="cannot be made"):
        Ledger.create(tmp_path / "nowhere" / "ledger.jsonl", PLAN, delta=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "Release"},
        {"kind": None},
        {"kind": "open"},
        {"noise_multiplier": "2.5"},
        {"noise_multiplier": True},
        {"noise_multiplier": 10**400},
        {"sample_rate": None},
        {"sampled_by": 3},
        {"reproducible": 0},
    ],
)
def test_a_line_that_tacit_does_not_write_is_never_passed_over_even_with_the_right_hashes(path, changes):
    entries = list(read_ledger(path))
    assert not rejected(path, forged(entries))
    assert rejected(path, forged([*entries[:-1], {**entries[-1], **changes}]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_hostile_ledger_gives_a_users_error_and_never_a_traceback(path, data):
    entries = json.loads(json.dumps([json.loads(line) for line in path.read_bytes().splitlines()]))
    target = path.parent / "hostile.jsonl"
    entry = data.draw(st.sampled_from(entries))
    entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(json_values)
    target.write_bytes(forged(entries))
    for read in (read_ledger, Ledger.resume):
        try:
            result = read(target)
        except UserError:
            continue
        if isinstance(result, Ledger):
            result.close()


def test_a_torn_last_line_is_cut_on_resumption_and_recorded(path):
    content = path.read_bytes()
    whole = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
    for torn in (content[len(whole) : -2], content[len(whole) : -20], b"\x00" * 9, b"{"):
        assert rejected(path, whole + torn)
        ledger = Ledger.resume(path)
        ledger.record_release(noise_multiplier=1.0, sample_rate=0.1)
        ledger.close()
        assert ledger.releases == 3
        entries = read_ledger(path)
        assert path.read_bytes().startswith(whole)
        assert [entry["kind"] for entry in entries[4:]] == ["resume", "release"]
        assert entries[4]["torn_bytes"] == len(torn)


def test_a_release_that_lacks_only_the_end_of_its_line_is_counted_on_resumption(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    ledger = Ledger.resume(path)
    ledger.close()
    assert ledger.releases == 3
    assert path.read_bytes().startswith(content)
    assert read_ledger(path) == ledger.entries


def test_a_resumption_does_not_mend_a_changed_line(path):
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1.5", b"9.5", 1))
    with pytest.raises(UserError, match="was changed"):
        Ledger.resume(path)
    path.write_bytes(content)
    Ledger.resume(path).close()  # the failed attempt left no lock behind


def test_a_resumption_continues_the_chain_and_counts_its_launches(path):
    head = read_ledger(path)[-1]["hash"]
    for launch in (1, 2):
        ledger = Ledger.resume(path)
        assert (ledger.launches, ledger.releases) == (launch, 2 + launch)
        ledger.record_release(noise_multiplier=1.5, sample_rate=0.1)
        ledger.close()
    entries = read_ledger(path)
    assert entries[5]["previous"] == head
    assert [entry["step"] for entry in entries if entry["kind"] == "release"] == [0, 1, 2, 3, 4]
    assert ledger.entries == entries
    assert ledger.head == entries[-1]["hash"]


def test_a_new_run_has_no_launches_and_a_ledger_is_never_overwritten(path):
    content = path.read_bytes()
    assert Ledger.in_memory(PLAN, delta=1e-5).launches == 0
    with pytest.raises(UserError, match="exists already"):
        Ledger.create(path, PLAN, delta=1e-5)
    assert path.read_bytes() == content
    Ledger.resume(path).close()


def test_two_ledgers_cannot_write_one_file(path):
    first = Ledger.resume(path)
    with pytest.raises(UserError, match="another process"):
        Ledger.resume(path)
    with pytest.raises(UserError, match="another process"):
        Ledger.create(path, PLAN, delta=1e-5)
    first.record_release(noise_multiplier=1.0, sample_rate=0.1)
    first.close()
    Ledger.resume(path).close()
    assert len(read_ledger(path)) == 8


def test_another_process_cannot_write_the_file(path):
    first = Ledger.resume(path)
    code = (
        "import sys\nfrom tacit.privacy import Ledger, UserError\n"
        "try: Ledger.resume(sys.argv[1])\nexcept UserError as error: print(error)"
    )
    command = [sys.executable, "-c", code, os.fspath(path)]
    assert "another process" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize("fact", [object(), float("nan"), {1, 2}])
def test_facts_that_cannot_be_written_leave_no_lock_and_no_half_of_a_ledger(tmp_path, fact):
    path = tmp_path / "ledger.jsonl"
    with pytest.raises((TypeError, ValueError)):
        Ledger.create(path, PLAN, delta=1e-5, fact=fact)
    Ledger.create(path, PLAN, delta=1e-5).close()
    assert len(read_ledger(path)) == 1


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan"), "1e-5"])
def test_a_delta_that_makes_no_sense_opens_no_ledger(tmp_path, delta):
    with pytest.raises(UserError):
        Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=delta)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_disclosure_is_recorded_once_from_where_it_began():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    ledger.record_release(noise_multiplier=1.0, sample_rate=0.1)
    for _ in range(3):
        ledger.record_disclosure("norms")
    ledger.record_disclosure("losses")
    found = [(entry["what"], entry["step"]) for entry in ledger.entries if entry["kind"] == "disclosure"]
    assert found == [("norms", 1), ("losses", 1)]
