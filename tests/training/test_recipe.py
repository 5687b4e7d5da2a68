"""Recipes say everything that makes a run, and refuse what they do not understand."""

import tomllib
from typing import get_args

import pytest

from tacit.privacy import Constant, Flat, Grouped, Linear, UserError
from tacit.training.recipe import Recipe, named_recipes


@pytest.mark.parametrize("name", named_recipes())
def test_every_recipe_that_comes_with_tacit_is_valid_and_described(name):
    recipe = Recipe.load(name)
    assert recipe.description
    assert recipe.plan(50_000).epsilon(recipe.privacy.delta) <= recipe.privacy.epsilon


def test_a_recipe_written_as_toml_reads_as_itself():
    changes = ["seed=3", "privacy.groups=[['a*'],['b*']]", "learning_rate_schedule.name=CosineAnnealingLR"]
    recipe = Recipe.load("digits", [*changes, 'optimizer.layers={"stem.*" = 0.1, "head.*" = 2}'])
    assert recipe.optimizer.layers == {"stem.*": 0.1, "head.*": 2.0}
    assert Recipe.check(tomllib.loads(recipe.to_toml())) == recipe
    assert Recipe.load("digits", ["optimizer.layers={}"]) == Recipe.load("digits")


def test_changes_replace_single_values_and_words_need_no_quotes():
    recipe = Recipe.load("mnist", ["privacy.epochs=3", "model.activation=relu", "optimizer.nesterov=true"])
    assert (recipe.privacy.epochs, recipe.model.activation) == (3, "relu")
    assert recipe.optimizer.model_extra["nesterov"] is True
    assert recipe.privacy.batch_size == Recipe.load("mnist").privacy.batch_size


def test_none_takes_a_value_out():
    recipe = Recipe.load("digits", ["privacy.epsilon=none", "privacy.noise_multiplier=2"])
    assert recipe.privacy.epsilon is None
    assert recipe.plan(1000).noise == Constant(2.0)


def test_the_plan_is_the_one_the_recipe_describes():
    groups = [
        "privacy.epsilon=none",
        "privacy.schedule='linear:4:2'",
        "privacy.groups=[['a*'],['b*']]",
        "privacy.clipping_norm=[1,2]",
    ]
    plan = Recipe.load("digits", groups).plan(1024)
    assert plan.clipping == Grouped((("a*",), ("b*",)), (1.0, 2.0))
    assert plan.noise == Linear(4.0, 2.0)
    assert (plan.sample_rate, plan.steps, plan.expected_batch_size) == (0.25, 120, 256)
    assert Recipe.load("digits").plan(1024).clipping == Flat(1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("privacy.epsilom=3", "did you mean 'epsilon'"),
        ("privcy.epsilon=3", "did you mean 'privacy'"),
        ("privacy.epsilon=-1", "epsilon must be a finite number above 0"),
        ("privacy.epsilon=0", "epsilon must be a finite number above 0"),
        ("privacy.epsilon=nan", "finite"),
        ("privacy.epsilon=many", "valid number"),
        ("privacy.delta=0", "delta must lie strictly between 0 and 1"),
        ("privacy.delta=1", "delta must lie strictly between 0 and 1"),
        ("privacy.epochs=0", "greater than 0"),
        ("privacy.batch_size=0", "greater than or equal to 1"),
        ("privacy.sample_rate=1.5", "less than or equal to 1"),
        ("privacy.sample_rate=0.5", "either batch_size or sample_rate"),
        ("privacy.noise_multiplier=2", "either epsilon"),
        ("data.held_out=1", "less than 1"),
        ("optimizer.lr=nan", "lr must be a finite number"),
        ('optimizer.layers={"stem.*" = -1.0}', "the factor of 'stem.\\*' must be a finite number above 0"),
        ("optimizer.layers=0.1", "valid table of numbers"),
        ("learning_rate_schedule.kind=cosine", "name is missing"),
        ("seed=-1", "greater than or equal to 0"),
        ("augmentation.views=65", "less than or equal to 64, not 65"),
        ("epsilon", "key=value"),
        ("data.source.name=3", "not a section"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_sentence(change, says):
    with pytest.raises(UserError, match=says) as refusal:
        Recipe.load("digits", [change])
    assert "\n" not in str(refusal.value)


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'mnist'"):
        Recipe.load("mnits")


def test_a_file_that_is_no_recipe_is_refused(tmp_path):
    path = tmp_path / "my.toml"
    with pytest.raises(UserError, match="cannot be read"):
        Recipe.load(path)
    path.write_text("privacy = [")
    with pytest.raises(UserError, match="not a TOML file"):
        Recipe.load(path)
    path.write_text("")
    with pytest.raises(UserError, match="privacy"):
        Recipe.load(path)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(UserError, match="larger than the 100 training examples"):
        Recipe.load("digits").plan(100)


GROUPS = 'must be a number of groups, "layers", or a list of name patterns each such as [["stem.*"], ["head.*"]]'


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("privacy.groups=2.5", f"privacy.groups {GROUPS}, not 2.5"),
        ("privacy.groups=true", f"privacy.groups {GROUPS}, not true"),
        ("privacy.groups=layer", f"privacy.groups {GROUPS}, not 'layer'; did you mean 'layers'?"),
        ("privacy.groups=['a*']", f"privacy.groups {GROUPS}, not ['a*']"),
        (
            "privacy.clipping_norm=one",
            "privacy.clipping_norm: input should be a valid number or list of numbers, not 'one'",
        ),
        ("privacy.clipping_norm=[1,'a']", "a valid number or list of numbers, not [1, 'a']"),
        ("data.resize=8.5", "data.resize: input should be a valid whole number or list of whole numbers, not 8.5"),
        ("model.activation=3", "model.activation: input should be a valid word or list of words, not 3"),
        (
            "augmentation=flip",
            "augmentation is a section, not a value such as 'flip'; set a key of it, such as augmentation.names=[\"flip\"]",
        ),
        ("privacy=3", "privacy is a section, not a value such as 3; set a key of it, such as privacy.epsilon"),
        (
            "augmentation.names=flip",
            "augmentation.names: input should be a valid list of words, such as [\"flip\"], not 'flip'",
        ),
        (
            "model.frozen=2026-01-01",
            "model.frozen: input should be a valid list of words, not datetime.date(2026, 1, 1)",
        ),
        ("optimizer.layers.0.*=0.1", "such as { \"stem.*\" = 0.1 }, not {'0': {'*': 0.1}}"),
    ],
)
def test_a_refusal_names_the_key_the_value_and_what_is_allowed(change, says):
    with pytest.raises(UserError) as refusal:
        Recipe.load("digits", [change])
    assert str(refusal.value).startswith("the recipe 'digits': ")
    assert str(refusal.value).endswith(says)


def _takes(annotation, *kinds):
    return annotation in kinds or any(_takes(part, *kinds) for part in get_args(annotation))


NUMBERS = [
    f"{section}.{key}" if section else key
    for section, kind in [("", Recipe), *((key, field.annotation) for key, field in Recipe.model_fields.items())]
    for key, field in getattr(kind, "model_fields", {}).items()
    if _takes(field.annotation, int, float)
]


@pytest.mark.parametrize("key", [*NUMBERS, "optimizer.lr", "optimizer.momentum"])
def test_true_is_no_number(key):
    assert len(NUMBERS) > 20
    with pytest.raises(UserError, match="not true"):
        Recipe.load("digits", [f"{key}=true"])


def test_a_whole_number_may_be_written_as_a_float_and_a_float_as_a_whole_number():
    recipe = Recipe.load("digits", ["privacy.batch_size=1e2", "privacy.epochs=2", "data.resize=[8, 8.0]"])
    assert (recipe.privacy.batch_size, recipe.privacy.epochs, recipe.data.resize) == (100, 2.0, [8, 8])
    assert isinstance(recipe.privacy.batch_size, int)
    assert isinstance(recipe.privacy.epochs, float)


def test_several_norms_without_groups_are_refused_and_every_kind_of_groups_is_named():
    with pytest.raises(
        UserError, match=r'need privacy\.groups: a number of groups, "layers", or a list of name patterns'
    ):
        Recipe.load("digits", ["privacy.clipping_norm=[1,2]"]).plan(1000)


@pytest.mark.parametrize(
    ("change", "mend"),
    [
        ("privacy.noise_allocation=depth", "leave privacy.noise_allocation out"),
        ("privacy.noise_shape=[1,2]", "leave privacy.noise_shape out"),
        ("privacy.groups=2", "leave privacy.groups out"),
        ("privacy.clipping_norm=[1,2]", "give one privacy.clipping_norm"),
    ],
)
def test_adaptive_clipping_has_one_norm_and_no_allocation(change, mend):
    with pytest.raises(UserError, match=f"one norm for the whole gradient and no allocation of its noise; {mend}$"):
        Recipe.load("digits", ["privacy.clipping=adaptive", change]).plan(1000)


@pytest.mark.parametrize("quantile", [0, 1, -0.5, 1.5])
def test_a_quantile_lies_strictly_between_0_and_1(quantile):
    with pytest.raises(UserError, match="quantile must lie strictly between 0 and 1"):
        Recipe.load("digits", ["privacy.clipping=adaptive", f"privacy.quantile={quantile}"]).plan(1000)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["privacy.groups=layers"], "privacy.groups"),
        (["privacy.groups=[['a*'],['b*']]"], "privacy.groups"),
        (["privacy.noise_allocation=depth"], "privacy.noise_allocation"),
        (["privacy.clipping_norm=[1,2]"], "several norms in privacy.clipping_norm"),
        (["privacy.clipping=adaptive"], 'privacy.clipping = "adaptive"'),
        (["privacy.schedule=linear:2:1"], "privacy.schedule"),
        (["privacy.epsilon=none", "privacy.noise_multiplier=2"], "privacy.noise_multiplier"),
        (['augmentation.names=["flip"]'], "augmentation.names"),
        (["diagnostics=5"], "diagnostics"),
        (["model.features=scattering", "model.normalization=standard"], 'model.normalization = "standard"'),
    ],
)
def test_error_feedback_names_the_key_that_it_does_not_go_with(changes, key):
    with pytest.raises(UserError) as refusal:
        Recipe.load("digits", ["privacy.error_norm=0.01", *changes]).feedback_plan(1000)
    assert str(refusal.value).startswith(f"error feedback does not go with {key};")


@pytest.mark.parametrize("order", [1, -1])
def test_another_name_takes_the_old_ones_options_out_but_not_those_of_the_changes(order):
    recipe = Recipe.load("digits", ["optimizer.name=PrivateAdam", "optimizer.floor=1e-4"][::order])
    assert recipe.optimizer.model_dump(exclude_none=True) == {"name": "PrivateAdam", "floor": 1e-4}
    same = Recipe.load("digits", ["optimizer.name=SGD", "optimizer.lr=2"][::order])
    assert same.optimizer.model_extra == {"lr": 2, "momentum": 0.9}


OPTIONS = """
[privacy]
epsilon = 3.0
batch_size = 64
[loss]
name = "focal"
gamma = 3.0
[optimizer]
lr = 0.5
layers = { "stem.*" = 0.1 }
[learning_rate_schedule]
name = "StepLR"
step_size = 5
[averaging]
name = "tail"
fraction = 0.5
"""


@pytest.mark.parametrize(
    ("change", "section", "left"),
    [
        ("loss.name=huber", "loss", {"name": "huber"}),
        ("loss.name=none", "loss", {"name": "cross-entropy"}),
        ("learning_rate_schedule.name=CosineAnnealingLR", "learning_rate_schedule", {"name": "CosineAnnealingLR"}),
        ("averaging.name=exponential", "averaging", {"name": "exponential"}),
        ("averaging.name=none", "averaging", {}),
        ("optimizer.name=Adam", "optimizer", {"name": "Adam", "layers": {"stem.*": 0.1}}),
        ("optimizer.name=SGD", "optimizer", {"name": "SGD", "layers": {"stem.*": 0.1}, "lr": 0.5}),
    ],
)
def test_in_every_section_with_options_they_go_with_their_name(change, section, left, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(OPTIONS)
    recipe, before = Recipe.load(path, [change]), Recipe.load(path)
    assert getattr(recipe, section).model_dump(exclude_none=True) == left
    assert recipe.model_dump(exclude={section}) == before.model_dump(exclude={section})


@pytest.mark.parametrize("pattern", ["0.*", "stem.0.weight", "a=b", "*"])
def test_a_pattern_in_quotes_is_one_key(pattern):
    for quote in "\"'":
        changes = [f"optimizer.layers.{quote}{pattern}{quote}=0.1", "optimizer.layers.head=2"]
        assert Recipe.load("digits", changes).optimizer.layers == {pattern: 0.1, "head": 2.0}


@pytest.mark.parametrize("change", ['optimizer.layers."0.*=0.1', '="x"', ".seed=1", "seed.=1", 'optimizer."\\q"=1'])
def test_a_key_that_cannot_be_read_is_refused(change):
    with pytest.raises(UserError, match=r"key=value|cannot be read"):
        Recipe.load("digits", [change])


def test_the_reference_loss_of_a_schedule_reaches_the_plan():
    noise = Recipe.load("digits", ["privacy.schedule=loss-driven:1:3:0.69"]).plan(1000).noise
    assert (noise.reference, noise.loss_bound) == (0.69, 1.38)


def test_a_table_of_noise_reaches_the_plan_in_its_shape():
    noise = Recipe.load("digits", ["privacy.schedule=table:4,1,2"]).plan(1000).noise
    assert [value / noise.multipliers[1] for value in noise.multipliers] == pytest.approx([4, 1, 2])
