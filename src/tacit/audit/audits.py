"""An audit from end to end: attack a subject, bound epsilon from below, and say what that means for the claim."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tacit.audit.canaries import LEFT_OUT, attack_canaries
from tacit.audit.mechanism import CANARIES, INDEPENDENT_BY_CLAIM, attack_mechanism
from tacit.audit.membership import attack_lira, attack_loss, check_pairs, target_of
from tacit.audit.one_run import bound_by_one_run, check_few_enough
from tacit.audit.scores import Roc, Scores
from tacit.audit.subject import Subject
from tacit.audit.thresholds import GAUSSIAN, LowerBound, best_of, bound_by_threshold, check_confidence
from tacit.privacy.validation import check_choice

MECHANISM, IN_TRAINING, LOSS, LIRA = "mechanism", "canaries", "loss", "lira"
ATTACKS = (MECHANISM, IN_TRAINING, LOSS, LIRA)
LOW_RATES = (0.001, 0.01, 0.1)
_TRAININGS = {MECHANISM: 16, IN_TRAINING: 1}
_CANARIES = {MECHANISM: CANARIES, IN_TRAINING: 1000}
_SHADOWS = 8
_FIXED_SPLIT = (
    "who took part was decided by the run's own split, once for all examples, and all scores are of one model: a comparison that "
    "shows what this attack finds, no proof"
)


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found: the bound by which it judges, others beside it, the scores, and what all of it cost.

    >>> import numpy as np
    >>> scores = Scores(np.zeros(2), np.array([True, False]))
    >>> bound = LowerBound(1.0, 0.95, "one-run", "nothing", {})
    >>> Audit("canaries", "digits", 3.0, 1e-5, bound, (), scores, trainings=1, seconds=2.0, caveats=()).exceeds
    False
    """

    attack: str
    subject: str
    claim: float
    delta: float
    bound: LowerBound
    beside: tuple[LowerBound, ...]
    scores: Scores
    trainings: int
    seconds: float
    caveats: tuple[str, ...]

    @property
    def exceeds(self) -> bool:
        """Whether the lower bound is above the claim: then, with the bound's confidence, the claim is false."""
        return self.bound.epsilon > self.claim

    @property
    def sentence(self) -> str:
        """The result for people."""
        sure = f"with {self.bound.confidence:g} confidence"
        if self.exceeds:
            return (
                f"The claim does not hold: an attacker showed, {sure}, that epsilon is at least {self.bound.epsilon:.3f}, and "
                f"{self.claim:.3f} is claimed."
            )
        return (
            f"The claim stands: the attacker could show, {sure}, an epsilon of at least {self.bound.epsilon:.3f}, which is "
            f"{self.bound.epsilon / self.claim if self.claim else 0:.0%} of the {self.claim:.3f} claimed."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores, which say who took part."""
        roc = Roc.of(self.scores)
        return {
            "attack": self.attack,
            "subject": self.subject,
            "epsilon": self.claim,
            "delta": self.delta,
            "epsilon_lower_bound": self.bound.epsilon,
            "confidence": self.bound.confidence,
            "exceeds_claim": self.exceeds,
            "bound": dataclasses.asdict(self.bound),
            "beside": [dataclasses.asdict(bound) for bound in self.beside],
            "scores": len(self.scores),
            "area_under_roc": roc.area,
            "true_positive_rates": {f"{rate:g}": roc.true_positives_at(rate) for rate in LOW_RATES},
            "trainings": self.trainings,
            "seconds": round(self.seconds, 2),
            "sentence": self.sentence,
            "caveats": list(self.caveats),
        }


def trainings_of(attack: str, subject: Subject, *, repeats: int | None = None, shadows: int | None = None) -> int:
    """How many trainings an audit makes.

    >>> trainings_of("lira", Subject.of_recipe("digits"), shadows=4)
    5
    """
    if attack in _TRAININGS:
        return _TRAININGS[attack] if repeats is None else repeats
    target = int(subject.run_directory is None)
    return target + (0 if attack == LOSS else _SHADOWS if shadows is None else shadows)


def audit(
    subject: Subject,
    attack: str = MECHANISM,
    *,
    canaries: int | None = None,
    repeats: int | None = None,
    shadows: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    advance: Callable[[float], Any] = lambda trainings: None,
) -> Audit:
    """Attack the subject, and bound its epsilon from below.

    - "mechanism": nothing but canaries, through the plan's sampler, clipping, noise and ledger; the attacker sees every release.
      `repeats` trainings with `canaries` each.
    - "canaries": canaries among the real examples, in whole trainings by the recipe; the attacker sees every release.
    - "loss": the finished model alone; those were in of whom it is sure.
    - "lira": the finished model, and `shadows` others trained by the recipe, to compare with.

    *Confidence.* If the claim holds, the bound exceeds it with probability at most 1 - `confidence`, under what the bound says
    that it assumes. The bounds `beside` it are for comparison, and nothing is judged by them.

    >>> found = audit(Subject.of_recipe("digits"), canaries=2000, repeats=1, seed=0)
    >>> 0 < found.bound.epsilon < found.claim, found.exceeds
    (True, False)
    """
    check_choice("attack", attack, ATTACKS)
    check_confidence(confidence)
    started = time.monotonic()
    split_seed = 0 if seed is None else seed
    count = _CANARIES.get(attack, 0) if canaries is None else canaries
    trainings = trainings_of(attack, subject, repeats=repeats, shadows=shadows)
    options: dict[str, Any] = {"delta": subject.delta, "confidence": confidence, "seed": split_seed}
    caveats: list[str] = []
    claim = subject.claim
    if attack == MECHANISM:
        kinds = attack_mechanism(
            subject.plan, delta=subject.delta, canaries=count, trainings=trainings, seed=seed, advance=advance
        )
        kind = best_of(kinds, **options)
        scores = kinds[kind]
        bound = dataclasses.replace(bound_by_threshold(scores, **options), assumes=INDEPENDENT_BY_CLAIM)
        bound.details["score"] = kind
        beside = [bound_by_threshold(scores, method=GAUSSIAN, **options)]
    elif attack == IN_TRAINING:
        check_few_enough(count * trainings, subject.delta)  # before anything is trained
        scores = attack_canaries(subject, canaries=count, trainings=trainings, seed=seed, advance=advance)
        bound = bound_by_one_run(scores, **options)
        beside = [
            dataclasses.replace(bound_by_threshold(scores, **options), assumes=INDEPENDENT_BY_CLAIM),
            bound_by_threshold(scores, method=GAUSSIAN, **options),
        ]
        caveats.append(f"canaries are extra records, trained on beside the data; {LEFT_OUT}")
    else:
        shadow_count = check_pairs(_SHADOWS if shadows is None else shadows)
        target = target_of(subject, seed=seed, advance=advance)
        claim = min(claim, target.claim) if target.by_coin else claim
        if attack == LOSS:
            scores = attack_loss(target)
        else:
            scores = attack_lira(subject, target, shadows=shadow_count, seed=seed, advance=advance)
        by_threshold = bound_by_threshold(scores, **options)
        bound = bound_by_one_run(scores, **options) if target.by_coin else by_threshold
        beside = [by_threshold] if target.by_coin else []
        if not target.by_coin:
            bound = dataclasses.replace(bound, assumes=_FIXED_SPLIT)
    if subject.run_directory is None and attack in (LOSS, LIRA):
        caveats.append(
            "the model attacked was trained for this audit, on a half of all examples, each in by a fair coin"
        )
    if attack != MECHANISM:
        caveats.append(
            "an audit is for whoever owns the data: its trainings and scores are no part of the certificate, so neither they nor "
            "what is concluded from them for single examples may leave"
        )
    caveats.append("a lower bound below the claim proves nothing but that this attack found no more")
    return Audit(
        attack,
        subject.name,
        claim,
        subject.delta,
        bound,
        tuple(beside),
        scores,
        trainings,
        time.monotonic() - started,
        tuple(caveats),
    )
