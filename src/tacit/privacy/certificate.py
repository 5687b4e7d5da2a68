"""The certificate: what is guaranteed, computed from the ledger alone, and checked against it again by `verify`."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.privacy.accounting import Levels
from tacit.privacy.beside import LOSS, WITHIN, Adaptive
from tacit.privacy.driven import LEVELS, LossDriven
from tacit.privacy.files import opened, read_whole
from tacit.privacy.ledger import SORTED, Entry, canonical, read_ledger, released_levels, unsampled, whole_levels
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError

FORMAT = "tacit-certificate/1"
NEIGHBOURS = "add or remove one example"
HELD_OUT = "accuracies are exact figures of held-out examples, which this guarantee does not protect"
ONE_RUN = (
    "only the releases of this run's ledger are counted: the initial weights are taken as public, and other runs on the same "
    "examples add to what is spent"
)

NO_NOISE = "at least one release had (almost) no noise"
SORTED_PASS = (
    "batches were taken in turn from the examples sorted by a model that learned from them without noise, so that one more "
    "example changes every later batch"
)

_BESIDE = {
    WITHIN: "the noisy number of examples whose gradient was within the clipping norm",
    LOSS: "the noisy mean of the losses, each cut to a bound",
}

# Epsilon is rounded up to a millionth, so that the certificate never claims less than was computed.
_UNITS = 1_000_000
_LARGEST = 1 << 26  # bytes of a certificate.json; a schedule with another level at each of a million steps fits


def certificate_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """The certificate of a ledger's entries: a deterministic function of them.

    *Guarantee.* epsilon is at least that of every release in the ledger, made or only announced, whatever the plan had been, and
    None, for infinity, if one of them was of a batch from a sorted pass; each caveat that the ledger gives reason for is listed;
    `valid_for_release` is true only if the noise came from the operating system's randomness, every batch from the plan's
    sampler, and nothing else computed from the training data was disclosed.

    >>> from tacit.privacy import Ledger, PrivacyPlan
    >>> ledger = Ledger.in_memory(PrivacyPlan(sample_rate=0.1, steps=10), delta=1e-5)
    >>> ledger.record_release(noise_multiplier=1.0, sample_rate=0.1)
    >>> certificate = certificate_of(ledger.entries)
    >>> certificate["releases"], certificate["delta"], certificate["neighbouring_relation"]
    (1, 1e-05, 'add or remove one example')
    """
    opening = entries[0]
    plan, delta, facts = PrivacyPlan.from_dict(opening["plan"]), float(opening["delta"]), opening["facts"]
    releases = [entry for entry in entries if entry["kind"] == "release"]
    if any(entry["sample_rate"] != plan.sample_rate for entry in releases):
        raise UserError(
            "the ledger holds releases at another sampling rate than its plan's; this ledger proves nothing"
        )
    levels, whole = released_levels(releases), whole_levels(entries)
    _check_filter(plan, levels)
    sampled = not unsampled(entries)
    epsilon = plan.epsilon_after(levels, delta, whole=whole) if sampled else math.inf
    epsilon_rdp = plan.epsilon_after(levels, delta, whole=whole, accountant="rdp") if sampled else math.inf
    void, caveats = caveats_of(entries, delta)
    if sampled and not math.isfinite(epsilon):
        void.append(f"no epsilon holds: {NO_NOISE}")
    models = [entry["sha256"] for entry in entries if entry["kind"] == "model"]
    content: dict[str, Any] = {
        "format": FORMAT,
        "statement": statement_of(rounded_up(epsilon), delta, f"{len(releases) + len(whole)} releases", void),
        "epsilon": rounded_up(epsilon),
        "delta": delta,
        "epsilon_rdp": rounded_up(epsilon_rdp),
        "accountant": _accountant(plan),
        "neighbouring_relation": NEIGHBOURS,
        "sampling": _sampling(plan) if sampled else {"kind": "none: the same order of the examples in every pass"},
        "clipping": _clipping(plan),
        "noise": _noise(plan, levels),
        "releases": len(releases),
        "planned_releases": plan.steps,
        "released": [
            "a noisy clipped gradient for every step, and with them every model along the way",
            *(f"with each of them, {_BESIDE[number.name]}" for number in plan.beside),
            *_fed_back(plan),
            *(
                f"{entry['what']} of all training examples, noise multiplier {entry['noise_multiplier']:g}"
                for entry in entries
                if entry["kind"] == "whole-release"
            ),
        ],
        "valid_for_release": not void,
        "void_because": void,
        "caveats": caveats,
        "facts": facts,
        "model_sha256": models[-1] if models else None,
        "ledger": {"entries": len(entries), "head": entries[-1]["hash"]},
    }
    return {**content, "digest": _digest(content)}


def _check_filter(plan: PrivacyPlan, levels: Levels) -> None:
    noise = plan.noise
    # Each level's RDP takes its time, and a run under a filter has only so many.
    if isinstance(noise, LossDriven) and len(levels) > LEVELS:
        raise UserError(
            f"the ledger holds {len(levels)} noise multipliers where its filter knows {LEVELS}; it proves nothing"
        )
    if isinstance(noise, LossDriven) and not noise.within_budget(plan.sample_rate, levels):
        raise UserError("the ledger holds more releases than its filter allows; this ledger proves nothing")


def _fed_back(plan: PrivacyPlan) -> list[str]:
    amplified = getattr(plan.clipping, "amplified", True)
    return [] if amplified else ["in each of them, what clipping cut off in earlier batches, up to a bound"]


def _sampling(plan: PrivacyPlan) -> dict[str, Any]:
    if not getattr(plan.clipping, "amplified", True):
        return {
            "kind": "accounted without sampling: what is released depends on all earlier batches",
            "sample_rate": 1.0,
        }
    return {"kind": "poisson", "sample_rate": plan.sample_rate}


def _clipping(plan: PrivacyPlan) -> dict[str, Any]:
    described = plan.clipping.to_dict()
    if isinstance(plan.clipping, Adaptive):  # later norms follow what was released
        first = described.pop("clipping_norm")
        return {**described, "first_clipping_norm": first}
    return {**described, "sensitivity": plan.clipping.sensitivity}


def _noise(plan: PrivacyPlan, levels: Levels) -> dict[str, Any]:
    found = {"kind": "gaussian", "levels": [{"noise_multiplier": s, "releases": k} for s, k in levels]}
    return {**found, "follows_the_released_loss": plan.noise.to_dict()} if isinstance(plan.noise, LossDriven) else found


def is_filtered(entries: Sequence[Entry]) -> bool:
    """Whether noise followed what was released, so that a filter's budget is claimed and not what happened to be used of it.

    *Guarantee.* False for a run whose multipliers were fixed beforehand.

    >>> from tacit.privacy import Ledger, PrivacyPlan
    >>> is_filtered(Ledger.in_memory(PrivacyPlan(sample_rate=0.1, steps=10), delta=1e-5).entries)
    False
    """
    return bool(entries[0]["plan"]["noise"]["kind"] == "loss-driven")


def _accountant(plan: PrivacyPlan) -> str:
    if isinstance(plan.noise, LossDriven):
        return f"RDP filter at order {plan.noise.order:g} (dp-accounting)"
    return "PLD (dp-accounting); RDP beside it"


def verify(run_directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The certificate of a run directory, if it is exactly what its ledger proves; otherwise a `UserError` says what is not.

    *Guarantee.* Returns only if the ledger's chain is whole, the certificate covers all of it, and every field of the
    certificate, epsilon first, equals the one computed here anew; and if `model.safetensors` is there, that it is the model which
    the certificate is about.
    """
    return verified_content(run_directory)[0]


def verified_content(run_directory: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes]:
    """What `verify` returns, and the very bytes of `certificate.json` that it was read from: what a signature is made of.

    *Guarantee.* That of `verify`; the file is read once, so that nobody can exchange it between the check and the signature.
    """
    directory = Path(run_directory)
    path = directory / "certificate.json"
    if not directory.is_dir():
        raise UserError(f"there is no run directory at {directory}")
    entries = read_ledger(directory / "ledger.jsonl")
    if not path.exists():
        raise UserError(
            f"{directory} holds no certificate.json yet; finish the run with `tacit train --resume --out {directory}`"
        )
    try:
        content = read_whole(path, largest=_LARGEST)
        found = json.loads(content.decode("utf-8"), object_pairs_hook=without_duplicates)
        ledger, digest = found["ledger"], found.pop("digest")
        covered = (int(ledger["entries"]), str(ledger["head"]))
        computed = _digest(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{path} is not a tacit certificate") from None
    if 0 < covered[0] < len(entries) and covered[1] == entries[covered[0] - 1]["hash"]:
        raise UserError(
            f"the ledger goes on after {path.name} was written: the run was interrupted; "
            f"finish it with `tacit train --resume --out {directory}`"
        )
    if covered != (len(entries), entries[-1]["hash"]):
        raise UserError(f"{path.name} belongs to another ledger, or lines of the ledger are missing")
    if digest != computed:
        raise UserError(f"{path} was changed after it was written: its digest does not fit")
    try:
        expected = certificate_of(entries)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(f"the ledger of {directory} is not one that tacit wrote; it proves nothing") from None
    del expected["digest"]
    if _close(found.get("epsilon"), expected["epsilon"]):
        # The sentence names the epsilon of the certificate, in whose last digit two machines may differ.
        count = f"{expected['releases'] + len(whole_levels(entries))} releases"
        expected["statement"] = statement_of(found["epsilon"], expected["delta"], count, expected["void_because"])
    for key, value in expected.items():
        given = found.get(key)
        same = _close(given, value) if key in ("epsilon", "epsilon_rdp") else canonical(given) == canonical(value)
        if not same or key not in found:
            raise UserError(f"the certificate says {key} = {given!r}, but its ledger gives {value!r}")
    model = directory / "model.safetensors"
    try:
        same_model = not model.exists() or sha256_of(model) == expected["model_sha256"]
    except OSError as error:
        raise UserError(f"{model} cannot be read: {error.strerror}; whether it is the model cannot be told") from None
    if not same_model:
        raise UserError(f"{model} is not the model of this certificate: its SHA-256 differs")
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise UserError(f"the certificate holds {unknown[0]!r}, which its ledger does not support")
    return {**found, "digest": digest}, content


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def caveats_of(entries: Sequence[Entry], delta: float) -> tuple[list[str], list[str]]:
    """What voids a certificate of these entries, at this delta, for release, and what its reader must know.

    *Guarantee.* Every reason that the ledger gives is among them, but that there is no noise, which the accountant finds.

    >>> from tacit.privacy import Ledger, PrivacyPlan
    >>> ledger = Ledger.in_memory(PrivacyPlan(sample_rate=0.1, steps=10), delta=1e-5, reproducible=True)
    >>> caveats_of(ledger.entries, 1e-5)[0]
    ['the noise came from a known seed: whoever knows it can subtract the noise']
    """
    facts, steps = entries[0]["facts"], PrivacyPlan.from_dict(entries[0]["plan"]).steps
    releases = [entry for entry in entries if entry["kind"] == "release"]
    void, caveats = [], []
    if facts.get("reproducible") or any(entry.get("reproducible") for entry in entries):
        void.append("the noise came from a known seed: whoever knows it can subtract the noise")
    if unsampled(releases):
        void.append(f"no epsilon holds: {SORTED_PASS}")
    if any(entry["sampled_by"] not in ("tacit", SORTED) for entry in releases):
        void.append(
            "some batches were chosen by the caller: epsilon holds only if by Poisson sampling at the stated rate"
        )
    void += [
        f"{entry['what']} was shown or stored without noise from step {entry['step']} on"
        for entry in entries
        if entry["kind"] == "disclosure"
    ]
    examples = facts.get("examples")
    if examples and delta >= 1 / examples:
        caveats.append(f"delta {delta:g} is not below 1/n = {1 / examples:.2g}, so it allows one example to be exposed")
    caveats.append(
        "the number of training examples, the classes, the shape of an example and the hyper-parameters are taken as public; "
        "choosing them by looking at the training data is not accounted"
    )
    caveats.append(ONE_RUN)
    caveats.append("that no layer mixes examples was tried on some of them, not proved")
    if facts.get("pretrained"):
        caveats.append(
            f"the run began with pre-trained weights (SHA-256 {facts['pretrained']}), which are taken as public: if they were "
            "learned from these examples, what that spent adds to this epsilon"
        )
    if isinstance(facts.get("dice"), dict):
        caveats.append(
            f"the authors of DiceSGD state epsilon {facts['dice'].get('epsilon_by_the_theorem')} for this noise, under "
            "assumptions that this certificate does not make"
        )
    if facts.get("evaluated_on_held_out"):
        caveats.append(HELD_OUT)
    resumed = sum(entry["kind"] == "resume" for entry in entries)
    if resumed:
        caveats.append(
            f"the run was resumed {resumed} time(s); releases lost to an interruption are counted all the same"
        )
    if len(releases) < steps:
        caveats.append(
            f"the run stopped after {len(releases)} of {steps} planned releases; epsilon is that of "
            + (
                "all that its filter would let through"
                if is_filtered(entries)
                else "those made, and holds if it was not what they showed that decided when to stop"
            )
        )
    caveats.append(
        "noise and sums are floating-point numbers; attacks on their last bits and on timing are out of scope"
    )
    return void, caveats


def statement_of(epsilon: float | None, delta: float, releases: str, void: Sequence[str]) -> str:
    """What is guaranteed, in a sentence: of `releases`, as in "3 releases"; an epsilon of None is infinity.

    *Guarantee.* The sentence begins with every reason that voids it, or with there being no guarantee.

    >>> statement_of(1.5, 1e-5, "3 releases", [])[:57]
    'All 3 releases together, and whatever is computed from th'
    """
    if epsilon is None:
        reason = SORTED_PASS if any(SORTED_PASS in reason for reason in void) else NO_NOISE
        return f"No differential privacy holds for this model: {reason}."
    condition = f"Not valid for release ({'; '.join(void)}). But for that: all" if void else "All"
    return (
        f"{condition} {releases} together, and whatever is computed from them, are ({epsilon}, {delta:g})-"
        f"differentially private with respect to the training examples: {NEIGHBOURS}."
    )


def rounded_up(epsilon: float) -> float | None:
    """Rounded up to a millionth; None stands for infinity, which JSON does not have.

    *Guarantee.* Never below what was computed.

    >>> rounded_up(1.00000001), rounded_up(math.inf)
    (1.000001, None)
    """
    if not math.isfinite(epsilon):
        return None
    return math.ceil(epsilon * _UNITS) / _UNITS


def _close(given: Any, expected: float | None) -> bool:
    """Equal up to the last digit, in which two machines' arithmetic may differ."""
    if given is None or expected is None:
        return given is expected
    return type(given) is float and given >= 0 and abs(given - expected) <= 2 / _UNITS * max(1.0, expected)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no key stands twice: whoever reads the first must not see another value than we do.

    >>> json.loads('{"a": 1, "b": 2}', object_pairs_hook=without_duplicates)
    {'a': 1, 'b': 2}
    """
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(content)).hexdigest()
