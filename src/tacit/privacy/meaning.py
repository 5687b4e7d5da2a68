"""What (epsilon, delta) means for one person: the best that anybody can do who tries to find out whether their example took part.

Somebody looks at everything that was released, and decides between two worlds: the example was in the training data, or it was
not. Whatever they do, (epsilon, delta)-differential privacy bounds the probability of being right in the one world by that of
being wrong in the other, in both directions (Kairouz, Oh & Viswanath, "The Composition Theorem for Differential Privacy", 2015).
With t the true-positive and f the false-positive rate of the decision "it was in":

    t <= e^epsilon f + delta     and     1 - f <= e^epsilon (1 - t) + delta.
"""

from __future__ import annotations

import math

from tacit.privacy.validation import check_count, check_delta, check_not_negative, check_probability


def factor_of(epsilon: float) -> float:
    """e^epsilon: how many times more probable one example can make anything that is concluded, delta aside.

    *Guarantee.* Infinite where it is too large for a float.

    >>> round(factor_of(3.0), 2)
    20.09
    """
    try:
        return math.exp(check_not_negative("epsilon", epsilon))
    except OverflowError:
        return math.inf


def most_true_positives(epsilon: float, delta: float, false_positive_rate: float) -> float:
    """The largest share of those who took part that anybody can find who wrongly names so large a share of those who did not.

    *Guarantee.* An upper bound for every attack on everything that was released, known or not, whatever else the attacker knows;
    and for each epsilon and delta there is a mechanism that reaches it.

    >>> round(most_true_positives(3.0, 1e-5, 0.01), 4)
    0.2009
    """
    check_delta(delta)
    check_probability("false_positive_rate", false_positive_rate)
    upper = 1 - (1 - delta - false_positive_rate) * math.exp(-check_not_negative("epsilon", epsilon))
    return min(factor_of(epsilon) * false_positive_rate + delta, upper, 1.0)


def most_accuracy(epsilon: float, delta: float) -> float:
    """The largest probability of deciding rightly, where it was as probable as not that the example took part.

    *Guarantee.* As for `most_true_positives`: (e^epsilon + delta) / (e^epsilon + 1), never exceeded and reached by a mechanism.

    >>> round(most_accuracy(3.0, 1e-5), 4)
    0.9526
    """
    check_delta(delta)
    odds = math.exp(-check_not_negative("epsilon", epsilon))
    return (1 + delta * odds) / (1 + odds)


def of_several_examples(epsilon: float, delta: float, count: int) -> tuple[float, float]:
    """The epsilon and delta for somebody with so many examples: k epsilon, and delta (1 + e^epsilon + ... + e^((k-1) epsilon)).

    *Guarantee.* They hold for adding or removing all of these examples at once. A delta of 1 or more guarantees nothing.

    >>> epsilon, delta = of_several_examples(1.0, 1e-5, 2)
    >>> epsilon, round(delta, 7)
    (2.0, 3.72e-05)
    """
    check_delta(delta)
    steps = range(check_count("count", count))
    return count * epsilon, delta * math.fsum(factor_of(step * epsilon) for step in steps)
