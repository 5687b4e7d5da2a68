"""A user's own data in an `.npz` file of arrays."""

from __future__ import annotations

import io
import math
import os
import sys
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from tacit.data.dataset import Dataset, Split, split_by_content
from tacit.data.formats import LARGEST_EXPANSION, expansion_of
from tacit.privacy.files import expanded, opened
from tacit.privacy.validation import UserError, visible

LARGEST_NPZ = 2**34
"""Bytes of arrays that are loaded: 16 GiB."""
MOST_CLASSES = 100_000
LONGEST_HEADER = 10_000
"""Bytes of the header of an array: NumPy's own limit, which it looks at only after reading as many as there are."""
LONGEST_REASON = 200
NAMES = ("x", "y", "x_test", "y_test", "classes")


def load_npz(path: str | os.PathLike[str], *, held_out: float = 1 / 6, limit: int = LARGEST_NPZ) -> Split:
    """The arrays `x` and `y` of an `.npz` file; optionally `x_test` and `y_test`, and the names in `classes`.

    `x` has the shape `[n, features]`, `[n, height, width]`, `[n, channels, height, width]` or `[n, height,
    width, channels]` (the last if its last axis is 1, 3 or 4 long and axis 1 is not). uint8 stays and is
    scaled to 0..1 later; all else becomes float32 and is taken as it is. `y` holds whole numbers 0..k-1, and
    k is the largest plus one unless `classes` says it: k is taken as public, so give `classes` if it is not.
    Without `x_test`, `is_held_out` decides for each example by itself. No pickle is ever loaded, nor more
    than `limit` bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "toy.npz")
    ...     np.savez(path, x=np.random.default_rng(0).normal(size=(60, 5)), y=np.arange(60) % 3)
    ...     split = load_npz(path)
    >>> split.train.input_shape, split.train.classes, len(split.train) + len(split.test)
    ((5,), ('0', '1', '2'), 60)
    """
    path = expanded(path)
    arrays = _read(path, limit)
    for name in ("x", "y"):
        if name not in arrays:
            raise UserError(f"{path} has no array {name!r}; save it with np.savez(path, x=..., y=...)")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise UserError(f"{path} has only one of 'x_test' and 'y_test'; give both or neither")
    inputs = {name: _inputs(path, name, array) for name, array in arrays.items() if name[0] == "x"}
    labels = {name: _labels(path, name, array) for name, array in arrays.items() if name[0] == "y"}
    classes = _classes(path, arrays.get("classes"), labels)
    constants = ((0.5,), (0.5,)) if inputs["x"].dtype == np.uint8 else ((0.0,), (1.0,))

    def dataset(suffix: str) -> Dataset:
        x, y = inputs[f"x{suffix}"], labels[f"y{suffix}"]
        if len(x) != len(y):
            raise UserError(f"x{suffix} of {path} has {len(x)} examples and y{suffix} has {len(y)}; make them agree")
        return Dataset(path.stem, x, y, classes, *constants)

    train = dataset("")
    if len(np.unique(train.labels)) < 2:
        raise UserError(f"y of {path} has one class only; a classifier needs at least two")
    return Split(train, dataset("_test")) if "x_test" in arrays else split_by_content(train, held_out)


def read_inputs(path: str | os.PathLike[str], *, limit: int = LARGEST_NPZ) -> np.ndarray:
    """The examples `x` alone of an `.npz` file, as `load_npz` takes them: new ones, without labels.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "new.npz")
    ...     np.savez(path, x=np.zeros((4, 8, 8), np.uint8))
    ...     read_inputs(path).shape
    (4, 1, 8, 8)
    """
    path = expanded(path)
    arrays = _read(path, limit)
    if "x" not in arrays:
        raise UserError(f"{path} has no array 'x'; save it with np.savez(path, x=...)")
    return _inputs(path, "x", arrays["x"])


def _read(path: Path, limit: int) -> dict[str, np.ndarray]:
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            members = {
                name: info for info in archive.infolist() if (name := info.filename.removesuffix(".npy")) in NAMES
            }
            # What the file declares is checked before any of it is unpacked: a small one may claim a lot.
            _check_sizes(path, list(members.values()), os.fstat(file.fileno()).st_size, limit)
            return {name: _array(path, name, archive, info) for name, info in members.items()}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check its name and permissions") from error
    except Exception as error:  # zipfile and NumPy raise many kinds for damaged, encrypted or odd files.
        reason = str(error).split("\n")[0].rstrip(".")[:LONGEST_REASON] or type(error).__name__
        raise UserError(f"{path} is not a sound .npz file ({reason}); save it again with np.savez") from error


def _check_sizes(path: Path, members: list[zipfile.ZipInfo], length: int, limit: int) -> None:
    unpacked = sum(info.file_size for info in members)
    if unpacked > limit:
        raise UserError(f"{path} unpacks to more than {limit} bytes; save fewer examples or a smaller type")
    if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in members):
        raise UserError(f"{path} is compressed in another way than NumPy's; save it again with np.savez")
    stored = [info for info in members if info.compress_type == zipfile.ZIP_STORED]
    if sum(info.compress_size for info in members) > length or any(i.file_size != i.compress_size for i in stored):
        raise UserError(f"{path} is damaged: it has fewer bytes than it says; save it again with np.savez")
    if unpacked > expansion_of(length):
        raise UserError(
            f"{path} unpacks to more than {LARGEST_EXPANSION} times its length; save it with np.savez, which compresses nothing"
        )


def _array(path: Path, name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        _check_header(path, name, info.file_size, *_header(file))
    with archive.open(info) as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    size = {(1, 0): 2, (2, 0): 4, (3, 0): 4}.get(version)
    if size is None:
        raise ValueError(f"an array of the format {version[0]}.{version[1]}")
    length = file.read(size)
    # NumPy reads a header of any length before it finds it too long.
    if int.from_bytes(length, "little") > LONGEST_HEADER:
        raise ValueError("a header that is far too long")
    head = io.BytesIO(length + file.read(int.from_bytes(length, "little")))
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(head)
    return shape, dtype


def _check_header(path: Path, name: str, size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    if dtype.hasobject:
        raise UserError(
            f"{name} of {path} is an array of Python objects, refused because it would be unpickled; "
            "save it as an array of numbers"
        )
    allowed = "US" if name == "classes" else "biuf"
    if dtype.kind not in allowed:
        raise UserError(f"{name} of {path} must hold {'names' if allowed == 'US' else 'numbers'}, not {dtype}")
    if dtype.itemsize == 0 or min(shape, default=1) < 0:
        raise UserError(f"{name} of {path} is damaged: its header gives {dtype} of shape {list(shape)}; save it again")
    if math.prod(shape) * dtype.itemsize > size:
        raise UserError(f"{name} of {path} is damaged: it has fewer bytes than its shape {list(shape)} needs")


def _inputs(path: Path, name: str, x: np.ndarray) -> np.ndarray:
    if x.ndim not in (2, 3, 4):
        raise UserError(
            f"{name} of {path} must have the shape [n, features], [n, height, width], "
            f"[n, channels, height, width] or [n, height, width, channels], not {list(x.shape)}"
        )
    if x.size == 0:
        raise UserError(f"{name} of {path} is empty (shape {list(x.shape)}); save at least one example")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        raise UserError(
            f"{name} of {path} has NaN or infinite values in {np.count_nonzero(~finite)} rows, the first "
            f"being row {int(np.argmin(finite))}; remove these rows or fill them with a constant"
        )
    return x


def _labels(path: Path, name: str, y: np.ndarray) -> np.ndarray:
    if y.dtype.kind not in "iu":
        raise UserError(f"{name} of {path} must hold whole numbers 0..k-1, not {y.dtype}; save it as integers")
    if y.ndim != 1 or not len(y):
        raise UserError(f"{name} of {path} must have the shape [n], one label an example, not {list(y.shape)}")
    if y.min() < 0 or y.max() >= MOST_CLASSES:
        wrong = int(y.min() if y.min() < 0 else y.max())
        raise UserError(f"{name} of {path} has the label {wrong}; labels are numbered 0..k-1, from 0, without gaps")
    return y.astype(np.int64)


def _classes(path: Path, names: np.ndarray | None, labels: dict[str, np.ndarray]) -> tuple[str, ...]:
    largest = int(max(y.max() for y in labels.values()))
    if names is None:
        return tuple(str(number) for number in range(largest + 1))
    if names.ndim != 1 or len(np.unique(names)) != len(names):
        raise UserError(f"classes of {path} must be a list of different names, one a class")
    if largest >= len(names):
        raise UserError(f"{path} has the label {largest}, but classes names only 0..{len(names) - 1}; add the rest")
    words = _words(names)
    if words is None or any(visible(word) != word for word in words):
        raise UserError(f"classes of {path} must be names in Unicode that can be printed; save others")
    return words


def _words(names: np.ndarray) -> tuple[str, ...] | None:
    """Names as Python has them; None if they are no characters, of which NumPy would make strings that no program can bear."""
    if names.dtype.kind == "U":
        codes = np.ascontiguousarray(names.astype(names.dtype.newbyteorder("="))).view(np.uint32)
        return None if codes.max(initial=0) > sys.maxunicode else tuple(names.tolist())
    try:
        return tuple(name.decode() for name in names.tolist())
    except UnicodeDecodeError:
        return None
