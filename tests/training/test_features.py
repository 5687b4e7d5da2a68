"""Scattering features are computed once, cached where they are public, and stored as part of the model."""

import hashlib

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tacit.cli import app
from tacit.data import Dataset, Split
from tacit.models import Standardize, prior
from tacit.privacy import PrivacyPlan, UserError, read_ledger, verify
from tacit.training import features
from tacit.training.checkpoint import load_tensors
from tacit.training.features import feature_map, with_features
from tacit.training.interruption import Interrupted
from tacit.training.recipe import Recipe
from tacit.training.run import load_data, load_model, train
from tacit.training.trainer import PrivateTrainer

CHANGES = ["data.resize=16", "model.name=linear", "model.features=scattering", "privacy.epochs=2"]


def toy(name="toy", count=600):
    images = np.random.default_rng(0).integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
    data = Dataset(name, images, np.arange(count) % 2, ("a", "b"), (0.5,), (0.5,))
    return Split(train=data, test=data.take(slice(0, 10)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_features_are_those_of_the_map_whatever_the_batch(cache):
    extract, shape = feature_map("scattering", "group", (1, 16, 16))
    split = toy()
    found = with_features(split, extract)
    assert found.train.input_shape == shape == (81, 4, 4)
    inputs, targets = split.train.batch([3, 599])
    again, labels = found.train.batch([3, 599])
    assert (extract(inputs) - again).abs().max() < 1e-5
    assert torch.equal(targets, labels)
    groups = again.reshape(2, 27, -1)
    assert groups.mean(dim=2).abs().max() < 1e-4
    deviations = groups.std(dim=2, correction=0)
    assert deviations.max() < 1.001
    assert deviations[:, 0].min() > 0.99
    assert deviations.min() > 0.5, "some groups hardly vary, and GroupNorm's eps shows"


def test_private_features_are_not_written_anywhere_and_public_ones_once(cache, monkeypatch):
    extract, _ = feature_map("scattering", "none", (1, 16, 16))
    for name in ("toy", "mnist"):  # whatever somebody's folder is called
        with_features(toy(name), extract)
    assert not cache.exists()
    split = toy()
    known = {hashlib.sha256(part.images.tobytes()).hexdigest() for part in (split.train, split.test)}
    monkeypatch.setattr(features, "PUBLIC", known)
    first = with_features(split, extract)
    kept = sorted(cache.rglob("*.npy"))
    assert len(kept) == 2
    monkeypatch.setattr(features, "_computed", lambda *_: pytest.fail("computed again"))
    second = with_features(split, extract)
    assert np.array_equal(first.train.images, second.train.images)
    monkeypatch.undo()
    monkeypatch.setenv("TACIT_CACHE", str(cache))
    monkeypatch.setattr(features, "PUBLIC", known)
    other, _ = feature_map("scattering", "group", (1, 16, 16))
    with_features(split, other)
    assert len(sorted(cache.rglob("*.npy"))) == 4, "another map has files of its own"


def test_a_folder_called_like_a_public_data_set_is_private(tmp_path, cache):
    data = toy().train
    np.savez(tmp_path / "mnist.npz", x=data.images, y=data.labels)
    changes = ["data.source=" + str(tmp_path / "mnist.npz"), *CHANGES[1:], "privacy.epochs=1"]
    train(Recipe.load("digits", changes), tmp_path / "run")
    assert not cache.exists()


def test_a_run_on_features_trains_evaluates_and_predicts_from_raw_images(tmp_path, cache):
    run = train(Recipe.load("digits", CHANGES), tmp_path / "run")
    assert run.certificate["valid_for_release"]
    assert run.metrics[-1]["test_accuracy"] > 0.3
    model, facts = load_model(tmp_path / "run")
    assert facts["input_shape"] == [1, 16, 16]
    test = load_data(Recipe.load("digits", CHANGES)).test
    inputs, targets = test.batch()
    accuracy = float((model(inputs).argmax(dim=1) == targets).float().mean())
    assert accuracy == pytest.approx(run.metrics[-1]["test_accuracy"], abs=0.01)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--json"])
    assert done.exit_code == 0, done.output


STANDARD = [*CHANGES, "model.normalization=standard"]


def test_a_run_that_standardises_pays_for_its_statistics_and_keeps_them(tmp_path, cache):
    recipe = Recipe.load("digits", STANDARD)
    run = train(recipe, tmp_path / "run")
    assert run.certificate["valid_for_release"]
    assert run.certificate["epsilon"] <= 3.0
    assert any("mean square" in line for line in run.certificate["released"])
    assert run.plan.whole_releases == (8.0,)
    assert run.plan.noise_multiplier(0) > recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"normalization": "group"})}
    ).plan(1500).noise_multiplier(0)
    assert verify(tmp_path / "run")["epsilon"] == run.certificate["epsilon"]
    model, _ = load_model(tmp_path / "run")
    layer = next(module for module in model.modules() if isinstance(module, Standardize))
    assert bool(layer.measured)
    assert (layer.std > 0).all()
    assert len(set(layer.mean.tolist())) > 70
    test = load_data(recipe).test
    inputs, targets = test.batch()
    accuracy = float((model(inputs).argmax(dim=1) == targets).float().mean())
    assert accuracy == pytest.approx(run.metrics[-1]["test_accuracy"], abs=0.01)


def test_statistics_are_measured_once_also_when_a_run_is_resumed(tmp_path, cache):
    steps = 0

    def stop_early(self, private, update=PrivateTrainer._update):
        nonlocal steps
        update(self, private)
        steps += 1
        self._stop.requested = steps == 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateTrainer, "_update", stop_early)
        with pytest.raises(Interrupted):
            train(Recipe.load("digits", STANDARD), tmp_path / "run")
        first, _ = load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")
        train(Recipe.load("digits", STANDARD), tmp_path / "run", resume=True)
    kinds = [entry["kind"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert kinds.count("whole-release") == 1
    model, _ = load_model(tmp_path / "run")
    layer = next(module for module in model.modules() if isinstance(module, Standardize))
    assert torch.equal(layer.mean, first["model.0.mean"])


def test_a_run_does_not_go_on_with_other_features(tmp_path, cache, monkeypatch):
    def stop_early(self, private, update=PrivateTrainer._update):
        update(self, private)
        self._stop.requested = True

    recipe = Recipe.load("digits", [*CHANGES, "model.normalization=prior"])
    with monkeypatch.context() as patch:
        patch.setattr(PrivateTrainer, "_update", stop_early)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(prior, "_WIDER", 2)  # as another version of the scale might have it
        with pytest.raises(UserError, match="another plan or other data"):
            train(recipe, tmp_path / "run", resume=True)
    train(recipe, tmp_path / "run", resume=True)


def test_statistics_that_a_crash_lost_are_not_drawn_a_second_time(tmp_path, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Standardize, "take", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(Recipe.load("digits", STANDARD), tmp_path / "run")
    with pytest.raises(UserError, match="start a new run"):
        train(Recipe.load("digits", STANDARD), tmp_path / "run", resume=True)
    kinds = [entry["kind"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert kinds.count("whole-release") == 1


def test_a_layer_that_standardises_and_what_pays_for_it_go_together():
    layer = Standardize(2, (1.0, 1.0))
    for whole, standardize in (((), layer), ((8.0,), None)):
        with pytest.raises(UserError, match="give both or neither"):
            small_trainer(layer, standardize, whole)


def small_trainer(layer, standardize, whole):
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    plan = PrivacyPlan(sample_rate=0.5, steps=2, expected_batch_size=2, whole_releases=whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    return PrivateTrainer(model, plan=plan, standardize=standardize, optimizer=optimizer, loss=loss)


def test_statistics_from_elsewhere_are_refused_or_told():
    data = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    layer = Standardize(2, (1.0, 1.0))
    layer.take(torch.tensor([[0.5, 0.5], [1.0, 1.0]]), smallest_variance=1e-3)
    with pytest.raises(UserError, match="statistics from elsewhere"):
        small_trainer(layer, layer, (8.0,)).fit(data)
    trainer = small_trainer(layer, None, ())
    trainer.fit(data)
    assert any("has not paid for" in reason for reason in trainer.certificate()["void_because"])


def test_a_step_of_ones_own_and_a_wrong_number_of_channels_are_refused_before_anything_is_paid():
    layer = Standardize(2, (1.0, 1.0))
    with pytest.raises(UserError, match="use fit"):
        small_trainer(layer, layer, (8.0,)).step((torch.randn(4, 2), torch.tensor([0, 1, 0, 1])))
    wrong = Standardize(3, (1.0, 1.0))
    trainer = small_trainer(wrong, wrong, (8.0,))
    with pytest.raises(UserError, match="standardises 3 channels"):
        trainer.fit((torch.randn(4, 2), torch.tensor([0, 1, 0, 1])))
    assert trainer.certificate()["epsilon"] == 0.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.features=scattering", "model.normalization_bounds=[1.0, 2.0]"], "bounds is of model.normalization"),
        (
            ["model.features=scattering", "model.normalization=standard", "model.normalization_bounds=[1.0]"],
            "two public numbers",
        ),
        (["privacy.statistics_noise_multiplier=4.0"], "is of model.normalization"),
        (["model.features=scatering"], "did you mean 'scattering'"),
        (["model.features=scattering", "model.normalization=batch"], "unknown model.normalization"),
        (["model.normalization=group"], "there are none"),
        (["model.normalization_bounds=[1.0, 2.0]"], "there are none"),
        (["data.resize=6", "model.features=scattering"], "too small"),
    ],
)
def test_wrong_features_are_refused_in_words(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        train(Recipe.load("digits", ["data.resize=16", *changes]), tmp_path / "run")
