"""What a reader must know of the machine and the software; no name, no path."""

from __future__ import annotations

import os
import platform
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "tacit", "opacus", "opake", "jax", "jax-privacy", "fastDP")


def facts() -> dict[str, Any]:
    """Processor, memory, versions, day."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", "2")),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
    }


def busy_seconds() -> float:
    """The processor time that all processes together have had so far."""
    user, nice, system, *_ = (int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float, *, at_most: float = 0.1, window: float = 0.3) -> None:
    """Return when less than a tenth of the processor was busy for a moment, or when patience ends."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = busy_seconds()
        time.sleep(window)
        if busy_seconds() - before < at_most * window * (os.cpu_count() or 1):
            return


def version_of(package: str) -> str | None:
    """The installed version, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first(path: str, field: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)
