"""Where the time of one step goes: the same network trained plainly and by tacit, operator by operator."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contestants.plain import Plain
from benchmarks.contestants.setup import Setup
from benchmarks.contestants.tacit_ import Tacit
from benchmarks.report import region, with_region

STEPS = 20
SHOWN = 0.01  # an operator below this part of both steps is put under "other operators"
KERNEL = "tacit kernel: "

# the names that torch gives the same work; anything else stands under its own name
NAMES = {
    "aten::mkldnn_convolution": "convolution, forward",
    "aten::_slow_conv2d_forward": "convolution, forward",
    "aten::convolution_backward": "convolution, backward",
    "aten::mkldnn_convolution_backward": "convolution, backward",
    "aten::max_pool2d_with_indices": "max pool, forward",
    "aten::max_pool2d_with_indices_backward": "max pool, backward",
    "aten::tanh": "tanh, forward",
    "aten::tanh_backward": "tanh, backward",
    "aten::addmm": "matrix products",
    "aten::mm": "matrix products",
    "aten::bmm": "matrix products",
    "aten::baddbmm": "matrix products",
    "aten::copy_": "copies and layout changes",
    "aten::clone": "copies and layout changes",
    "aten::cat": "copies and layout changes",
}


class _Recorded:
    """tacit's compiled kernels, each call under a name of its own: the profiler does not see them otherwise."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found):
            return found

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with record_function(KERNEL + name):
                return found(*args, **kwargs)

        return recorded


def write_profile(readme: Path, network: str, batch: int) -> None:
    """Measure, print and put the table between the markers of the page."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    setup = Setup(network, batch)
    table = _table(setup)
    print(table)
    page = readme.read_text()
    if region(page, "profile") is None:
        raise SystemExit("benchmarks/README.md has no profile region; write it with `python -m benchmarks report`")
    readme.write_text(with_region(page, "profile", f"\n{table}\n"))


def _table(setup: Setup) -> str:
    plain, private = Plain(setup, compiled=False, kept=True), Tacit(setup, groups=1, noise=True)
    for contestant in (plain, private):
        contestant.load(*setup.network.examples(setup.batch))
    (plain_ms, private_ms), kept = _interleaved(plain.step, private.step), _kernels()
    plain_ops = _operators(plain.step)
    with kept:
        private_ops = _operators(private.step)
    summed = private.gradient(private.inputs, private.targets)
    noise_ms = _median(lambda: private.mechanism.release(summed))
    lines = [
        f"{setup.network.title}, batch {setup.batch}, channels last: {plain_ms:.1f} ms a step not private, "
        f"{private_ms:.1f} ms with tacit, of which ledger and noise {noise_ms:.1f} ms (medians of {STEPS} steps taken in turns, "
        "without the profiler). By operator, under the profiler, in ms and as part of the step:",
        "",
        "| | not private | | tacit | |",
        "|---|---|---|---|---|",
    ]
    totals = {"plain": plain_ops.pop("step"), "private": private_ops.pop("step")}
    rest = [0.0, 0.0]
    for name in sorted(set(plain_ops) | set(private_ops), key=lambda n: -max(plain_ops[n], private_ops[n])):
        pair = (plain_ops[name], private_ops[name])
        if max(pair[0] / totals["plain"], pair[1] / totals["private"]) < SHOWN:
            rest = [r + p for r, p in zip(rest, pair)]
        else:
            lines.append(_row(name, pair, totals))
    lines.append(_row("other operators", (rest[0], rest[1]), totals))
    outside = (totals["plain"] - sum(plain_ops.values()), totals["private"] - sum(private_ops.values()))
    lines.append(_row("Python, noise and what is no operator", outside, totals))
    lines.append(_row("**the step**", (totals["plain"], totals["private"]), totals))
    return "\n".join(lines)


def _row(name: str, pair: tuple[float, float], totals: dict[str, float]) -> str:
    cells = [f"{ms:.1f} | {ms / total:.0%}" for ms, total in zip(pair, totals.values())]
    return f"| {name} | {' | '.join(cells)} |"


def _operators(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds a step of each operator by itself, without those it calls; and of the "step" as a whole."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        for _ in range(STEPS):
            step()
        total = time.perf_counter() - started
    found: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        if event.key.startswith(("aten::", KERNEL)):
            found[NAMES.get(event.key, event.key.removeprefix("aten::"))] += event.self_cpu_time_total / 1000 / STEPS
    found["step"] = 1000 * total / STEPS
    return found


def _interleaved(*steps: Callable[[], None]) -> list[float]:
    for step in steps:
        step()
    rounds = [[_ms(step) for step in steps] for _ in range(STEPS)]
    return [statistics.median(times) for times in zip(*rounds)]


def _median(work: Callable[[], Any]) -> float:
    return statistics.median(_ms(work) for _ in range(STEPS))


def _ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


class _kernels:
    """While it lasts, the kernels are recorded."""

    def __enter__(self) -> None:
        try:
            from tacit.gradients import kernels
        except ImportError:
            self.module = None
            return
        self.module, self.former = kernels, kernels._kernels
        if self.former is not None:
            kernels._kernels = _Recorded(self.former)

    def __exit__(self, *_: object) -> None:
        if self.module is not None:
            self.module._kernels = self.former
