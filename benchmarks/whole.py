"""A whole training run by a recipe, and what of its time are not steps: start-up, loading, evaluation, checkpoints, accounts."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = "steps: sampling, gathering, clipped sum, ledger, noise, update"
PARTS = {
    "import torch": "`import torch`",
    "import tacit": "imports of tacit and what it needs, after torch's",
    "load": "loading the data",
    "plan": "calibrating the noise (and importing dp-accounting)",
    "evaluate": "evaluation on held-out data",
    "save": "checkpoints",
    "account": "epsilon so far",
    "finish": "model file and certificate",
    "steps": STEPS,
    "rest": "building the model and the optimizer (and torch's own late imports), progress, the rest",
}


def write_whole(readme: Path, recipe: str, data_dir: str | None, epochs: int | None) -> None:
    """Measure in a fresh process, print, and put the table between the markers of the page."""
    from benchmarks.report import (  # not above: the fresh process must not import torch before it is timed
        region,
        with_region,
    )

    options = json.dumps({"recipe": recipe, "data_dir": data_dir, "epochs": epochs})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.whole", options], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    table = _table(found)
    print(table)
    page = readme.read_text()
    if region(page, "whole") is None:
        raise SystemExit("benchmarks/README.md has no region for it; write it with `python -m benchmarks report`")
    readme.write_text(with_region(page, "whole", f"\n{table}\n"))


def _table(found: dict[str, Any]) -> str:
    parts, total = found["parts"], found["total"]
    of_torch = parts["import torch"]
    lines = [
        f"`tacit train {found['recipe']}`, {found['epochs']:g} epochs in a process of its own, from its start to its end: "
        f"{total:.1f} s. What is not steps is {(total - parts['steps']) / total:.1%} of the run, "
        f"{(total - parts['steps'] - of_torch) / total:.1%} without torch's own import.",
        "",
        "| | seconds | of the run |",
        "|---|---|---|",
    ]
    lines += [f"| {PARTS[part]} | {parts[part]:.2f} | {parts[part] / total:.1%} |" for part in PARTS]
    return "\n".join(lines)


class _Clock:
    """Seconds by part; what happens inside another part is counted there alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def watch(self, holder: Any, name: str, part: str) -> None:
        """Count the time of a function of a module or class."""
        function: Callable[..., Any] = getattr(holder, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[part] += time.perf_counter() - start

        setattr(holder, name, watched)


def _measured(options: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process."""
    start = time.perf_counter()
    import torch  # noqa: F401

    with_torch = time.perf_counter()
    import tacit.cli.train  # noqa: F401
    from tacit.privacy.sampling import PoissonSampler
    from tacit.training import run, trainer
    from tacit.training.recipe import Recipe

    imported = time.perf_counter()
    clock = _Clock()
    clock.seconds["import torch"] = with_torch - start
    clock.seconds["import tacit"] = imported - with_torch
    clock.watch(run, "load_data", "load")
    clock.watch(Recipe, "plan", "plan")
    clock.watch(trainer, "evaluate", "evaluate")
    clock.watch(trainer.PrivateTrainer, "_save", "save")
    clock.watch(trainer, "epsilon_of", "account")
    clock.watch(trainer.PrivateTrainer, "_finish", "finish")
    for holder, name in (
        (PoissonSampler, "draw"),
        (trainer.PrivateTrainer, "_release"),
        (trainer.PrivateTrainer, "_update"),
    ):
        clock.watch(holder, name, "steps")
    changes = [] if options["data_dir"] is None else [f"data.directory={json.dumps(options['data_dir'])}"]
    changes += [] if options["epochs"] is None else [f"privacy.epochs={options['epochs']}"]
    recipe = Recipe.load(options["recipe"], changes)
    with tempfile.TemporaryDirectory() as folder:
        run.train(recipe, Path(folder) / "run")
    total = time.perf_counter() - start
    clock.seconds["rest"] = total - sum(clock.seconds.values())
    parts = {part: clock.seconds[part] for part in PARTS}
    return {"recipe": options["recipe"], "epochs": recipe.privacy.epochs, "total": total, "parts": parts}


if __name__ == "__main__":
    print(json.dumps(_measured(json.loads(sys.argv[1]))))
