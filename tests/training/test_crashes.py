"""Killed at any moment and resumed, a run ends, verifies, and has paid for all that it released."""

import multiprocessing
import os
import random
import time
from pathlib import Path

from tacit.privacy import read_ledger, verify

KILLS = 20
CHANGES = ["model.name=linear", "privacy.epsilon=none", "privacy.noise_multiplier=2.0", "privacy.epochs=12"]


def _train(directory: str, witness: str) -> None:
    """A whole run in a process of its own, which leaves a byte in `witness` just before it draws any noise."""
    import torch

    from tacit.privacy.randomness import Randomness
    from tacit.training.recipe import Recipe
    from tacit.training.run import train

    torch.set_num_threads(1)
    descriptor = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    draw = Randomness.normal

    def witnessed(self: Randomness, shape: object) -> object:
        os.write(descriptor, b"x")
        return draw(self, shape)  # type: ignore[arg-type]

    Randomness.normal = witnessed  # type: ignore[method-assign,assignment]
    train(Recipe.load("digits", CHANGES), directory, resume=True)


def _released(run: Path) -> int:
    ledger = run / "ledger.jsonl"
    return ledger.read_bytes().count(b'"kind":"release"') if ledger.exists() else 0


def test_killed_at_twenty_random_moments_every_run_ends_and_none_under_counts(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tacit.training.run", "sklearn.datasets", "dp_accounting.pld", "torch._dynamo"])

    def start(run: Path, witness: Path):
        process = context.Process(target=_train, args=(str(run), str(witness)))
        process.start()
        return process

    start(tmp_path / "whole", tmp_path / "whole.witness").join()
    planned = verify(tmp_path / "whole")["releases"]

    moments = random.Random(0)
    interrupted = 0
    for trial in range(KILLS):
        run, witness = tmp_path / f"run{trial}", tmp_path / f"witness{trial}"
        process = start(run, witness)
        after = moments.randrange(-5, planned + 3)  # releases; fewer than 0: before the first, more: while it certifies
        while process.is_alive() and _released(run) < min(after, planned):
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.3 if after < 0 or after > planned else 0.02))
        process.kill()
        process.join()
        interrupted += process.exitcode != 0
        process = start(run, witness)
        process.join(timeout=300)
        assert process.exitcode == 0
        releases = sum(entry["kind"] == "release" for entry in read_ledger(run / "ledger.jsonl"))
        made = witness.stat().st_size  # the linear model's noise is one draw
        assert releases >= made
        certificate = verify(run)
        assert certificate["releases"] == releases == planned
    assert interrupted >= KILLS // 2
