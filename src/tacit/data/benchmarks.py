"""The named sets, from files to a `Split`: the embedded digits, MNIST and its kin, CIFAR-10."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import warnings
from pathlib import Path

import numpy as np

from tacit.data.catalogue import Entry, File, catalogue, entry
from tacit.data.dataset import Dataset, Split, split_by_content
from tacit.data.fetch import cache_dir, fetch, file_names
from tacit.data.formats import parse_cifar10, parse_idx, read_bytes
from tacit.privacy.files import expanded
from tacit.privacy.validation import UserError

Contents = dict[str, bytes]


def is_present(name: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether a named set can be loaded without fetching anything (its files are there; they are not read).

    >>> is_present("digits")
    True
    """
    chosen = entry(name)
    return not chosen.files or any(_found(chosen, folder) for folder in _folders(chosen, data_dir))


def load_digits(held_out: float) -> Split:
    """scikit-learn's 1797 digits of 8 x 8; their values 0..16 are stored as bytes, `round(255 * value / 16)`.

    The set has no test part of its own: `is_held_out` decides for each example by itself. Mean and standard
    deviation are both 0.5, chosen and not measured.

    >>> split = load_digits(held_out=1 / 6)
    >>> len(split.train), len(split.test), split.train.input_shape
    (1495, 302, (1, 8, 8))
    """
    digits = entry("digits")
    table = _digits_table()
    images = np.rint(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    whole = Dataset("digits", images, table[:, -1].astype(np.int64), digits.classes, digits.mean, digits.std)
    return split_by_content(whole, held_out)


def _digits_table() -> np.ndarray:
    """A row a digit: 64 values and the label. The file alone is read where it is known to lie: importing scikit-learn takes
    longer than training on its digits."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn import datasets

    values, labels = datasets.load_digits(return_X_y=True)
    return np.column_stack([values, labels])


def load_benchmark(
    chosen: Entry,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    progress: bool = True,
) -> Split:
    """MNIST, Fashion-MNIST or CIFAR-10 from the user's folder, else the cache, else fetched.

    Files in the user's folder that are not the standard ones are taken with a warning, if their format is
    right; files in the cache that are not are fetched again.

    >>> load_benchmark(entry("mnist"), data_dir="/no/such/folder")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: data_dir is '/no/such/folder', which is not a folder; ...
    """
    contents = _from_user(chosen, data_dir) if data_dir is not None else None
    if contents is None and data_dir is not None:
        warnings.warn(
            f"no files of {chosen.name!r} are in {os.fspath(data_dir)}; the cache is used instead", stacklevel=3
        )
    if contents is None:
        contents = _from_cache(chosen)
    if contents is None:
        if not download:
            raise UserError(
                f"the files of {chosen.name!r} are not in {data_dir or cache_dir()}; allow fetching them, "
                "or pass --data-dir with the folder that holds them"
            )
        contents = _read(chosen, _found(chosen, fetch(chosen, progress=progress)) or {})
    return _cifar_split(chosen, contents) if chosen.archive else _idx_split(chosen, contents)


def _folders(chosen: Entry, data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Where to look. A folder named after the set comes before the folder it lies in: MNIST and Fashion-MNIST
    have the same file names, and may share the latter."""
    root = expanded(data_dir) if data_dir is not None else None
    own = [*(root / folder for folder in chosen.folders), root] if root else []
    return [*own, cache_dir() / chosen.folders[0]]


def _found(chosen: Entry, folder: Path) -> dict[File, Path] | None:
    found = {}
    for file in chosen.files:
        paths = (folder / name for name in file_names(file))
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        found[file] = path
    return found


def _read(chosen: Entry, found: dict[File, Path]) -> Contents:
    return {file.name: read_bytes(path, idx=not chosen.archive) for file, path in found.items()}


def _from_user(chosen: Entry, data_dir: str | os.PathLike[str]) -> Contents | None:
    if not os.path.isdir(expanded(data_dir)):
        raise UserError(f"data_dir is {os.fspath(data_dir)!r}, which is not a folder; name the one with the files")
    candidates = (_found(chosen, folder) for folder in _folders(chosen, data_dir)[:-1])
    found = next((files for files in candidates if files), None)
    if found is None:
        return None
    contents = _read(chosen, found)
    foreign = {f.sha256: e.name for e in catalogue() if e is not chosen for f in e.files if f.sha256}
    for file, path in found.items():
        digest = hashlib.sha256(contents[file.name]).hexdigest() if file.sha256 else None
        if digest in foreign:
            raise UserError(
                f"{path} belongs to {foreign[digest]!r}; pass --dataset {foreign[digest]}, or its own files"
            )
        if digest != file.sha256:
            warnings.warn(
                f"{path} is not the standard file of {chosen.name!r}: its SHA-256 differs",
                stacklevel=4,
            )
    return contents


def _from_cache(chosen: Entry) -> Contents | None:
    found = _found(chosen, cache_dir() / chosen.folders[0])
    if found is None:
        return None
    with contextlib.suppress(UserError):
        contents = _read(chosen, found)
        if all(_is_standard(file, contents[file.name]) for file in found):
            return contents
    return None


def _is_standard(file: File, content: bytes) -> bool:
    if len(content) != file.size:
        return False
    return file.sha256 is None or hashlib.sha256(content).hexdigest() == file.sha256


def _idx_split(chosen: Entry, contents: Contents) -> Split:
    def part(prefix: str) -> Dataset:
        names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        images, labels = (parse_idx(contents[name], name) for name in names)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UserError(
                f"{names[0]} and {names[1]} of {chosen.name!r} must hold as many images as labels, "
                f"not shapes {list(images.shape)} and {list(labels.shape)}; fetch them again"
            )
        return _dataset(chosen, images[:, None], labels.astype(np.int64))

    return Split(train=part("train"), test=part("t10k"))


def _cifar_split(chosen: Entry, contents: Contents) -> Split:
    def part(files: tuple[File, ...]) -> Dataset:
        batches = [parse_cifar10(contents[file.name], file.name) for file in files]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
        return _dataset(chosen, images, labels)

    return Split(train=part(chosen.files[:-1]), test=part(chosen.files[-1:]))


def _dataset(chosen: Entry, images: np.ndarray, labels: np.ndarray) -> Dataset:
    return Dataset(chosen.name, images, labels, chosen.classes, chosen.mean, chosen.std)
