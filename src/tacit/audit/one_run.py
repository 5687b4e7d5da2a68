"""A lower bound on epsilon from one training run (Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", 2023).

Of m canaries, each takes part by its own fair coin. The auditor guesses the coins of r of them, and is right v times. If the run
is (epsilon, delta)-differentially private, v is hardly larger than Binomial(r, e^epsilon / (1 + e^epsilon)), *whatever* the
canaries do to each other: no independence of the scores is assumed.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit
from scipy.stats import binom

from tacit.audit.scores import Scores
from tacit.audit.thresholds import LowerBound, check_confidence
from tacit.privacy.validation import UserError, check_count, check_not_negative

ONE_RUN = "one-run"
NOTHING_MORE = "nothing but that each canary took part by its own fair coin"
_FEWEST_GUESSES = 8
_LARGEST_EPSILON = 100.0


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The probability of so many correct guesses, or more, under (epsilon, delta)-differential privacy is at most

    P[B >= v] + 2 m delta max over i = 1..v of P[v - i <= B < v] / i,     B ~ Binomial(r, e^epsilon / (1 + e^epsilon))

    (Theorem 5.2 and Corollary 5.4 of the paper).

    >>> round(p_value(100, 10, 10, math.log(3), 0.0), 6) == round(0.75**10, 6)
    True
    """
    check_count("canaries", canaries)
    check_count("guesses", guesses)
    if not 0 <= correct <= guesses <= canaries:
        raise UserError(f"there cannot be {correct} correct ones of {guesses} guesses on {canaries} canaries")
    accuracy = float(expit(check_not_negative("epsilon", epsilon)))
    at_least = float(binom.sf(correct - 1, guesses, accuracy))
    if check_not_negative("delta", delta) == 0 or correct == 0:
        return min(at_least, 1.0)
    back = np.arange(1, correct + 1)
    nearly = binom.sf(correct - back - 1, guesses, accuracy) - at_least
    return min(at_least + 2 * canaries * delta * float(np.max(nearly / back)), 1.0)


def check_few_enough(canaries: int, delta: float) -> int:
    """So many canaries, if 2 m delta <= 1, as `epsilon_of_guesses` needs it.

    >>> check_few_enough(1000, 1e-5)
    1000
    """
    if 2 * canaries * delta > 1:
        raise UserError(f"{canaries} canaries are too many for delta {delta:g}; take at most {math.floor(0.5 / delta)}")
    return canaries


def epsilon_of_guesses(canaries: int, guesses: int, correct: int, *, delta: float, confidence: float) -> float:
    """The largest epsilon that so many correct guesses contradict, by bisection, rounded down; 0 if none.

    *Confidence.* With probability `confidence` it lies below the true epsilon, if the number of guesses was fixed beforehand. The
    bound on the p-value rises with epsilon as long as 2 m delta <= 1 (it is then a mixture of two binomial tails), which is
    asked for, so that what one epsilon contradicts, each smaller one does.

    >>> round(epsilon_of_guesses(1000, 100, 100, delta=0.0, confidence=0.95), 3)      # q^100 = 0.05
    3.493
    """
    error = 1 - check_confidence(confidence)
    check_few_enough(canaries, delta)
    if p_value(canaries, guesses, correct, 0.0, delta) > error:
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    while high - low > 1e-6:
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) > error:
            high = middle
        else:
            low = middle
    return low


def bound_by_one_run(
    scores: Scores, *, delta: float, confidence: float = 0.95, guesses: int | None = None, seed: int = 0
) -> LowerBound:
    """The lower bound from the highest scores, guessed to be in, and as many of the lowest, guessed to be out.

    `guesses` is how many there are in all, chosen *beforehand*. Without, each of m, m/2, m/4, ... is tried, and the error
    probability is shared among them (a union bound), so that the best may be taken.

    *Confidence.* With probability `confidence` the bound lies below the true epsilon of the run.

    >>> took_part = np.random.default_rng(0).random(1000) < 0.5
    >>> bound_by_one_run(Scores(np.zeros(1000), took_part), delta=1e-5).epsilon       # who sees nothing proves nothing
    0.0
    >>> round(bound_by_one_run(Scores(took_part * 1.0, took_part), delta=1e-5).epsilon, 2)
    4.53
    """
    m = len(scores)
    if guesses is not None and check_count("guesses", guesses) > m:
        raise UserError(f"{guesses} guesses are more than the {m} canaries; choose at most {m}")
    tried = _numbers_of_guesses(m) if guesses is None else [guesses]
    # The order of equal scores is drawn by lot: it must not say who took part.
    lot = np.random.default_rng(seed).permutation(m)
    by_score = lot[np.argsort(scores.values[lot], kind="stable")]
    best = LowerBound(-1.0, confidence, ONE_RUN, NOTHING_MORE, {})
    each = 1 - (1 - check_confidence(confidence)) / len(tried)
    for count in tried:
        lowest, highest = count // 2, count - count // 2
        correct = int((~scores.took_part[by_score[:lowest]]).sum() + scores.took_part[by_score[m - highest :]].sum())
        epsilon = epsilon_of_guesses(m, count, correct, delta=delta, confidence=each)
        if epsilon > best.epsilon:
            details = {"canaries": m, "guesses": count, "correct": correct, "numbers_of_guesses_tried": len(tried)}
            best = LowerBound(epsilon, confidence, ONE_RUN, NOTHING_MORE, details)
    return best


def _numbers_of_guesses(canaries: int) -> list[int]:
    """
    >>> _numbers_of_guesses(100)
    [100, 50, 25, 12]
    """
    halvings = [canaries >> k for k in range(canaries.bit_length())]
    return [count for count in halvings if count >= _FEWEST_GUESSES] or [canaries]
