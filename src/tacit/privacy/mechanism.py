"""The Gaussian mechanism: the only place where a clipped sum becomes something that may leave.

ClippedSum  --(ledger written and flushed, then noise)-->  PrivateGradient
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.privacy.beside import LOSS, WITHIN, Adaptive
from tacit.privacy.clipping import Clipping
from tacit.privacy.driven import LossDriven
from tacit.privacy.ledger import released_levels
from tacit.privacy.normals import noisy_mean
from tacit.privacy.statistics import BoundedSum
from tacit.privacy.validation import UserError, check_finite, check_positive

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
    losses: Tensor | None = None  # [examples], for a plan that releases their mean

    @property
    def sensitivity(self) -> float:
        """How far one example can move the sum."""
        return self.clipping.sensitivity

    @property
    def examples(self) -> int:
        """How many examples took part. Private: it is the realised batch size."""
        return len(self.norms)


_SEAL = object()
_BLOCK = 2**14  # numbers drawn at once: 128 KiB, so that what works on them stays in the cache


@dataclass(frozen=True)
class PrivateGradient:
    """A noisy mean gradient: the clipped sum plus noise, divided by the *expected* batch size. Free to use.

    `beside` are the numbers released with it, means over the expected batch size as well.

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
    beside: Mapping[str, float] = field(default_factory=dict)
    _seal: InitVar[object] = None  # not kept, so that dataclasses.replace cannot make another one

    def __post_init__(self, _seal: object) -> None:
        if _seal is not _SEAL:
            raise TypeError("a PrivateGradient is made by GaussianMechanism.release alone")


class GaussianMechanism:
    """Adds the plan's noise to clipped sums, one release a step, each in the ledger before its noise is drawn.

    *Guarantee.* Each release adds independent noise N(0, s_j^2), drawn from `randomness` in double precision, to every
    coordinate of group j, with the s_j of the plan's clipping for the plan's noise multiplier at this step, whatever the batch:
    an empty one too; what the plan releases beside the gradient is part of the same release. Each number is rounded, after its
    noise, to a grid that the s_j and the expected batch size alone decide (`normals.grid_of`). The step is the number of releases
    in the ledger, so the composition of all releases is the plan's own, never more, however often a run was interrupted. A sum
    clipped in another way than the plan's, and a ledger opened with another plan, are refused. Where the plan's
    clipping or noise follows what was released, `clipping` and the multiplier are functions of this mechanism's own releases, and
    its filter is asked before each.

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
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.clipping: Clipping = plan.clipping  # of the next sum
        self._loss: float | None = None  # released, and smoothed

    @property
    def next_step(self) -> int:
        """The step of the next release: the number of releases in the ledger."""
        return self._ledger.releases

    @property
    def steps_left(self) -> int:
        """How many releases the plan still has; none, if its filter allows no more."""
        left = self.plan.steps - self._ledger.releases
        if left > 0 and isinstance(self.plan.noise, LossDriven):
            used = released_levels(self._ledger.entries)
            return left if self.plan.noise.allows(self.plan.sample_rate, used, self._noise_multiplier()) else 0
        return left

    def _noise_multiplier(self) -> float:
        planned = self.plan.noise_multiplier(self.next_step)  # refuses a step that the plan does not have
        return self.plan.noise.multiplier_at(self._loss) if isinstance(self.plan.noise, LossDriven) else planned

    @property
    def state(self) -> dict[str, float]:
        """What the next release depends on, of what was released: free to store."""
        found = {} if self._loss is None else {"loss": self._loss}
        if isinstance(self.clipping, Adaptive):
            found["clipping_norm"] = self.clipping.clipping_norm
        return found

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a stored `state`.

        *Guarantee.* Whatever it says, noise stays in proportion to the bound, and the filter counts what is in the ledger.
        """
        if isinstance(self.clipping, Adaptive) and "clipping_norm" in state:
            self.clipping = self.clipping.at(check_positive("clipping_norm", state["clipping_norm"]))
        self._loss = check_finite("loss", state["loss"]) if "loss" in state else None

    def release(self, summed: ClippedSum, *, sampled_by: str = "caller") -> PrivateGradient:
        """Pay for, and make, one release. `sampled_by="tacit"` says that the plan's own sampler drew the batch."""
        if any(gradient.dtype not in (torch.float32, torch.float64) for gradient in summed.gradients.values()):
            raise UserError(
                "a clipped sum must be in float32 or float64: in half precision its sensitivity does not hold"
            )
        if summed.clipping != self.clipping:
            raise UserError(f"the sum was clipped by {summed.clipping}, the plan accounts for {self.clipping}")
        step = self.next_step
        sigma = self._noise_multiplier()
        if self.steps_left <= 0:
            raise UserError("the filter allows no further release: the budget is spent")
        stds = summed.clipping.noise_stds(self.plan.gradient_multiplier(sigma))
        numbers = [(number, number.sum_over(summed)) for number in self.plan.beside]
        names = tuple(summed.gradients)
        if names not in self._groups:
            self._groups[names] = summed.clipping.group_of(names)
        std_of = {name: stds[group] for name, group in zip(names, self._groups[names], strict=True)}
        self._ledger.record_release(
            noise_multiplier=sigma,
            sample_rate=self.plan.sample_rate,
            sampled_by=sampled_by,
            reproducible=self._randomness.reproducible,
        )
        gradients = self._noisy(list(summed.gradients.values()), list(std_of.values()))
        beside = {
            number.name: float(self._noisy([torch.tensor([total], dtype=torch.float64)], [number.noise_std(sigma)])[0])
            for number, total in numbers
        }
        self._follow(beside)
        return PrivateGradient(dict(zip(names, gradients, strict=True)), step, sigma, std_of, beside, _SEAL)

    def _follow(self, beside: Mapping[str, float]) -> None:
        """What the next release takes from the numbers of this one."""
        if isinstance(self.clipping, Adaptive):
            self.clipping = self.clipping.moved(beside[WITHIN] + 0.5)
        if isinstance(self.plan.noise, LossDriven):
            self._loss = self.plan.noise.smoothed(self._loss, beside[LOSS])

    def release_whole(self, summed: BoundedSum, *, what: str) -> Tensor:
        """Pay for, and make, the plan's next release in which every example takes part: the sum with noise, [blocks, width].

        *Guarantee.* Each block is divided by its bound, so that one example moves the whole by at most `summed.sensitivity`;
        independent noise of `noise_multiplier * sensitivity` is added to every coordinate, in double precision, and each block
        is rounded to the grid of its noise. A plan without such a release, or whose releases were all made, refuses.

        >>> from tacit.privacy import Ledger, PrivacyPlan, Randomness
        >>> plan = PrivacyPlan(sample_rate=0.1, steps=2, expected_batch_size=10, whole_releases=(8.0,))
        >>> mechanism = plan.mechanism(Randomness.from_operating_system(), Ledger.in_memory(plan, delta=1e-5))
        >>> mechanism.release_whole(BoundedSum.over([torch.ones(5, 1, 3)], [1.0]), what="the sum").shape
        torch.Size([1, 3])
        """
        made = self._ledger.whole_releases
        if made >= len(self.plan.whole_releases):
            raise UserError(
                f"the plan has {len(self.plan.whole_releases)} releases of all examples at once, and they were made; "
                "what was released then is lost: start a new run"
                if made
                else "the plan pays for no statistics of the training set; give it whole_releases"
            )
        sigma = self.plan.whole_releases[made]
        self._ledger.record_whole_release(noise_multiplier=sigma, what=what, reproducible=self._randomness.reproducible)
        # Noise in proportion to its bound on each block: the same as on blocks that were divided by their bounds.
        stds = [sigma * summed.sensitivity * bound for bound in summed.bounds]
        return torch.stack(self._noisy(list(summed.total.double().cpu()), stds, divisor=1.0))

    def _noisy(self, clipped: list[Tensor], stds: list[float], *, divisor: float | None = None) -> list[Tensor]:
        """(clipped + N(0, std^2)) / expected batch size for each tensor, in double precision, on the grid of its noise.

        All of them are one long vector, worked on in blocks, each with noise of its own: small tensors share a draw, and no noise
        is held but that of one block. Each tensor comes back laid out in memory as it was.
        """
        divisor = self._batch_size if divisor is None else divisor
        # On the CPU, whatever the device: some accelerators have no doubles.
        flat = torch.cat([_flat(tensor) for tensor in clipped])
        private = torch.empty_like(flat)
        sums, means = flat.numpy(), private.numpy()
        runs = _runs([tensor.numel() for tensor in clipped], stds)
        for start in range(0, len(sums), _BLOCK):
            noise = self._randomness.normal(min(_BLOCK, len(sums) - start))
            for begin, end, std in runs:
                first, last = max(begin, start), min(end, start + _BLOCK)
                if first < last:
                    noisy_mean(sums[first:last], noise[first - start : last - start], std, divisor, means[first:last])
        return _unflat(private, clipped)


def _runs(sizes: Iterable[int], stds: Iterable[float]) -> list[tuple[int, int, float]]:
    """(begin, end, std) of the stretches of one long vector that have the same std.

    >>> _runs([3, 4, 2], [0.5, 0.5, 0.1])
    [(0, 7, 0.5), (7, 9, 0.1)]
    """
    runs: list[tuple[int, int, float]] = []
    end = 0
    for size, std in zip(sizes, stds, strict=True):
        begin = runs.pop()[0] if runs and runs[-1][2] == std else end
        end += size
        runs.append((begin, end, std))
    return runs


@lru_cache(maxsize=4096)
def _gapless(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether the numbers of a tensor lie side by side in memory, in whatever order of the axes.

    >>> _gapless(torch.Size([2, 3]), (1, 2)), _gapless(torch.Size([2, 3]), (4, 1)), _gapless(torch.Size([2, 3]), (0, 1))
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """The numbers of a tensor on the CPU, in the order of its memory if they lie side by side there."""
    tensor = tensor.detach().cpu()
    if _gapless(tensor.shape, tensor.stride()):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _unflat(flat: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """The opposite of `_flat` for the tensors side by side: on their devices, of their types, and laid out as they are."""
    parts: list[Tensor] = []
    begin = 0
    for tensor in like:
        end = begin + tensor.numel()
        if _gapless(tensor.shape, tensor.stride()):
            part = flat.as_strided(tensor.shape, tensor.stride(), begin)
        else:
            part = flat[begin:end].view(tensor.shape)
        parts.append(part.to(tensor.device, tensor.dtype))
        begin = end
    return parts
