"""The file formats of the benchmark sets: IDX (MNIST and its kin) and CIFAR-10 binary batches.

Both parsers are strict: a file is exactly as long as it says, or it is refused with a `UserError`. What a
file claims about its size is checked before anything of that size is read.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from tacit.privacy.files import opened
from tacit.privacy.validation import UserError

CIFAR_RECORD = 1 + 3 * 32 * 32
LARGEST_FILE = 2**31
"""No file of a benchmark set is longer than this, decompressed; nothing beyond it is read."""
FREELY_EXPANDED, LARGEST_EXPANSION = 2**28, 100
"""A file may unpack to 256 MiB, or to so many times its own length: images and numbers never shrink further, bombs do."""


def parse_idx(content: bytes, name: str = "IDX file") -> np.ndarray:
    """The array of unsigned bytes in an IDX file of one to three dimensions.

    Bytes 0 and 1 are zero, byte 2 is 8 (unsigned byte), byte 3 the number of dimensions; each dimension
    follows as a big-endian 32-bit number, then the values, and nothing after them.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])).tolist()
    [7, 2, 1]
    """
    shape = _idx_shape(content[:16], name)
    expected = _idx_length(shape)
    if len(content) != expected:
        raise UserError(_wrong_length(name, len(content), expected))
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape).copy()


def parse_cifar10(content: bytes, name: str = "CIFAR-10 batch") -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 3, 32, 32]` (a view of the bytes) and labels `[n]` of a CIFAR-10 binary batch.

    It is made of records of a label byte and 3072 pixels, 1024 a colour.

    >>> images, labels = parse_cifar10(bytes([9]) + bytes(3072))
    >>> images.shape, labels.tolist()
    ((1, 3, 32, 32), [9])
    """
    if not content or len(content) % CIFAR_RECORD:
        raise UserError(
            f"{name} is not a CIFAR-10 binary batch: its {len(content)} bytes are not records of "
            f"{CIFAR_RECORD}; fetch it again"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise UserError(f"{name} is not a CIFAR-10 binary batch: it has the label {labels.max()}, above 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def read_bytes(path: str | os.PathLike[str], *, idx: bool = False, limit: int = LARGEST_FILE) -> bytes:
    """The contents of a plain or gzip-compressed file, decompressed; refused beyond `limit` bytes.

    An IDX file (`idx`) is decompressed no further than the length its own header states.

    >>> import gzip, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "labels.gz")
    ...     _ = path.write_bytes(gzip.compress(b"three"))
    ...     read_bytes(path)
    b'three'
    """
    path = Path(path)
    try:
        with opened(path) as raw:
            most = expansion_of(os.fstat(raw.fileno()).st_size)
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if compressed else raw
            chunks = [file.read(16)]
            if idx:
                promised = _idx_length(_idx_shape(chunks[0], str(path)))
                if promised > limit:
                    raise UserError(f"{path} promises {promised} bytes, above the {limit} allowed; fetch it again")
                limit = promised
            room = limit + 1 - len(chunks[0])  # One byte more than allowed, to see whether there are more.
            while room > 0 and (chunk := file.read(min(room, 2**24))):
                chunks.append(chunk)
                room -= len(chunk)
                most -= len(chunk)
                if compressed and most < 0:
                    raise UserError(
                        f"{path} unpacks to more than {LARGEST_EXPANSION} times its length; unpack it yourself"
                    )
    except UserError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again or check its permissions") from error
    if room <= 0:
        raise UserError(f"{path} is longer than the {limit} bytes it may have; fetch it again")
    return b"".join(chunks)


def expansion_of(length: int) -> int:
    """The most bytes that so many compressed ones may be unpacked to.

    >>> expansion_of(11_490_434) // 2**20
    1095
    """
    return max(FREELY_EXPANDED, LARGEST_EXPANSION * length)


def _idx_shape(header: bytes, name: str) -> tuple[int, ...]:
    if len(header) < 4 or header[:2] != b"\0\0":
        raise UserError(f"{name} is not an IDX file: it does not begin as one; fetch it again")
    if header[2] != 8 or not 1 <= header[3] <= 3:
        raise UserError(
            f"{name} must be an IDX file of unsigned bytes in one to three dimensions, "
            f"not of type 0x{header[2]:02x} in {header[3]}"
        )
    end = 4 + 4 * header[3]
    if len(header) < end:
        raise UserError(_wrong_length(name, len(header), end))
    shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, end, 4))
    if 0 in shape:
        raise UserError(f"{name} holds no values: its header states the shape {list(shape)}; fetch it again")
    return shape


def _idx_length(shape: tuple[int, ...]) -> int:
    # Python's whole numbers: the product of three 32-bit sizes cannot overflow.
    return 4 + 4 * len(shape) + math.prod(shape)


def _wrong_length(name: str, actual: int, expected: int) -> str:
    return f"{name} is damaged: it has {actual} bytes where its header promises {expected}; fetch it again"
