"""`python -m benchmarks [run|report|profile|ways|chance|whole]`: race, write tables, look into a step, a layer, a run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    options = _parser().parse_args(arguments)
    if options.command == "report":
        from benchmarks.report import readme_with_summary, write

        write(RESULTS, HERE / "README.md")
        readme = HERE.parent / "README.md"
        readme.write_text(readme_with_summary(readme.read_text(), RESULTS))
        return 0
    if options.command == "profile":
        from benchmarks.profile import write_profile

        write_profile(HERE / "README.md", options.network, options.batch)
        return 0
    if options.command == "ways":
        from benchmarks.ways import write_ways

        write_ways(HERE / "README.md")
        return 0
    if options.command == "chance":
        from benchmarks.chance import write_chance

        write_chance(HERE / "README.md")
        return 0
    if options.command == "whole":
        from benchmarks.whole import write_whole

        write_whole(HERE / "README.md", options.recipe, options.data_dir, options.epochs)
        return 0
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    from benchmarks.cases import BATCHES
    from benchmarks.contestants import CONTESTANTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="race everybody, one JSON a race in benchmarks/results/")
    size = run.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="batch 128 alone, few rounds")
    size.add_argument("--full", action="store_true", help="every network at every batch size, every epoch: hours")
    run.add_argument("--only", nargs="+", metavar="MODEL", choices=list(BATCHES), help=f"of {', '.join(BATCHES)}")
    run.add_argument("--batch", nargs="+", type=int, metavar="N", help="these batch sizes for every network")
    run.add_argument(
        "--contestants", nargs="+", metavar="WHO", choices=list(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)}"
    )
    run.add_argument(
        "--kinds", nargs="+", choices=["step", "width", "groups", "decay", "epoch"], help="these kinds of race alone"
    )
    run.add_argument("--rounds", type=int, help="at most so many rounds a race (default 15; 5 with --quick)")
    run.add_argument(
        "--seconds", type=float, help="about so long for the rounds of a race (default 25; 15 with --quick)"
    )
    run.add_argument("--patience", type=float, default=10.0, help="seconds to wait for quiet after a disturbed turn")
    run.add_argument("--resume", action="store_true", help="keep what is finished; otherwise every race is run anew")
    commands.add_parser("report", help="write benchmarks/README.md and the table of the README from the results")
    profile = commands.add_parser("profile", help="one step operator by operator, into benchmarks/README.md")
    profile.add_argument("--network", default="cifar-cnn", choices=list(BATCHES))
    profile.add_argument("--batch", type=int, default=128)
    commands.add_parser("ways", help="the cost model against measurement, layer by layer, into benchmarks/README.md")
    commands.add_parser("chance", help="what sampling, ledger and noise cost of a step, into benchmarks/README.md")
    whole = commands.add_parser("whole", help="what of a whole training run is not steps, into benchmarks/README.md")
    whole.add_argument("--recipe", default="mnist", help="a recipe's name or file")
    whole.add_argument("--data-dir", help="where its data lie, if not in the cache")
    whole.add_argument("--epochs", type=int, help="fewer than the recipe has")
    return parser


def _run(options: argparse.Namespace) -> int:
    from benchmarks import machine, pairs
    from benchmarks.cases import cases
    from benchmarks.models import parameters_of
    from benchmarks.race import Race

    races = cases(
        quick=options.quick,
        full=options.full,
        only=options.only,
        batches=options.batch,
        contestants=options.contestants,
    )
    races = [case for case in races if options.kinds is None or case.kind in options.kinds]
    missing = _missing({key for case in races for key in case.contestants})
    if missing:
        print(
            f"{', '.join(missing)} cannot be imported here; `make bench` makes an environment with all of them, "
            "or choose others with --contestants",
            file=sys.stderr,
        )
        return 2
    RESULTS.mkdir(exist_ok=True)
    rounds = options.rounds or (5 if options.quick else 15)
    seconds = options.seconds or (15.0 if options.quick else 25.0)
    layouts: dict[tuple[str, str], str] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("races", total=len(races))
        for case in races:
            path = RESULTS / f"{case.name}.json"
            if options.resume and path.exists():
                _recall(json.loads(path.read_text()), layouts)
            else:
                started = time.monotonic()
                say = lambda s, c=case: progress.update(task, description=f"{c.name}: {s}")  # noqa: E731
                if case.kind == "decay":
                    contestants = pairs.run(case, seconds, options.patience, say)
                else:
                    contestants = Race(case, rounds, seconds, options.patience, layouts, say).run()
                found = {
                    "kind": case.kind,
                    "network": case.network,
                    "batch": case.batch,
                    "examples": case.examples,
                    "parameters": parameters_of(case.network),
                    "machine": machine.facts(),
                    "contestants": contestants,
                    "seconds": round(time.monotonic() - started),
                }
                path.write_text(json.dumps(found, indent=1) + "\n")
            progress.advance(task)
    return 0


def _recall(found: dict[str, Any], layouts: dict[tuple[str, str], str]) -> None:
    """Take the layouts that suited from a finished race."""
    for key, result in found["contestants"].items():
        if "layout" in result and result["agrees"] is not False:
            layouts[key, found["network"]] = result["layout"]


def _missing(contestants: set[str]) -> list[str]:
    """Packages that `make bench` would have installed; fastDP is on no index, and its absence is reported in the table."""
    from benchmarks.contestants import CONTESTANTS

    needed = {CONTESTANTS[key].package for key in contestants} - {None, "fastDP"}
    return sorted(name for name in needed if name and importlib.util.find_spec(name) is None)


if __name__ == "__main__":
    sys.exit(main())
