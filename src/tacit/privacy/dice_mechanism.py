"""DiceSGD's release: the clipped sum and the clipped error, with noise; what clipping cut off is kept for later steps."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.privacy.dice import ErrorFeedback
from tacit.privacy.mechanism import ClippedSum, GaussianMechanism, PrivateGradient
from tacit.privacy.validation import UserError


class DiceMechanism:
    """Feeds the clipping error back, and releases through the Gaussian mechanism of a plan with `ErrorFeedback` clipping.

    The error is *private data* and stays in here: it is in no ledger, checkpoint or log. A mechanism made anew, after an
    interruption too, begins with an error of 0.

    *Guarantee.* Each release is one of the Gaussian mechanism, in the ledger before its noise is drawn. What noise is added to
    moves by at most the plan's sensitivity C1 + 2 B C2 when one example is added or removed, now or in any earlier batch, for
    every past of the run: the error is clipped to C2, and counts 0 if it is not finite. A plan that claims amplification by
    sampling, and a sum clipped in another way than the plan's, are refused.

    >>> from tacit.privacy import Flat, Ledger, Randomness
    >>> from tacit.privacy.dice import DicePlan
    >>> plan = DicePlan(examples=10, batch_size=1, steps=2, clipping_norm=1.0, error_norm=1.0, noise_std=0.0).accounted()
    >>> gaussian = plan.mechanism(Randomness.from_operating_system(), Ledger.in_memory(plan, delta=1e-5))
    >>> mechanism = DiceMechanism(gaussian)
    >>> clipped = ClippedSum({"weight": torch.tensor([1.0])}, norms=torch.tensor([[1.5]]), clipping=plan.clipping)
    >>> whole = ClippedSum({"weight": torch.tensor([1.5])}, norms=torch.tensor([[1.5]]), clipping=Flat(1e30))
    >>> [float(mechanism.release(clipped, whole).gradients["weight"]) for _ in range(2)]
    [1.0, 1.5]
    """

    def __init__(self, mechanism: GaussianMechanism) -> None:
        clipping = mechanism.plan.clipping
        if not isinstance(clipping, ErrorFeedback):
            raise UserError(f"error feedback needs a plan that accounts for it, not one with {clipping}; use DicePlan")
        if mechanism.plan.beside:
            raise UserError("error feedback releases nothing beside the gradient; use DicePlan")
        if mechanism.plan.expected_batch_size != clipping.batch_size:
            raise UserError(
                f"the plan divides by {mechanism.plan.expected_batch_size}, its clipping counts on {clipping.batch_size:g}; "
                "make both the expected batch size"
            )
        self._mechanism = mechanism
        self._clipping = clipping
        self._error: dict[str, Tensor] = {}

    def release(self, clipped: ClippedSum, unclipped: ClippedSum, *, sampled_by: str = "caller") -> PrivateGradient:
        """Pay for, and make, one release: (clipped sum + noise) / B + clip(e_t, C2); then e_{t+1} is kept.

        `unclipped` is the sum of the same examples' gradients at a clipping norm that none of them reaches.
        """
        if clipped.clipping != self._clipping:
            raise UserError(f"the sum was clipped by {clipped.clipping}, the plan accounts for {self._clipping}")
        if set(clipped.gradients) != set(unclipped.gradients):
            raise UserError("the clipped and the unclipped sum must be of the same parameters")
        size = self._clipping.batch_size
        # In double precision: an error far outside its ball still has to lose what is released of it.
        sums = {name: gradient.double() for name, gradient in clipped.gradients.items()}
        error = self._error or {name: torch.zeros_like(gradient) for name, gradient in sums.items()}
        fed_back = _clipped_to(error, self._clipping.error_norm)
        direction = {name: gradient + size * fed_back[name] for name, gradient in sums.items()}
        private = self._mechanism.release(
            ClippedSum(direction, clipped.norms, self._clipping, clipped.not_finite), sampled_by=sampled_by
        )
        # Only now: nothing is taken from the error by a release that was not made.
        self._error = {
            name: error[name] + (unclipped.gradients[name].double() - direction[name]) / size for name in direction
        }
        return private


def _clipped_to(error: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    """The tensors, as one long vector, scaled down to the bound; zeros if they are not finite.

    *Guarantee.* A vector of norm at most `bound` (up to rounding), whatever the error.

    >>> _clipped_to({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)
    {'a': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in error.values()])))
    if not norm < float("inf"):
        return {name: torch.zeros_like(part) for name, part in error.items()}
    factor = min(1.0, bound / norm) if norm > 0 else 1.0
    return {name: part * factor for name, part in error.items()}
