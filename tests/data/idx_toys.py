"""Small IDX sets for the tests of this folder."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np

from tacit.data.catalogue import Entry, File


def encode_idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.astype(np.uint8).tobytes()


def toy_contents(seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    return {
        "train-images-idx3-ubyte": encode_idx(rng.integers(0, 256, (20, 5, 4))),
        "train-labels-idx1-ubyte": encode_idx(np.arange(20) % 10),
        "t10k-images-idx3-ubyte": encode_idx(rng.integers(0, 256, (10, 5, 4))),
        "t10k-labels-idx1-ubyte": encode_idx(np.arange(10)),
    }


def toy_entry(contents: dict[str, bytes], **changes) -> Entry:
    files = tuple(File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    defaults = {
        "name": "toy-mnist",
        "description": "",
        "train": 20,
        "test": 10,
        "shape": (1, 5, 4),
        "classes": tuple("0123456789"),
        "source": "",
        "mean": (0.5,),
        "std": (0.5,),
        "files": files,
        "folders": ("toy-mnist", "TOY/raw"),
    }
    return Entry(**(defaults | changes))


def write_files(folder: Path, contents: dict[str, bytes], *, suffix: str = ".gz", dotted: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        spelled = (name.replace("-idx", ".idx") if dotted else name) + suffix
        (folder / spelled).write_bytes(gzip.compress(data, 1) if suffix == ".gz" else data)
