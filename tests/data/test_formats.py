from __future__ import annotations

import contextlib
import gzip
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from idx_toys import encode_idx

from tacit.data.formats import CIFAR_RECORD, parse_cifar10, parse_idx, read_bytes
from tacit.privacy.validation import UserError

bytes_arrays = arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=3, max_side=6))
# Random bytes seldom look like a header; these do.
headers = st.builds(
    lambda kind, dims, tail: bytes([0, 0, kind, dims]) + tail,
    st.sampled_from([8, 8, 8, 9, 13]),
    st.integers(0, 5),
    st.binary(max_size=40),
)


@settings(deadline=None)
@given(bytes_arrays)
def test_an_idx_file_gives_back_the_array_it_was_made_from(array):
    parsed = parse_idx(encode_idx(array))
    np.testing.assert_array_equal(parsed, array)
    assert parsed.flags.writeable


@settings(deadline=None)
@given(bytes_arrays, st.data())
def test_a_truncated_idx_file_is_refused(array, data):
    content = encode_idx(array)
    with pytest.raises(UserError):
        parse_idx(content[: data.draw(st.integers(0, len(content) - 1))])


@settings(deadline=None)
@given(bytes_arrays, st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_of_an_idx_file_are_refused(array, more):
    with pytest.raises(UserError, match="damaged"):
        parse_idx(encode_idx(array) + more)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), headers))
def test_garbage_raises_nothing_but_a_user_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "garbage")
        path.write_bytes(content)
        for parse in (parse_idx, parse_cifar10, lambda _: read_bytes(path), lambda _: read_bytes(path, idx=True)):
            with contextlib.suppress(UserError):
                parse(content)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_garbage_after_a_gzip_beginning_raises_nothing_but_a_user_error(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "garbage.gz")
        path.write_bytes(b"\x1f\x8b\x08\x00" + content)
        with pytest.raises(UserError):
            read_bytes(path)


def test_dimensions_whose_product_overflows_64_bits_are_refused():
    content = bytes([0, 0, 8, 3]) + b"\xff" * 12
    with pytest.raises(UserError, match="promises"):
        parse_idx(content)


def test_a_file_that_promises_too_much_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + b"\xff" * 12 + bytes(10**7)))
    tracemalloc.start()
    with pytest.raises(UserError, match="promises"):
        read_bytes(path, idx=True)
    assert tracemalloc.get_traced_memory()[1] < 5 * 10**6
    tracemalloc.stop()


def test_no_more_is_decompressed_than_a_header_promises(tmp_path):
    path = tmp_path / "longer.gz"
    path.write_bytes(gzip.compress(encode_idx(np.arange(5)) + bytes(10**6)))
    with pytest.raises(UserError, match="longer than the 13 bytes"):
        read_bytes(path, idx=True)


def test_plain_and_compressed_files_read_alike(tmp_path):
    content = encode_idx(np.arange(200).reshape(10, 20))
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / "packed").write_bytes(gzip.compress(content))
    assert read_bytes(tmp_path / "plain", idx=True) == content == read_bytes(tmp_path / "packed", idx=True)


def test_a_cifar_batch_that_begins_like_an_idx_file_is_read_whole(tmp_path):
    content = bytes([0, 0, 8, 1]) + bytes(CIFAR_RECORD - 4)
    (tmp_path / "batch.bin").write_bytes(content)
    assert read_bytes(tmp_path / "batch.bin") == content


def test_a_cifar_batch_holds_planes_of_red_green_and_blue():
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes([3]) * 1024
    images, labels = parse_cifar10(record * 2)
    assert labels.tolist() == [7, 7]
    assert [np.unique(images[1, channel]).tolist() for channel in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("content", [b"", bytes(CIFAR_RECORD - 1), bytes(CIFAR_RECORD + 1), bytes([10]) * CIFAR_RECORD])
def test_an_odd_cifar_batch_is_refused(content):
    with pytest.raises(UserError, match="not a CIFAR-10 binary batch"):
        parse_cifar10(content)


def test_a_missing_file_is_a_user_error():
    with pytest.raises(UserError, match="cannot be read"):
        read_bytes("/no/such/file")
