"""From a recipe to a model: any optimizer and learning-rate schedule of torch, wrong ones named."""

import pytest
import torch
from torch import nn

from tacit.privacy import PrivacyPlan, UserError
from tacit.training.recipe import LearningRateSection, ModelSection, OptimizerSection, Recipe
from tacit.training.run import (
    build_learning_rate_schedule,
    build_model,
    build_optimizer,
    load_model,
    pick_device,
    train,
)

PLAN = PrivacyPlan(sample_rate=0.1, steps=30)
OPTIMIZERS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_trains_and_resumes(name, tmp_path):
    changes = [f"optimizer.name={name}", "model.name=linear", "privacy.epochs=1", "privacy.epsilon=none"]
    recipe = Recipe.load(
        "digits", [*changes, "privacy.noise_multiplier=3", "optimizer.lr=0.01", "optimizer.momentum=none"]
    )
    first = train(recipe, tmp_path / "run")
    again = train(recipe, tmp_path / "run", resume=True)
    assert again.certificate["releases"] == first.certificate["releases"] == 6
    assert torch.equal(*(load_model(tmp_path / "run")[0][1].weight for _ in range(2)))


@pytest.mark.parametrize(
    "options",
    [
        {"name": "CosineAnnealingLR", "eta_min": 0.1},
        {"name": "OneCycleLR", "max_lr": 2.0},
        {"name": "StepLR", "step_size": 10},
        {"name": "LinearLR", "start_factor": 1.0, "end_factor": 0.1},
        {"name": "CosineAnnealingWarmRestarts", "T_0": 7},
    ],
)
def test_learning_rate_schedules_of_torch_run_for_the_whole_plan(options):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = build_learning_rate_schedule(LearningRateSection(**options), optimizer, PLAN)
    rates = []
    for _ in range(PLAN.steps):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert min(rates) < 0.5
    assert build_learning_rate_schedule(LearningRateSection(), optimizer, PLAN) is None


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: build_optimizer(OptimizerSection(name="SDG"), nn.Linear(2, 2)), "did you mean 'SGD'"),
        (lambda: build_optimizer(OptimizerSection(name="SGD", momentun=1), nn.Linear(2, 2)), "did you mean 'momentum'"),
        (lambda: build_optimizer(OptimizerSection(name="SGD", lr=-1), nn.Linear(2, 2)), "cannot be made"),
        (lambda: build_model(ModelSection(activation="tahn"), (1, 8, 8), 2), "did you mean 'tanh'"),
        (lambda: pick_device("nowhere"), "no device 'nowhere'"),
        (lambda: load_model("nowhere"), "no run directory"),
    ],
)
def test_what_cannot_be_built_is_told_in_words(build, says):
    with pytest.raises(UserError, match=says):
        build()


def test_a_model_of_another_network_is_refused(tmp_path):
    recipe = Recipe.load("digits", ["privacy.epochs=1", "privacy.epsilon=none", "privacy.noise_multiplier=3"])
    train(recipe, tmp_path / "run")
    from tacit.training.checkpoint import load_tensors, save_tensors

    path = tmp_path / "run" / "model.safetensors"
    tensors, facts = load_tensors(path)
    save_tensors(path, tensors, {**facts, "model": {"name": "linear", "activation": "tanh"}})
    with pytest.raises(UserError, match="another model"):
        load_model(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        load_model(tmp_path / "run")
