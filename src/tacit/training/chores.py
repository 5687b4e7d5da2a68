"""What a run does beside learning (checkpoints, epsilon along the way), kept to a share of its time."""

from __future__ import annotations

import time

_LONGEST = 600.0  # seconds that such a thing waits at most


class Chore:
    """Something that may take a share of a run's time and no more: it is due again when what it last took is earned.

    >>> frugal, lavish = Chore(share=1e-9), Chore(share=1e9)
    >>> with frugal, lavish:
    ...     time.sleep(0.001)
    >>> frugal.due(), lavish.due(), lavish.due(at_least=60.0)
    (False, True, False)
    """

    def __init__(self, share: float) -> None:
        self._share, self._cost, self._done = share, 0.0, time.monotonic()

    def due(self, at_least: float = 0.0) -> bool:
        """Whether it may be done now, and was last done so many seconds ago."""
        return time.monotonic() - self._done >= max(min(self._cost / self._share, _LONGEST), at_least)

    def __enter__(self) -> None:
        self._done = time.monotonic()

    def __exit__(self, *_: object) -> None:
        begun, self._done = self._done, time.monotonic()
        self._cost = self._done - begun
