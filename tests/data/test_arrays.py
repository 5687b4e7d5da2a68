from __future__ import annotations

import contextlib
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.data import load
from tacit.data.arrays import load_npz
from tacit.privacy.validation import UserError

RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3


@pytest.fixture
def npz(tmp_path):
    def write(**arrays):
        path = tmp_path / "own.npz"
        np.savez(path, **({"x": RNG.normal(size=(60, 5)), "y": LABELS} | arrays))
        return path

    return write


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((60, 5), (5,)),
        ((60, 8, 7), (1, 8, 7)),
        ((60, 3, 8, 7), (3, 8, 7)),
        ((60, 8, 7, 3), (3, 8, 7)),
        ((60, 8, 7, 1), (1, 8, 7)),
        ((60, 8, 7, 4), (4, 8, 7)),
        ((60, 3, 8, 3), (3, 8, 3)),
        ((60, 2, 8, 7), (2, 8, 7)),
    ],
)
def test_the_shape_tells_features_images_and_where_their_channels_are(npz, shape, expected):
    assert load(npz(x=RNG.integers(0, 256, shape, dtype=np.uint8))).train.input_shape == expected


def test_channels_last_are_moved_and_not_mixed(npz):
    x = RNG.integers(0, 256, (60, 8, 7, 3), dtype=np.uint8)
    split = load(npz(x=x, x_test=x, y_test=LABELS))
    np.testing.assert_array_equal(split.train.images[:, 2], x[..., 2])


@pytest.mark.parametrize(
    ("dtype", "stored", "constants"),
    [
        (np.uint8, np.uint8, (0.5, 0.5)),
        (np.int64, np.float32, (0.0, 1.0)),
        (bool, np.float32, (0.0, 1.0)),
        (np.float16, np.float32, (0.0, 1.0)),
        (np.float64, np.float32, (0.0, 1.0)),
        (">f4", np.float32, (0.0, 1.0)),
    ],
)
def test_bytes_stay_and_all_other_numbers_become_float32(npz, dtype, stored, constants):
    x = RNG.integers(0, 100, (60, 5)).astype(dtype)
    train = load(npz(x=x, x_test=x, y_test=LABELS)).train
    assert train.images.dtype == stored
    np.testing.assert_array_equal(train.images, x.astype(np.float32))
    assert (train.mean, train.std) == ((constants[0],), (constants[1],))


def test_adding_one_row_never_moves_another_between_train_and_test(npz):
    x = RNG.normal(size=(60, 5))
    before = load(npz(x=x))
    after = load(npz(x=np.insert(x, 7, 0.5, axis=0), y=np.insert(LABELS, 7, 1)))
    for part in ("train", "test"):
        old, new = (getattr(split, part).images for split in (before, after))
        np.testing.assert_array_equal(new[(new != 0.5).any(axis=1)], old)


def test_a_test_part_in_the_file_is_used(npz):
    split = load(npz(x_test=RNG.normal(size=(4, 5)), y_test=np.array([0, 1, 2, 3]), classes=np.array(list("abcd"))))
    assert (len(split.train), len(split.test)) == (60, 4)
    assert split.train.classes == ("a", "b", "c", "d")
    assert split.train.name == "own"


def test_classes_are_numbered_without_names(npz):
    assert load(npz()).train.classes == ("0", "1", "2")
    assert load(npz(classes=np.array([b"a", b"b", b"c", b"d"]))).train.classes == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([[1], [None]], object)}, "array of Python objects"),
        ({"y": np.array(["a"] * 60)}, "must hold numbers"),
        ({"x": np.zeros((60, 5), complex)}, "must hold numbers"),
        ({"x": np.zeros(60)}, "must have the shape"),
        ({"x": np.zeros((60, 1, 1, 1, 1))}, "must have the shape"),
        ({"x": np.zeros((0, 5))}, "is empty"),
        ({"x": np.zeros((60, 0))}, "is empty"),
        ({"x": np.full((60, 5), np.nan)}, "in 60 rows, the first being row 0"),
        ({"x": np.full((60, 5), 1e300)}, "infinite"),
        ({"x": np.zeros((59, 5))}, "59 examples and y has 60"),
        ({"y": LABELS + 0.5}, "whole numbers"),
        ({"y": LABELS - 1}, "has the label -1"),
        ({"y": LABELS + 10**12}, "has the label 10"),
        ({"y": np.full(60, 2**64 - 1, np.uint64)}, "has the label 1844"),
        ({"y": np.zeros(60, int)}, "one class only"),
        ({"y": np.full(60, 2)}, "one class only"),
        ({"y": np.zeros((60, 2), int)}, "one label an example"),
        ({"y": np.zeros(0, int)}, "one label an example"),
        ({"classes": np.array(["a", "b"])}, r"names only 0\.\.1"),
        ({"classes": np.array(["a", "a", "b"])}, "different names"),
        ({"classes": np.arange(3)}, "must hold names"),
        ({"x_test": np.zeros((4, 5))}, "only one of"),
        ({"x_test": np.zeros((4, 6)), "y_test": np.arange(4) % 3}, "differ in shape"),
        ({"x_test": np.zeros((4, 5), np.uint8), "y_test": np.arange(4) % 3}, "differ in shape or kind"),
        ({"x_test": np.zeros((4, 5)), "y_test": np.arange(3)}, "x_test .* 4 examples and y_test has 3"),
    ],
)
def test_arrays_that_cannot_be_learned_from_are_refused_in_one_sentence(npz, arrays, message):
    with pytest.raises(UserError, match=message) as caught:
        load(npz(**arrays))
    assert "\n" not in str(caught.value)


def test_the_first_row_that_is_not_finite_is_named(npz):
    x = RNG.normal(size=(60, 5))
    x[17, 2], x[40, 0] = np.inf, np.nan
    with pytest.raises(UserError, match="in 2 rows, the first being row 17"):
        load(npz(x=x))


def test_a_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "own.npz", data=np.zeros(3))
    with pytest.raises(UserError, match="no array 'x'"):
        load(tmp_path / "own.npz")


def test_what_a_file_declares_is_checked_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100)), y=np.zeros(1000, int))
    assert path.stat().st_size < 10_000
    with pytest.raises(UserError, match="unpacks to more than 500000 bytes"):
        load_npz(path, limit=500_000)


def test_a_header_that_claims_more_than_the_file_has_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 5)))
    content = (tmp_path / "x.npy").read_bytes().replace(b"(10, 5), }       ", b"(99999999, 5), } ")
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(UserError, match="fewer bytes than its shape"):
        load(tmp_path / "own.npz")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_raises_nothing_but_a_user_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "own.npz"
    np.savez(path, x=np.arange(80.0).reshape(40, 2), y=np.arange(40) % 2)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    with contextlib.suppress(UserError):
        load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_a_file_that_is_no_npz_is_refused(tmp_path, content):
    (tmp_path / "own.npz").write_bytes(content)
    with pytest.raises(UserError, match="not a sound"):
        load(tmp_path / "own.npz")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "missing.npz")
