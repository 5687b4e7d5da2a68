"""Runs a study: what is not there yet, one small JSON a run; a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import glob
import json
import math
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError
from tacit.studies.study import Example, Study, Variant
from tacit.training.checkpoint import write_atomically
from tacit.training.recipe import Recipe

_FORMAT = "tacit-result/1"


@dataclass(frozen=True)
class Task:
    """One run of a study: a variant with a seed, and where its result goes.

    >>> study = Study("toy", "A Paper", [Variant("digits/a", {"privacy": {"epsilon": 3.0, "batch_size": 256}})])
    >>> Task(study, study.variants[0], 2, Path("results")).path.as_posix()
    'results/toy/digits-a-seed2.json'
    """

    study: Study
    variant: Variant
    seed: int
    out: Path
    epochs: float | None = None  # fewer than the paper has, to try it out

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.variant.name.replace('/', '-')}-seed{self.seed}"

    @property
    def path(self) -> Path:
        """Where the result goes."""
        return folder_of(self.study, self.out, self.epochs) / f"{self.name}.json"

    def recipe(self, data_dir: str | None = None) -> Recipe:
        """What is run."""
        return self.variant.recipe(self.seed, self.epochs, data_dir)

    def finished(self) -> dict[str, Any] | None:
        """The result, if it is there and was made with the settings the study has now."""
        try:
            found: dict[str, Any] = json.loads(self.path.read_text())
            # as a recipe again, so that settings which came later have their defaults
            settings = settings_of(Recipe.check(found["recipe"], str(self.path)))
        except (OSError, ValueError, KeyError, UserError):
            return None
        return found if found.get("format") == _FORMAT and settings == settings_of(self.recipe()) else None


def folder_of(study: Study, out: Path, epochs: float | None = None) -> Path:
    """Where a study's results, table and figures go; a trial with another number of epochs has a folder of its own.

    >>> study = Study("toy", "A Paper", [])
    >>> folder_of(study, Path("results")).as_posix(), folder_of(study, Path("results"), 2).as_posix()
    ('results/toy', 'results/toy/trial-of-2-epochs')
    """
    return out / study.name if epochs is None else out / study.name / f"trial-of-{epochs:g}-epochs"


def tasks_of(
    study: Study, out: Path, *, only: Sequence[str] = (), seeds: int | None = None, epochs: float | None = None
) -> list[Task]:
    """All runs asked for, in such an order that each variant has a first seed before any has a second.

    >>> study = Study("toy", "A Paper", [Variant("digits/a", {"privacy": {"epsilon": 3.0, "batch_size": 256}}, seeds=2)])
    >>> [task.seed for task in tasks_of(study, Path("results"))]
    [0, 1]
    """
    found = [
        Task(study, variant, seed, out, epochs)
        for variant in study.chosen(only)
        for seed in range(variant.seeds if seeds is None else seeds)
    ]
    return sorted(found, key=lambda task: task.seed)


def finished_of(study: Study, out: Path, epochs: float | None = None) -> list[dict[str, Any]]:
    """Every finished result of the study as it is today, whenever it was made.

    >>> finished_of(Study("toy", "A Paper", []), Path("nowhere"))
    []
    """
    found = []
    for variant in study.variants:
        prefix = Task(study, variant, 0, out, epochs).path.name.removesuffix("0.json")
        for path in folder_of(study, out, epochs).glob(f"{glob.escape(prefix)}*.json"):
            seed = path.name.removeprefix(prefix).removesuffix(".json")
            result = Task(study, variant, int(seed), out, epochs).finished() if seed.isdecimal() else None
            if result is not None:
                found.append(result)
    return found


def run_task(
    task: Task, *, data_dir: str | None, runs: Path, keep: bool = False, progress: bool = False
) -> dict[str, Any]:
    """Make the run, or what is left of it, and write its result; the run directory is removed then, unless it is kept."""
    from tacit.training.run import train

    directory = folder_of(task.study, runs, task.epochs) / task.name
    recipe = task.recipe(data_dir)
    if directory.exists() and not _continues(directory, recipe):
        _put_aside(directory)
    run = train(recipe, directory, resume=directory.exists(), progress=progress)
    # killed after its last step, before it was measured
    if not run.metrics or run.metrics[-1]["step"] != run.certificate["releases"]:
        _put_aside(directory)
        run = train(recipe, directory, progress=progress)
    certificate = run.certificate
    result = {
        "format": _FORMAT,
        "study": task.study.name,
        "variant": task.variant.name,
        "seed": task.seed,
        "recipe": settings_of(recipe),
        "test_accuracy": run.metrics[-1]["test_accuracy"],
        "epsilon": certificate["epsilon"],
        "epsilon_rdp": certificate["epsilon_rdp"],
        "delta": certificate["delta"],
        "planned_releases": certificate["planned_releases"],
        "releases": certificate["releases"],
        "resumed": sum("resumed" in caveat for caveat in certificate["caveats"]),
        "curve": curve_of(run.plan, recipe.privacy.delta, run.metrics, holds=certificate["epsilon"] is not None),
        "diagnostics": [
            {"epoch": row["epoch"], **_rounded(row["diagnostics"])} for row in run.metrics if "diagnostics" in row
        ],
        "seconds": run.metrics[-1]["seconds"],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    _write(task.path, result)
    if not keep:
        shutil.rmtree(directory)
    return result


def _write(path: Path, result: dict[str, Any]) -> None:
    """One line a key: small, and readable all the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in result.items())
    write_atomically(path, f"{{\n{lines}\n}}\n".encode())


def _put_aside(directory: Path) -> None:
    """Out of the way, and not lost: it may be somebody's."""
    number = next(n for n in range(1, 10_000) if not directory.with_name(f"{directory.name}.old{n}").exists())
    directory.rename(directory.with_name(f"{directory.name}.old{number}"))


def _rounded(value: Any) -> Any:
    """Numbers with four digits that count."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


def curve_of(
    plan: PrivacyPlan, delta: float, metrics: Sequence[Mapping[str, Any]], *, holds: bool = True
) -> list[dict[str, Any]]:
    """What was measured, each time with the epsilon spent until then (a quick bound, which can only be a little too high); with
    none, where none `holds` of the run.

    >>> from tacit.privacy import Constant
    >>> plan = PrivacyPlan(sample_rate=0.01, steps=200, noise=Constant(1.5))
    >>> curve_of(plan, 1e-5, [{"epoch": 1.0, "step": 100, "test_accuracy": 0.9, "seconds": 3.0}])
    [{'epoch': 1.0, 'step': 100, 'test_accuracy': 0.9, 'epsilon': 0.2922}]
    >>> curve_of(plan, 1e-5, [{"epoch": 1.0, "step": 100}], holds=False)
    [{'epoch': 1.0, 'step': 100, 'epsilon': None}]
    """
    found = []
    for row in metrics:
        levels = Counter(plan.noise_multiplier(step) for step in range(row["step"]))
        epsilon = math.inf
        if holds:
            epsilon = plan.epsilon_after(sorted(levels.items()), delta, whole=plan.whole_releases, coarse=True)
        point = {key: row[key] for key in ("epoch", "step", "test_accuracy") if key in row}
        found.append({**point, "epsilon": round(epsilon, 4) if math.isfinite(epsilon) else None})
    return found


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """What of a recipe makes the result: not where the data lie.

    >>> settings_of(Recipe.load("digits"))["data"]["source"]
    'digits'
    """
    values = recipe.model_dump(mode="json", exclude_none=True)
    values["data"].pop("directory", None)
    return values


def _continues(directory: Path, recipe: Recipe) -> bool:
    """Whether a run directory holds the beginning of this very run."""
    try:
        return settings_of(Recipe.load(directory / "recipe.toml")) == settings_of(recipe)
    except Exception:
        return False


def _taken_over(task: Task) -> dict[str, Any] | None:
    """The result of the very same run, if another study has made it."""
    wanted = settings_of(task.recipe())
    for path in sorted(task.out.glob("*/*.json")):
        try:
            found = json.loads(path.read_text())
            same = found["format"] == _FORMAT and settings_of(Recipe.check(found["recipe"], str(path))) == wanted
        except (OSError, ValueError, KeyError, TypeError, UserError):
            continue
        if same:
            result = {**found, "study": task.study.name, "variant": task.variant.name}
            _write(task.path, result)
            return result
    return None


def example_path(study: Study, example: Example, out: Path) -> Path:
    """Where what an example gave is kept.

    >>> example_path(Study("toy", "A Paper", []), Example("scalar", dict), Path("results")).as_posix()
    'results/toy/example-scalar.json'
    """
    return folder_of(study, out) / f"example-{example.name}.json"


def finished_examples(study: Study, out: Path) -> dict[str, dict[str, Any]]:
    """What the study's examples gave, by name, as far as they were run.

    >>> finished_examples(Study("toy", "A Paper", []), Path("nowhere"))
    {}
    """
    found = {}
    for example in study.examples:
        try:
            found[example.name] = json.loads(example_path(study, example, out).read_text())
        except (OSError, ValueError):
            continue
    return found


def run_examples(
    study: Study, out: Path, only: Sequence[str] = (), started: Callable[[Example], None] = lambda example: None
) -> None:
    """Run the examples that are asked for, by name, or all if nothing is; those that are finished are not run again."""
    done = finished_examples(study, out)
    for example in study.examples:
        if example.name not in done and (not only or example.name in only):
            started(example)
            _write(example_path(study, example, out), example.run())


def run_study(
    tasks: Sequence[Task],
    *,
    data_dir: str | None,
    runs: Path,
    keep: bool = False,
    started: Callable[[Task, int, int, float | None], None] = lambda task, done, total, left: None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """The results of all tasks; what is finished is not run again.

    `started` hears of each run, how many are done, and how many seconds the rest takes if it goes on as it did.
    """
    results: list[dict[str, Any]] = []
    waiting = sum(task.finished() is None for task in tasks)
    begun, made = time.monotonic(), 0
    for number, task in enumerate(tasks):
        found = task.finished() or _taken_over(task)
        if found is None:
            left = (time.monotonic() - begun) / made * (waiting - made) if made else None
            started(task, number, len(tasks), left)
            made += 1
            found = run_task(task, data_dir=data_dir, runs=runs, keep=keep, progress=progress)
        results.append(found)
    return results
