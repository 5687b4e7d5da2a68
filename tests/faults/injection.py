"""Faults inside a run's own process: at the n-th event of a kind, or when a timer ends, something happens to it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What happens in a run's process, in the order in which it first does. `noise` comes after the ledger's line was flushed.
EVENTS = ("open", "write", "fsync", "rename", "noise", "step", "certify")
ACTIONS = ("kill", "interrupt", "interrupt-twice", "terminate", "memory", "ENOSPC", "EIO", "EROFS")
_LASTING = ("ENOSPC", "EROFS")  # a disk that is full, or read-only, stays so
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 1, 32, 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Fault:
    """`action` at the `count`-th `event`; or after so many `seconds`; or a limit of the operating system's."""

    action: str
    event: str = ""
    count: int = 0
    seconds: float = 0.0
    limit: int = 0  # bytes: of a file for "file-size", beyond what is in use for "address-space"


def arm(fault: Fault | None, run: Path, witness: Path) -> None:
    """From here on this process has the fault before it, and leaves a byte in `witness` just before it draws any noise."""
    injector = _Injector(fault, run)
    injector.watch(os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if fault is None:
        return
    if fault.action == "file-size":  # a write beyond it is cut short, the next one fails
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit, resource.RLIM_INFINITY))
    elif fault.action == "address-space":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + fault.limit, resource.RLIM_INFINITY))
    elif fault.action == "read-only-mount":
        _mount_read_only(run)
    elif fault.action == "clock":
        _jumping_clock(fault.count)
    elif not fault.event:
        signal.signal(signal.SIGPROF, lambda *_: injector.act())
        signal.setitimer(signal.ITIMER_PROF, max(fault.seconds, 2e-3))  # of its own time, however busy the machine is


class _Injector:
    def __init__(self, fault: Fault | None, run: Path) -> None:
        self.fault, self.run, self.seen = fault, f"{run}{os.sep}", 0

    def watch(self, descriptor: int) -> None:
        """Hear of every event: through the functions that tacit calls, and through Python's audit of files."""
        from tacit.privacy.randomness import Randomness
        from tacit.training import directory
        from tacit.training.trainer import PrivateTrainer

        write, draw = os.write, Randomness.normal

        def witnessed(own: Randomness, shape: Any) -> Any:
            self.heard("noise")
            write(descriptor, b"x")
            return draw(own, shape)

        Randomness.normal = witnessed  # type: ignore[method-assign]
        os.write = self._before("write", os.write)
        os.fsync = self._before("fsync", os.fsync)
        directory.certificate_of = self._before("certify", directory.certificate_of)  # type: ignore[attr-defined]
        PrivateTrainer._update = self._before("step", PrivateTrainer._update)  # type: ignore[method-assign]
        sys.addaudithook(self._audited)

    def _before(self, event: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*args: Any, **options: Any) -> Any:
            self.heard(event)
            return function(*args, **options)

        return heard

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove") or not str(args[0]).startswith(self.run):
            return
        if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self.heard("rename" if event == "os.rename" else "open")

    def heard(self, event: str) -> None:
        fault = self.fault
        if fault is None or not fault.event:
            return
        lasts = fault.action in _LASTING and self.seen >= fault.count and event in ("open", "write", "fsync", "rename")
        if event == fault.event or lasts:
            self.seen += event == fault.event
            if self.seen == fault.count or lasts:
                self.act()

    def act(self) -> None:
        import errno

        assert self.fault is not None
        action = self.fault.action
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action.startswith("interrupt"):
            os.kill(os.getpid(), signal.SIGINT)
        if action == "interrupt-twice":
            os.kill(os.getpid(), signal.SIGINT)
        if action == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        if action == "memory":
            raise MemoryError
        if action in ("ENOSPC", "EIO", "EROFS"):
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number))


def can_mount() -> bool:
    """Whether a process here may have mounts of its own, so that a disk can really be read-only for it."""
    child = os.fork()
    if child == 0:
        os._exit(0 if os.geteuid() == 0 and _libc().unshare(_CLONE_NEWNS) == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _mount_read_only(run: Path) -> None:
    """For this process alone, the run directory is on a read-only disk."""
    place, libc = str(run).encode(), _libc()
    steps = [(b"/", _MS_REC | _MS_PRIVATE), (place, _MS_BIND), (place, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)]
    done = libc.unshare(_CLONE_NEWNS) == 0
    for target, flags in steps:
        done = done and libc.mount(target, target, None, flags, None) == 0
    if not done:
        raise OSError(ctypes.get_errno(), "the mount failed")


def _jumping_clock(jump: int) -> None:
    """Every other look at the clock is so many seconds away from the one before it."""
    import datetime
    import time

    from tacit.privacy import ledger

    state = {"there": False}

    def shift() -> int:
        state["there"] = not state["there"]
        return jump if state["there"] else 0

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(max(real() + shift(), 0), tz)

    real = time.time
    time.time = lambda: real() + shift()  # type: ignore[assignment]
    ledger.datetime = Jumping  # type: ignore[attr-defined,misc]
