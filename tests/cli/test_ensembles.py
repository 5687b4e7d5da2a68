"""`tacit ensemble` on real runs: members and whole, accuracy and epsilon, side by side."""

import json

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.privacy import UserError

QUICK = ["model.name=linear", "privacy.epsilon=none", "privacy.noise_multiplier=2.5", "privacy.epochs=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    from tacit.training import Recipe, train

    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (("one", []), ("two", ["optimizer.lr=0.1"]), ("seeded", ["seed=1"])):
        train(Recipe.load("digits", [*QUICK, *changes]), folder / name)
    return folder


def run(*arguments):
    result = CliRunner().invoke(app, ["ensemble", *map(str, arguments)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_prints_each_member_and_the_whole_with_what_they_cost(runs):
    text = run(runs / "one", runs / "two")
    found = json.loads(run(runs / "one", runs / "two", "--json"))
    lines = text.splitlines()
    assert lines[0].startswith(str(runs / "one"))
    assert f"{found['members'][1]['test_accuracy']:.2%}" in lines[1]
    assert lines[2].startswith("ensemble")
    assert f"{found['test_accuracy']:.2%}" in lines[2]
    assert "302 held-out examples of digits" in lines[3]
    assert found["statement"] in text
    assert text.count("exact figures of held-out examples") == 1
    assert found["epsilon"] > max(member["epsilon"] for member in found["members"])
    assert (found["releases"], found["delta"], found["valid_for_release"]) == (24, 1e-5, True)


def test_weights_voting_and_delta_are_as_asked_for(runs):
    found = json.loads(
        run(runs / "one", runs / "two", "--weights", "3,1", "--voting", "votes", "--delta", "1e-6", "--json")
    )
    assert [member["weight"] for member in found["members"]] == [0.75, 0.25]
    assert found["test_accuracy"] == found["members"][0]["test_accuracy"], "the heavier member outvotes the other"
    assert (found["voting"], found["delta"]) == ("votes", 1e-6)
    by_accuracy = json.loads(run(runs / "one", runs / "two", "--weights", "accuracy", "--json"))
    accuracies = [member["test_accuracy"] for member in by_accuracy["members"]]
    weights = [member["weight"] for member in by_accuracy["members"]]
    assert weights == pytest.approx([accuracy / sum(accuracies) for accuracy in accuracies])
    assert any("the weights are the members' accuracies" in caveat for caveat in by_accuracy["caveats"])


def test_one_member_with_a_known_seed_voids_the_whole(runs):
    text = run(runs / "one", runs / "seeded")
    assert f"Not valid for release ({runs / 'seeded'}: the noise came from a known seed" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["one", "one"], "the same run directory"),
        (["one", "three"], "no run directory at three"),
        (["one", "two", "--weights", "most"], "--weights must be equal, accuracy, or numbers"),
        (["one", "two", "--weights", "1,2,3"], "3 weights for 2 runs"),
        (["one", "two", "--voting", "vote"], "did you mean 'votes'"),
        (["one", "two", "--delta", "2"], "delta must lie strictly between 0 and 1"),
        (["one", "two", "--dataset", "no/such/file.npz"], "no/such/file.npz"),
    ],
)
def test_bad_input_is_told_in_one_sentence(runs, monkeypatch, arguments, says):
    monkeypatch.chdir(runs)
    with pytest.raises(UserError, match=says) as refusal:
        run(*arguments)
    assert "\n" not in str(refusal.value)
