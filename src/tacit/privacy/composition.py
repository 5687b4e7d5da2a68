"""Several runs on the same examples, as in an ensemble: what is guaranteed of all their releases together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.privacy.accounting import epsilon_of_all
from tacit.privacy.certificate import NEIGHBOURS, ONE_RUN, caveats_of, is_filtered, rounded_up, statement_of, verify
from tacit.privacy.ledger import Entry, read_ledger, released_levels, unsampled, whole_levels
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError, check_delta

FORMAT = "tacit-composition/1"
_OF_A_RUN = ("epsilon", "delta", "releases", "valid_for_release", "model_sha256", "ledger")


def composed_certificate(
    run_directories: Sequence[str | os.PathLike[str]], delta: float | None = None
) -> dict[str, Any]:
    """What holds of all releases of these runs together, at one delta: by default the smallest of the runs' own.

    Every run is taken to have trained on the same examples. For runs on disjoint examples the largest epsilon alone would do;
    that is not offered, since nothing here can tell that they are disjoint.

    *Guarantee.* Returns only if every run passes `verify` and none is named twice. epsilon is at least that of the composition of
    every release in every ledger, also of those in which all examples take part, for adding or removing one example that may be
    in the data of each run. It is valid for release only if every run is, and if the runs trained on the same number of examples
    (or measured none that were held out): whether one measured exactly what another trained on cannot be told, and is a caveat.
    The runs' plans are taken as fixed beforehand: noise that was chosen after looking at what another
    run released is not accounted.

    >>> import json, tempfile
    >>> from tacit.privacy import Ledger, PrivacyPlan, certificate_of
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     runs = [Path(folder) / name for name in ("a", "b")]
    ...     for run in runs:
    ...         run.mkdir()
    ...         ledger = Ledger.create(run / "ledger.jsonl", PrivacyPlan(sample_rate=0.1, steps=10), delta=1e-5)
    ...         ledger.record_release(noise_multiplier=1.0, sample_rate=0.1, sampled_by="tacit")
    ...         ledger.close()
    ...         _ = (run / "certificate.json").write_text(json.dumps(certificate_of(ledger.entries)))
    ...     composed = composed_certificate(runs)
    >>> composed["releases"], composed["valid_for_release"]
    (2, True)
    >>> composed["epsilon"] > max(run["epsilon"] for run in composed["runs"])
    True
    """
    directories = _distinct([Path(directory) for directory in run_directories])
    certificates = [verify(directory) for directory in directories]
    ledgers = [_ledger_of(directory, found) for directory, found in zip(directories, certificates)]
    _check_heads(directories, ledgers)
    delta = check_delta(min(found["delta"] for found in certificates) if delta is None else delta)
    whole = [sigma for entries in ledgers for sigma in whole_levels(entries)]
    epsilon = _epsilon(ledgers, delta, "pld")
    void = [f"{run}: {reason}" for run, found in zip(directories, certificates) for reason in found["void_because"]]
    void += _held_out_by_some(ledgers)
    if not math.isfinite(epsilon) and not void:
        void.append("no epsilon holds: there is (almost) no noise in all the releases together")
    releases = sum(found["releases"] for found in certificates)
    counted = f"{releases + len(whole)} releases of {len(directories)} run{'s' if len(directories) > 1 else ''}"
    return {
        "format": FORMAT,
        "statement": statement_of(rounded_up(epsilon), delta, counted, void),
        "epsilon": rounded_up(epsilon),
        "delta": delta,
        "epsilon_rdp": rounded_up(_epsilon(ledgers, delta, "rdp")),
        "accountant": "PLD (dp-accounting); RDP beside it",
        "neighbouring_relation": NEIGHBOURS,
        "releases": releases,
        "whole_releases": len(whole),
        "valid_for_release": not void,
        "void_because": void,
        "caveats": _caveats(directories, ledgers, delta),
        "runs": [
            {"run_directory": str(run), **{key: found[key] for key in _OF_A_RUN}}
            for run, found in zip(directories, certificates)
        ],
    }


def _epsilon(ledgers: Sequence[Sequence[Entry]], delta: float, accountant: str) -> float:
    """Of all runs whose noise was fixed beforehand as one composition; a run under a filter of its own is added by its epsilon,
    and each part has its share of delta: basic composition. With a run of which none holds, none holds of all."""
    if any(unsampled(entries) for entries in ledgers):
        return math.inf
    fixed = [entries for entries in ledgers if not is_filtered(entries)]
    filtered = [entries for entries in ledgers if is_filtered(entries)]
    share = delta / (len(filtered) + bool(fixed))
    total = sum(
        PrivacyPlan.from_dict(entries[0]["plan"]).epsilon_after(
            released_levels(entries), share, whole=whole_levels(entries), accountant=accountant
        )
        for entries in filtered
    )
    if fixed:
        parts = [(float(entries[0]["plan"]["sample_rate"]), released_levels(entries)) for entries in fixed]
        whole = [sigma for entries in fixed for sigma in whole_levels(entries)]
        total += epsilon_of_all(parts, share, whole=whole, accountant=accountant)
    return total


def _check_heads(directories: Sequence[Path], ledgers: Sequence[Sequence[Entry]]) -> None:
    seen: dict[str, Path] = {}
    for directory, entries in zip(directories, ledgers):
        first = seen.setdefault(entries[-1]["hash"], directory)
        if first is not directory:
            raise UserError(f"{first} and {directory} are copies of one run; name every run once")


def _distinct(directories: list[Path]) -> list[Path]:
    if not directories:
        raise UserError("there is no run to compose; name at least one run directory")
    seen: dict[Path, Path] = {}
    for directory in directories:
        first = seen.setdefault(directory.resolve(), directory)
        if first is not directory:
            raise UserError(f"{first} and {directory} are the same run directory; name every run once")
    return directories


def _ledger_of(directory: Path, certificate: dict[str, Any]) -> tuple[Entry, ...]:
    """The entries that the certificate was verified against; a run that went on meanwhile is refused."""
    entries = read_ledger(directory / "ledger.jsonl")
    if entries[-1]["hash"] != certificate["ledger"]["head"]:
        raise UserError(f"the run in {directory} went on while it was read; wait until it has ended")
    return entries


def _held_out_by_some(ledgers: Sequence[Sequence[Entry]]) -> list[str]:
    """A reason to void: runs on different numbers of examples cannot all have held out the same ones."""
    facts = [entries[0]["facts"] for entries in ledgers]
    counts = sorted({found["examples"] for found in facts if type(found.get("examples")) is int})
    if len(counts) > 1 and any(found.get("evaluated_on_held_out") for found in facts):
        return [
            f"the runs trained on different numbers of examples ({', '.join(map(str, counts))}), so that what one held out, and "
            "measured exactly, another may have trained on"
        ]
    return []


def _caveats(directories: Sequence[Path], ledgers: Sequence[Sequence[Entry]], delta: float) -> list[str]:
    """What a reader must know: of the composition, then of the runs, each sentence once, with those it is about if not all."""
    about: dict[str, list[str]] = {}
    for run, entries in zip(directories, ledgers):
        for caveat in caveats_of(entries, delta)[1]:
            about.setdefault(caveat, []).append(str(run))
    del about[ONE_RUN]
    return [
        "all runs are taken to have trained on the same examples, and only their releases are counted: initial weights are taken "
        "as public, and other runs on the same examples add to what is spent",
        "the runs are taken to have held out the same examples: what one measured exactly, another must not have trained on",
        "the plan of every run is taken as fixed beforehand; noise chosen after looking at another run is not accounted",
        *(
            caveat if len(runs) == len(directories) else f"{', '.join(runs)}: {caveat}"
            for caveat, runs in about.items()
        ),
    ]
