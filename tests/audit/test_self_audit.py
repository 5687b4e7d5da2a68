"""tacit audits itself on every run of the tests: its own trainings stay below their claim, and broken ones do not.

Seeds are fixed, so that what passes once passes always. For another seed, an honest training would fail with probability at most
0.05, by the confidence of the bound.
"""

import pytest
from broken import MUTANTS

from tacit.audit.mechanism import attack_mechanism
from tacit.audit.thresholds import best_of, bound_by_threshold
from tacit.privacy import Constant, Ledger, PrivacyPlan, Randomness, certificate_of

DELTA = 1e-3  # at which an epsilon is decided by events that so many canaries show; every delta has a claim of its own
PLAN = PrivacyPlan(sample_rate=0.25, steps=24, noise=Constant(1.9), expected_batch_size=100)
OPTIONS = {"delta": DELTA, "confidence": 0.95}


@pytest.fixture(scope="module")
def claim():
    """The epsilon of a certificate of this plan, its ledger written by its own mechanism."""
    import torch

    from tacit.privacy.mechanism import ClippedSum

    ledger = Ledger.in_memory(PLAN, delta=DELTA)
    mechanism = PLAN.mechanism(Randomness.from_operating_system(), ledger)
    for _ in range(PLAN.steps):
        mechanism.release(
            ClippedSum({"w": torch.zeros(1)}, norms=torch.zeros(0, 1), clipping=PLAN.clipping), sampled_by="tacit"
        )
    return certificate_of(ledger.entries)["epsilon"]


def found(canaries, seed):
    kinds = attack_mechanism(PLAN, delta=DELTA, canaries=canaries, seed=seed)
    kind = best_of(kinds, **OPTIONS)
    return kind, bound_by_threshold(kinds[kind], **OPTIONS).epsilon


def test_the_mechanism_stays_below_its_claim_and_the_audit_comes_within_half_of_it(claim):
    kind, epsilon = found(canaries=300_000, seed=0)
    assert kind == "likelihood ratio"
    assert claim / 2 < epsilon < claim


@pytest.mark.parametrize("name", MUTANTS)
def test_the_same_audit_exceeds_the_claim_when_the_mechanism_is_broken(claim, name):
    with MUTANTS[name]():
        kind, epsilon = found(canaries=200_000, seed=0)
    assert epsilon > claim
    assert kind == ("spread over the steps" if name == "noise that repeats" else "likelihood ratio")
