"""The Gaussian mechanism: the only place where a clipped sum becomes something that may leave.

ClippedSum  --(ledger written and flushed, then noise)-->  PrivateGradient
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.privacy.clipping import Clipping
from tacit.privacy.validation import UserError

if TYPE_CHECKING:
    from tacit.privacy.ledger import Ledger
    from tacit.privacy.plan import PrivacyPlan
    from tacit.privacy.randomness import Randomness


@dataclass(frozen=True)
class ClippedSum:
    """A sum of clipped per-example gradients. It is *private data*: only the mechanism may turn it into something else.

    `gradients` has one tensor a trainable parameter, by name, in float32 or better (rounding to half precision before the noise
    would let one example move the sum by more than its sensitivity); `norms` ([examples, groups]) are the norms before clipping,
    in the order of the examples, `nan` or `inf` where an example's gradient was not finite (it contributes nothing, and is
    counted in `not_finite`).

    *Guarantee.* Adding or removing one example moves `gradients`, as one long vector, by at most `sensitivity`
    (up to the rounding of floating-point arithmetic).

    >>> from tacit.privacy import Flat
    >>> summed = ClippedSum({"weight": torch.zeros(3)}, norms=torch.zeros(0, 1), clipping=Flat(0.5))
    >>> summed.sensitivity, summed.examples
    (0.5, 0)
    """

    gradients: Mapping[str, Tensor]
    norms: Tensor
    clipping: Clipping
    not_finite: int = 0

    @property
    def sensitivity(self) -> float:
        """How far one example can move the sum."""
        return self.clipping.sensitivity

    @property
    def examples(self) -> int:
        """How many examples took part. Private: it is the realised batch size."""
        return len(self.norms)


_SEAL = object()


@dataclass(frozen=True)
class PrivateGradient:
    """A noisy mean gradient: the clipped sum plus noise, divided by the *expected* batch size. Free to use.

    Only `GaussianMechanism.release` makes one, so whatever holds one has been paid for.

    >>> PrivateGradient({}, step=0, noise_multiplier=1.0, noise_stds={})
    Traceback (most recent call last):
    ...
    TypeError: a PrivateGradient is made by GaussianMechanism.release alone
    """

    gradients: Mapping[str, Tensor]
    step: int
    noise_multiplier: float
    noise_stds: Mapping[str, float]
    _seal: InitVar[object] = None  # not kept, so that dataclasses.replace cannot make another one

    def __post_init__(self, _seal: object) -> None:
        if _seal is not _SEAL:
            raise TypeError("a PrivateGradient is made by GaussianMechanism.release alone")


class GaussianMechanism:
    """Adds the plan's noise to clipped sums, one release a step, each in the ledger before its noise is drawn.

    *Guarantee.* Each release adds independent noise N(0, s_j^2), drawn from `randomness` in double precision, to every
    coordinate of group j, with the s_j of the plan's clipping for the plan's noise multiplier at this step, whatever the batch:
    an empty one too. The step is the number of releases in the ledger, so the composition of all releases is the plan's own,
    never more, however often a run was interrupted. A sum clipped in another way than the plan's, and a ledger opened with
    another plan, are refused.

    >>> from tacit.privacy import Flat, Ledger, PrivacyPlan, Randomness
    >>> plan = PrivacyPlan(sample_rate=0.1, steps=2, clipping=Flat(1.0), expected_batch_size=10)
    >>> ledger = Ledger.in_memory(plan, delta=1e-5)
    >>> mechanism = GaussianMechanism(plan, Randomness.from_operating_system(), ledger)
    >>> empty = ClippedSum({"weight": torch.zeros(3)}, norms=torch.zeros(0, 1), clipping=Flat(1.0))
    >>> private = mechanism.release(empty)
    >>> bool((private.gradients["weight"] != 0).all()), ledger.releases
    (True, 1)
    """

    def __init__(self, plan: PrivacyPlan, randomness: Randomness, ledger: Ledger) -> None:
        if plan.expected_batch_size is None:
            raise UserError("the plan needs an expected_batch_size to train with; PrivacyPlan.for_examples sets it")
        if ledger.plan != plan:
            raise UserError("the ledger was opened with another privacy plan; a run cannot change its plan")
        self.plan = plan
        self._batch_size = plan.expected_batch_size
        self._randomness = randomness
        self._ledger = ledger

    @property
    def next_step(self) -> int:
        """The step of the next release: the number of releases in the ledger."""
        return self._ledger.releases

    @property
    def steps_left(self) -> int:
        """How many releases the plan still has."""
        return self.plan.steps - self._ledger.releases

    def release(self, summed: ClippedSum, *, sampled_by: str = "caller") -> PrivateGradient:
        """Pay for, and make, one release. `sampled_by="tacit"` says that the plan's own sampler drew the batch."""
        if any(gradient.dtype not in (torch.float32, torch.float64) for gradient in summed.gradients.values()):
            raise UserError(
                "a clipped sum must be in float32 or float64: in half precision its sensitivity does not hold"
            )
        if summed.clipping != self.plan.clipping:
            raise UserError(f"the sum was clipped by {summed.clipping}, the plan accounts for {self.plan.clipping}")
        step = self.next_step
        sigma = self.plan.noise_multiplier(step)
        stds = summed.clipping.noise_stds(sigma)
        names = list(summed.gradients)
        std_of = {name: stds[group] for name, group in zip(names, summed.clipping.group_of(names), strict=True)}
        self._ledger.record_release(
            noise_multiplier=sigma,
            sample_rate=self.plan.sample_rate,
            sampled_by=sampled_by,
            reproducible=self._randomness.reproducible,
        )
        gradients = {name: self._noisy(summed.gradients[name], std_of[name]) for name in names}
        return PrivateGradient(gradients, step, sigma, std_of, _SEAL)

    def _noisy(self, clipped: Tensor, std: float) -> Tensor:
        # On the CPU and in double precision, whatever the device: some accelerators have no doubles.
        noise = torch.from_numpy(self._randomness.normal(tuple(clipped.shape))).mul_(std)
        return ((clipped.cpu().double() + noise) / self._batch_size).to(clipped.device, clipped.dtype)
