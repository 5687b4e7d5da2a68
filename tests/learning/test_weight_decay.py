"""Weight decay in training: where each kind ends, for every optimizer, and of chosen parameters alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit.learning import PRIVATE_OPTIMIZERS, WeightDecay
from tacit.privacy import Adaptive, Automatic, Constant, Flat, Grouped, PrivacyPlan
from tacit.privacy.validation import UserError
from tacit.studies.weight_decay_examples import scalar
from tacit.training import PrivateTrainer, Recipe, train

QUICK = ["privacy.epochs=2", "data.source=digits"]


def half_square(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(dim=1)


def trainer_of(model, optimizer, decay, clipping=None, steps=400):
    plan = PrivacyPlan(
        sample_rate=1.0, steps=steps, expected_batch_size=2, clipping=clipping or Flat(1.0), noise=Constant(0.0)
    )
    return PrivateTrainer(model, optimizer=optimizer, loss=half_square, plan=plan, weight_decay=decay)


def number(value=0.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


TWO = (torch.ones(2, 1), torch.full((2, 1), 3.8))


def test_the_scalar_example_ends_at_r_over_lambda_after_noise_and_at_the_minimum_before_clipping():
    lines = scalar()["panels"]["theta"]
    assert lines["after noise"][-1][1] == pytest.approx(1.0 / 0.5, rel=0.01)
    assert lines["before clipping"][-1][1] == pytest.approx(3.8 / 1.5, rel=0.01)
    assert (lines["R / lambda"], lines["theta* / (1 + lambda)"]) == (2.0, 3.8 / 1.5)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "AdamW", *PRIVATE_OPTIMIZERS])
def test_every_optimizer_finds_the_minimum_of_the_regularised_loss_with_decay_before_clipping(name):
    model = number()
    kind = PRIVATE_OPTIMIZERS.get(name) or getattr(torch.optim, name)
    options = {"lr": 0.5} if name == "Adagrad" else {"lr": 0.03}
    optimizer = kind(model.parameters(), **options, **({"weight_decay": 0.0} if name == "AdamW" else {}))
    trainer = trainer_of(model, optimizer, WeightDecay(0.5), steps=600)
    trainer.fit(TWO)
    assert model.weight.item() == pytest.approx(3.8 / 1.5, rel=0.02)


@pytest.mark.parametrize("clipping", [Flat(1.0), Grouped((("weight",),), (1.0,)), Automatic(Flat(1.0)), Adaptive(1.0)])
def test_every_clipping_takes_decay_before_clipping(clipping):
    model = number()
    trainer_of(model, torch.optim.SGD(model.parameters(), lr=0.02), WeightDecay(0.5), clipping, steps=1000).fit(TWO)
    assert model.weight.item() == pytest.approx(3.8 / 1.5, rel=0.02)


def test_without_clipping_and_noise_the_two_are_the_same_for_plain_descent():
    weights = []
    for when in ("before-clipping", "after-noise"):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        plan = PrivacyPlan(sample_rate=1.0, steps=20, expected_batch_size=2, clipping=Flat(1e6), noise=Constant(0.0))
        inputs, targets = torch.randn(2, 3), torch.randn(2, 1)
        PrivateTrainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=half_square,
            plan=plan,
            weight_decay=WeightDecay(0.3, when),
        ).fit((inputs, targets))
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("when", ["before-clipping", "after-noise"])
def test_only_the_parameters_that_are_chosen_decay(when):
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero_gradient = (torch.zeros(2, 1), torch.ones(2, 1))  # of the weight, and the bias is where it should be
    trainer_of(model, optimizer, WeightDecay(0.5, when, ["weight"]), steps=1).fit(zero_gradient)
    assert model.weight.item() == pytest.approx(1 - 0.1 * 0.5)
    assert model.bias.item() == pytest.approx(1.0)


def test_decay_after_noise_has_the_learning_rate_of_each_group():
    model = nn.Sequential(number(1.0), number(1.0))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.1}]
    WeightDecay(1.0, "after-noise").shrink(model, torch.optim.SGD(groups))
    assert model[0].weight.item() == pytest.approx(0.5)
    assert model[1].weight.item() == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["weight_decay.when=before-clipping"], "weight_decay.rate is missing"),
        (["weight_decay.rate=-1"], "weight_decay.rate"),
        (["weight_decay.rate=0.1", "weight_decay.when=befor-clipping"], "did you mean 'before-clipping'"),
        (["weight_decay.rate=0.1", "optimizer.weight_decay=0.1"], "not both"),
    ],
)
def test_a_recipe_says_what_is_wrong(changes, message):
    with pytest.raises(UserError, match=message):
        Recipe.load("digits", changes)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match="matches no parameter"):
        WeightDecay(0.1, parameters=["wieght"]).rates(number())
    with pytest.raises(UserError, match="list of name patterns"):
        WeightDecay(0.1, parameters="weight")


def test_a_recipe_with_decay_trains_and_its_epsilon_is_that_without(tmp_path):
    plain = train(Recipe.load("digits", [*QUICK, "seed=1"]), tmp_path / "plain")
    changes = ["weight_decay.rate=0.01", 'weight_decay.parameters=["*weight"]', "seed=1"]
    decayed = train(Recipe.load("digits", [*QUICK, *changes]), tmp_path / "decayed")
    assert decayed.certificate["epsilon"] == plain.certificate["epsilon"]
    assert decayed.metrics[-1]["test_loss"] != plain.metrics[-1]["test_loss"]
    assert Recipe.load(tmp_path / "decayed" / "recipe.toml").weight_decay.rate == 0.01
