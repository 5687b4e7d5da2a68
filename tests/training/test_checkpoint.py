"""A checkpoint is what was saved, or it is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tacit.privacy import UserError
from tacit.training.checkpoint import load_tensors, save_tensors

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "steps": torch.tensor(7),
    "none": torch.zeros(0),
    "half": torch.ones(2).bfloat16(),
}
FACTS = {"ledger": {"entries": 3}, "state": {10: 0.1, 2: [None, "tensor:weight"]}}
AS_READ = json.loads(json.dumps(FACTS))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "state.safetensors"
    save_tensors(path, TENSORS, FACTS)
    return path


def test_it_reads_as_it_was_saved(saved):
    tensors, facts = load_tensors(saved)
    assert facts == AS_READ
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changing_any_single_bit_is_noticed_or_changes_nothing(saved, data):
    content = bytearray(saved.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    other = saved.with_name("other")
    other.write_bytes(content)
    try:
        tensors, facts = load_tensors(other)
    except UserError:
        return
    # such as a bit of the name of the hash itself
    facts.pop(next(iter(set(facts) - set(AS_READ)), ""), None)
    assert facts == AS_READ
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_a_number_of_a_weight_that_changed_is_noticed(saved):
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    other = saved.with_name("changed")
    other.write_bytes(content)
    with pytest.raises(UserError, match="has changed since"):
        load_tensors(other)


def test_a_file_of_before_there_was_a_hash_is_still_read(saved):
    old = saved.with_name("old")
    old.write_bytes(save(TENSORS, metadata={"tacit": json.dumps({"seconds": 1.0})}))
    assert load_tensors(old)[1] == {"seconds": 1.0}
