"""`tacit recipes --keys` names every key of a recipe, and the page in docs/ is what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from tacit.cli.recipes import reference
from tacit.privacy import PrivacyPlan, UserError
from tacit.training.building import build_learning_rate_schedule, build_optimizer
from tacit.training.recipe import LearningRateSection, OptimizerSection, Recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"


def test_the_page_is_what_the_command_prints(tacit):
    assert tacit("recipes", "--keys", "--markdown", check=0).stdout == PAGE.read_text()


def test_every_key_is_there_with_its_type_and_a_description():
    chapters = {chapter.section: chapter for chapter in reference()}
    top = {name for name in Recipe.model_fields if name not in chapters}
    assert {key.name for key in chapters.pop("top").keys} == top
    for section, chapter in chapters.items():
        assert [key.name for key in chapter.keys] == list(Recipe.model_fields[section].annotation.model_fields)
        for key in chapter.keys:
            assert key.description.endswith("."), key
            assert re.match(r"a (whole )?(number|word|list of|table of)", key.type), key


def test_it_reads_well_at_80_columns_and_one_section_can_be_asked_for(tacit):
    text = tacit("recipes", "--keys", check=0).stdout
    assert max(map(len, text.splitlines())) <= 80
    one = tacit("recipes", "--keys", "privacy", check=0).stdout
    assert one.startswith("[privacy]\n")
    assert one in text
    assert "sample_rate = none  (a number, above 0 and at most 1)" in one
    assert "[data]" not in one


def test_what_is_not_there_is_told(tacit):
    done = tacit("recipes", "--keys", "privcy")
    assert (done.returncode, "did you mean 'privacy'" in done.stderr) == (2, True)
    done = tacit("recipes", "--markdown")
    assert (done.returncode, "is of --keys" in done.stderr) == (2, True)


def named(section):
    return dict(next(iter(reference(section)[0].named.values())))


def known_by(build):
    with pytest.raises(UserError) as refusal:
        build()
    return set(re.search(r"there are: (.*)\)", str(refusal.value))[1].split(", "))


def test_the_optimizers_and_schedules_are_those_that_can_be_built():
    model = nn.Linear(2, 2, bias=False)
    assert set(named("optimizer")) == known_by(lambda: build_optimizer(OptimizerSection(name="?"), model))
    for name, options in named("optimizer").items():
        known = set(build_optimizer(OptimizerSection(name=name), model).defaults)
        assert {option.partition(" = ")[0] for option in re.split(r", (?=[A-Za-z])", options)} - known <= {"foreach"}
    optimizer = build_optimizer(OptimizerSection(), model)
    plan = PrivacyPlan(sample_rate=0.1, steps=30)
    known = known_by(lambda: build_learning_rate_schedule(LearningRateSection(name="?"), optimizer, plan))
    # which take functions and other schedules: no recipe can say them
    assert set(named("learning_rate_schedule")) == known - {"LambdaLR", "MultiplicativeLR", "SequentialLR"}


def test_the_list_of_recipes_imports_no_torch():
    program = (
        "import sys; from typer.testing import CliRunner; from tacit.cli import app\n"
        "done = CliRunner().invoke(app, ['recipes']); assert 'digits' in done.stdout\n"
        "assert CliRunner().invoke(app, ['recipes', 'mnist']).exit_code == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
