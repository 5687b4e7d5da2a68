"""Thresholds of a sample curriculum: public functions of the epoch that end in letting everybody in."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tacit.data import load
from tacit.learning import CURRICULA, SampleCurriculum, cross_entropy
from tacit.models import build
from tacit.privacy import UserError
from tacit.privacy.ledger import SORTED

names = st.sampled_from(["linear", "step", "self-paced"])
orders = st.sampled_from(["easy", "hard"])
positive = st.floats(1e-3, 1e3)
moments = st.floats(0, 1e3)


@st.composite
def curricula(draw):
    name, order, first = draw(names), draw(orders), draw(positive)
    options = {"first": first, "epochs": draw(positive)}
    if name == "linear":
        options["last"] = first * draw(st.floats(1, 10) if order == "easy" else st.floats(0.1, 1))
    if name == "self-paced":
        options["growth"] = draw(st.floats(1, 1e3) if order == "easy" else st.floats(1e-3, 1))
    return SampleCurriculum(name, order=order, **options)


@given(curricula(), moments, moments)
def test_a_threshold_only_ever_lets_more_examples_in(curriculum, one, other):
    sooner, later = sorted((one, other))
    before, after = curriculum.threshold(sooner), curriculum.threshold(later)
    assert before <= after if curriculum.order == "easy" else before >= after


@given(curricula())
def test_it_begins_with_the_first_threshold_and_ends_with_everybody(curriculum):
    everybody = math.inf if curriculum.order == "easy" else -math.inf
    assert curriculum.threshold(0) == pytest.approx(curriculum.first)
    assert curriculum.threshold(curriculum.epochs) == curriculum.threshold(10 * curriculum.epochs) == everybody


@given(curricula(), st.floats(0, 0.999))
def test_each_shape_is_what_its_formula_says(curriculum, part):
    epoch, first = part * curriculum.epochs, curriculum.first
    try:
        expected = {
            "linear": lambda: first + (curriculum.last - first) * part,
            "step": lambda: first,
            "self-paced": lambda: first * curriculum.growth**epoch,
        }[curriculum.name]()
    except OverflowError:
        expected = math.inf
    assert curriculum.threshold(epoch) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=20), st.floats(0.01, 10), orders)
def test_an_example_is_admitted_by_its_own_difficulty_alone_and_never_if_that_is_not_finite(values, threshold, order):
    curriculum = SampleCurriculum("step", order=order)
    together = curriculum.admits(torch.tensor(values), threshold).tolist()
    for value, admitted in zip(values, together, strict=True):
        assert curriculum.admits(torch.tensor([value]), threshold).item() == admitted
        assert not admitted or math.isfinite(value)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["linear", "step", "self-paced"])
def test_by_default_an_untrained_network_of_ten_classes_shuts_hardly_anybody_out(name, seed):
    curriculum, (inputs, targets) = SampleCurriculum(name), load("digits").train.batch()
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = cross_entropy(build("small-cnn", (1, 8, 8), 10, torch.nn.Tanh)(inputs), targets)
    assert curriculum.admits(losses, curriculum.threshold(0)).float().mean() > 0.95


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "lineal"}, "did you mean 'linear'"),
        ({"name": "step", "difficulty": "netwerk"}, "did you mean 'network'"),
        ({"name": "step", "order": "random"}, "unknown curriculum.order"),
        ({"name": "step", "first": 0.0}, "curriculum.first"),
        ({"name": "step", "first": math.nan}, "curriculum.first"),
        ({"name": "linear", "first": 2.0, "last": 1.0}, "must be at least 2, not 1"),
        ({"name": "linear", "order": "hard", "first": 2.0, "last": 3.0}, "must be at most 2, not 3"),
        ({"name": "self-paced", "growth": 0.9}, "must be at least 1, not 0.9"),
        ({"name": "step", "last": 3.0}, "has no option 'last'"),
        ({"name": "linear", "growth": 2.0}, "has no option 'growth'"),
        ({"name": "linear", "logistic_epochs": 1.0}, "has no option 'logistic_epochs'"),
        ({"name": SORTED, "epochs": 2.0}, "has no option 'epochs'"),
        ({"name": SORTED, "difficulty": "network"}, "has no option 'difficulty'"),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_sentence(options, says):
    with pytest.raises(UserError, match=says):
        SampleCurriculum(**options)


def test_its_constants_are_those_of_its_kind_alone():
    assert SampleCurriculum(SORTED).to_dict() == {"name": SORTED}
    assert set(SampleCurriculum("self-paced", difficulty="logistic").to_dict()) == {
        "name",
        "difficulty",
        "order",
        "first",
        "growth",
        "epochs",
        "logistic_epochs",
        "logistic_learning_rate",
    }
    assert all(SampleCurriculum(name).to_dict()["name"] == name for name in CURRICULA)


def test_a_logistic_regression_takes_its_epochs_in_whole_steps_and_at_least_one():
    curriculum = SampleCurriculum("step", difficulty="logistic", logistic_epochs=0.5)
    assert [curriculum.logistic_steps(rate) for rate in (0.01, 0.1, 1.0)] == [50, 5, 1]
