"""`tacit audit` as people use it: what it prints, writes and draws, and the status it ends with."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.privacy import UserError

SMALL = ["--canaries", "4000", "--repeats", "1", "--seed", "0", "--set", "privacy.epochs=4", "--quiet"]


def run(*arguments):
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    from tacit.training import Recipe, train

    folder = tmp_path_factory.mktemp("runs")
    changes = ["model.name=linear", "privacy.epsilon=none", "privacy.noise_multiplier=2.5", "privacy.epochs=2"]
    return train(Recipe.load("digits", changes), folder / "run")


def test_without_a_run_it_audits_the_digits_recipe_and_the_claim_stands(tmp_path):
    status, text = run(*SMALL, "--json", "--plot", tmp_path / "roc.png", "--out", tmp_path / "audit.json")
    found = json.loads(text)
    assert status == 0
    assert (found["attack"], found["subject"], found["delta"], found["exceeds_claim"]) == (
        "mechanism",
        "digits",
        1e-5,
        False,
    )
    assert 0 < found["epsilon_lower_bound"] < found["epsilon"] <= 3
    assert (found["confidence"], found["scores"], found["trainings"]) == (0.95, 4000, 1)
    assert found["beside"][0]["method"] == "Gaussian"
    assert "no bound" in found["beside"][0]["assumes"]
    assert json.loads((tmp_path / "audit.json").read_text()) == found
    assert (tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_people_read_the_claim_the_bound_what_it_cost_and_one_sentence():
    status, text = run(*SMALL)
    lines = {line[:15].strip(): line[15:] for line in text.splitlines() if line[:1] != " "}
    assert status == 0
    assert lines["claimed"].startswith("epsilon 2.99")
    assert "with 0.95 confidence (Clopper-Pearson)" in lines["lower bound"]
    assert lines["it cost"].startswith("1 training, 4000 scores")
    assert lines["it says"].startswith("The claim stands")
    assert "at 0.1%" in lines["found"]


def test_a_claim_that_is_too_small_ends_with_status_1():
    status, text = run(*SMALL, "--set", "privacy.epsilon=8", "--claim", "0.5")
    assert status == 1
    assert "The claim does not hold" in text


def test_several_audits_are_counted():
    status, text = run(*SMALL, "--times", "3", "--json")
    found = json.loads(text)
    assert status == 0
    assert (found["audits"], found["below"], found["trainings"]) == (3, 3, 3)
    assert len(set(found["epsilon_lower_bounds"])) == 3, "each has a seed of its own"
    assert found["smallest"] == min(found["epsilon_lower_bounds"])


def test_a_finished_run_is_audited_by_its_own_plan_and_certificate(finished):
    status, text = run(finished.directory, "--canaries", 2000, "--repeats", 1, "--seed", 1, "--json", "--quiet")
    found = json.loads(text)
    assert status == 0
    assert found["epsilon"] == finished.certificate["epsilon"]
    assert found["epsilon_lower_bound"] < found["epsilon"]


def test_the_finished_model_is_attacked_by_its_losses_without_a_training(finished):
    status, text = run(finished.directory, "--attack", "loss", "--quiet")
    assert status == 0
    assert "no training, 1797 scores" in text
    assert "no proof" in text
    assert "whoever owns the data" in text


def test_a_recipe_is_attacked_with_shadow_models_and_fair_coins(tmp_path):
    quick = ["--set", "model.name=linear", "--set", "privacy.epochs=2", "--quiet"]
    status, text = run("--attack", "lira", "--shadows", 2, "--seed", 0, "--json", *quick)
    found = json.loads(text)
    assert status == 0
    assert (found["trainings"], found["scores"], found["bound"]["method"]) == (3, 1797, "one-run")
    assert any("a fair coin" in caveat for caveat in found["caveats"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--attack", "canary"], "did you mean 'canaries'"),
        (["--confidence", "1.5"], "confidence must lie between 0.5 and 1, not 1.5"),
        (["--canaries", "0"], "--canaries must be a whole number of at least 1, not 0"),
        (["--times", "0"], "--times must be a whole number"),
        (["--attack", "loss", "--canaries", "5"], "--canaries is not for --attack loss; leave it out"),
        (["--shadows", "4"], "--shadows is not for --attack mechanism"),
        (["--attack", "lira", "--shadows", "3"], "an even number of them, not 3"),
        (["--plot", "roc.gif"], "ends in .png or .svg"),
        (["--out", "nowhere/at/all.json"], "there is no folder 'nowhere/at'"),
        (["--recipe", "digit"], "did you mean 'digits'"),
        (["--claim", "-1"], "--claim must be a finite number of at least 0"),
        (["no-such-run"], "there is no run directory at no-such-run"),
        (["no-such-run", "--recipe", "digits"], "leave --recipe and --set out"),
        (["--attack", "canaries", "--canaries", "60000"], "60000 canaries are too many for delta 1e-05"),
    ],
)
def test_bad_input_is_told_in_one_sentence(arguments, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as refusal:
        run(*arguments, "--quiet")
    assert "\n" not in str(refusal.value)


def test_a_run_that_was_changed_is_not_audited(finished, tmp_path):
    import shutil

    copy = shutil.copytree(finished.directory, tmp_path / "copy")
    certificate = json.loads((copy / "certificate.json").read_text())
    (copy / "certificate.json").write_text(json.dumps({**certificate, "epsilon": 0.1}))
    with pytest.raises(UserError, match="was changed after it was written"):
        run(copy)


def test_ctrl_c_ends_an_audit_without_a_traceback():
    command = [sys.executable, "-c", "from tacit.cli import main; main()", "audit", "--repeats", "500"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr.readline().startswith("auditing digits by mechanism")
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest


def test_the_help_says_what_the_status_means():
    status, text = run("--help")
    assert status == 0
    assert "1 if the lower bound exceeds it" in " ".join(text.split())
