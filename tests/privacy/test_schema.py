"""The schema fits every certificate that the code makes, and nothing that it does not."""

import copy
import json
import math
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tacit.privacy import (
    Adaptive,
    Automatic,
    Constant,
    DicePlan,
    Flat,
    Grouped,
    Ledger,
    LossDriven,
    PrivacyPlan,
    UserError,
    accounting,
    certificate_of,
    certificate_schema,
)
from tacit.privacy.clipping import clipping_from_dict
from tacit.privacy.ledger import SORTED

SCHEMA = certificate_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
GROUPS = Grouped((("a.*",), ("b.*", "c")), (1.0, 0.5))
DICE = DicePlan(examples=100, batch_size=10, steps=4, clipping_norm=1.0, error_norm=0.1, noise_std=2.0)
DRIVEN = LossDriven(1.0, 2.0, order=8.0, budget=5.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The form of a certificate does not depend on how large epsilon is, but on whether there is one."""

    def epsilon_of(rate, levels, delta, *, whole=(), **_):
        return math.inf if min([sigma for sigma, _ in levels] + list(whole), default=1.0) < 1e-6 else 1.5

    monkeypatch.setattr(accounting, "epsilon_of", epsilon_of)


def plan_of(clipping=None, noise=None, **more):
    return PrivacyPlan(
        sample_rate=0.1,
        steps=4,
        clipping=clipping or Flat(1.0),
        noise=noise or Constant(2.0),
        expected_batch_size=4,
        **more,
    )


def entries_of(plan, *, releases=2, whole=(), disclosure=None, sha256=None, change=None, **facts):
    ledger = Ledger.in_memory(plan, delta=1e-5, **facts)
    if disclosure is not None:
        ledger.record_disclosure(disclosure)
    for sigma in whole:
        ledger.record_whole_release(noise_multiplier=sigma, what="the means of the features")
    for step in range(releases):
        sigma = plan.noise_multiplier(step)
        ledger.record_release(
            **{"noise_multiplier": sigma, "sample_rate": plan.sample_rate, "sampled_by": "tacit", **(change or {})}
        )
    if sha256 is not None:
        ledger.record_model(sha256)
    return ledger.entries


FACTS = {"examples": 40, "reproducible": False, "evaluated_on_held_out": True, "data": "digits", "model": "linear"}
KINDS = {
    "plain": lambda: entries_of(plan_of(), **FACTS),
    "nothing released": lambda: entries_of(plan_of(), releases=0),
    "no facts": lambda: entries_of(plan_of()),
    "facts of the caller's own": lambda: entries_of(plan_of(), project={"of": ["ours", None, 3]}, examples=None),
    "with its model": lambda: entries_of(plan_of(), sha256="0" * 64, **FACTS),
    "grouped": lambda: entries_of(plan_of(GROUPS)),
    "grouped with noise by depth": lambda: entries_of(plan_of(GROUPS.allocated("depth", {"a.w": 3, "b.w": 4, "c": 1}))),
    "automatic": lambda: entries_of(plan_of(Automatic(Flat(1.0)))),
    "automatic by groups": lambda: entries_of(plan_of(Automatic(GROUPS))),
    "adaptive": lambda: entries_of(plan_of(Adaptive(1.0))),
    "error feedback": lambda: entries_of(DICE.accounted(), dice=DICE.facts(1e-5), examples=100),
    "noise by the loss": lambda: entries_of(plan_of(noise=DRIVEN)),
    "statistics": lambda: entries_of(plan_of(whole_releases=(8.0,)), whole=(8.0,)),
    "void: a seed": lambda: entries_of(plan_of(), reproducible=True),
    "void: the caller's batches": lambda: entries_of(plan_of(), change={"sampled_by": "caller"}),
    "void: a disclosure": lambda: entries_of(plan_of(), disclosure="the training loss"),
    "void: no noise": lambda: entries_of(plan_of(), change={"noise_multiplier": 0.0}),
    "void: a sorted pass": lambda: entries_of(plan_of(), change={"sampled_by": SORTED}),
    "pre-trained": lambda: entries_of(plan_of(), pretrained="1" * 64, features="2" * 64, curriculum={"name": "step"}),
}


def certificate(kind):
    """As a reader has it: through JSON."""
    return json.loads(json.dumps(certificate_of(KINDS[kind]()), allow_nan=False))


def test_it_is_a_schema_of_the_draft_it_names():
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_certificate_fits(kind):
    found = certificate(kind)
    VALIDATOR.validate(found)
    assert found["valid_for_release"] is not kind.startswith("void")


def test_a_resumed_run_fits(tmp_path):
    Ledger.create(tmp_path / "ledger.jsonl", plan_of(), delta=1e-5).close()
    ledger = Ledger.resume(tmp_path / "ledger.jsonl")
    VALIDATOR.validate(json.loads(json.dumps(certificate_of(ledger.entries))))
    ledger.close()


def test_its_fields_are_those_of_a_certificate_all_of_them_required():
    assert set(certificate("plain")) == set(SCHEMA["required"]) == set(SCHEMA["properties"])
    assert SCHEMA["title"] == SCHEMA["properties"]["format"]["const"] == certificate("plain")["format"]


def test_every_kind_of_clipping_is_in_it_and_tried_here():
    with pytest.raises(UserError) as error:
        clipping_from_dict({"kind": "?"})
    known = set(re.search(r"there are: (.*)\)", str(error.value)).group(1).split(", "))
    described = {one["properties"]["kind"]["const"] for one in SCHEMA["properties"]["clipping"]["oneOf"]}
    assert known == described == {certificate(kind)["clipping"]["kind"] for kind in KINDS}


def places(value, path=()):
    """Every place in a certificate, but what is inside its facts."""
    yield path, value
    if path == ("facts",):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def changed(found, path, value):
    other = copy.deepcopy(found)
    place = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return other


OF_TYPE = {str: "x", float: 7, bool: True, type(None): None, list: ["x"], dict: {"x": 1}}
NULLABLE = {"epsilon": float, "epsilon_rdp": float, "model_sha256": str, "noise_shape": list}


def type_of(value):
    return float if type(value) is int else type(value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_another_type_in_any_place_does_not_fit(kind):
    found = certificate(kind)
    for path, value in places(found):
        allowed = {type_of(value)} | ({NULLABLE[path[-1]], type(None)} if path[-1:] and path[-1] in NULLABLE else set())
        for other in OF_TYPE.keys() - allowed if path else ():
            assert not VALIDATOR.is_valid(changed(found, path, OF_TYPE[other])), (path, other)


@pytest.mark.parametrize("kind", KINDS)
def test_one_field_more_or_one_less_in_any_object_does_not_fit(kind):
    found = certificate(kind)
    for path, value in places(found):
        if isinstance(value, dict) and path != ("facts",):
            for key in value:
                fewer = {k: v for k, v in value.items() if k != key}
                if (path, key) != (("noise",), "follows_the_released_loss"):
                    assert not VALIDATOR.is_valid(changed(found, path, fewer) if path else fewer), (path, key)
            more = {**value, "more": 1}
            assert not VALIDATOR.is_valid(changed(found, path, more) if path else more), path


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "tacit-certificate/2"),
        (("epsilon",), -0.1),
        (("epsilon",), None),  # yet valid for release
        (("delta",), 0),
        (("delta",), 1),
        (("valid_for_release",), False),  # for no reason
        (("void_because",), ["a reason"]),  # yet valid for release
        (("neighbouring_relation",), "replace one example"),
        (("sampling", "sample_rate"), 0),
        (("sampling", "sample_rate"), 1.5),
        (("sampling", "kind"), "shuffled"),
        (("noise", "kind"), "laplace"),
        (("noise", "levels", 0, "releases"), 0),
        (("noise", "levels", 0, "noise_multiplier"), -1),
        (("releases",), 2.5),
        (("caveats",), []),
        (("model_sha256",), "0" * 63),
        (("model_sha256",), "A" * 64),
        (("model_sha256",), "0" * 64 + "\n"),
        (("ledger", "entries"), 0),
        (("ledger", "head"), "z" * 64),
        (("facts", "examples"), "many"),
    ],
)
def test_a_value_that_cannot_be_does_not_fit(path, value):
    found = certificate("with its model")
    VALIDATOR.validate(found)
    assert not VALIDATOR.is_valid(changed(found, path, value))


def test_it_is_installed_with_the_package_and_so_is_the_style_of_the_page():
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tacit"]
    for name in ("privacy/certificate.schema.json", "report/certificate.css"):
        assert (root / "src" / "tacit" / name).is_file()
        assert any(fnmatch(name, pattern) for pattern in patterns)
