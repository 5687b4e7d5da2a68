from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tacit.data import load
from tacit.privacy.validation import UserError


def test_importing_the_package_imports_no_heavy_library():
    heavy = "torch", "sklearn", "PIL", "rich"
    code = f"import sys, tacit.data; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_loading_twice_gives_the_same_split():
    first, second = load("digits"), load("digits")
    np.testing.assert_array_equal(first.test.images, second.test.images)


def test_a_larger_fraction_holds_out_more():
    assert len(load("digits", held_out=0.5).test) > len(load("digits", held_out=0.1).test)


def test_given_constants_replace_those_of_the_set():
    split = load("digits", mean=0.25, std=[2])
    assert split.train.mean == split.test.mean == (0.25,)
    assert split.train.std == split.test.std == (2.0,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": 0}, "std must be above 0"),
        ({"mean": [0.1, 0.2]}, "one a channel"),
        ({"mean": "much"}, "mean must be"),
        ({"held_out": 2}, "held_out"),
        ({"resize": 0}, "resize"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        load("digits", **options)


def test_resizing_has_no_say_in_the_split():
    plain, large = load("digits"), load("digits", resize=12)
    assert large.train.input_shape == (1, 12, 12)
    np.testing.assert_array_equal(plain.train.labels, large.train.labels)


def test_floats_are_not_resized(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.random.default_rng(0).normal(size=(60, 8, 8)), y=np.arange(60) % 2)
    with pytest.raises(UserError, match="images of bytes"):
        load(tmp_path / "own.npz", resize=4)


@pytest.mark.parametrize(
    ("source", "advice"), [("minst", "did you mean 'mnist'"), ("no/such/path", "neither a folder")]
)
def test_an_unknown_source_is_answered_with_what_there_is(source, advice):
    with pytest.raises(UserError, match=advice):
        load(source)
