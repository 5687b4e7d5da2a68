"""Ctrl-C and SIGTERM end a run after the step under way, so that what was paid for is saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM) and stopped after a whole step, with everything saved."""


class StopRequest:
    """Whether the run was asked to stop; signals are heard inside `with`, and a second Ctrl-C ends everything at once.

    Outside the main thread, where Python hears no signals, it is never asked.

    >>> with StopRequest() as stop:
    ...     signal.raise_signal(signal.SIGINT)
    ...     stop.requested
    True
    """

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self.requested = False
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
