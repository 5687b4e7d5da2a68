"""Lower bounds on epsilon from how often one decision is right: score above a threshold, "it took part".

With t the true-positive and f the false-positive rate of any decision, (epsilon, delta)-differential privacy implies

    t <= e^epsilon f + delta     and     1 - f <= e^epsilon (1 - t) + delta,

so a decision that is better proves that epsilon is larger. Rates are known from samples only: Clopper and Pearson's interval says
how small t and how large f can be with the error probability allowed for, half of it each, and both inequalities follow from
these two. The threshold is chosen on one half of the scores and judged on the other, so that the choice costs no confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri
from scipy.stats import beta

from tacit.audit.scores import Scores
from tacit.privacy.validation import UserError, check_choice, check_count, check_delta, check_not_negative

_MOST_THRESHOLDS = 400  # that are tried
CLOPPER_PEARSON = "Clopper-Pearson"
GAUSSIAN = "Gaussian"
INDEPENDENT = "the scores are independent of each other"
GAUSSIAN_CURVE = (
    "the scores are independent, and the trade-off curve is that of a Gaussian mechanism, which is near the truth for many "
    "sampled steps, not proved: an estimate, no bound"
)


@dataclass(frozen=True)
class LowerBound:
    """An epsilon that lies below the true one with this confidence, how it was found, and what that assumes.

    >>> LowerBound(1.5, 0.95, "Clopper-Pearson", "nothing", {}).epsilon
    1.5
    """

    epsilon: float
    confidence: float
    method: str
    assumes: str
    details: dict[str, Any]


def check_confidence(value: float) -> float:
    """A probability above a half and below 1.

    >>> check_confidence(0.95)
    0.95
    """
    number = check_not_negative("confidence", value)
    if not 0.5 < number < 1:
        raise UserError(f"confidence must lie between 0.5 and 1, not {value!r}; 0.95 is usual")
    return number


def rates_at(
    true_positives: Any, included: int, false_positives: Any, excluded: int, *, confidence: float
) -> tuple[Any, Any]:
    """The smallest true-positive and the largest false-positive rate that go with these counts (arrays, too).

    *Confidence.* Both hold at once with probability `confidence`, whatever the true rates are, if the examples are independent
    (Clopper & Pearson, 1934; half of the error probability for each).

    >>> smallest, largest = rates_at(100, 100, 0, 100, confidence=0.95)
    >>> round(float(smallest), 4) == round(0.025 ** (1 / 100), 4), round(float(smallest + largest), 6)
    (True, 1.0)
    """
    error = (1 - check_confidence(confidence)) / 2
    right, wrong = np.asarray(true_positives), np.asarray(false_positives)
    with np.errstate(invalid="ignore"):
        smallest = np.where(right > 0, beta.ppf(error, right, included - right + 1), 0.0)
        largest = np.where(wrong < excluded, beta.ppf(1 - error, wrong + 1, excluded - wrong), 1.0)
    return smallest, largest


def epsilon_of_rates(true_positive_rate: Any, false_positive_rate: Any, delta: float) -> Any:
    """The largest epsilon which a decision with these rates contradicts, 0 if none:

    max(log((t - delta) / f), log((1 - f - delta) / (1 - t))).

    >>> float(epsilon_of_rates(0.5, 0.05, 0.0).round(4)) == round(math.log(10), 4)
    True
    """
    t, f = np.asarray(true_positive_rate, dtype=float), np.asarray(false_positive_rate, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = [np.where(a > delta, np.log(np.maximum(a - delta, 0) / b), 0.0) for a, b in ((t, f), (1 - f, 1 - t))]
    return np.maximum(np.maximum(found[0], found[1]), 0.0)


def mu_of_rates(true_positive_rate: Any, false_positive_rate: Any) -> Any:
    """The mu of the Gaussian mechanism whose best test has these rates, Phi^-1(1 - f) - Phi^-1(1 - t), at least 0.

    >>> float(mu_of_rates(0.5, 0.1586552539).round(6))
    1.0
    """
    t, f = np.asarray(true_positive_rate, dtype=float), np.asarray(false_positive_rate, dtype=float)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.maximum(ndtri(t) - ndtri(f), 0.0), nan=0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The epsilon at this delta of N(0, 1) against N(mu, 1), exactly: the solution of

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)     (Balle & Wang, 2018).

    >>> round(epsilon_of_mu(1.0, 1e-5), 3)
    4.377
    """
    check_delta(delta)
    if check_not_negative("mu", mu) == 0:
        return 0.0

    def excess(epsilon: float) -> float:
        larger, smaller = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
        # log of the difference, since both may be tiny
        return float(larger + np.log1p(-np.exp(min(smaller - larger, -1e-300)))) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    upper = 1.0
    while excess(upper) > 0:
        upper *= 2
    return float(brentq(excess, 0.0, upper, xtol=1e-10))


def bound_by_threshold(
    scores: Scores, *, delta: float, confidence: float = 0.95, method: str = CLOPPER_PEARSON, seed: int = 0
) -> LowerBound:
    """The lower bound of the best threshold: found on one half of the scores, judged on the other.

    `method` "Clopper-Pearson" takes the inequalities of (epsilon, delta) as they are, and can show no more than samples can: an
    epsilon that is reached only by events of probability near delta stays out of sight. "Gaussian" takes the curve to be that of
    a Gaussian mechanism, mu >= Phi^-1(1 - f) - Phi^-1(1 - t), and turns mu into epsilon at delta exactly. That is right for one
    release without sampling, and *heuristic* for the composition of many sampled ones.

    *Confidence.* With probability `confidence` the bound lies below the true epsilon, if the scores are independent (and for
    "Gaussian" if the curve is).

    >>> generator = np.random.default_rng(0)
    >>> took_part = generator.random(20000) < 0.5
    >>> scores = Scores(generator.normal(size=20000) + took_part, took_part)          # mu = 1: epsilon 4.38
    >>> round(bound_by_threshold(scores, delta=1e-5).epsilon, 1)
    1.6
    >>> round(bound_by_threshold(scores, delta=1e-5, method="Gaussian").epsilon, 1)
    3.9
    """
    check_delta(delta)
    check_choice("method", method, (CLOPPER_PEARSON, GAUSSIAN))
    choosing, judging = scores.halves(seed)
    threshold = _best_threshold(choosing, delta, confidence, method)
    smallest, largest = (float(rate[0]) for rate in _rates(judging, np.array([threshold]), confidence))
    mu = float(mu_of_rates(smallest, largest))
    if method == GAUSSIAN:
        epsilon, assumes = epsilon_of_mu(mu, delta), GAUSSIAN_CURVE
    else:
        epsilon, assumes = float(epsilon_of_rates(smallest, largest, delta)), INDEPENDENT
    details = {
        "threshold": threshold,
        "true_positive_rate_at_least": smallest,
        "false_positive_rate_at_most": largest,
        "judged_on": len(judging),
    }
    return LowerBound(epsilon, confidence, method, assumes, {**details, "mu": mu} if method == GAUSSIAN else details)


def best_of(kinds: dict[str, Scores], *, delta: float, confidence: float = 0.95, seed: int = 0) -> str:
    """Of several kinds of scores of the same examples, that which promises most on the half on which thresholds are chosen.

    So a bound on the other half keeps its confidence.

    >>> took_part = np.arange(400) % 2 == 0
    >>> best_of({"blind": Scores(np.zeros(400), took_part), "seeing": Scores(took_part * 1.0, took_part)}, delta=1e-5)
    'seeing'
    """
    promised = {}
    for kind, scores in kinds.items():
        choosing, _ = scores.halves(seed)
        threshold = np.array([_best_threshold(choosing, delta, confidence, CLOPPER_PEARSON)])
        promised[kind] = float(epsilon_of_rates(*_rates(choosing, threshold, confidence), delta)[0])
    return max(promised, key=lambda kind: promised[kind])


def _best_threshold(scores: Scores, delta: float, confidence: float, method: str) -> float:
    thresholds = _thresholds(scores)
    # As if each had to hold at once: else the best would be one that few examples, and luck, decide.
    rates = _rates(scores, thresholds, 1 - (1 - confidence) / len(thresholds))
    promised = mu_of_rates(*rates) if method == GAUSSIAN else epsilon_of_rates(*rates, delta)
    return float(thresholds[int(np.argmax(promised))])


def _thresholds(scores: Scores) -> Any:
    """Places between neighbouring scores, dense at both ends, where few examples decide."""
    found = np.unique(scores.values)
    between = np.append((found[1:] + found[:-1]) / 2, found[-1] + 1.0)
    if len(between) <= _MOST_THRESHOLDS:
        return between
    steps = np.geomspace(1, len(between) / 2, _MOST_THRESHOLDS // 2).astype(int)
    return between[np.unique(np.concatenate([steps - 1, len(between) - steps]))]


def _rates(scores: Scores, thresholds: np.ndarray, confidence: float) -> tuple[Any, Any]:
    included, excluded = np.sort(scores.included), np.sort(scores.excluded)
    for name, found in (("took part", included), ("did not", excluded)):
        check_count(f"the number of examples that {name}, in each half of the scores,", len(found))
    above = [len(found) - np.searchsorted(found, thresholds) for found in (included, excluded)]
    return rates_at(above[0], len(included), above[1], len(excluded), confidence=confidence)
