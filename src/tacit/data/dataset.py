"""A data set in memory, its train and test parts, and the rule that holds examples out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tacit.privacy.validation import UserError, check_positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples and labels in memory, with the public constants that normalise them.

    `images` is uint8 (`[n, channels, height, width]`, or `[n, features]`), scaled from 0..255 to 0..1 when a
    batch is made, or float32 of either shape, taken as it is. Then `(x - mean) / std` is applied, by channel
    (axis 1); one number stands for all channels. `mean` and `std` must be public constants: to measure them
    on the training examples is a release that has to be paid for.

    >>> images = np.zeros((4, 1, 2, 2), dtype=np.uint8)
    >>> data = Dataset("toy", images, np.array([0, 1, 1, 0]), ("no", "yes"), mean=(0.5,), std=(0.5,))
    >>> len(data), data.input_shape
    (4, (1, 2, 2))
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.dtype not in (np.uint8, np.float32) or self.images.ndim not in (2, 4):
            raise UserError(
                f"images of {self.name!r} must be uint8 or float32 of shape [n, channels, height, width] or "
                f"[n, features], not {self.images.dtype} of shape {list(self.images.shape)}"
            )
        if self.labels.dtype != np.int64 or self.labels.shape != (len(self.images),):
            raise UserError(
                f"labels of {self.name!r} must be int64 of shape [{len(self.images)}], one an image, "
                f"not {self.labels.dtype} of shape {list(self.labels.shape)}"
            )
        if len(self.labels) and (self.labels.min() < 0 or self.labels.max() >= len(self.classes)):
            raise UserError(
                f"labels of {self.name!r} must lie in 0..{len(self.classes) - 1}, having {len(self.classes)} "
                f"classes, not in {self.labels.min()}..{self.labels.max()}"
            )
        channels = self.images.shape[1]
        object.__setattr__(self, "mean", per_channel("mean", self.mean, channels))
        object.__setattr__(self, "std", per_channel("std", self.std, channels))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example, as a model sees it.

        >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0,), (1,))
        >>> data.input_shape
        (5,)
        """
        return tuple(self.images.shape[1:])

    def batch(
        self, indices: np.ndarray | Sequence[int] | slice | None = None, device: str | torch.device = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen examples (all, without `indices`) as normalised float32, and their labels as int64.

        The tensors are copies: changing them never changes the data set. No index at all is an empty batch,
        as Poisson sampling may draw it. `uint8` images are indexed and moved as bytes first, and become
        floats on `device`.

        >>> images = np.full((4, 1, 2, 2), 255, dtype=np.uint8)
        >>> data = Dataset("toy", images, np.array([0, 1, 1, 0]), ("no", "yes"), mean=(0.5,), std=(0.5,))
        >>> inputs, targets = data.batch(np.array([1, 3]))
        >>> inputs.shape, inputs.unique().tolist(), targets.tolist()
        (torch.Size([2, 1, 2, 2]), [1.0], [1, 0])
        """
        import torch

        chosen = _as_index(indices)
        # `copy`: a slice of a NumPy array is a view, and a caller may change a batch in place.
        inputs = torch.from_numpy(np.require(self.images[chosen], requirements="W")).to(device)
        inputs = inputs.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        targets = torch.from_numpy(np.array(self.labels[chosen])).to(device)
        if self.images.dtype == np.uint8 or set(self.mean) != {0.0} or set(self.std) != {1.0}:
            # ((x / largest) - mean) / std, in one multiplication and one addition.
            largest = 255.0 if self.images.dtype == np.uint8 else 1.0
            shape = (1, -1) + (1,) * (inputs.ndim - 2)
            scale = [1 / (largest * s) for s in self.std]
            shift = [-m / s for m, s in zip(self.mean, self.std)]
            inputs.mul_(torch.tensor(scale, device=inputs.device).view(shape))
            inputs.add_(torch.tensor(shift, device=inputs.device).view(shape))
        return inputs, targets

    def take(self, indices: np.ndarray | Sequence[int] | slice) -> Dataset:
        """The data set of these examples alone, in this order.

        >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0,), (1,))
        >>> data.take([2, 1]).labels.tolist()
        [0, 1]
        """
        chosen = _as_index(indices)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Split:
    """The examples to learn from, and those the model is judged on.

    >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0.0,), (1.0,))
    >>> split = Split(train=data.take([0, 1]), test=data.take([2]))
    >>> len(split.train), len(split.test)
    (2, 1)
    """

    train: Dataset
    test: Dataset

    def __post_init__(self) -> None:
        for part, data in (("train", self.train), ("test", self.test)):
            if not len(data):
                raise UserError(
                    f"the {part} part of {data.name!r} is empty; give more examples or change data.held_out"
                )
        if self.train.input_shape != self.test.input_shape or self.train.images.dtype != self.test.images.dtype:
            raise UserError(
                f"the train and test parts of {self.train.name!r} differ in shape or kind "
                f"({self.train.images.dtype} {list(self.train.input_shape)} and "
                f"{self.test.images.dtype} {list(self.test.input_shape)}); make them alike"
            )
        if self.train.classes != self.test.classes:
            raise UserError(f"the train and test parts of {self.train.name!r} must have the same classes")


def is_held_out(content: bytes, label: str, held_out: float) -> bool:
    """Whether an example belongs to the test part: decided by the example alone.

    The first eight bytes of SHA-256(label, 0, content), read as a number, lie below `held_out` * 2^64.

    *Guarantee.* The answer is a function of this example and of the public constant `held_out`. Adding an
    example to a data set or removing one therefore moves no other example between train and test:
    neighbouring data sets have neighbouring training sets, which is what the privacy of training is stated
    about. A shuffled split, or the "last sixth", would not have this property. Equal examples always go to
    the same side.

    >>> [is_held_out(b"pixels of one example", "cat", held_out) for held_out in (0.1, 0.9)]
    [False, True]
    """
    digest = hashlib.sha256(label.encode("utf-8", "surrogateescape") + b"\0" + content).digest()
    return int.from_bytes(digest[:8], "big") < held_out * 2.0**64


def split_by_content(dataset: Dataset, held_out: float) -> Split:
    """Hold out about the fraction `held_out` of the examples, each by its own content.

    *Guarantee.* That of `is_held_out`, with the bytes of the stored image and the number of its class.

    >>> images = np.arange(60, dtype=np.float32).reshape(30, 2)
    >>> data = Dataset("toy", images, np.arange(30) % 2, ("even", "odd"), (0.0,), (1.0,))
    >>> split = split_by_content(data, held_out=0.3)
    >>> len(split.train), len(split.test)
    (22, 8)
    """
    held_out = check_held_out(held_out)
    # Little-endian whatever the machine, so that the split is the same everywhere.
    rows = np.ascontiguousarray(dataset.images.astype(dataset.images.dtype.newbyteorder("<"), copy=False))
    test = [is_held_out(row.tobytes(), str(label), held_out) for row, label in zip(rows, dataset.labels)]
    return split_by_mask(dataset, np.array(test, dtype=bool))


def split_by_mask(dataset: Dataset, test: np.ndarray) -> Split:
    """The split whose test part is where the mask is true.

    >>> data = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0.0,), (1.0,))
    >>> len(split_by_mask(data, np.array([True, False, False])).train)
    2
    """
    return Split(train=dataset.take(np.flatnonzero(~test)), test=dataset.take(np.flatnonzero(test)))


def check_held_out(value: float) -> float:
    """The fraction of examples held out for testing: strictly between 0 and 1.

    >>> check_held_out(0.2)
    0.2
    """
    fraction = check_positive("held_out", value)
    if fraction >= 1:
        raise UserError(f"held_out must lie strictly between 0 and 1, not {value!r}")
    return fraction


def per_channel(name: str, value: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """Finite constants, one for all channels or one each; a standard deviation (`std`) is above 0.

    >>> per_channel("mean", 0.5, 3)
    (0.5,)
    """
    numbers = list(value) if isinstance(value, Sequence | np.ndarray) else [value]
    if len(numbers) not in (1, channels):
        raise UserError(
            f"{name} must be one number or one a channel ({channels}), not {len(numbers)} numbers: {value!r}"
        )
    for number in numbers:
        if isinstance(number, bool | str | bytes) or not np.isreal(number) or not np.isfinite(float(number)):
            raise UserError(f"{name} must be finite numbers, not {value!r}")
        if name == "std" and float(number) <= 0:
            raise UserError(f"std must be above 0 for every channel, not {value!r}")
    return tuple(float(number) for number in numbers)


def _as_index(indices: np.ndarray | Sequence[int] | slice | None) -> np.ndarray | slice:
    if indices is None:
        return slice(None)
    if isinstance(indices, slice):
        return indices
    array = np.asarray(indices)
    return array if array.size else array.astype(np.int64)
