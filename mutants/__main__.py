"""`python -m mutants`: make each privacy bug of the catalogue in a copy of tacit, and see which test notices.

Exit status 0 if a test fails for every bug, 1 if one survives, 2 if the catalogue does not fit the tree, or tests fail without
any bug.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants.catalogue import Mutant, Rotten, catalogue
from mutants.record import Record, digest_of, key_of
from mutants.scratch import FAILED, PASSED, ROOT, Scratch

EVERYTHING = ("tests/privacy", "tests/gradients", "tests/training")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        chosen = catalogue(options.only)
        for mutant in chosen:  # before anything takes time
            mutant.applied((ROOT / "src" / "tacit" / mutant.file).read_text())
        if not chosen:
            raise Rotten(f"no mutant is called {options.only}")
        if options.list:
            for mutant in chosen:
                print(f"{mutant.name:46} {mutant.file:28} {mutant.breaks}")
            return 0
        rows = _run(chosen, again=options.again, quick=options.quick)
    except Rotten as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    survivors = [row["mutant"] for row in rows if row["caught_by"] is None]
    print(f"\n{len(rows) - len(survivors)} of {len(rows)} bugs are noticed")
    for name in survivors:
        print(f"survives: {name}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"bugs": len(rows), "survive": survivors, "found": rows}, indent=1) + "\n")
    return 1 if survivors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="those whose name matches, such as 'noise-*'")
    parser.add_argument("--list", action="store_true", help="say which there are, and no more")
    parser.add_argument(
        "--quick", action="store_true", help="only the tests that a mutant names, not all others after them"
    )
    parser.add_argument("--again", action="store_true", help="do not take what an earlier run found")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    return parser


def _run(chosen: list[Mutant], *, again: bool, quick: bool) -> list[dict[str, Any]]:
    record, rows = Record(digest_of("src")), []
    with tempfile.TemporaryDirectory(prefix="tacit-mutants-") as place:
        scratch = Scratch(Path(place) / "tree")
        print(f"{'':8} {'mutant':46} {'seconds':>7}  caught by")
        for number, mutant in enumerate(chosen, 1):
            row = None if again else record.get(key_of(mutant)) or record.get(key_of(mutant, survived=True))
            if row is None:
                row = _tried(scratch, mutant, () if quick else EVERYTHING)
                if row["caught_by"] or not quick:
                    record.put(key_of(mutant, survived=not row["caught_by"]), row)
            rows.append(row)
            place_in_line = f"{number}/{len(chosen)}"
            caught = row["caught_by"] or "SURVIVES"
            print(f"{place_in_line:8} {mutant.name:46} {row['seconds']:7.1f}  {caught}", flush=True)
        _check_unmutated(scratch, rows, record, again)
    return rows


def _check_unmutated(scratch: Scratch, rows: list[dict[str, Any]], record: Record, again: bool) -> None:
    """A test that fails anyway notices nothing: those that caught a bug must pass in the copy without one."""
    key = "passes without a bug"
    found = {row["caught_by"]: digest_of(row["caught_by"].partition("::")[0]) for row in rows if row["caught_by"]}
    known = {} if again else record.get(key) or {}
    tests = [test for test, digest in found.items() if known.get(test) != digest]
    if not tests:
        return
    print(f"the copy without a bug: {len(tests)} tests ...", flush=True)
    outcome = scratch.tests(tests)
    if outcome.status != PASSED:
        raise Rotten(f"the tests do not pass without any bug:\n{outcome.tail}")
    print(f"pass in {outcome.seconds:.0f} s", flush=True)
    record.put(key, {**known, **found})


def _tried(scratch: Scratch, mutant: Mutant, others: Sequence[str]) -> dict[str, Any]:
    """First by the tests that ought to notice, then by the others."""
    seconds = 0.0
    with scratch.mutated(mutant):
        for targets in filter(None, (mutant.tests, others)):
            outcome = scratch.tests(targets)
            seconds += outcome.seconds
            if outcome.status not in (PASSED, FAILED) or (outcome.status == FAILED and outcome.failed is None):
                raise Rotten(f"{mutant.name}: its tests could not be run\n{outcome.tail}")
            if outcome.failed is not None:
                break
    return {
        "mutant": mutant.name,
        "breaks": mutant.breaks,
        "file": f"src/tacit/{mutant.file}",
        "caught_by": outcome.failed,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
