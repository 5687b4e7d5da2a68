"""Who sees every release of a training, and knows what gradient one example would have: the strongest attacker there is.

Release t, in the direction of a canary whose clipped gradient has norm C, and in units of its noise, is x_t = z_t + N(0, 1). If
the canary is in the data, z_t is mu_t = 1/sigma_t with probability q, and else 0. Best to look at is the likelihood ratio

    sum over t of log(1 - q + q exp(mu_t x_t - mu_t^2 / 2)),

and nothing computed from the releases tells more about the canary, if the mechanism does what it claims. The second score is for
a mechanism that does not: if noise repeats, what a canary adds shows in how much its releases *differ* from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tacit.audit.scores import Scores
from tacit.privacy.clipping import Automatic, Clipping, Flat, Grouped
from tacit.privacy.driven import LossDriven
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError

LIKELIHOOD, SPREAD = "likelihood ratio", "spread over the steps"
_FEWEST_STEPS = 8  # of which a spread says anything
_FACTORS, _LARGEST_EXPONENT = 8, 40.0  # e^(8 * 40) is a float


class Listener:
    """Hears of each release, for many canaries at once, and scores each of them.

    `hear` takes, for each clipping group, the released sums (of the whole batch, in units of that group's noise) along each
    canary's gradient: [canaries]. `strengths` are C_j / s_j of the groups at this step, whose squares add up to 1/sigma^2.

    >>> listener = Listener(canaries=2, sample_rate=1.0)
    >>> listener.hear([np.array([2.0, -1.0])], [0.5])
    >>> listener.scores(np.array([True, False]))["likelihood ratio"].values
    array([ 0.875, -0.625])
    """

    def __init__(self, canaries: int, sample_rate: float) -> None:
        self._rate = sample_rate
        self._ratio, self._product = np.zeros(canaries), np.ones(canaries)
        self._steps = 0
        self._mean, self._squares = np.zeros(canaries), np.zeros(canaries)

    def hear(self, along: list[NDArray[np.float64]], strengths: list[float]) -> None:
        """One more release."""
        projected = np.tensordot(np.array(strengths), np.array(along), axes=1)
        exponent = projected - sum(strength**2 for strength in strengths) / 2
        if self._rate == 1:
            self._ratio += exponent
        elif exponent.max() > _LARGEST_EXPONENT:
            self._ratio += np.logaddexp(math.log1p(-self._rate), math.log(self._rate) + exponent)
        else:
            self._product *= (1 - self._rate) + self._rate * np.exp(exponent)
        self._steps += 1
        if self._steps % _FACTORS == 0:
            self._settle()
        # Welford's running variance: sums of squares would lose what differs in the last digits.
        before = projected - self._mean
        self._mean += before / self._steps
        self._squares += before * (projected - self._mean)

    def _settle(self) -> None:
        """The logarithm of several factors at once: one a step would take most of the time."""
        self._ratio += np.log(self._product)
        self._product[:] = 1.0

    def scores(self, took_part: NDArray[np.bool_]) -> dict[str, Scores]:
        """The scores of each kind; `took_part` is by canary."""
        self._settle()
        found = {LIKELIHOOD: Scores(self._ratio, took_part)}
        if self._steps >= _FEWEST_STEPS:
            found[SPREAD] = Scores(self._squares / (self._steps - 1), took_part)
        return found


def strengths_at(plan: PrivacyPlan, step: int) -> tuple[list[float], list[float]]:
    """C_j / s_j and s_j of the plan's groups, as it claims them for this step.

    >>> strengths_at(PrivacyPlan(sample_rate=0.1, steps=1, clipping=Flat(0.5)), 0)
    ([1.0], [0.5])
    """
    stds = list(plan.clipping.noise_stds(plan.noise_multiplier(step)))
    return [norm / std for norm, std in zip(plan.clipping.clipping_norms, stds, strict=True)], stds


def check_audible(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan, if a listener can follow it: fixed bounds, and noise fixed beforehand.

    >>> check_audible(PrivacyPlan(sample_rate=0.1, steps=1)).steps
    1
    """
    if isinstance(plan.noise, LossDriven) or not isinstance(plan.clipping, Flat | Grouped | Automatic):
        kind = plan.noise if isinstance(plan.noise, LossDriven) else plan.clipping
        raise UserError(
            f"{type(kind).__name__} follows what was released, and this attack knows fixed bounds and fixed noise alone; "
            "choose --attack loss or --attack lira"
        )
    return plan


def renamed(clipping: Clipping, patterns: Mapping[int, str]) -> Clipping:
    """The same bounds and noise for parameters of other names: group j takes those that fit `patterns[j]`.

    >>> renamed(Grouped((("a",), ("b",)), (1.0, 2.0)), {0: "x.*", 1: "y.*"}).groups
    (('x.*',), ('y.*',))
    """
    if isinstance(clipping, Automatic):
        of = renamed(clipping.of, patterns)
        assert isinstance(of, Flat | Grouped)
        return Automatic(of, clipping.stability)
    if isinstance(clipping, Grouped):
        return Grouped(
            tuple((patterns[group],) for group in range(len(clipping.groups))),
            clipping.clipping_norms,
            clipping.noise_shape,
        )
    return clipping
