"""`python -m tests.fuzz --minutes M [--target NAME ...]`: a campaign over the targets, from the top folder of the project."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="only these; all, if left out")
    parser.add_argument("--driver", choices=("atheris", "chance"), help="atheris where it is installed, if left out")
    parser.add_argument("--seed", type=int, help="of what is drawn by chance; another one each time, if left out")
    parser.add_argument("--list", action="store_true", help="list the targets")
    for option in ("--session", "--folder"):  # of a process that a campaign starts
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    driver = given.driver or ("atheris" if importlib.util.find_spec("atheris") else "chance")
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    if given.session:
        return _session(given.session.split(","), driver, seed, given)
    from .campaign import campaign
    from .targets import TARGETS

    names = given.target or TARGETS
    unknown = [name for name in names if name not in TARGETS]
    if unknown or given.list:
        print("\n".join(TARGETS) if not unknown else f"there is no target {unknown[0]!r}; --list lists them")
        return 2 if unknown else 0
    print(f"driver {driver}, seed {seed}")
    return 1 if campaign(names, given.minutes, driver, seed) else 0


def _session(names: list[str], driver: str, seed: int, given: argparse.Namespace) -> int:
    from .drivers import CORPUS, Log, by_chance, by_coverage

    for number, name in enumerate(names):
        log = Log(Path(given.folder, name), driver)
        if driver == "atheris":
            by_coverage(name, log, given.seconds, CORPUS / name, seed)
        from .targets import target_of

        by_chance(target_of(name), log, given.seconds, CORPUS / name, seed + number)
    return 0


sys.exit(main())
