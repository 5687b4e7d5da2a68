"""Numbers that are released beside a gradient, as part of the same Gaussian release: how many examples lie within the clipping
norm, and the mean loss.

Each is a sum of one bounded number an example, and takes a *share* of the step's privacy. With a gradient of sensitivity C and
noise sigma C / sqrt(1 - shares), and numbers of bounds b_k with noise sigma b_k / sqrt(share_k), everything together, each part
divided by its noise, has sensitivity sqrt((1 - shares) + sum_k share_k) / sigma = 1 / sigma: one Gaussian release of multiplier
sigma, whatever the shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tacit.privacy.validation import UserError, check_finite, check_not_negative, check_positive

if TYPE_CHECKING:
    from torch import Tensor

    from tacit.privacy.mechanism import ClippedSum

WITHIN, LOSS = "within", "loss"


@dataclass(frozen=True)
class Beside:
    """A number released beside each gradient: which, how far one example can move its sum, and its share of the privacy.

    *Guarantee.* Adding or removing one example moves `sum_over` by at most `bound`, whatever the example, also if its gradient
    or loss is not finite.

    >>> Beside(LOSS, bound=2.0, share=0.01).noise_std(1.5)
    30.0
    """

    name: str
    bound: float
    share: float

    def noise_std(self, noise_multiplier: float) -> float:
        """The standard deviation of the noise on the sum, in a release of this multiplier.

        *Guarantee.* bound / noise_std = sqrt(share) / noise_multiplier.
        """
        return noise_multiplier * self.bound / math.sqrt(self.share)

    def sum_over(self, summed: ClippedSum) -> float:
        """The sum itself: *private data*, in double precision."""
        if self.name == WITHIN:
            bound = summed.clipping.clipping_norms[0]
            within = int((summed.norms[:, 0] <= bound).sum())  # what is not a number is not within
            return within - summed.examples / 2
        losses = summed.losses
        if losses is None or losses.shape != (summed.examples,):
            raise UserError("the plan releases the mean loss; make the ClippedGradient with with_losses=True")
        return float(_clamped(losses, self.bound).sum())


def _clamped(losses: Tensor, bound: float) -> Tensor:
    """Between 0 and the bound, in double precision; 0 for what is not a number."""
    return losses.detach().double().nan_to_num(nan=0.0).clamp(min=0.0, max=bound)


@dataclass(frozen=True)
class Adaptive:
    """Clip at a norm that follows a quantile of the gradients' norms.

    After Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021.

    Beside each gradient, the noisy fraction b of examples within the norm C is released, and C <- C exp(-rate (b - quantile)).
    `share` is the part of each step's privacy that pays for it; `clipping_norm` is where it begins.

    *Guarantee.* Adding or removing one example moves the clipped sum by at most the `clipping_norm` at that step, and the count
    of those within, each counted as 1/2 or -1/2, by at most 1/2. The norm depends on earlier releases alone, and the noise is in
    proportion to it, so that the multiplier is the plan's at every step.

    >>> clipping = Adaptive(1.0, quantile=0.5, rate=0.2)
    >>> round(clipping.moved(within=0.9).clipping_norm, 4), round(clipping.moved(within=0.1).clipping_norm, 4)
    (0.9231, 1.0833)
    """

    clipping_norm: float
    quantile: float = 0.5
    rate: float = 0.2
    share: float = 0.001

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "rate"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        if self.rate > 1:
            raise UserError(f"rate must be at most 1, not {self.rate!r}; 0.2 is usual")
        if not 0 < check_finite("quantile", self.quantile) < 1:
            raise UserError(f"quantile must lie strictly between 0 and 1, not {self.quantile!r}")
        object.__setattr__(self, "share", check_share(self.share))

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        return (self.clipping_norm,)

    @property
    def sensitivity(self) -> float:
        return self.clipping_norm

    @property
    def stability(self) -> None:
        return None

    @property
    def beside(self) -> tuple[Beside, ...]:
        """What is released with each gradient."""
        return (Beside(WITHIN, 0.5, self.share),)

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        return (noise_multiplier * self.clipping_norm,)

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        return (0,) * len(names)

    def moved(self, within: float) -> Adaptive:
        """The clipping of the next step, after so large a fraction of the examples was found, with noise, within the norm.

        *Guarantee.* A function of what was released alone. The norm moves by at most a factor of e^rate.
        """
        return self.at(self.clipping_norm * math.exp(-self.rate * (min(max(within, 0.0), 1.0) - self.quantile)))

    def at(self, clipping_norm: float) -> Adaptive:
        """The same with another norm.

        *Guarantee.* Never 0 and never infinite: it stays between 1e-12 and 1e12.
        """
        return replace(self, clipping_norm=min(max(clipping_norm, 1e-12), 1e12))

    def to_dict(self) -> dict[str, Any]:
        fields = {
            "clipping_norm": self.clipping_norm,
            "quantile": self.quantile,
            "rate": self.rate,
            "share": self.share,
        }
        return {"kind": "adaptive", **fields}


def check_share(share: float) -> float:
    """A share of the privacy: above 0 and at most a half, since the rest is the gradient's.

    *Guarantee.* The shares of two numbers leave something for the gradient unless both are a half.

    >>> check_share(0.01)
    0.01
    """
    number = check_not_negative("share", share)
    if not 0 < number <= 0.5:
        raise UserError(f"share must be above 0 and at most 0.5, not {share!r}; 0.001 to 0.01 is usual")
    return number
