from __future__ import annotations

import warnings

import numpy as np
import pytest
from idx_toys import encode_idx, toy_contents, toy_entry, write_files

from tacit.data import benchmarks, catalogue, is_present, load
from tacit.data.benchmarks import load_benchmark
from tacit.data.catalogue import entry
from tacit.data.formats import CIFAR_RECORD
from tacit.privacy.validation import UserError


@pytest.fixture
def cifar(tmp_path):
    """Six short batches in the layout of CIFAR-10, in `tmp_path`."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for file in entry("cifar10").files:
        records = rng.integers(0, 256, (20, CIFAR_RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        records.tofile(folder / file.name)
    return tmp_path


@pytest.mark.parametrize("place", ["", "toy-mnist", "TOY/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dotted", [False, True])
def test_files_are_found_in_the_usual_places_and_spellings(tmp_path, place, suffix, dotted):
    contents = toy_contents()
    write_files(tmp_path / place, contents, suffix=suffix, dotted=dotted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = load_benchmark(toy_entry(contents), data_dir=tmp_path, download=False)
    assert split.train.input_shape == (1, 5, 4)
    assert split.train.images.tobytes() == contents["train-images-idx3-ubyte"][16:]
    assert split.test.labels.tolist() == list(range(10))


def test_the_users_own_variant_is_taken_with_a_warning(tmp_path):
    write_files(tmp_path, toy_contents(seed=1))
    with pytest.warns(UserWarning, match="not the standard file of 'toy-mnist'"):
        split = load_benchmark(toy_entry(toy_contents()), data_dir=tmp_path, download=False)
    assert split.train.images.tobytes() == toy_contents(seed=1)["train-images-idx3-ubyte"][16:]


def test_the_files_of_another_set_are_refused_by_name(tmp_path, monkeypatch):
    mine, other = toy_entry(toy_contents(1)), toy_entry(toy_contents(2), name="other")
    monkeypatch.setattr(benchmarks, "catalogue", lambda: (mine, other))
    write_files(tmp_path, toy_contents(2))
    with pytest.raises(UserError, match="belongs to 'other'"):
        load_benchmark(mine, data_dir=tmp_path, download=False)


def test_a_folder_named_after_the_set_comes_before_the_one_it_lies_in(tmp_path):
    write_files(tmp_path, toy_contents(seed=1))
    write_files(tmp_path / "toy-mnist", toy_contents())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_benchmark(toy_entry(toy_contents()), data_dir=tmp_path, download=False)


def test_an_incomplete_folder_falls_back_to_the_cache(tmp_path, cache):
    contents = toy_contents()
    write_files(tmp_path, dict(list(contents.items())[:3]))
    entry = toy_entry(contents)
    with pytest.raises(UserError, match="allow fetching them"):
        load_benchmark(entry, data_dir=tmp_path, download=False)
    write_files(cache / "toy-mnist", contents, suffix="")
    assert len(load_benchmark(entry, data_dir=tmp_path, download=False).train) == 20


@pytest.mark.parametrize("damage", [b"", b"\0" * 18, b"\0" * 17])
def test_a_damaged_file_in_the_cache_is_never_used(cache, damage):
    contents = toy_contents()
    write_files(cache / "toy-mnist", contents | {"t10k-labels-idx1-ubyte": damage}, suffix="")
    with pytest.raises(UserError, match="allow fetching them"):
        load_benchmark(toy_entry(contents), download=False)


@pytest.mark.filterwarnings("ignore:.*not the standard file")
@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train-labels-idx1-ubyte", np.arange(19) % 10, "as many images as labels"),
        ("train-labels-idx1-ubyte", np.arange(20), r"must lie in 0\.\.9"),
        ("train-images-idx3-ubyte", np.zeros((20, 20)), "as many images as labels"),
        ("t10k-images-idx3-ubyte", np.zeros((10, 6, 6)), "differ in shape"),
    ],
)
def test_a_variant_whose_parts_do_not_fit_is_refused(tmp_path, name, array, message):
    write_files(tmp_path, toy_contents() | {name: encode_idx(array)})
    with pytest.raises(UserError, match=message):
        load_benchmark(toy_entry(toy_contents()), data_dir=tmp_path, download=False)


def test_cifar_batches_of_any_order_are_taken_without_a_warning(cifar):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = load("cifar10", data_dir=cifar, download=False)
    first = np.fromfile(cifar / "cifar-10-batches-bin" / "data_batch_1.bin", np.uint8)
    assert (len(split.train), len(split.test)) == (100, 20)
    assert split.train.images[0].tobytes() == first[1:CIFAR_RECORD].tobytes()
    assert split.train.images.flags.c_contiguous
    assert split.train.images.flags.writeable


def test_cifar_batches_in_the_named_folder_itself_are_found(cifar):
    assert is_present("cifar10", cifar)
    assert is_present("cifar10", cifar / "cifar-10-batches-bin")
    (cifar / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    assert not is_present("cifar10", cifar)


def test_a_cifar_label_out_of_range_is_refused(cifar):
    path = cifar / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"data_batch_3\.bin .* label 11"):
        load("cifar10", data_dir=cifar, download=False)


def test_a_data_dir_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        load("mnist", data_dir=tmp_path / "typo")


def test_the_catalogue_tells_the_truth_about_the_digits():
    digits = entry("digits")
    split = load("digits")
    assert (digits.train, digits.test) == (len(split.train), len(split.test))
    assert digits.shape == split.train.input_shape
    assert set(np.unique(split.train.labels)) == set(range(10))
    assert split.train.images.max() == 255


def test_every_entry_states_its_constants_and_its_files():
    for known in catalogue():
        assert len(known.mean) == len(known.std) == known.shape[0]
        assert known.name == "digits" or known.mirrors or known.archive
        for file in known.files:
            assert known.archive or len(file.sha256) == 64


def test_the_digits_are_those_of_scikit_learn_wherever_its_file_lies(monkeypatch):
    from sklearn import datasets

    from tacit.data import benchmarks

    values, labels = datasets.load_digits(return_X_y=True)
    table = benchmarks._digits_table()
    assert (table == np.column_stack([values, labels])).all()
    monkeypatch.setattr(benchmarks.importlib.util, "find_spec", lambda name: None)
    assert (benchmarks._digits_table() == table).all()
