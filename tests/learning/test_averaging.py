"""Averages of weights are their formulas, are what is measured and stored, and survive an interruption."""

import pytest
import torch
from torch import nn

from tacit.learning import AveragedWeights, Exponential, Tail, make_averaging
from tacit.privacy import Constant, Flat, PrivacyPlan, UserError
from tacit.training import Interrupted, PrivateTrainer, Recipe, evaluate, load_model, train
from tacit.training.checkpoint import load_tensors

LOSS = nn.CrossEntropyLoss(reduction="none")


def averaged(averaging, values):
    model = nn.Linear(1, 1, bias=False)
    average = AveragedWeights(averaging)
    for step, value in enumerate(values, 1):
        nn.init.constant_(model.weight, value)
        average.update(model, step, len(values))
    return float(average.tensors["weight"])


def test_a_tail_is_the_mean_of_the_last_iterates():
    values = [5.0, -3.0, 2.0, 8.0, 1.0, 0.5, 4.0, 7.0]
    for fraction, count in ((1.0, 8), (0.5, 4), (0.25, 2), (0.01, 1)):
        assert averaged(Tail(fraction), values) == pytest.approx(sum(values[-count:]) / count, rel=1e-5)


def test_an_exponential_average_is_its_formula():
    values = [float(i % 5) for i in range(200)]
    expected = values[0]
    for step, value in enumerate(values[1:], 2):
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert averaged(Exponential(0.9), values) == pytest.approx(expected, rel=1e-4)


def test_averages_of_half_precision_are_kept_in_full():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = AveragedWeights(Exponential(0.999))
    for step in range(1, 400):
        nn.init.constant_(model.weight, 1.0 + step / 400)
        average.update(model, step, 400)
    assert average.tensors["weight"].dtype == torch.float32
    with average.in_place(model):
        assert model.weight.dtype == torch.bfloat16
        assert 1.0 < model.weight.item() < 1.9, "it lags behind"


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(90) % 3
    return 3 * torch.eye(3, 5)[targets] + torch.randn(90, 5, generator=generator), targets


def trainer_of(model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3) if model is None else model
    plan = PrivacyPlan(sample_rate=0.5, steps=12, expected_batch_size=45, clipping=Flat(1.0), noise=Constant(1.0))
    return PrivateTrainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loss=LOSS, plan=plan, seed=1, **options
    )


def test_the_model_that_fit_leaves_and_measures_is_the_mean_of_its_iterates(monkeypatch):
    iterates = []

    def remembered(self, private, update=PrivateTrainer._update):
        update(self, private)
        iterates.append(self.model.weight.detach().clone())

    monkeypatch.setattr(PrivateTrainer, "_update", remembered)
    plain = trainer_of()
    plain.fit(data())
    last = plain.model.weight.detach().clone()
    iterates.clear()
    trainer = trainer_of(averaging=Tail(0.5))
    history = trainer.fit(data(), validate_on=data(seed=1))
    assert torch.equal(iterates[-1], last), "averaging changes nothing of what is learned"
    torch.testing.assert_close(trainer.model.weight.detach(), torch.stack(iterates[6:]).mean(dim=0))
    assert not torch.allclose(trainer.model.weight, last)
    assert history[-1]["test_loss"] == pytest.approx(evaluate(trainer.model, data(seed=1), LOSS)[1], rel=1e-6)
    assert trainer.certificate()["statement"] == plain.certificate()["statement"], "and costs nothing"


def test_an_interrupted_run_goes_on_with_its_average(tmp_path, monkeypatch):
    def stop_early(self, private, update=PrivateTrainer._update):
        update(self, private)
        self._stop.requested = self._mechanism.next_step == 8

    run = tmp_path / "run"
    first = trainer_of(averaging=Tail(0.5), run_directory=run)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateTrainer, "_update", stop_early)
        with pytest.raises(Interrupted):
            first.fit(data())
    stored = load_tensors(run / "checkpoint" / "state.safetensors")[0]
    assert torch.equal(stored["average.weight"], first._average.tensors["weight"])
    assert torch.equal(stored["model.weight"], first.model.weight), "the weights themselves are there too"
    with pytest.raises(UserError, match="averages its weights"):
        trainer_of(run_directory=run, resume=True).fit(data())
    again = trainer_of(averaging=Tail(0.5), run_directory=run, resume=True)
    again._opened(examples=90, evaluated_on_held_out=False)
    assert torch.equal(again._average.tensors["weight"], first._average.tensors["weight"])
    again.close()
    sequel = trainer_of(averaging=Tail(0.5), run_directory=run, resume=True)
    sequel.fit(data())
    assert torch.equal(sequel.model.weight, sequel._average.tensors["weight"])
    other = trainer_of(nn.Linear(5, 3), averaging=Tail(0.5))
    with pytest.raises(UserError, match="another model"):
        other._average.restore({"weight": torch.zeros(2)}, other.model)


def test_a_recipe_that_averages_stores_the_average(tmp_path):
    changes = ["privacy.epochs=3", "averaging.name=exponential", "averaging.decay=0.9"]
    run = train(Recipe.load("digits", changes), tmp_path / "run")
    assert run.certificate["valid_for_release"]
    stored = load_tensors(tmp_path / "run" / "checkpoint" / "state.safetensors")[0]
    model, _ = load_model(tmp_path / "run")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[f"average.{name}"])
        assert not torch.equal(parameter, stored[f"model.{name}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "expnential"}, "did you mean 'exponential'"),
        ({"name": "exponential", "decay": 1.0}, "between 0 and 1"),
        ({"name": "tail", "fraction": 0.0}, "averaging.fraction"),
        ({"name": "tail", "fraction": 1.5}, "at most 1"),
        ({"name": "tail", "decay": 0.5}, "has no option 'decay'"),
    ],
)
def test_wrong_averages_are_refused_in_words(options, words):
    with pytest.raises(UserError, match=words):
        make_averaging(**options)
