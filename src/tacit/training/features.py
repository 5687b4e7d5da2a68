"""Features that are computed once: a fixed map of one example at a time, before anything is learned, costs no privacy.

Those of the public data sets, known by their content, are kept in the cache; those of anybody's own data stay in memory.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import nn

from tacit.data import Dataset, Split
from tacit.data.fetch import cache_dir
from tacit.models.prior import PriorScale
from tacit.models.scattering import Scattering
from tacit.privacy.files import opened
from tacit.privacy.validation import UserError, check_choice

FEATURES = ("scattering",)
NORMALIZATIONS = ("none", "group", "prior", "standard")
_BATCH = 256
_GROUPS = 27  # of channels that are normalised together, as Tramèr and Boneh have it for the 81 of Fashion-MNIST
# SHA-256 of the images, as bytes: what somebody's file or folder is called says nothing.
PUBLIC = {
    "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",  # MNIST
    "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",  # Fashion-MNIST
    "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "4ae6153a4633a25fc12241ec6e34b0a6e7337928da5fe045801f49ad70770b91",  # CIFAR-10
    "c8b681405da867bee3780a1cc635d895cebb2ee074906fea8364e6d445ff9e64",
}
_VERSION = 1  # of the maps: features of another version are not taken from the cache


def feature_map(name: str, normalization: str, input_shape: Sequence[int]) -> tuple[nn.Module, tuple[int, ...]]:
    """The map of this name for examples of this shape, and the shape of what it gives.

    "group" normalises groups of channels of each example by their own mean and variance (a GroupNorm that learns nothing);
    "prior" scales each channel by what random images have; "standard" does so too, and leaves the rest to a layer that comes
    after the map, since it needs the training set.

    >>> feature_map("scattering", "group", (1, 28, 28))[1]
    (81, 7, 7)
    """
    check_choice("model.features", name, FEATURES)
    check_choice("model.normalization", normalization, NORMALIZATIONS)
    if len(input_shape) != 3:
        raise UserError(f"scattering takes images [channels, height, width], not examples of shape {list(input_shape)}")
    scattering = Scattering(input_shape[1:])
    shape = scattering.output_shape(input_shape[0])
    if normalization == "none":
        return scattering, shape
    if normalization == "group":
        return nn.Sequential(scattering, nn.GroupNorm(_GROUPS, shape[0], affine=False)), shape
    return nn.Sequential(scattering, PriorScale.of(scattering, input_shape)), shape


def fingerprint(features: nn.Module) -> str:
    """A text that tells this very map from any other: what it prints, and the numbers it holds.

    >>> map, _ = feature_map("scattering", "group", (1, 28, 28))
    >>> fingerprint(map) == fingerprint(map), len(fingerprint(map))
    (True, 32)
    """
    digest = hashlib.sha256(f"{_VERSION} {features!r}".encode())
    for name, numbers in features.state_dict().items():
        digest.update(f"{name} {numbers.tolist()}".encode())
    return digest.hexdigest()[:32]


def with_features(split: Split, features: nn.Module, *, progress: bool = False) -> Split:
    """The same examples, each as its features."""
    return Split(
        train=_featured(split.train, features, "training", progress),
        test=_featured(split.test, features, "held-out", progress),
    )


def _featured(data: Dataset, features: nn.Module, part: str, progress: bool) -> Dataset:
    content = hashlib.sha256(np.ascontiguousarray(data.images).data).hexdigest()
    path = _place(data, features, content) if content in PUBLIC else None
    found = None if path is None else cached_features(path, len(data))
    if found is None:
        found = _computed(data, features, part, progress)
        if path is not None:
            _keep(path, found)
            kept = cached_features(path, len(data))
            found = found if kept is None else kept
    channels = found.shape[1]
    return replace(data, images=found, mean=(0.0,) * channels, std=(1.0,) * channels)


def cached_features(path: Path, examples: int) -> NDArray[np.float32] | None:
    """The features in a file of the cache, if they are of so many examples; None if the file is not one that tacit wrote.

    >>> cached_features(Path("nothing.npy"), 10) is None
    True
    """
    try:
        with opened(path):
            # Several times as large as the images: not all of it need be in memory.
            found = np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception:  # of many kinds, for a damaged file: whatever it is, the features are computed again
        return None
    sound = isinstance(found, np.ndarray) and found.dtype == np.float32 and found.ndim > 1 and len(found) == examples
    return found if sound else None


@torch.no_grad()
def _computed(data: Dataset, features: nn.Module, part: str, progress: bool) -> NDArray[np.float32]:
    starts: Any = range(0, len(data), _BATCH)
    if progress:
        console = Console(stderr=True)
        starts = track(starts, f"features of the {part} examples", console=console, disable=not sys.stderr.isatty())
    found: NDArray[np.float32] | None = None
    for start in starts:
        inputs, _ = data.batch(slice(start, start + _BATCH))
        values = features(inputs).numpy()
        if found is None:
            found = np.empty((len(data), *values.shape[1:]), dtype=np.float32)
        found[start : start + _BATCH] = values
    assert found is not None
    return found


def _place(data: Dataset, features: nn.Module, content: str) -> Path:
    """A file for these very examples and this very map."""
    digest = hashlib.sha256(f"{fingerprint(features)} {data.mean} {data.std} {content}".encode())
    return cache_dir() / "features" / f"{data.name}-{digest.hexdigest()[:32]}.npy"


def _keep(path: Path, features: NDArray[np.float32]) -> None:
    """Written beside its place and renamed, so that half a file is never taken for a whole one; a full disk is no error."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            np.save(file, features)
        beside.rename(path)
    except OSError:
        pass
    finally:
        beside.unlink(missing_ok=True)
