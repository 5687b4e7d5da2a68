"""A certificate says what its ledger proves, no less and no more, and `verify` believes nothing else."""

import functools
import hashlib
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tacit.privacy import (
    Flat,
    Ledger,
    Linear,
    PrivacyPlan,
    UserError,
    accounting,
    certificate,
    certificate_of,
    epsilon_of,
    verify,
)
from tacit.privacy.ledger import SORTED, canonical, read_ledger

PLAN = PrivacyPlan(sample_rate=0.1, steps=3, clipping=Flat(1.0), noise=Linear(4.0, 2.0), expected_batch_size=4)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The same accountant, asked once for the same question: hundreds of forgeries share their ledger."""
    monkeypatch.setattr(accounting, "epsilon_of", remembered)


@functools.cache
def _epsilon(rate, levels, delta, whole, accountant):
    return epsilon_of(rate, levels, delta, whole=whole, accountant=accountant)


def remembered(rate, levels, delta, whole=(), accountant="pld", coarse=False):
    return _epsilon(rate, tuple(levels), delta, tuple(whole), accountant)


def entries_of(*, plan=PLAN, delta=1e-5, releases=3, change=None, **facts):
    ledger = Ledger.in_memory(plan, delta=delta, **facts)
    for step in range(releases):
        ledger.record_release(
            **{
                "noise_multiplier": plan.noise_multiplier(step),
                "sample_rate": 0.1,
                "sampled_by": "tacit",
                **(change or {}),
            }
        )
    return ledger.entries


@pytest.fixture
def run(tmp_path):
    """An honest run directory."""
    ledger = Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=1e-5, examples=40)
    for step in range(3):
        ledger.record_release(noise_multiplier=PLAN.noise_multiplier(step), sample_rate=0.1, sampled_by="tacit")
    write(tmp_path, certificate_of(ledger.entries))
    ledger.close()
    return tmp_path


def write(run, content):
    (run / "certificate.json").write_text(content if isinstance(content, str) else json.dumps(content))


def sealed(content):
    """The certificate with its digest made anew: anybody can do that."""
    content = {key: value for key, value in content.items() if key != "digest"}
    return {**content, "digest": hashlib.sha256(canonical(content)).hexdigest()}


def honest(run):
    return json.loads((run / "certificate.json").read_text())


def test_verify_passes_on_an_honest_run_and_returns_its_certificate(run):
    assert verify(run) == honest(run) == certificate_of(read_ledger(run / "ledger.jsonl"))
    assert verify(str(run))["valid_for_release"] is True


def test_a_certificate_is_a_deterministic_function_of_the_ledger(run):
    entries = read_ledger(run / "ledger.jsonl")
    assert canonical(certificate_of(entries)) == canonical(certificate_of(list(entries)))


def test_epsilon_is_that_of_the_releases_made_and_rounded_up():
    for releases in (1, 3):
        found = certificate_of(entries_of(releases=releases))
        levels = tuple(sorted((PLAN.noise_multiplier(step), 1) for step in range(releases)))
        exact = remembered(0.1, levels, 1e-5)
        assert exact <= found["epsilon"] <= exact + 1e-6
        assert found["epsilon_rdp"] >= remembered(0.1, levels, 1e-5, accountant="rdp")
        assert (found["releases"], found["planned_releases"], found["delta"]) == (releases, 3, 1e-5)
        assert f"({found['epsilon']}, 1e-05)-differentially private" in found["statement"]
        assert tuple((level["noise_multiplier"], level["releases"]) for level in found["noise"]["levels"]) == levels


def test_epsilon_counts_what_was_released_whatever_the_plan_had_been():
    weaker = certificate_of(entries_of(change={"noise_multiplier": 1.0}))
    assert weaker["epsilon"] >= remembered(0.1, ((1.0, 3),), 1e-5) > certificate_of(entries_of())["epsilon"]


VOID = {
    "seed": ({"reproducible": True}, {}, "known seed"),
    "seed of a release": ({}, {"reproducible": True}, "known seed"),
    "caller": ({}, {"sampled_by": "caller"}, "chosen by the caller"),
    "no noise": ({}, {"noise_multiplier": 0.0}, "no epsilon holds"),
}


@pytest.mark.parametrize("reason", VOID)
def test_each_reason_to_void_stands_when_it_should_and_alone(reason):
    facts, change, words = VOID[reason]
    found = certificate_of(entries_of(**facts, change=change))
    assert found["valid_for_release"] is False
    assert len(found["void_because"]) == 1
    assert words in found["void_because"][0]


def test_a_disclosure_voids_and_names_what_was_shown():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    ledger.record_disclosure("the training loss")
    found = certificate_of(ledger.entries)
    assert found["void_because"] == ["the training loss was shown or stored without noise from step 0 on"]
    assert found["valid_for_release"] is False


def test_an_honest_run_is_void_for_no_reason():
    found = certificate_of(entries_of(examples=40, reproducible=False))
    assert found["valid_for_release"] is True
    assert found["void_because"] == []


def test_without_noise_no_epsilon_is_claimed():
    found = certificate_of(entries_of(change={"noise_multiplier": 0.0}))
    assert found["epsilon"] is found["epsilon_rdp"] is None
    assert found["statement"].startswith("No differential privacy holds")
    json.dumps(found, allow_nan=False)


def test_of_batches_from_a_sorted_pass_no_epsilon_is_claimed_however_much_noise_there_is():
    mixed = Ledger.in_memory(PLAN, delta=1e-5)
    mixed.record_release(noise_multiplier=4.0, sample_rate=0.1, sampled_by="tacit")
    mixed.record_release(noise_multiplier=4.0, sample_rate=0.1, sampled_by=SORTED)
    for entries in (mixed.entries, entries_of(change={"sampled_by": SORTED})):
        found = certificate_of(entries)
        assert found["epsilon"] is found["epsilon_rdp"] is None
        assert found["valid_for_release"] is False
        assert [reason.partition(":")[0] for reason in found["void_because"]] == ["no epsilon holds"]
        assert "(almost) no noise" not in found["statement"] + found["void_because"][0]
        assert found["statement"].startswith("No differential privacy holds for this model: batches were taken")
        assert "poisson" not in found["sampling"]["kind"]


def caveats(**given):
    return " | ".join(certificate_of(entries_of(**given))["caveats"])


def test_each_caveat_stands_exactly_when_it_should(monkeypatch):
    monkeypatch.setattr(accounting, "epsilon_of", lambda *_, **__: 1.0)  # caveats do not depend on it
    plain = caveats(examples=40)
    for words in ("not below 1/n", "resumed", "stopped after", "held-out"):
        assert words not in plain
    assert "taken as public" in plain
    assert "floating-point" in plain
    assert "not below 1/n" in caveats(examples=40, delta=1 / 40)
    assert "not below 1/n" in caveats(examples=40, delta=0.03)
    assert "not below 1/n" not in caveats(examples=40, delta=0.0249)
    assert "stopped after 2 of 3" in caveats(releases=2)
    assert "held-out" in caveats(evaluated_on_held_out=True)


def test_resumptions_are_a_caveat_and_counted(run):
    for _ in range(2):
        Ledger.resume(run / "ledger.jsonl").close()
    assert "resumed 2 time(s)" in " | ".join(certificate_of(read_ledger(run / "ledger.jsonl"))["caveats"])


def test_a_mixture_of_sampling_rates_is_refused():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    ledger.record_release(noise_multiplier=4.0, sample_rate=0.1)
    certificate_of(ledger.entries)
    ledger.record_release(noise_multiplier=4.0, sample_rate=0.05)
    with pytest.raises(UserError, match="another sampling rate"):
        certificate_of(ledger.entries)


def test_changing_any_single_byte_of_the_certificate_fails_or_changes_nothing(run):
    """`1E-05` for `1e-05` is the same number; hardly anything else may pass."""
    path = run / "certificate.json"
    content, expected, passed = path.read_bytes(), honest(run), 0
    for position, byte in enumerate(content):
        for other in (byte ^ 1, byte ^ 0x20):
            path.write_bytes(content[:position] + bytes([other]) + content[position + 1 :])
            try:
                found = verify(run)
            except UserError:
                continue
            assert canonical(found) == canonical(expected), (position, chr(byte), chr(other))
            passed += 1
    assert passed <= 10


def test_changing_any_digit_of_epsilon_fails(run):
    text = json.dumps(honest(run)["epsilon"])
    for position, digit in enumerate(text):
        for other in set("0123456789") - {digit} if digit.isdigit() else set():
            changed = float(text[:position] + other + text[position + 1 :])
            if changed != honest(run)["epsilon"]:
                content = honest(run)
                write(run, {**content, "epsilon": changed})
                with pytest.raises(UserError, match="changed after it was written"):
                    verify(run)
                write(run, content)


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.999, 0.99999, 1.001, -1.0])
def test_another_epsilon_fails_even_with_a_digest_made_anew(run, factor):
    content = honest(run)
    epsilon = content["epsilon"] * factor
    statement = content["statement"].replace(str(content["epsilon"]), str(epsilon))
    write(run, sealed({**content, "epsilon": epsilon, "statement": statement}))
    with pytest.raises(UserError, match="the certificate says"):
        verify(run)


def test_the_last_digit_may_differ_as_between_two_machines_and_no_more(run):
    content = honest(run)
    for units, passes in [(1, True), (-1, True), (10, False), (-10, False)]:
        epsilon = round(content["epsilon"] + units * 1e-6, 6)
        statement = content["statement"].replace(str(content["epsilon"]), str(epsilon))
        write(run, sealed({**content, "epsilon": epsilon, "statement": statement}))
        if passes:
            assert verify(run)["epsilon"] == epsilon
        else:
            with pytest.raises(UserError):
                verify(run)


FORGERIES = {
    "statement": "All 3 releases together are (0.01, 1e-09)-differentially private.",
    "delta": 1e-9,
    "epsilon": None,
    "epsilon_rdp": 0.01,
    "neighbouring_relation": "replace one example",
    "valid_for_release": 1,
    "void_because": ["nothing"],
    "caveats": [],
    "releases": 3.0,
    "planned_releases": 30,
    "facts": {"examples": 10**9},
    "clipping": {"kind": "flat", "clipping_norm": 1.0, "sensitivity": 0.5},
    "sampling": {"kind": "poisson", "sample_rate": 0.01},
    "noise": {},
    "format": "tacit-certificate/2",
    "accountant": "mine",
    "released": [],
    "more": "anything",
}


@pytest.mark.parametrize("key", FORGERIES)
def test_no_field_can_be_forged_even_with_a_digest_made_anew(run, key):
    write(run, sealed({**honest(run), key: FORGERIES[key]}))
    with pytest.raises(UserError, match=r"the certificate (says|holds)"):
        verify(run)


def test_no_field_can_be_left_out_even_with_a_digest_made_anew(run):
    content = honest(run)
    for key in content:
        write(run, sealed({k: v for k, v in content.items() if k != key}) if key != "digest" else {**content, key: ""})
        with pytest.raises(UserError):
            verify(run)


def test_a_key_that_stands_twice_is_refused_because_readers_may_see_the_other(run):
    text = (run / "certificate.json").read_text()
    write(run, '{"epsilon": 0.001, ' + text[1:])
    with pytest.raises(UserError, match="not a tacit certificate"):
        verify(run)


def test_missing_lines_of_the_ledger_are_noticed(run):
    path = run / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(UserError):
            verify(run)
    path.write_bytes(b"".join(lines))
    verify(run)


def test_a_ledger_that_goes_on_tells_of_an_interruption(run):
    Ledger.resume(run / "ledger.jsonl").close()
    with pytest.raises(UserError, match=r"interrupted.*--resume"):
        verify(run)


def test_the_certificate_of_another_run_is_refused(run, tmp_path_factory):
    write(run, certificate_of(entries_of(examples=41)))
    with pytest.raises(UserError, match="another ledger"):
        verify(run)


def test_a_directory_without_its_files_is_a_users_error(tmp_path, run):
    with pytest.raises(UserError, match="no run directory"):
        verify(tmp_path / "nowhere")
    (run / "certificate.json").unlink()
    with pytest.raises(UserError, match="no certificate"):
        verify(run)
    (run / "certificate.json").mkdir()
    with pytest.raises(UserError):
        verify(run)
    (run / "ledger.jsonl").unlink()
    with pytest.raises(UserError, match="holds no ledger"):
        verify(run)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        '"x"',
        "{}",
        "NaN",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        '{"ledger": 3, "digest": 3}',
        '{"ledger": {"entries": NaN, "head": ""}, "digest": ""}',
        '{"ledger": {"entries": Infinity, "head": ""}, "digest": ""}',
        '{"ledger": {"entries": 1e999, "head": ""}, "digest": ""}',
        '{"ledger": {"entries": "four", "head": ""}, "digest": ""}',
        '{"ledger": {"entries": 4, "head": ""}, "digest": "", "epsilon": NaN}',
    ],
)
def test_hostile_text_is_a_users_error(run, text):
    write(run, text)
    with pytest.raises(UserError):
        verify(run)


@pytest.mark.parametrize("count", [0, -1, -2, -4, -5, -(10**9), 5, 10**9, 10**400, True, 3.9, "4", None])
def test_a_wrong_count_of_entries_is_a_users_error_for_every_head(run, count):
    for head in [entry["hash"] for entry in read_ledger(run / "ledger.jsonl")]:
        write(run, sealed({**honest(run), "ledger": {"entries": count, "head": head}}))
        with pytest.raises(UserError):
            verify(run)


@pytest.mark.parametrize("depth", range(900, 1000, 7))
def test_nesting_as_deep_as_the_parser_allows_is_a_users_error(run, depth):
    text = json.dumps(honest(run))
    write(run, text[:-1] + ', "more": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(UserError):
        verify(run)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**330), 10**330) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fuzzed = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@fuzzed
@given(content=json_values)
def test_any_json_is_a_users_error(run, content):
    write(run, content)
    with pytest.raises(UserError):
        verify(run)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    run = tmp_path_factory.mktemp("template")
    ledger = Ledger.create(run / "ledger.jsonl", PLAN, delta=1e-5, examples=40)
    for step in range(3):
        ledger.record_release(noise_multiplier=PLAN.noise_multiplier(step), sample_rate=0.1, sampled_by="tacit")
    ledger.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounting, "epsilon_of", remembered)
        return run, certificate_of(ledger.entries)


@fuzzed
@given(data=st.data())
def test_any_value_in_any_place_of_the_certificate_is_a_users_error_or_the_same_value(template, data):
    run, content = template
    content = json.loads(json.dumps(content))
    place = content
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    before, place[key] = json.dumps(place[key]), data.draw(json_values)
    with_digest = data.draw(st.booleans())
    try:
        write(run, sealed(content) if with_digest and content is not place else content)
    except ValueError:  # a digest cannot be made of NaN
        write(run, content)
    try:
        verify(run)
    except UserError:
        return
    assert json.dumps(place[key]) == before


@fuzzed
@given(data=st.data())
def test_a_forged_ledger_of_any_content_is_a_users_error_or_gets_the_epsilon_it_proves(template, data):
    """Whoever forges ledger and certificate together must at least write a ledger that tacit could have written."""
    source, content = template
    run = source.parent / "forged"
    run.mkdir(exist_ok=True)
    entries = [json.loads(line) for line in (source / "ledger.jsonl").read_bytes().splitlines()]
    place = entries[0]
    key = data.draw(
        st.sampled_from(["plan", "delta", "facts", "examples", "sample_rate", "steps", "clipping", "noise"])
    )
    if key == "examples":
        place = entries[0]["facts"]
    elif key not in place:
        place = entries[0]["plan"]
    place[key] = data.draw(json_values)
    previous, lines = "0" * 64, []
    for entry in entries:
        entry["previous"] = previous
        del entry["hash"]
        try:
            previous = hashlib.sha256(canonical(entry)).hexdigest()
        except ValueError:
            return
        lines.append(canonical({**entry, "hash": previous}) + b"\n")
    (run / "ledger.jsonl").write_bytes(b"".join(lines))
    write(run, sealed({**content, "ledger": {"entries": 4, "head": previous}}))
    try:
        found = verify(run)
    except UserError:
        return
    assert found["epsilon"] == content["epsilon"]


def test_epsilon_is_never_rounded_down():
    for epsilon in (1e-9, 0.1, 1 / 3, 2.3650001, 166.1, 12345.678901234):
        rounded = certificate.rounded_up(epsilon)
        assert epsilon <= rounded <= epsilon + 1.1e-6
    assert certificate.rounded_up(math.inf) is None


def test_a_release_with_almost_no_noise_voids_the_certificate():
    found = certificate_of(entries_of(change={"noise_multiplier": 1e-9}))
    assert (found["epsilon"], found["valid_for_release"]) == (None, False)


def test_the_statement_of_a_void_certificate_begins_with_that():
    assert certificate_of(entries_of(change={"reproducible": True}))["statement"].startswith("Not valid for release")
    assert certificate_of(entries_of())["statement"].startswith("All 3 releases")


def test_another_model_beside_the_certificate_fails_verification(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=1e-5)
    ledger.record_release(noise_multiplier=PLAN.noise_multiplier(0), sample_rate=0.1, sampled_by="tacit")
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"weights")
    ledger.record_model(hashlib.sha256(b"weights").hexdigest())
    ledger.record_model(hashlib.sha256(b"weights").hexdigest())
    assert [entry["kind"] for entry in ledger.entries] == ["open", "release", "model"], "recorded once"
    ledger.close()
    (tmp_path / "certificate.json").write_text(json.dumps(certificate_of(ledger.entries)))
    verify(tmp_path)
    model.write_bytes(b"Weights")
    with pytest.raises(UserError, match="not the model of this certificate"):
        verify(tmp_path)
    model.unlink()
    verify(tmp_path)


def test_a_model_that_the_certificate_does_not_name_fails_verification(run):
    (run / "model.safetensors").write_bytes(b"weights from elsewhere")
    with pytest.raises(UserError, match="not the model of this certificate"):
        verify(run)


def test_no_fact_of_the_callers_hides_a_caveat():
    assert set(certificate_of(entries_of())["caveats"]) <= set(certificate_of(entries_of(model="mine"))["caveats"])
