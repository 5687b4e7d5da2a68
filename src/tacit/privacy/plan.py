"""The privacy plan: one frozen object from which everything that runs, and everything that is claimed, is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tacit.privacy import accounting
from tacit.privacy.beside import Beside
from tacit.privacy.clipping import Clipping, Flat, clipping_from_dict
from tacit.privacy.driven import LossDriven
from tacit.privacy.schedules import Constant, NoiseSchedule, levels, schedule_from_dict
from tacit.privacy.validation import UserError, check_count, check_positive, check_probability, check_steps, steps_of

if TYPE_CHECKING:
    from tacit.privacy.ledger import Ledger
    from tacit.privacy.mechanism import GaussianMechanism
    from tacit.privacy.randomness import Randomness
    from tacit.privacy.sampling import PoissonSampler


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Sampling rate, number of steps, clipping and noise of a whole training run.

    `whole_releases` are the noise multipliers of releases in which every training example takes part, made before the first step:
    of statistics, with which inputs are standardised.

    *Guarantee.* The sampler, the mechanism and the accounting event all come from the same values, so what runs and what is
    claimed cannot differ. `sample_rate`, `steps` and `expected_batch_size` are public constants, fixed before training.

    >>> plan = PrivacyPlan(sample_rate=1024 / 50000, steps=1440, noise=Constant(1.54), clipping=Flat(0.1))
    >>> round(plan.epsilon(delta=1e-5), 3)
    2.365
    """

    sample_rate: float
    steps: int
    clipping: Clipping = dataclasses.field(default_factory=lambda: Flat(1.0))
    noise: NoiseSchedule = dataclasses.field(default_factory=lambda: Constant(1.0))
    expected_batch_size: float | None = None
    whole_releases: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", check_probability("sample_rate", self.sample_rate))
        object.__setattr__(self, "steps", check_steps(self.steps))
        if self.expected_batch_size is not None:
            size = check_positive("expected_batch_size", self.expected_batch_size)
            object.__setattr__(self, "expected_batch_size", size)
        whole = tuple(check_positive("whole_releases", sigma) for sigma in self.whole_releases)
        object.__setattr__(self, "whole_releases", whole)
        if not isinstance(self.clipping, Clipping):
            raise UserError(
                f"clipping must be Flat(...), Grouped(...), Automatic(...) or Adaptive(...), not {self.clipping!r}"
            )
        if not isinstance(self.noise, NoiseSchedule):
            raise UserError(f"noise must be a schedule such as Constant(1.0), not {self.noise!r}")
        if not getattr(self.clipping, "amplified", True) and self.sample_rate != 1.0:
            raise UserError(
                "what is clipped so depends on earlier batches, so that sampling amplifies nothing: the plan must be accounted "
                f"at a sample_rate of 1, not {self.sample_rate:g}"
            )
        if sum(number.share for number in self.beside) >= 1:
            raise UserError("what is released beside the gradient takes all of the privacy; give it smaller shares")

    @classmethod
    def for_examples(
        cls,
        examples: int,
        *,
        batch_size: float,
        epochs: float,
        clipping: Clipping | None = None,
        noise: NoiseSchedule | None = None,
        whole_releases: Sequence[float] = (),
    ) -> PrivacyPlan:
        """A plan in the usual words: how many examples there are, the expected batch size, and passes over the data.

        The number of examples becomes a public constant: it is part of the plan, which is shown to others.

        >>> plan = PrivacyPlan.for_examples(60000, batch_size=600, epochs=20)
        >>> plan.sample_rate, plan.steps
        (0.01, 2000)
        """
        check_count("examples", examples)
        check_positive("batch_size", batch_size)
        check_positive("epochs", epochs)
        if batch_size > examples:
            raise UserError(
                f"batch_size {batch_size:g} is larger than the {examples} training examples; choose at most {examples}"
            )
        rate = batch_size / examples
        return cls(
            sample_rate=rate,
            steps=steps_of(epochs, rate),
            expected_batch_size=batch_size,
            clipping=clipping or Flat(1.0),
            noise=noise or Constant(1.0),
            whole_releases=tuple(whole_releases),
        )

    @property
    def beside(self) -> tuple[Beside, ...]:
        """The numbers that are released with each gradient, for a share of its privacy.

        >>> from tacit.privacy import Adaptive
        >>> [number.name for number in PrivacyPlan(sample_rate=0.1, steps=10, clipping=Adaptive(1.0)).beside]
        ['within']
        """
        clipping, noise = getattr(self.clipping, "beside", ()), getattr(self.noise, "beside", ())
        return (*clipping, *noise)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """The multiplier of the gradient alone, in a release of this multiplier: what is released beside it has its share.

        *Guarantee.* Gradient and numbers together are one Gaussian release of multiplier `noise_multiplier`.

        >>> from tacit.privacy import Adaptive
        >>> PrivacyPlan(sample_rate=0.1, steps=10, clipping=Adaptive(1.0, share=0.19)).gradient_multiplier(0.9)
        1.0
        """
        return noise_multiplier / math.sqrt(1 - sum(number.share for number in self.beside))

    def noise_multiplier(self, step: int) -> float:
        """sigma_t of step t = 0 .. steps-1; a step outside the plan does not exist.

        >>> PrivacyPlan(sample_rate=0.1, steps=10, noise=Constant(2.0)).noise_multiplier(9)
        2.0
        """
        if not 0 <= step < self.steps:
            raise UserError(f"the plan has {self.steps} steps, so there is no step {step}; the budget is spent")
        return float(self.noise.multiplier(step, self.steps))

    def levels(self) -> tuple[tuple[float, int], ...]:
        """The distinct noise multipliers of the plan's steps, with their counts.

        >>> PrivacyPlan(sample_rate=0.1, steps=10, noise=Constant(2.0)).levels()
        ((2.0, 10),)
        """
        return levels(self.noise, self.steps)

    def event(self) -> Any:
        """The whole plan as an event of dp-accounting.

        >>> type(PrivacyPlan(sample_rate=0.1, steps=10).event()).__name__
        'ComposedDpEvent'
        """
        return accounting.composed_event(self.sample_rate, self.levels(), self.whole_releases)

    def epsilon(self, delta: float, *, accountant: str = "pld") -> float:
        """The epsilon of the whole plan at this delta, for adding or removing one example.

        >>> plan = PrivacyPlan(sample_rate=600 / 60000, steps=2000, noise=Constant(1.38))
        >>> round(plan.epsilon(1e-5, accountant="rdp"), 3)
        1.641
        """
        return self.epsilon_after(self.levels(), delta, whole=self.whole_releases, accountant=accountant)

    def epsilon_after(
        self,
        levels: accounting.Levels,
        delta: float,
        *,
        whole: Sequence[float] = (),
        accountant: str = "pld",
        coarse: bool = False,
    ) -> float:
        """The epsilon of releases with these multipliers, and of those of all examples at once (`whole`).

        Where noise follows what was released, it is the whole of the filter's, however little of it was used so far: the sum of
        what happened to be used is no bound.

        *Guarantee.* An upper bound at any time, if the releases were those of this plan's mechanism.

        >>> PrivacyPlan(sample_rate=0.1, steps=10).epsilon_after([], delta=1e-5)
        0.0
        """
        if isinstance(self.noise, LossDriven):
            return self.noise.epsilon(delta, tuple(whole))
        return accounting.epsilon_of(self.sample_rate, levels, delta, whole=whole, accountant=accountant, coarse=coarse)

    def calibrated(self, *, epsilon: float, delta: float) -> PrivacyPlan:
        """The same plan with its noise scaled so that epsilon is reached: never exceeded, and missed by less than 0.5%.

        >>> plan = PrivacyPlan(sample_rate=0.02, steps=500).calibrated(epsilon=3.0, delta=1e-5)
        >>> 0.995 * 3.0 < plan.epsilon(delta=1e-5) <= 3.0
        True
        """
        if isinstance(self.noise, LossDriven):
            noise = self.noise.calibrated(
                self.sample_rate, self.steps, epsilon=epsilon, delta=delta, whole=self.whole_releases
            )
            return dataclasses.replace(self, noise=noise)
        factor = accounting.calibrated_scale(
            self.sample_rate,
            lambda scale: levels(self.noise.scaled(scale), self.steps),
            epsilon=epsilon,
            delta=delta,
            whole=self.whole_releases,
        )
        return dataclasses.replace(self, noise=self.noise.scaled(factor))

    def sampler(self, examples: int, randomness: Randomness) -> PoissonSampler:
        """The sampler of this plan over so many examples.

        >>> from tacit.privacy import Randomness
        >>> PrivacyPlan(sample_rate=0.5, steps=10).sampler(100, Randomness.from_seed(0)).sample_rate
        0.5
        """
        from tacit.privacy.sampling import PoissonSampler

        return PoissonSampler(examples, self.sample_rate, randomness)

    def mechanism(self, randomness: Randomness, ledger: Ledger) -> GaussianMechanism:
        """The mechanism of this plan, which writes to the ledger before each release.

        >>> from tacit.privacy import Ledger, Randomness
        >>> plan = PrivacyPlan(sample_rate=0.5, steps=10, expected_batch_size=50)
        >>> plan.mechanism(Randomness.from_seed(0), Ledger.in_memory(plan, delta=1e-5)).next_step
        0
        """
        from tacit.privacy.mechanism import GaussianMechanism

        return GaussianMechanism(self, randomness, ledger)

    def to_dict(self) -> dict[str, Any]:
        """A plain description, from which `from_dict` makes the same plan.

        >>> plan = PrivacyPlan(sample_rate=0.1, steps=10)
        >>> PrivacyPlan.from_dict(plan.to_dict()) == plan
        True
        """
        described = {
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "expected_batch_size": self.expected_batch_size,
            "clipping": self.clipping.to_dict(),
            "noise": self.noise.to_dict(),
        }
        return {**described, "whole_releases": list(self.whole_releases)} if self.whole_releases else described

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> PrivacyPlan:
        """The plan that `to_dict` described."""
        try:
            fields = dict(description)
            clipping, noise = (
                clipping_from_dict(fields.pop("clipping")),
                schedule_from_dict(fields.pop("noise")),
            )
            return cls(clipping=clipping, noise=noise, **fields)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the privacy plan cannot be read: {error}") from None
