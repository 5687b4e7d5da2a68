"""Recipes say everything that makes a run, and refuse what they do not understand."""

import tomllib

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
        ("optimizer.layers=0.1", "valid dictionary"),
        ("learning_rate_schedule.kind=cosine", "name is missing"),
        ("seed=-1", "greater than or equal to 0"),
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


def test_several_norms_without_groups_are_refused():
    with pytest.raises(UserError, match=r"need privacy\.groups"):
        Recipe.load("digits", ["privacy.clipping_norm=[1,2]"]).plan(1000)
