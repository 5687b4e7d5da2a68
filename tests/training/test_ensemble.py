"""An ensemble says what its formula says, each member sees examples as it was trained on them, and all are paid for."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tacit.data import load
from tacit.privacy import UserError, epsilon_of
from tacit.privacy.certificate import rounded_up
from tacit.training import Ensemble, Recipe, load_model, train
from tacit.training.checkpoint import load_tensors, save_tensors
from tacit.training.ensemble import Member, held_out_of

CHANGES = ["model.name=linear", "privacy.epsilon=none", "privacy.noise_multiplier=2.0", "privacy.epochs=2"]
OTHER = ["data.mean=0.1", "data.std=0.6", "privacy.epochs=1", "optimizer.lr=0.1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on the embedded digits that normalise them in two ways."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in (("one", []), ("two", OTHER)):
        train(Recipe.load("digits", [*CHANGES, *changes]), folder / name)
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def held_out():
    return load("digits").test


def softmax_of(run, images):
    """A member's probabilities, by hand: its weights and its constants."""
    model, facts = load_model(run)
    inputs = (torch.from_numpy(images).double() / 255 - facts["mean"][0]) / facts["std"][0]
    return model.double()(inputs).softmax(dim=1).detach()


def test_it_is_the_weighted_mean_of_probabilities_each_with_its_own_normalisation(runs, held_out):
    expected = 0.25 * softmax_of(runs[0], held_out.images) + 0.75 * softmax_of(runs[1], held_out.images)
    ensemble = Ensemble.load(runs, [1.0, 3.0])
    found = ensemble.predict(held_out)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(held_out)).double())
    batch = torch.from_numpy(held_out.images[:7])
    assert torch.equal(ensemble.predict(batch), ensemble.predict(batch.numpy()))
    torch.testing.assert_close(ensemble.predict(batch), found[:7])
    assert ensemble.predict(batch[:0]).shape == (0, 10)


def test_votes_give_a_whole_weight_to_the_likeliest_class(runs, held_out):
    found = Ensemble.load(runs, [0.4, 0.6], voting="votes").predict(held_out)
    choices = [softmax_of(run, held_out.images).argmax(dim=1) for run in runs]
    expected = torch.zeros(len(held_out), 10, dtype=torch.float64)
    for weight, chosen in zip((0.4, 0.6), choices):
        expected[torch.arange(len(held_out)), chosen] += weight
    assert torch.equal(found, expected)
    assert (choices[0] != choices[1]).any(), "or this would show nothing"


def test_members_are_measured_as_their_runs_measured_them_and_accuracies_are_weights(runs, held_out):
    from tacit.training.directory import read_metrics

    last = [read_metrics(run / "metrics.jsonl")[-1]["test_accuracy"] for run in runs]
    ensemble = Ensemble.load(runs, "accuracy")
    assert ensemble.weights == pytest.approx([accuracy / sum(last) for accuracy in last])
    judged = ensemble.evaluate(held_out)
    assert judged.member_accuracies == pytest.approx(last)
    right = ensemble.predict(held_out).argmax(dim=1).numpy() == held_out.labels
    assert judged.accuracy == pytest.approx(np.mean(right))
    assert "the weights are the members' accuracies on held-out examples" in judged.caveats[-1]
    assert len(Ensemble.load(runs).evaluate(held_out).caveats) == 1


def test_a_weight_of_nothing_takes_a_member_out_and_one_member_is_itself(runs, held_out):
    alone = Ensemble.load(runs[:1]).predict(held_out)
    torch.testing.assert_close(Ensemble.load(runs, [7, 0]).predict(held_out), alone)
    assert not torch.allclose(Ensemble.load(runs).predict(held_out), alone)


def test_the_members_are_paid_for_together(runs):
    found = Ensemble.load(runs).certificate(delta=1e-6)
    assert found["epsilon"] == rounded_up(epsilon_of(256 / 1495, [(2.0, 18)], 1e-6))
    assert [run["releases"] for run in found["runs"]] == [12, 6]


FACTS = {"input_shape": [4], "classes": ["a", "b"], "mean": [0.0], "std": [1.0], "scaled_bytes": False}


def members(**changes):
    return [Member(Path(name), nn.Linear(4, 2), {**FACTS, **other}, 1.0) for name, other in (("x", {}), ("y", changes))]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda runs: Ensemble(members(classes=["a", "c"])), "x and y cannot vote together: classes"),
        (lambda runs: Ensemble(members(input_shape=[5])), "input_shape"),
        (lambda runs: Ensemble(members(scaled_bytes=True)), "scaled_bytes"),
        (lambda runs: Ensemble([]), "at least one"),
        (lambda runs: Ensemble(members(), voting="vote"), "did you mean 'votes'"),
        (lambda runs: Ensemble(members()).predict(torch.zeros(2, 5)), "the model takes \\[4\\]"),
        (lambda runs: Ensemble(members()).predict(torch.zeros(2, 4, dtype=torch.uint8)), "floating-point"),
        (lambda runs: Ensemble(members()).evaluate(load("digits").test), "10 classes; the ensemble knows 2"),
        (lambda runs: Ensemble.load(runs, [1.0]), "1 weights for 2 runs"),
        (lambda runs: Ensemble.load(runs, [0.0, 0.0]), "above 0"),
        (lambda runs: Ensemble.load(runs, [1.0, -1.0]), "each weight"),
        (lambda runs: Ensemble.load(runs, "acuracy"), "did you mean 'accuracy'"),
        (lambda runs: Ensemble.load([*runs, "nowhere"]), "no run directory at nowhere"),
    ],
)
def test_what_cannot_vote_is_told_in_words(runs, make, says):
    with pytest.raises(UserError, match=says):
        make(runs)


def test_runs_on_other_data_or_another_part_of_them_share_no_held_out_examples(runs, tmp_path, held_out):
    assert np.array_equal(held_out_of(runs).images, held_out.images)
    other = shutil.copytree(runs[1], tmp_path / "other")
    recipe = (other / "recipe.toml").read_text()
    for old, new, says in (
        ('source = "digits"', 'source = "mnist"', "data.source is digits there and mnist here"),
        ("held_out = 0.16666666666666666", "held_out = 0.3", "data.held_out"),
    ):
        assert old in recipe
        (other / "recipe.toml").write_text(recipe.replace(old, new))
        with pytest.raises(UserError, match=says):
            held_out_of([runs[0], other])


def test_a_run_that_was_never_measured_has_no_accuracy_for_a_weight(runs, tmp_path):
    other = shutil.copytree(runs[1], tmp_path / "other")
    (other / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="no test accuracy"):
        Ensemble.load([runs[0], other], "accuracy")
    Ensemble.load([runs[0], other])


def test_a_member_that_was_exchanged_is_refused_when_it_is_certified(runs, tmp_path):
    other = shutil.copytree(runs[1], tmp_path / "other")
    tensors, facts = load_tensors(other / "model.safetensors")
    save_tensors(other / "model.safetensors", {name: tensor + 1 for name, tensor in tensors.items()}, facts)
    with pytest.raises(UserError, match="not the model of this certificate"):
        Ensemble.load([runs[0], other]).certificate()
