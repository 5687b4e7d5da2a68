"""Data sets: the embedded digits, the benchmark sets and where they come from, a user's folders and arrays.

Loading looks at one example at a time. What describes a whole set (its classes, its shape, the constants that
normalise it) is public; the held-out part is chosen by each example's own content. So neighbouring data sets
stay neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from tacit.data.arrays import load_npz, read_inputs
from tacit.data.benchmarks import is_present, load_benchmark, load_digits
from tacit.data.catalogue import Entry, catalogue, entry
from tacit.data.dataset import Dataset, Split, check_held_out, is_held_out, per_channel
from tacit.data.folders import load_folder
from tacit.data.images import check_resize, read_image, resize_images
from tacit.privacy.files import expanded
from tacit.privacy.validation import UserError, nearest

__all__ = ["Dataset", "Entry", "Split", "catalogue", "is_held_out", "is_present", "load", "read_image", "read_inputs"]


def load(
    source: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    held_out: float = 1 / 6,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    resize: int | Sequence[int] | None = None,
    download: bool = True,
    progress: bool = True,
) -> Split:
    """A named data set, a folder with one sub-folder a class, or an `.npz` file, as train and test parts.

    A named set is looked for in `data_dir`, then in the cache, and fetched if `download` allows it. Data
    without a test part have about the fraction `held_out` held out. `mean` and `std` (public constants, one
    or one a channel) replace those of the set: published ones for a benchmark, 0.5 and 0.5 for a user's
    bytes, 0 and 1 for floats. `resize` (a side, or height and width) resizes each image by itself.

    *Guarantee.* Which part an example belongs to, and what it looks like there, is decided by that example
    and by what is public about the set: the constants above, its classes and shape, whether it has colour.
    While these stay, adding an example or removing one changes nothing about any other; and whatever becomes
    of them, none moves between train and test (see `is_held_out`).

    >>> split = load("digits")
    >>> split.train.name, len(split.train), len(split.test), split.train.input_shape, len(split.train.classes)
    ('digits', 1495, 302, (1, 8, 8), 10)
    """
    held_out = check_held_out(held_out)
    size = check_resize(resize)
    names = [entry.name for entry in catalogue()]
    path = expanded(source)
    if source == "digits":
        split = load_digits(held_out)
    elif source in names:
        split = load_benchmark(entry(str(source)), data_dir=data_dir, download=download, progress=progress)
    elif os.path.isdir(path):
        split = load_folder(path, held_out=held_out, resize=size, progress=progress)
    elif path.suffix == ".npz":
        split = load_npz(path, held_out=held_out)
    else:
        raise UserError(
            f"dataset {os.fspath(source)!r} is neither a folder, nor an .npz file, nor one of "
            f"{', '.join(names)}{nearest(os.fspath(source), names)}"
        )

    def prepared(data: Dataset) -> Dataset:
        images = data.images if size is None else resize_images(data.images, size)
        return replace(
            data,
            images=images,
            mean=data.mean if mean is None else per_channel("mean", mean, images.shape[1]),
            std=data.std if std is None else per_channel("std", std, images.shape[1]),
        )

    return Split(train=prepared(split.train), test=prepared(split.test))
