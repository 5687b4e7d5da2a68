"""From a recipe to a model: any optimizer and learning-rate schedule of torch, wrong ones named; pre-trained weights."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from tacit.cli import app
from tacit.data import load
from tacit.models import efficientnet_b0, small_cnn
from tacit.privacy import PrivacyPlan, UserError, verify
from tacit.training.building import (
    build_augmentation,
    build_learning_rate_schedule,
    build_model,
    build_optimizer,
    prepare_network,
)
from tacit.training.recipe import AugmentationSection, LearningRateSection, ModelSection, OptimizerSection, Recipe
from tacit.training.run import load_model, pick_device, train

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


def test_a_run_begins_with_pretrained_weights_and_needs_their_file_no_more(tmp_path):
    weights, run = tmp_path / "weights.safetensors", tmp_path / "run"
    start = small_cnn((1, 8, 8), 5).state_dict()  # of five classes, not ten
    save_file(start, weights)
    changes = [f"model.pretrained={weights}", 'model.frozen=["0.*"]', "privacy.epochs=2"]
    arguments = ["train", "digits", *(word for change in changes for word in ("--set", change)), "--out", str(run)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"pre-trained weights of {weights}: 2 tensors of 4; fresh: 4.weight, 4.bias; not used" in done.output
    certificate = verify(run)
    assert certificate["valid_for_release"]
    assert certificate["facts"]["pretrained"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert any("initial weights are taken as public" in line for line in certificate["caveats"])
    finished = load_file(run / "model.safetensors")
    assert torch.equal(finished["0.weight"], start["0.weight"])
    assert torch.equal(finished["0.bias"], start["0.bias"])
    assert finished["4.weight"].shape == (10, 256)

    content = weights.read_bytes()
    weights.unlink()
    model, facts = load_model(run)
    assert "pretrained" not in facts["model"], "what is handed on does not say where files lie on a machine"
    assert torch.equal(model[4].weight, finished["4.weight"])
    evaluated = CliRunner().invoke(app, ["evaluate", str(run), "--json"])
    assert json.loads(evaluated.output)["test_accuracy"] > 0.5
    with pytest.raises(UserError, match=r"there is no file .*weights.safetensors"):
        train(Recipe.load(run / "recipe.toml"), run, resume=True)
    save_file({name: tensor + 1 for name, tensor in start.items()}, weights)
    with pytest.raises(UserError, match=r"another plan or other data, .*pre-trained weights; start a new one"):
        train(Recipe.load(run / "recipe.toml"), run, resume=True)
    weights.write_bytes(content)
    assert train(Recipe.load(run / "recipe.toml"), run, resume=True).pretrained.loaded == ("0.weight", "0.bias")


def test_weights_that_are_not_frozen_are_trained_on(tmp_path):
    start = small_cnn((1, 8, 8), 10).state_dict()
    save_file(start, tmp_path / "weights.safetensors")
    recipe = Recipe.load("digits", [f"model.pretrained={tmp_path / 'weights.safetensors'}", "privacy.epochs=0.3"])
    run = train(recipe, tmp_path / "run")
    assert run.pretrained.fresh == ()
    finished = load_file(tmp_path / "run" / "model.safetensors")
    for name, tensor in start.items():
        moved = float((finished[name] - tensor).abs().max())
        assert 0 < moved < 1, "two steps away from where it began"


def test_a_folded_network_is_stored_without_normalisation_and_loaded_again(tmp_path):
    torch.manual_seed(0)
    start = efficientnet_b0((1, 8, 8), 10).state_dict()
    for name in [name for name in start if name.endswith("norm.weight")]:
        norm = name.removesuffix(".weight")
        start |= {
            f"{norm}.running_mean": torch.zeros(len(start[name])),
            f"{norm}.running_var": torch.ones(len(start[name])),
        }
    save_file(start, tmp_path / "weights.safetensors")
    changes = [
        "model.name=efficientnet-b0",
        f"model.pretrained={tmp_path / 'weights.safetensors'}",
        "model.batch_norm=fold",
    ]
    small = ["model.frozen=['stem.*', 'stages.*']", "privacy.batch_size=4", "privacy.epochs=0.005"]
    train(Recipe.load("digits", [*changes, *small, "model.activation=silu"]), tmp_path / "run")
    (tmp_path / "weights.safetensors").unlink()
    model, _ = load_model(tmp_path / "run")
    assert not any(isinstance(module, nn.GroupNorm) for module in model.modules())
    scale = 1 / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(model.stem.conv.weight, start["stem.conv.weight"] * scale)


@pytest.mark.parametrize(("normalization", "place"), [("group", "1"), ("prior", "1"), ("standard", "1.1")])
def test_pretrained_weights_are_for_the_network_that_comes_after_the_features(normalization, place, tmp_path):
    options = {"name": "linear", "features": "scattering", "normalization": normalization}
    section = ModelSection(**options, pretrained=str(tmp_path / "weights.safetensors"), frozen=["1.bias"])
    model = build_model(section, (1, 16, 16), 3)
    save_file({"1.weight": torch.ones(3, 81 * 16), "1.bias": torch.ones(3)}, section.pretrained)
    assert prepare_network(section, model).fresh == ()
    network = model.get_submodule(place)
    assert torch.equal(network[1].weight, torch.ones(3, 81 * 16))
    assert [p.requires_grad for p in network.parameters()] == [True, False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["model.pretrained=nowhere.safetensors"], "there is no file nowhere.safetensors"),
        (["model.pretrained=weights.pth"], "is a pickle"),
        (["model.batch_norm=fold"], "model.batch_norm is of model.pretrained; there is none"),
        (["model.pretrained=a.safetensors", "model.batch_norm=folt"], "did you mean 'fold'"),
        (['model.frozen=["conv*"]'], r"no parameter has a name like 'conv\*'"),
        (['model.frozen=["*"]'], "leave nothing to train"),
        (["model.frozen=conv"], "model.frozen: input should be a valid list"),
    ],
)
def test_wrong_pretrained_weights_are_told_before_anything_is_made(changes, says, tmp_path):
    with pytest.raises(UserError, match=says):
        train(Recipe.load("digits", changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


QUICK = ["privacy.epochs=2", "seed=0"]


@pytest.mark.parametrize(
    ("changes", "clipping"),
    [
        (["privacy.clipping=automatic"], "automatic"),
        (["privacy.clipping=automatic", "privacy.stability=0.1", "privacy.groups=3"], "automatic"),
        (["privacy.clipping=adaptive", "privacy.quantile=0.3"], "adaptive"),
        (["privacy.groups=3", "privacy.noise_allocation=dimension"], "grouped"),
        (["privacy.groups=layers", "privacy.noise_allocation=depth"], "grouped"),
        (["privacy.schedule=loss-driven:1:3"], "flat"),
        (['augmentation.names=["crop"]', "augmentation.padding=1", "augmentation.views=3"], "flat"),
        (['augmentation.names=["augmix"]'], "flat"),
        (["privacy.error_norm=0.004"], "error-feedback"),
    ],
)
def test_every_way_to_clip_to_add_noise_and_to_augment_stays_within_epsilon(changes, clipping, tmp_path):
    run = train(Recipe.load("digits", [*QUICK, *changes]), tmp_path / "run")
    certificate = verify(tmp_path / "run")
    assert certificate["epsilon"] <= 3.0
    assert certificate["clipping"]["kind"] == clipping
    assert certificate["releases"] == run.metrics[-1]["step"]
    model, _ = load_model(tmp_path / "run")
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_an_interrupted_run_goes_on_with_the_norm_it_had(tmp_path, monkeypatch):
    from tacit.training import trainer as training

    changes = ["privacy.clipping=adaptive", "privacy.clipping_norm=100.0", "averaging.name=tail", *QUICK]
    recipe = Recipe.load("digits", changes)
    monkeypatch.setattr(training, "_SAVING", 1e9)  # a checkpoint a step
    monkeypatch.setattr(training, "_CHECKPOINT_SECONDS", 0.0)
    norms = []  # of every step, as it begins

    def begun(trainer, step):
        norms.append((step, trainer._mechanism.clipping.clipping_norm))

    def stopped(*_):
        if len(norms) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(training.PrivateTrainer, "_begin_step", begun)
    monkeypatch.setattr(training.AveragedWeights, "update", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    (before, norm), (after, norm_again) = norms[4], norms[5]
    assert after == before + 1
    assert norm < 0.9 * 100.0
    assert 0.5 * norm < norm_again < 2 * norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["privacy.clipping=automatc"], "did you mean 'automatic'"),
        (["privacy.stability=0.1"], "is of privacy.clipping"),
        (["privacy.quantile=0.1"], "is of privacy.clipping"),
        (["privacy.clipping=adaptive", "privacy.groups=3"], "one norm for the whole gradient"),
        (["privacy.groups=1000"], "more than the"),
        (["privacy.groups=layer"], "did you mean 'layers'"),
        (["privacy.noise_allocation=depth"], "need privacy.groups"),
        (["privacy.groups=2", "privacy.noise_allocation=deep"], "unknown noise allocation"),
        (["augmentation.views=3"], "names is missing"),
        (['augmentation.names=["flop"]'], "did you mean 'flip'"),
        (["privacy.schedule=loss-driven:1:3", "averaging.name=tail"], "average exponentially"),
        (["privacy.error_noise=theorem"], "give privacy.error_norm too"),
        (["privacy.error_norm=0.1", "privacy.groups=2"], "groups"),
        (["privacy.error_norm=0.1", 'augmentation.names=["flip"]'], "error feedback goes with"),
        (["model.features=scattering", 'augmentation.names=["flip"]'], "nothing to augment"),
    ],
)
def test_what_does_not_go_together_is_told_in_a_sentence(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        train(Recipe.load("digits", [*QUICK, *changes]), tmp_path / "run")


@pytest.mark.parametrize("option", ["mean", "std"])
@pytest.mark.parametrize(("names", "there"), [(["crop"], "padding"), (["augmix"], "severity, width, depth, alpha")])
def test_the_constants_of_the_data_are_no_options_of_an_augmentation(option, names, there):
    section = AugmentationSection(names=names, **{option: 0.5})
    with pytest.raises(UserError, match=rf"no augmentation.{option} \(of {names[0]} there are: {there}\)"):
        build_augmentation(section, load("digits").train)
    with pytest.raises(UserError, match="did you mean 'flip'"):
        build_augmentation(AugmentationSection(names=["flop"], **{option: 0.5}), load("digits").train)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "StepLR", "step_size": 0}, "StepLR .* zero"),
        ({"name": "StepLR", "step_size": 10, "gamma": "low"}, "StepLR .* multiply"),  # in the tenth step
        ({"name": "CosineAnnealingLR", "eta_min": "low"}, "CosineAnnealingLR .* 'str'"),
        ({"name": "CosineAnnealingLR", "T_max": 0}, "CosineAnnealingLR .* zero"),
        ({"name": "OneCycleLR", "max_lr": 1.0, "total_steps": 10}, "OneCycleLR .* Tried to step 11 times"),
        ({"name": "MultiStepLR", "milestones": 3}, "MultiStepLR cannot be made"),
    ],
)
def test_a_schedule_that_would_fail_in_the_middle_of_a_run_is_refused_before_it(options, reason, tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    before = optimizer.state_dict()
    with pytest.raises(UserError, match=f"learning_rate_schedule: {reason}"):
        build_learning_rate_schedule(LearningRateSection(**options), optimizer, PLAN)
    assert optimizer.state_dict() == before
    changes = [f"learning_rate_schedule.{key}={value}" for key, value in options.items()]
    with pytest.raises(UserError, match=f"learning_rate_schedule: {reason}"):
        train(Recipe.load("digits", [*QUICK, *changes]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("PrivateAdam", {})])
@pytest.mark.parametrize(
    "schedule", [{"name": "OneCycleLR", "max_lr": 2.0}, {"name": "CyclicLR", "base_lr": 0.1, "max_lr": 1.0}]
)
def test_to_try_a_schedule_out_leaves_optimizer_and_schedule_as_they_were_made(name, options, schedule):
    model = network()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    section = OptimizerSection(name=name, lr=0.5, layers={"stem.*": 0.1}, **options)
    ours, theirs = (build_optimizer(section, model) for _ in range(2))
    built = build_learning_rate_schedule(LearningRateSection(**schedule), ours, PLAN)
    given = {key: value for key, value in schedule.items() if key != "name"}
    given |= {key: [given[key], 0.1 * given[key]] for key in ("base_lr", "max_lr") if key in given}
    if schedule["name"] == "OneCycleLR":
        given["total_steps"] = PLAN.steps
    made = getattr(torch.optim.lr_scheduler, schedule["name"])(theirs, **given)
    assert built.last_epoch == 0
    assert built.optimizer is ours
    for _ in range(3):
        assert ours.state_dict() == theirs.state_dict()
        assert built.get_last_lr() == made.get_last_lr()
        assert built.last_epoch == made.last_epoch
        for optimizer, walked in ((ours, built), (theirs, made)):
            optimizer.zero_grad()
            if name == "PrivateAdam":
                optimizer.learn_noise({})
            optimizer.step()
            walked.step()
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), start, strict=True))


def frozen_stem():
    model = network()
    model["stem"].requires_grad_(False)
    return model


def test_a_factor_is_for_parameters_that_learn():
    def groups(**layers):
        model = frozen_stem()
        built = build_optimizer(OptimizerSection(name="SGD", lr=0.5, layers=layers), model).param_groups
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return [([names[id(parameter)] for parameter in group["params"]], group["lr"]) for group in built]

    with pytest.raises(
        UserError, match=r"'stem.\*' matches only parameters that are frozen \(stem.weight, stem.bias\)"
    ):
        groups(**{"stem.*": 0.1, "head.*": 2.0})
    with pytest.raises(UserError, match=r"'tail.\*' matches no parameter \(there are: body.weight.*head.bias\)"):
        groups(**{"tail.*": 0.1})
    rest = ["body.weight", "head.weight"]
    assert groups(**{"*.bias": 2.0}) == [(rest, 0.5), (["body.bias", "head.bias"], 1.0)]
    assert groups(**{"*.bias": 2.0, "[sh]*.weight": 4.0}) == [
        (["body.weight"], 0.5),
        (["body.bias", "head.bias"], 1.0),
        (["head.weight"], 2.0),
    ]


def test_a_run_with_frozen_layers_and_rates_by_layer_trains_and_resumes(tmp_path):
    changes = ['model.frozen=["0.*"]', 'optimizer.layers={"*.bias" = 0.1}', "privacy.epochs=0.3", "seed=0"]
    recipe = Recipe.load("digits", changes)
    first = train(recipe, tmp_path / "run")
    assert train(recipe, tmp_path / "run", resume=True).certificate["releases"] == first.certificate["releases"] > 0
    with pytest.raises(UserError, match="matches only parameters that are frozen"):
        train(Recipe.load("digits", [*changes, 'optimizer.layers={"0.*" = 0.1}']), tmp_path / "other")


def test_a_checkpoint_with_a_broken_state_is_refused_and_the_certificate_still_holds(tmp_path):
    from tacit.training.checkpoint import load_tensors, save_tensors
    from tacit.training.directory import RunDirectory

    recipe = Recipe.load("digits", ["privacy.clipping=adaptive", *QUICK])
    train(recipe, tmp_path / "run")
    path = RunDirectory(tmp_path / "run").checkpoint
    tensors, facts = load_tensors(path)
    assert facts["released"]["clipping_norm"] > 0
    save_tensors(path, tensors, {**facts, "released": {"clipping_norm": -1.0}})
    with pytest.raises(UserError, match="clipping_norm must be a finite number above 0"):
        train(recipe, tmp_path / "run", resume=True)
    assert verify(tmp_path / "run")["epsilon"] <= 3
