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


@pytest.mark.parametrize("name", [*OPTIMIZERS, "PrivateAdam", "PrivateRMSprop"])
def test_every_optimizer_of_torch_and_of_ours_trains_and_resumes(name, tmp_path):
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


def network():
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in ("stem", "body", "head")})


def rates(optimizer, model):
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: pytest.approx(found[id(parameter)]) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["SGD", "PrivateAdam"])
def test_each_layer_learns_at_its_own_rate_and_schedules_scale_all_of_them(name):
    model = network()
    section = OptimizerSection(name=name, lr=0.5, layers={"stem.*": 0.1, "head.bias": 2.0})
    expected = {"stem": 0.05, "body": 0.5, "head": 0.5}
    optimizer = build_optimizer(section, model)
    for parameter, rate in rates(optimizer, model).items():
        assert rate == (1.0 if parameter == "head.bias" else expected[parameter.partition(".")[0]])
    for options in (
        {"name": "LinearLR", "start_factor": 0.5, "end_factor": 0.5},
        {"name": "OneCycleLR", "max_lr": 0.25 * 25},
    ):
        optimizer = build_optimizer(section, model)
        build_learning_rate_schedule(LearningRateSection(**options), optimizer, PLAN)
        assert rates(optimizer, model)["stem.weight"] == 0.025
        assert rates(optimizer, model)["body.weight"] == 0.25
        assert rates(optimizer, model)["head.bias"] == 0.5


def test_without_layers_there_is_one_group_and_a_rate_left_out_is_the_optimizers_own():
    model = network()
    (group,) = build_optimizer(OptimizerSection(name="SGD", lr=0.5), model).param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]
    optimizer = build_optimizer(OptimizerSection(name="Adam", layers={"*": 3.0}), model)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(3e-3)]


def test_a_run_with_a_rate_for_each_layer_resumes(tmp_path):
    changes = ["model.name=linear", "privacy.epochs=1", "privacy.epsilon=none", "privacy.noise_multiplier=3"]
    recipe = Recipe.load("digits", [*changes, 'optimizer.layers={"*.bias" = 0.1}'])
    train(recipe, tmp_path / "run")
    assert train(recipe, tmp_path / "run", resume=True).certificate["releases"] == 6
    assert Recipe.load(tmp_path / "run" / "recipe.toml") == recipe


def layered(**layers):
    return lambda: build_optimizer(OptimizerSection(name="SGD", lr=0.5, layers=layers), network())


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: build_optimizer(OptimizerSection(name="SDG"), nn.Linear(2, 2)), "did you mean 'SGD'"),
        (lambda: build_optimizer(OptimizerSection(name="SGD", momentun=1), nn.Linear(2, 2)), "did you mean 'momentum'"),
        (lambda: build_optimizer(OptimizerSection(name="SGD", lr=-1), nn.Linear(2, 2)), "cannot be made"),
        (lambda: build_optimizer(OptimizerSection(name="PrivateAdm"), nn.Linear(2, 2)), "did you mean 'PrivateAdam'"),
        (
            lambda: build_optimizer(OptimizerSection(name="PrivateAdam", flor=1), nn.Linear(2, 2)),
            "did you mean 'floor'",
        ),
        (lambda: build_optimizer(OptimizerSection(name="PrivateAdam", floor=-1), nn.Linear(2, 2)), "floor must be"),
        (layered(**{"stem.*": 1.0, "*.bias": 2.0}), "both match 'stem.bias'"),
        (layered(**{"tail.*": 1.0}), "'tail.*' matches no parameter .*stem.weight"),
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
