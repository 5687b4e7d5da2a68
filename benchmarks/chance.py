"""What sampling, the ledger and noise cost of a step: timed inside of steps that take turns with them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants.setup import Setup
from benchmarks.contestants.tacit_ import Tacit
from benchmarks.models import NETWORKS
from benchmarks.report import region, with_region
from tacit.privacy import Randomness
from tacit.privacy.sampling import PoissonSampler

EXAMPLES = 60_000
BATCH = 128
SECONDS = 8.0  # a network
FEWEST = 8
SHOWN = ("mnist-cnn", "cifar-cnn", "scatter-cnn", "resnet-20", "wrn-16-4", "transformer")


def write_chance(readme: Path) -> None:
    """Measure, print and put the table between the markers of the page."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    table = _table()
    print(table)
    page = readme.read_text()
    if region(page, "chance") is None:
        raise SystemExit("benchmarks/README.md has no region for it; write it with `python -m benchmarks report`")
    readme.write_text(with_region(page, "chance", f"\n{table}\n"))


def _table() -> str:
    lines = [
        f"Batch {BATCH} of {EXAMPLES:,} examples, medians in ms. *Sampling* is one coin an example, "
        "cryptographic; *release* is the entry in the ledger, cryptographic noise, and the division; *the usual noise* is "
        "`torch.randn` in its place, in single precision, and no ledger: what everybody has to do. The share is that of sampling "
        "and release in a step with both; what cryptography, double precision and the ledger add is the share less that of the "
        "usual noise.",
        "",
        "| | step without | sampling | release | the usual noise | share | above the usual noise |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        step, sampling, release, usual = _measured(name)
        whole = step + sampling + release
        cells = [NETWORKS[name].title, f"{step:.2f}", f"{sampling:.3f}", f"{release:.3f}", f"{usual:.3f}"]
        cells += [f"{(sampling + release) / whole:.1%}", f"{(sampling + release - usual) / whole:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(name: str) -> list[float]:
    """(step without noise, sampling, release, the usual noise), each right after the other, as in training."""
    setup = Setup(name, BATCH)
    plain = Tacit(setup, groups=1, noise=False)
    plain.load(*setup.network.examples(BATCH))
    sampler = PoissonSampler(EXAMPLES, BATCH / EXAMPLES, Randomness.from_operating_system())
    summed = plain.gradient(plain.inputs, plain.targets)

    def usual() -> None:
        for gradient in summed.gradients.values():
            (gradient + torch.randn_like(gradient)) / BATCH

    parts: list[Callable[[], Any]] = [plain.step, sampler.draw, lambda: plain.mechanism.release(summed), usual]
    rounds: list[list[float]] = []
    started = time.perf_counter()
    while len(rounds) < FEWEST or time.perf_counter() - started < SECONDS:
        rounds.append([_ms(part) for part in parts])
    return [statistics.median(times) for times in zip(*rounds[2:])]


def _ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)
