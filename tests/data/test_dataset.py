from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.data.dataset import Dataset, Split, is_held_out, split_by_content
from tacit.privacy.validation import UserError


def pixels(n=40, seed=0, shape=(3, 4, 5)):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def dataset(images=None, labels=None, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), classes=("a", "b")):
    images = pixels() if images is None else images
    labels = np.arange(len(images)) % 2 if labels is None else labels
    return Dataset("toy", images, labels, classes, mean, std)


def fingerprints(data):
    return [(image.tobytes(), int(label)) for image, label in zip(data.images, data.labels)]


def test_a_batch_is_scaled_to_one_and_normalised_by_channel():
    data = dataset()
    inputs, targets = data.batch(np.array([3, 1, 7]))
    expected = (data.images[[3, 1, 7]] / 255.0 - np.reshape(data.mean, (3, 1, 1))) / np.reshape(data.std, (3, 1, 1))
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-6)
    assert targets.tolist() == [1, 1, 1]


@pytest.mark.parametrize("chosen", [None, slice(None), np.arange(40), list(range(40)), np.ones(40, bool)])
def test_every_way_to_choose_all_examples_gives_the_same_batch(chosen):
    data = dataset()
    torch.testing.assert_close(data.batch(chosen)[0], data.batch()[0])
    assert len(data.batch(chosen)[1]) == 40


@pytest.mark.parametrize("nobody", [np.array([], dtype=np.int64), [], np.zeros(40, bool), slice(0, 0)])
def test_an_empty_batch_has_the_shape_of_its_examples(nobody):
    inputs, targets = dataset().batch(nobody)
    assert inputs.shape == (0, 3, 4, 5)
    assert targets.shape == (0,)


@pytest.mark.parametrize("chosen", [None, slice(0, 4), np.arange(4)])
def test_changing_a_batch_never_changes_the_data_set(chosen):
    images = np.ones((8, 6), np.float32)
    data = dataset(images, mean=(0.0,), std=(1.0,))
    inputs, targets = data.batch(chosen)
    inputs.zero_()
    targets.fill_(1)
    assert images.min() == 1
    assert data.labels.tolist() == [0, 1] * 4


def test_a_read_only_array_makes_batches_without_a_warning(recwarn):
    images = pixels()
    images.flags.writeable = False
    assert dataset(images).batch(slice(0, 3))[0].shape == (3, 3, 4, 5)
    assert not recwarn.list


def test_floats_are_normalised_but_not_scaled():
    data = dataset(np.full((4, 6), 3.0, np.float32), mean=(1.0,), std=(2.0,))
    assert data.batch()[0].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((4, 3, 2, 2), np.int32)}, "must be uint8 or float32"),
        ({"images": np.zeros((4, 3, 2), np.uint8)}, "must be uint8 or float32"),
        ({"labels": np.zeros(3, np.int64)}, "one an image"),
        ({"labels": np.zeros(40, np.int32)}, "must be int64"),
        ({"labels": np.full(40, 2)}, r"must lie in 0\.\.1"),
        ({"labels": np.full(40, -1)}, r"must lie in 0\.\.1"),
        ({"mean": (0.1, 0.2)}, "one a channel"),
        ({"mean": (float("nan"),)}, "finite"),
        ({"std": (1.0, 0.0, 1.0)}, "above 0"),
        ({"std": ("1",)}, "finite numbers"),
    ],
)
def test_a_data_set_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataset(**changes)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), position=st.integers(0, 120), held_out=st.floats(0.2, 0.8))
def test_adding_one_example_never_moves_another_between_train_and_test(seed, position, held_out):
    # so many that neither part is empty: by chance less than once in 10^11
    images, labels = pixels(120, seed), np.arange(120) % 2
    one_more = pixels(1, seed + 1)
    smaller = split_by_content(dataset(images, labels), held_out)
    larger = split_by_content(
        dataset(np.insert(images, position, one_more, axis=0), np.insert(labels, position, 1)), held_out
    )
    added = (one_more[0].tobytes(), 1)
    for part in ("train", "test"):
        before, after = (fingerprints(getattr(split, part)) for split in (smaller, larger))
        assert [example for example in after if example != added] == before
    assert len(larger.train) + len(larger.test) == 121


def test_the_order_of_the_examples_has_no_say_in_the_split():
    images, labels = pixels(50), np.arange(50) % 2
    order = np.random.default_rng(1).permutation(50)
    straight = split_by_content(dataset(images, labels), 0.3)
    shuffled = split_by_content(dataset(images[order], labels[order]), 0.3)
    assert sorted(fingerprints(straight.test)) == sorted(fingerprints(shuffled.test))


def test_about_the_wanted_fraction_is_held_out():
    # 4000 examples at 1/6: a count further than 6 standard deviations (141) from 667 has probability below 1e-8.
    held = sum(is_held_out(number.to_bytes(4, "big"), "x", 1 / 6) for number in range(4000))
    assert abs(held - 4000 / 6) < 142


def test_a_smaller_fraction_holds_out_a_part_of_what_a_larger_one_does():
    few, many = ({n for n in range(500) if is_held_out(bytes([n % 256, n // 256]), "x", f)} for f in (0.1, 0.4))
    assert few
    assert few < many


def test_the_label_and_the_content_cannot_be_confused():
    # The label ends at a zero byte, so moving a byte from one to the other is another example.
    answers = {(is_held_out(b"b" + bytes([n]), "a", 0.5), is_held_out(bytes([n]), "ab", 0.5)) for n in range(64)}
    assert len(answers) == 4


@pytest.mark.parametrize("held_out", [0.0, 1.0, -0.1, float("nan"), "some", True])
def test_a_fraction_outside_zero_and_one_is_refused(held_out):
    with pytest.raises(UserError, match="held_out"):
        split_by_content(dataset(), held_out)


def test_an_empty_part_is_refused():
    with pytest.raises(UserError, match="test part of 'toy' is empty"):
        split_by_content(dataset(pixels(2)), 1e-9)
    with pytest.raises(UserError, match="train part of 'toy' is empty"):
        split_by_content(dataset(pixels(2)), 1 - 1e-9)


def test_parts_that_differ_are_refused():
    with pytest.raises(UserError, match="differ in shape"):
        Split(dataset(), dataset(pixels(4, shape=(3, 4, 4))))
    with pytest.raises(UserError, match="same classes"):
        Split(dataset(), dataset(classes=("a", "c")))
