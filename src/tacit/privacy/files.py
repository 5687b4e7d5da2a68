"""Files that somebody else may have made: what is no regular file is not waited for, what is too long is not read, and what is
replaced is replaced as a whole."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from tacit.privacy.validation import UserError


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[BufferedReader]:
    """A regular file, to be read; anything else is an `OSError`.

    *Guarantee.* Never waits: a named pipe, which would never end, and a device, which has no end, are refused.

    >>> with opened("/dev/zero") as file:
    ...     file.read()
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is not a regular file
    """
    # Without O_NONBLOCK, to open a pipe would mean to wait until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    with open(descriptor, "rb") as file:
        yield file


def read_whole(path: str | os.PathLike[str], *, largest: int) -> bytes:
    """The bytes of a regular file of at most `largest` of them; an `OSError` otherwise.

    *Guarantee.* Never holds more than `largest` + 1 bytes, also if the file grows meanwhile.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"four"), file.flush()
    ...     read_whole(file.name, largest=4)
    b'four'
    """
    with opened(path) as file:
        # A buffer as long as the file, not as long as it may be; and once more, should it have grown.
        content = file.read(min(largest, os.fstat(file.fileno()).st_size) + 1)
        while len(content) <= largest and (more := file.read(min(largest + 1 - len(content), 2**20))):
            content += more
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it is longer than {largest} bytes")
    return content


def replace_whole(path: Path, content: bytes) -> None:
    """Replace a file as a whole, on the disk, or leave it as it was and raise an `OSError`.

    *Guarantee.* Writes to a new file beside it alone, so that a link which somebody put there leads nowhere.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_whole(Path(folder) / "note", b"hello")
    ...     (Path(folder) / "note").read_bytes()
    b'hello'
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)  # of a crash, or a link
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):  # a disk that takes nothing may not give anything up either
            draft.unlink(missing_ok=True)
        raise


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with `~` for the user's own folder.

    *Guarantee.* A path, or a `UserError`.

    >>> expanded("~no-such-user/data.npz")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: ~no-such-user/data.npz is in the folder of a user who is not here; write the whole path
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} is in the folder of a user who is not here; write the whole path") from None
