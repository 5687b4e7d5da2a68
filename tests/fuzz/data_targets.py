"""Targets in `tacit.data`: the files of benchmark sets, arrays, images and folders, and the archives that are fetched."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from functools import cache

import numpy as np
from PIL import Image

from tacit.data import fetch
from tacit.data.arrays import load_npz, read_inputs
from tacit.data.catalogue import File
from tacit.data.folders import load_folder
from tacit.data.formats import parse_cifar10, parse_idx, read_bytes
from tacit.data.images import decode_image, read_image

from .target import Target, workshop, written

RECORD = bytes([3]) + bytes(range(256)) * 12
LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])
PICTURES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(12)


def idx(content: bytes) -> None:
    parse_idx(content)


def cifar(content: bytes) -> None:
    images, labels = parse_cifar10(content)
    assert len(images) == len(labels)


def benchmark_file(content: bytes) -> None:
    """The first byte says whether it is read as an IDX file; the rest is the file, plain or compressed."""
    path = written("benchmark", content[1:])
    if content[:1] == b"i":
        parse_idx(read_bytes(path, idx=True))
    else:
        parse_cifar10(read_bytes(path, limit=2**24))


def benchmark_seeds() -> list[bytes]:
    plain = [b"i" + LABELS, b"i" + PICTURES, b"c" + RECORD]
    return plain + [file[:1] + gzip.compress(file[1:], mtime=0) for file in plain]


FILES = (File("data_batch_1.bin", 3073), File("labels", 11))


def archive(content: bytes) -> None:
    """The first byte says whether the rest is a tar that is still to be compressed, so that what is in it is spoiled, too."""
    folder = workshop() / "unpacked"
    folder.mkdir(exist_ok=True)
    packed = written("archive", content[1:] if content[:1] == b"z" else gzip.compress(content[1:], 1, mtime=0))
    before = set(workshop().iterdir())
    try:
        fetch.unpack(packed, FILES, folder)
        for file in FILES:
            fetch._checked(file, folder)
    finally:
        found = set(workshop().iterdir()) - before
        shutil.rmtree(folder, ignore_errors=True)
    assert not found, f"written outside of its folder: {found}"


@cache
def archive_seeds() -> list[bytes]:
    seeds = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=form) as made:
            for name, body in (
                ("cifar/data_batch_1.bin", RECORD),
                ("../labels", LABELS),
                ("x" * 120 + "é/labels", LABELS),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(body)
                made.addfile(member, io.BytesIO(body))
            link = tarfile.TarInfo("labels")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            made.addfile(link)
        seeds += [b"t" + stream.getvalue(), b"z" + gzip.compress(stream.getvalue(), mtime=0)]
    return seeds


def tar_sums(content: bytes) -> bytes:
    """The check sum of every block that looks like a header, as a tar has it."""
    if content[:1] != b"t":
        return content
    fixed = bytearray(content)
    for at in range(1, len(fixed) - 511, 512):
        if fixed[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    return bytes(fixed)


def npz(content: bytes) -> None:
    path = written("own.npz", content)
    try:
        load_npz(path)
    finally:
        read_inputs(path)


def npy(content: bytes) -> None:
    """One array of a sound archive; the first byte says which."""
    names = ("x", "y", "classes", "x_test")
    chosen = names[content[0] % len(names)] if content else "x"
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name in ("x", "y"):
            if name != chosen:
                made.writestr(f"{name}.npy", _array(ARRAYS[name]))
        made.writestr(f"{chosen}.npy", content[1:])
    npz(stream.getvalue())


ARRAYS = {
    "x": np.arange(24, dtype=np.float32).reshape(6, 4),
    "y": np.arange(6) % 2,
    "classes": np.array(["no", "yes"]),
}


def _array(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue()


@cache
def npz_seeds() -> list[bytes]:
    seeds = []
    for save in (np.savez, np.savez_compressed):
        for arrays in (ARRAYS, {"x": np.zeros((6, 2, 2), np.uint8), "y": ARRAYS["y"]}):
            stream = io.BytesIO()
            save(stream, **arrays)
            seeds.append(stream.getvalue())
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{}], dtype=object), y=ARRAYS["y"])
    return [*seeds, stream.getvalue()]


def npy_seeds() -> list[bytes]:
    kinds = [
        ARRAYS["x"],
        ARRAYS["x"].astype(">f8"),
        np.zeros((6, 2, 2, 3), np.uint8),
        ARRAYS["y"],
        ARRAYS["classes"],
        np.array([b"no", b"\xff"]),
        np.array([{}, 1], dtype=object),
        np.zeros(3, [("a", "i4")]),
    ]
    return [bytes([place]) + _array(array) for array in kinds for place in (0, 1, 2)]


def image(content: bytes) -> None:
    decode_image(content, "x.png", resize=(4, 4) if content[-1:] == b"r" else None)


def image_file(content: bytes) -> None:
    read_image(written("image", content))


@cache
def image_seeds() -> list[bytes]:
    seeds = []
    for mode, colour in (
        ("1", 1),
        ("L", 7),
        ("LA", (7, 9)),
        ("P", 3),
        ("RGB", (1, 2, 3)),
        ("RGBA", (1, 2, 3, 4)),
        ("I;16", 900),
    ):
        stream = io.BytesIO()
        Image.new(mode, (5, 3), colour).save(stream, "PNG")
        seeds.append(stream.getvalue())
    for options in ({}, {"progressive": True}, {"exif": _upside_down()}):
        for mode in ("L", "RGB", "CMYK"):
            stream = io.BytesIO()
            Image.new(mode, (9, 7)).save(stream, "JPEG", **options)
            seeds.append(stream.getvalue())
    return seeds


def _upside_down() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif.tobytes()


def png_sums(content: bytes) -> bytes:
    """The check sum of every chunk of a PNG, so that a spoiled chunk is read."""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return content
    fixed, at = bytearray(content), 8
    while at + 12 <= len(fixed):
        end = at + 8 + int.from_bytes(fixed[at : at + 4], "big")
        if end + 4 > len(fixed):
            break
        fixed[end : end + 4] = struct.pack(">I", zlib.crc32(fixed[at + 4 : end]))
        at = end + 4
    return bytes(fixed)


def folder(content: bytes) -> None:
    """Two bytes an entry: where it is put, and what it is."""
    root = workshop() / "tree"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    names = (
        "a",
        "b",
        "train",
        "test",
        "a/1.png",
        "a/2.PNG",
        "b/1.png",
        "b/3.jpg",
        "train/a",
        "train/b",
        "test/a",
        "test/c",
    )
    names += (
        "train/a/1.png",
        "train/b/1.png",
        "test/a/1.png",
        "test/c/1.png",
        "b/\udcff.png",
        "\udcff",
        "b/\x1b[2J.png",
        ".git",
    )
    images = image_seeds()
    for place, what in zip(content[::2], content[1::2]):
        path = root / names[place % len(names)]
        if path.is_symlink() or path.exists() or path.parent.is_symlink():
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError:  # there is a file in the place of its folder, or a link to itself
            continue
        links = {200: path.name, 201: "..", 202: "/dev/zero", 203: "nowhere", 204: "../a", 205: "/", 206: str(root)}
        if what in links:
            path.symlink_to(links[what])
        elif what == 210:
            os.mkfifo(path)
        elif what >= 220:
            path.mkdir()
        elif path.parent.is_dir():
            path.write_bytes(images[what % len(images)][: None if what < 100 else what - 60])
    load_folder(root, progress=False)


def folder_seeds() -> list[bytes]:
    return [
        bytes([4, 1, 5, 1, 6, 1, 7, 8]),
        bytes([12, 1, 13, 1, 14, 1]),
        bytes([12, 1, 13, 1, 15, 1]),
        *(
            bytes([4, 1, 5, 1, 6, 1, place, link])
            for place in (1, 7, 17)
            for link in (200, 201, 202, 203, 204, 205, 206, 210)
        ),
    ]


TARGETS = [
    Target("idx", idx, lambda: [LABELS, PICTURES]),
    Target("cifar", cifar, lambda: [RECORD, RECORD * 2]),
    Target("benchmark-file", benchmark_file, benchmark_seeds, (b"\x1f\x8b\x08", b"\0\0\x08\x03")),
    Target(
        "archive",
        archive,
        archive_seeds,
        (b"ustar\x0000", b"ustar  \0", b"\x80" + b"\xff" * 11, b"20 path=x\n", b"x", b"L"),
        tar_sums,
    ),
    Target(
        "npz",
        npz,
        npz_seeds,
        (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"\x93NUMPY", b"x.npy", b"|O"),
    ),
    Target(
        "npy",
        npy,
        npy_seeds,
        (b"\x93NUMPY\x02\0", b"'descr'", b"'shape': (", b"'|O'", b"'<U0'", b"'|S0'", b"'<f4'", b"True", b"(", b"-1"),
    ),
    Target(
        "image",
        image,
        image_seeds,
        (b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"iCCP", b"zTXt", b"eXIf", b"IEND", b"\xff\xda", b"\xff\xc2", b"\xff\xe1"),
        png_sums,
    ),
    Target("image-file", image_file, image_seeds, repair=png_sums),
    Target("folder", folder, folder_seeds),
]
