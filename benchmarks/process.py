"""A contestant's process seen from the driver: commands go in, answers come out, memory is watched."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
MEMORY_LIMIT = 6 * 2**30
TIME_LIMIT = 900.0  # seconds for one command: the longest is a first step that compiles


class Failed(Exception):
    """A contestant that cannot take part, with the reason in its own words."""


class OutOfMemory(Failed):
    """It needed more than the limit."""


class Process:
    """One worker. Between commands it sleeps on its pipe and takes no processor time."""

    def __init__(self, contestant: str, network: str, batch: int, layout: str, physical: int | None) -> None:
        spec = {
            "contestant": contestant,
            "network": network,
            "batch": batch,
            "layout": layout,
            "physical": physical,
        }
        self.layout, self.physical = layout, physical
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(spec)],
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Have a command carried out; raises `Failed` if it was not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps({"do": command, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed("its process ended") from None
        deadline = time.monotonic() + TIME_LIMIT
        while not select.select([self.process.stdout], [], [], 0.05)[0]:
            if self._resident() > MEMORY_LIMIT:
                self.stop()
                raise OutOfMemory(f"needs more than {MEMORY_LIMIT / 2**30:.0f} GiB")
            if time.monotonic() > deadline:
                self.stop()
                raise Failed(f"gave no answer in {TIME_LIMIT / 60:.0f} minutes")
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"its process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _resident(self) -> int:
        try:
            return PAGE * int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
