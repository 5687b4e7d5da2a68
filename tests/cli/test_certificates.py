"""`tacit sign` and `tacit verify`: for people, for pipelines, and for those who hold another to a policy."""

import json
import os
import shutil
import stat
import sys
import warnings
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator

from tacit.cli import main, verify
from tacit.privacy import Flat, Ledger, PrivacyPlan, certificate_of, certificate_schema

PLAN = PrivacyPlan(sample_rate=0.1, steps=2, clipping=Flat(1.0), expected_batch_size=4)


@pytest.fixture
def command(monkeypatch, capsys):
    """The command line in this process: its exit status, stdout and stderr."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which main replaces

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tacit", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        done = capsys.readouterr()
        return ended.value.code or 0, done.out, done.err

    return run


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Run directories without a model: an honest one, one with a seed, one without noise."""
    made = {}
    for name, sigma, reproducible in (("honest", 1.0, False), ("seeded", 1.0, True), ("bare", 0.0, False)):
        run = made[name] = tmp_path_factory.mktemp(name)
        ledger = Ledger.create(run / "ledger.jsonl", PLAN, delta=1e-5, examples=40, reproducible=reproducible)
        for _ in range(2):
            ledger.record_release(noise_multiplier=sigma, sample_rate=0.1, sampled_by="tacit")
        ledger.close()
        (run / "certificate.json").write_text(json.dumps(certificate_of(ledger.entries)))
    return made


@pytest.fixture
def runs(templates, tmp_path):
    return {name: shutil.copytree(run, tmp_path / name) for name, run in templates.items()}


@pytest.fixture
def key(command, tmp_path):
    path = tmp_path / "key.pem"
    status, out, _ = command("sign", "--new-key", path, "--json")
    assert status == 0
    return path, json.loads(out)["public_key"]


def test_json_is_one_object_whatever_comes_out(command, runs):
    status, out, err = command("verify", runs["honest"], "--json")
    found = json.loads(out)
    assert (status, err, found["verified"], found["signature"]) == (0, "", True, None)
    certificate = json.loads((runs["honest"] / "certificate.json").read_text())
    assert {k: v for k, v in found.items() if k not in ("verified", "signature")} == certificate
    path = runs["honest"] / "certificate.json"
    path.write_text(path.read_text().replace('"epsilon": ', '"epsilon": 9'))
    status, out, err = command("verify", runs["honest"], "--json")
    found = json.loads(out)
    assert (status, set(found), found["verified"]) == (2, {"verified", "reason"}, False)
    assert "digest does not fit" in found["reason"]
    assert err == f"tacit: {found['reason']}\n"


@pytest.mark.parametrize("trouble", ["nowhere", "no certificate", "no ledger", "broken signature", "model is a folder"])
def test_json_says_why_for_every_kind_of_trouble(command, runs, trouble):
    run = runs["honest"]
    if trouble == "no certificate":
        (run / "certificate.json").unlink()
    elif trouble == "no ledger":
        (run / "ledger.jsonl").unlink()
    elif trouble == "broken signature":
        (run / "certificate.sig").write_text("{}")
    elif trouble == "model is a folder":
        (run / "model.safetensors").mkdir()
    status, out, err = command("verify", run / "no" if trouble == "nowhere" else run, "--json")
    found = json.loads(out)
    assert (status, set(found), found["verified"]) == (2, {"verified", "reason"}, False)
    assert "Traceback" not in err


def test_a_policy_that_is_met_passes_and_one_that_is_not_fails_with_its_reason(command, runs):
    certificate = json.loads((runs["honest"] / "certificate.json").read_text())
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    met = ["--require-valid", "--max-epsilon", epsilon, "--max-delta", delta]
    assert command("verify", runs["honest"], *met)[0] == 0
    for name, option, value, says in (
        ("honest", "--max-epsilon", epsilon * 0.999, "is above --max-epsilon"),
        ("honest", "--max-delta", delta * 0.999, "is above --max-delta"),
        ("bare", "--max-epsilon", 1e9, "no epsilon holds"),
        ("seeded", "--require-valid", None, "not valid for release: the noise came from a known seed"),
        ("bare", "--require-valid", None, "not valid for release: no epsilon holds"),
        ("honest", "--max-epsilon", "nan", "--max-epsilon must be a finite number above 0"),
        ("honest", "--max-delta", 1, "delta must lie strictly between 0 and 1"),
    ):
        status, out, err = command("verify", runs[name], option, *([] if value is None else [value]), "--json")
        assert (status, json.loads(out)["verified"]) == (2, False)
        assert says in json.loads(out)["reason"]
        assert says in err
    for name in ("seeded", "bare"):
        assert command("verify", runs[name])[0] == 0, "true, if not valid for release"


def test_a_signature_is_made_and_asked_for(command, runs, key):
    path, public = key
    assert command("verify", runs["honest"], "--public-key", public)[0] == 2
    status, out, _ = command("sign", runs["honest"], "--key", path)
    assert status == 0
    assert f"--public-key {public}" in out
    status, out, _ = command("verify", runs["honest"])
    assert (status, f"signature: signed by {public} (nobody has said whose key that is)\n" in out) == (0, True)
    status, out, _ = command("verify", runs["honest"], "--public-key", public, "--json")
    assert (status, json.loads(out)["signature"]) == (0, {"public_key": public, "expected": True})
    status, out, _ = command("verify", runs["honest"], "--json")
    assert json.loads(out)["signature"] == {"public_key": public, "expected": False}
    status, out, err = command("verify", runs["honest"], "--public-key", "0" * 64, "--json")
    assert (status, json.loads(out)["verified"]) == (2, False)
    assert "by another key" in err


def test_what_does_not_verify_is_not_signed(command, runs, key):
    (runs["honest"] / "certificate.json").write_text("{}")
    status, _, err = command("sign", runs["honest"], "--key", key[0])
    assert (status, err.count("\n")) == (2, 1)
    assert not (runs["honest"] / "certificate.sig").exists()


def test_a_key_is_made_for_its_owner_alone_and_encrypted_if_asked(command, runs, tmp_path, monkeypatch):
    path = tmp_path / "key.pem"
    monkeypatch.setenv("TACIT_KEY_PASSPHRASE", "open sesame")
    status, out, _ = command("sign", "--new-key", path, "--encrypt")
    public = out.split()[-1]
    assert (status, len(public), stat.S_IMODE(os.stat(path).st_mode)) == (0, 64, 0o600)
    assert b"ENCRYPTED" in path.read_bytes()
    assert command("sign", runs["honest"], "--key", path)[0] == 0
    assert command("verify", runs["honest"], "--public-key", public)[0] == 0
    monkeypatch.setenv("TACIT_KEY_PASSPHRASE", "open barley")
    assert "passphrase is wrong" in command("sign", runs["honest"], "--key", path)[2]
    monkeypatch.delenv("TACIT_KEY_PASSPHRASE")
    assert "set TACIT_KEY_PASSPHRASE" in command("sign", runs["honest"], "--key", path)[2], "nobody sits there"
    assert "never overwritten" in command("sign", "--new-key", path)[2]


def test_a_passphrase_is_asked_for_where_somebody_sits_there(monkeypatch, command, runs, tmp_path):
    asked = []
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or "open sesame")
    path = tmp_path / "key.pem"
    assert command("sign", "--new-key", path, "--encrypt")[0] == 0
    assert len(asked) == 2, "once more, for typing errors"
    assert command("sign", runs["honest"], "--key", path)[0] == 0
    assert len(asked) == 3
    monkeypatch.setattr("getpass.getpass", lambda prompt: prompt)
    assert "differ" in command("sign", "--new-key", tmp_path / "other.pem", "--encrypt")[2]
    assert not (tmp_path / "other.pem").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--key", "k.pem"], ["run"], ["run", "--new-key", "k.pem"], ["--encrypt"], ["--key", "k", "--new-key", "n"]],
)
def test_half_a_question_is_answered_with_what_is_missing(command, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    status, _, err = command("sign", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "sign" in err
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_only_of_what_holds(command, runs, tmp_path):
    page = tmp_path / "certificate.html"
    assert command("verify", runs["seeded"], "--page", page, "--require-valid")[0] == 2
    assert not page.exists()
    status, out, _ = command("verify", runs["seeded"], "--page", page)
    assert (status, out.splitlines()[-1]) == (0, f"page: {page}")
    assert "Not valid for release" in page.read_text(encoding="utf-8")
    status, out, err = command("verify", runs["honest"], "--page", tmp_path / "page.txt", "--json")
    assert (status, json.loads(out)["verified"]) == (2, False)
    assert "ends in .html" in err


def test_the_schema_is_printed_without_a_run_and_fits_what_is_verified(command, runs):
    status, out, _ = command("verify", "--schema")
    assert (status, json.loads(out)) == (0, certificate_schema())
    found = json.loads(command("verify", runs["honest"], "--json")[1])
    del found["verified"], found["signature"]
    Draft202012Validator(json.loads(out)).validate(found)


def test_the_help_says_how_a_pipeline_uses_it(command):
    status, out, _ = command("verify", "--help")
    assert status == 0
    assert '"verified": false' in out
    assert "&&" in verify.command.__doc__


def test_a_real_run_is_signed_checked_and_shown(tacit, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    public = json.loads(tacit("sign", "--new-key", tmp_path / "key.pem", "--json", check=0).stdout)["public_key"]
    tacit("sign", run, "--key", tmp_path / "key.pem", check=0)
    page = tmp_path / "certificate.html"
    policy = ["--require-valid", "--max-epsilon", 3, "--max-delta", 1e-5, "--public-key", public]
    found = json.loads(tacit("verify", run, *policy, "--page", page, "--json", check=0).stdout)
    assert found["verified"] is found["signature"]["expected"] is True
    assert found["model_sha256"] in page.read_text(encoding="utf-8")
    Draft202012Validator(certificate_schema()).validate(json.loads((run / "certificate.json").read_text()))
    with open(run / "model.safetensors", "ab") as file:
        file.write(b"\0")
    assert json.loads(tacit("verify", run, *policy, "--json", check=2).stdout)["verified"] is False
