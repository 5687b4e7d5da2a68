"""Bombs, tricks and lies in data files: each is refused in a sentence, before it takes time or memory."""

import gzip
import io
import os
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from tacit.data import fetch, formats
from tacit.data.arrays import load_npz
from tacit.data.catalogue import File
from tacit.data.folders import load_folder
from tacit.data.formats import read_bytes
from tacit.data.images import decode_image, read_file
from tacit.privacy.validation import UserError

FILES = (File("labels", 11),)


def npy(array):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=True)
    return stream.getvalue()


def written(path, compression=zipfile.ZIP_DEFLATED, **members):
    """An archive of these members, by default with sound labels."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, content in ({"y": npy(np.arange(6) % 2)} | members).items():
            made.writestr(name if "." in name else f"{name}.npy", content)
    return path


SOUND = npy(np.zeros((6, 4), np.uint8))


def test_an_array_may_unpack_to_many_times_its_length_only_while_it_is_small(tmp_path, monkeypatch):
    path = written(tmp_path / "own.npz", x=npy(np.zeros((6, 100_000), np.uint8)))
    load_npz(path, held_out=0.5)
    monkeypatch.setattr(formats, "FREELY_EXPANDED", 1000)
    with pytest.raises(UserError, match="more than 100 times its length"):
        load_npz(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_without_a_bound_is_refused(tmp_path, compression):
    with pytest.raises(UserError, match="another way than NumPy's"):
        load_npz(written(tmp_path / "own.npz", compression, x=SOUND))


def test_a_header_longer_than_any_is_not_read(tmp_path):
    header = b"\x93NUMPY\x02\0" + struct.pack("<I", 2**27) + b" " * 2**27
    with pytest.raises(UserError, match="a header that is far too long"):
        load_npz(written(tmp_path / "own.npz", x=header))


def test_what_is_checked_is_what_is_read_if_two_members_have_a_name(tmp_path):
    objects = npy(np.array([{}] * 6, dtype=object))
    path = written(tmp_path / "own.npz", **{"x.npy": objects, "x.abc": SOUND})
    with pytest.raises(UserError, match="array of Python objects"):
        load_npz(path)


@pytest.mark.parametrize(
    "classes",
    [
        npy(np.array([b"no", b"\xff"])),
        npy(np.array(["no", "yes"])).replace("yes".encode("utf-32-le"), b"\xff" * 12),
        npy(np.array(["no", "\x1b[2J"])),
    ],
    ids=["not UTF-8", "no characters", "a command"],
)
def test_class_names_that_nobody_could_read_are_refused(tmp_path, classes):
    with pytest.raises(UserError, match="classes of"):
        load_npz(written(tmp_path / "own.npz", x=SOUND, classes=classes))


def test_a_compressed_file_may_unpack_to_many_times_its_length_only_while_it_is_small(tmp_path, monkeypatch):
    path = tmp_path / "data_batch_1.bin.gz"
    path.write_bytes(gzip.compress(bytes(10**6)))
    assert len(read_bytes(path)) == 10**6
    monkeypatch.setattr(formats, "FREELY_EXPANDED", 1000)
    with pytest.raises(UserError, match="more than 100 times its length"):
        read_bytes(path)


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_an_image_of_too_many_pixels_is_refused_by_its_header():
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    with pytest.raises(UserError, match="pixels; remove it"):
        decode_image(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")), "bomb.png")


def test_a_photograph_of_ever_more_scans_is_refused():
    stream = io.BytesIO()
    Image.new("L", (8, 8)).save(stream, "JPEG", progressive=True)
    content = stream.getvalue()
    decode_image(content, "sound.jpg")
    at = content.index(b"\xff\xda")
    with pytest.raises(UserError, match="more than 100 scans"):
        decode_image(content[:at] + content[at:-2] * 101 + content[-2:], "slow.jpg")


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "cat.png")
    with pytest.raises(UserError, match="not a regular file"):
        read_file(tmp_path / "cat.png")


@pytest.mark.parametrize("target", ["loop.png", "../b", "nowhere", "/etc", "/dev/zero"])
def test_links_that_lead_out_or_nowhere_or_in_a_circle_are_refused(tmp_path, target):
    for name in ("a", "b"):
        (tmp_path / "root" / name).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "root" / name / "1.png")
    link = tmp_path / "root" / ("b2" if target == "../b" else "a") / "loop.png"
    if target == "../b":
        link = tmp_path / "root" / "loop"
        (tmp_path / "b").mkdir()
    link.symlink_to(target)
    with pytest.raises(UserError, match="symbolic link that leads out"):
        load_folder(tmp_path / "root", progress=False)


def test_a_class_folder_whose_name_cannot_be_printed_is_refused(tmp_path):
    for name in ("a", "b\x1b[2J"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "1.png")
    with pytest.raises(UserError, match="cannot be printed"):
        load_folder(tmp_path, progress=False)


def tar_of(*members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        for member, body in members:
            made.addfile(member, io.BytesIO(body))
    return stream.getvalue()


def member(name, size=0):
    made = tarfile.TarInfo(name)
    made.size = size
    return made


def unpacked(tmp_path, content):
    archive = tmp_path / "archive"
    archive.write_bytes(gzip.compress(content))
    (tmp_path / "out").mkdir()
    fetch.unpack(archive, FILES, tmp_path / "out")
    return sorted(os.listdir(tmp_path / "out"))


def test_of_an_archive_only_the_expected_files_are_written_and_only_there(tmp_path):
    link = tarfile.TarInfo("x/labels")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    content = tar_of((member("../../labels", 11), b"l" * 11), (member("../other", 5), b"other"), (link, b""))
    assert unpacked(tmp_path, content) == ["labels"]
    assert sorted(os.listdir(tmp_path)) == ["archive", "out"]


def test_an_archive_is_unpacked_no_further_than_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "LARGEST_UNPACKED", 10_000)
    with pytest.raises(UserError, match="more than 10000 bytes"):
        unpacked(tmp_path, tar_of((member("padding", 20_000), bytes(20_000)), (member("labels", 11), b"l" * 11)))


def test_an_archive_that_leads_back_ends(tmp_path):
    block = bytearray(tar_of((member("labels"), b""))[:512])
    block[124:136] = b"\xff" * 10 + b"\xfc\x00"  # a size of -1024, as a number of two's complement
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(UserError, match=r"damaged|unpacked"):
        unpacked(tmp_path, bytes(block) * 4)


def test_an_archive_of_ever_more_names_is_refused(tmp_path):
    long = tarfile.TarInfo("x")
    long.type = tarfile.GNUTYPE_LONGNAME
    header = long.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(UserError, match="cannot be unpacked"):
        unpacked(tmp_path, header * 3000)
