"""`python -m tests.faults`: random faults upon real runs; exit status 1 if anything was lost, uncounted or unclear."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .trials import KINDS, Runner, Trial

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    kinds = [options.only] if options.only else list(KINDS)
    log = ROOT / "build" / "faults" / f"seed{options.seed}.jsonl"
    if options.again:
        log.unlink(missing_ok=True)
    known = {(row["kind"], row["number"]): row for row in _rows(log)}
    log.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with _Kept(options.keep) if options.keep else tempfile.TemporaryDirectory(prefix="tacit-faults-") as folder:
        runner = Runner(Path(folder), options.seed)
        for number in range(options.trials):
            kind = kinds[number % len(kinds)]
            row = known.get((kind, number // len(kinds)))
            if row is None:
                row = _as_row(runner.trial(kind, number // len(kinds)))
                with open(log, "a") as file:
                    file.write(json.dumps(row) + "\n")
            rows.append(row)
            if not row["survived"]:
                print(f"{kind} {row['number']} ({row['what']}): {row['under_counted'] + row['lost'] + row['unclear']}")
            if sys.stderr.isatty() or (number + 1) % 25 == 0:
                print(f"{number + 1}/{options.trials}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)
    table = _table(rows)
    print(f"{'':14}" + "".join(f"{name:>15}" for name in table[0] if name != "kind"))
    for line in table:
        print(f"{line['kind']:14}" + "".join(f"{value:>15}" for name, value in line.items() if name != "kind"))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"trials": len(rows), "seed": options.seed, "by_kind": table}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["survived"] for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--again", action="store_true", help="do not go on with what an interrupted command left")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs of trials that failed there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    return parser


class _Kept:
    """A folder that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        self.folder.mkdir(parents=True)
        return self.folder

    def __exit__(self, *_: object) -> None: ...


def _rows(log: Path) -> list[dict[str, Any]]:
    found = []
    for line in log.read_text().splitlines() if log.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:  # cut short by an interruption
            continue
    return found


def _as_row(trial: Trial) -> dict[str, Any]:
    return {**asdict(trial), "survived": trial.survived}


def _table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a kind, and one for all."""

    def line(kind: str, of: list[dict[str, Any]]) -> dict[str, Any]:
        names = ("interrupted", "refused", "survived", "under_counted", "lost", "unclear")
        return {"kind": kind, "trials": len(of), **{name: sum(bool(row[name]) for row in of) for name in names}}

    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [*(line(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds), line("all", rows)]


if __name__ == "__main__":
    sys.exit(main())
