"""Recipes, models, checkpoints and measurements that somebody else made."""

import json
import os
import struct
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tacit.models import load_pretrained
from tacit.privacy.validation import UserError
from tacit.training.checkpoint import load_tensors, write_atomically
from tacit.training.directory import read_metrics
from tacit.training.features import cached_features
from tacit.training.recipe import Recipe
from tacit.training.run import load_model


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 5000,
        "a." * 3000 + "b = 1",
        "seed = " + "9" * 5000,
        "seed = 0x" + "f" * 9000,
        "a = " + "{b=" * 3000,
    ],
    ids=["lists", "keys", "digits", "bits", "tables"],
)
def test_a_recipe_that_is_nested_or_counts_beyond_reason_is_refused(text):
    with pytest.raises(UserError):
        Recipe.of(text.encode())
    with pytest.raises(UserError):
        Recipe.load("digits", [text])


def test_a_recipe_is_a_regular_file_of_some_size(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "long.toml").write_bytes(b"#" * (2**20 + 1))
    for name, reason in (("pipe", "not a regular file"), ("long", "longer than 1048576 bytes")):
        with pytest.raises(UserError, match=reason):
            Recipe.load(tmp_path / f"{name}.toml")


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/own.toml"])
def test_a_name_that_cannot_be_a_file_is_told(name):
    with pytest.raises(UserError):
        Recipe.load(name)


FACTS = {
    "format": "tacit-model/1",
    "model": {"name": "linear"},
    "input_shape": [4],
    "classes": ["a", "b"],
    "mean": [0.0],
    "std": [1.0],
    "scaled_bytes": False,
}
WEIGHTS = {"1.weight": torch.zeros(2, 4), "1.bias": torch.zeros(2)}


def model_file(folder, **facts):
    content = save(WEIGHTS, metadata={"tacit": json.dumps(FACTS | facts)})
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_a_sound_model_file_is_loaded(tmp_path):
    assert load_model(model_file(tmp_path))[1]["classes"] == ["a", "b"]


@pytest.mark.parametrize(
    "facts",
    [
        {"model": {"name": 7}},
        {"model": {"name": "linear", "unknown": 1}},
        {"model": []},
        {"input_shape": [10**10]},
        {"input_shape": [10**6]},
        {"model": {"name": "pooled-cnn"}, "input_shape": [1, 20_000, 20_000]},
        {"model": {"name": "linear", "features": "scattering"}, "input_shape": [1, 4000, 4000]},
        {"input_shape": [True]},
        {"input_shape": ["4"]},
        {"input_shape": [-4]},
        {"classes": 2},
        {"classes": []},
        {"mean": "x"},
        {"std": [0.0]},
    ],
    ids=str,
)
def test_a_model_file_whose_facts_do_not_fit_it_is_refused_without_building_what_it_claims(tmp_path, facts):
    with pytest.raises(UserError):
        load_model(model_file(tmp_path, **facts))


@pytest.mark.parametrize("facts", ["[" * 5000, "[]", "1", "{"])
def test_facts_that_are_no_table_are_refused(tmp_path, facts):
    path = tmp_path / "state.safetensors"
    path.write_bytes(save(WEIGHTS, metadata={"tacit": facts}))
    with pytest.raises(UserError, match="damaged or was not written by tacit"):
        load_tensors(path)


def test_tensors_are_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not a regular file"):
        load_tensors(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not a regular file"):
        load_pretrained(torch.nn.Linear(2, 2), tmp_path / "model.safetensors")


def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".note.draft").symlink_to(precious)
    write_atomically(tmp_path / "note", b"new")
    assert (precious.read_text(), (tmp_path / "note").read_bytes()) == ("mine", b"new")


def test_measurements_that_are_none_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"epoch": 1}\n[1]\n7\n\xff\n' + b"[" * 5000 + b'\n{"epoch": 2}')
    assert read_metrics(path) == [{"epoch": 1}, {"epoch": 2}]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        read_metrics(path)


def test_features_in_the_cache_that_tacit_did_not_write_are_computed_again(tmp_path):
    path = tmp_path / "digits.npy"
    np.save(path, np.zeros((3, 2), np.float32))
    assert cached_features(path, 3).shape == (3, 2)
    assert cached_features(path, 4) is None
    np.save(path, np.array([{}] * 3, dtype=object), allow_pickle=True)
    assert cached_features(path, 3) is None
    path.write_bytes(b"\x93NUMPY\x02\0" + struct.pack("<I", 2**31))
    assert cached_features(path, 3) is None


@pytest.mark.parametrize(
    "text", ["a." * 10_000 + "a = 1", "[" + "a." * 10_000 + "a]", "x = {" + "a." * 500_000 + "a = 1}"]
)
def test_a_name_of_very_many_parts_is_refused_before_it_is_read(tmp_path, text):
    (tmp_path / "own.toml").write_text(text)
    began = time.process_time()
    with pytest.raises(UserError, match="more than 100 parts"):
        Recipe.load(tmp_path / "own.toml")
    assert time.process_time() - began < 0.5
