"""DiceSGD's noise, and what it guarantees: by its authors' formula, and without any assumption.

DiceSGD (Zhang, Bu, Wu and Hong, ICLR 2024, arXiv 2311.14632) feeds back what clipping cut off:

    v_t = 1/B sum_{i in batch t} clip(g_i, C1) + clip(e_t, C2),     x_{t+1} = x_t - eta (v_t + w_t),     w_t ~ N(0, sigma_1^2 I)
    e_{t+1} = e_t + 1/B sum_{i in batch t} g_i - v_t,               e_0 = 0

The error e_t is never released, but it holds all earlier batches without noise, and v_t shows as much of it as fits into C2.

*What holds.* Fix which examples every batch holds (and every other coin but the noise), the same in both of two neighbouring
data sets. Given that and what was released before, x_t is the same in both; v_t is a fixed vector in each; their clipped
gradients differ by C1/B at most, and their clipped errors lie in one ball of radius C2, however far apart e_t and e'_t are. So
v_t moves by at most D = C1/B + 2 C2, the releases are Gaussian mechanisms of sensitivity D composed adaptively, and T of them
are no worse than one of sensitivity D sqrt(T). The real run is a mixture of such runs over the coins, with the same weights on
both sides, and a mixture is no easier to tell apart than its worst part (divergences are jointly convex). Sampling amplifies
nothing here: the coins were given away, as they must be, since an example of any earlier batch may still be in e_t. This needs
no bound on gradients, and no trust in e_t: starting it at 0 again after an interruption is as private.

*What the authors state.* Noise of sigma_1^2 = 32 T (C1^2 + 2 min(C, G')^2) log(1/delta) / (N^2 epsilon^2), for gradients
bounded by a G from which their G' follows. Certain of that are the algorithm above (the authors' first code and two other
accounts agree; their last code keeps less of an error outside its ball), that sigma_1 is a standard deviation, that gradients
are assumed bounded, and that the proof uses the sampled Gaussian's Renyi bound 2 q^2 alpha / sigma^2 (a published review says
these three). *Not certain* are the constants 32 and 2, and C: they are quoted from memory, the paper's text was not at hand.
That Renyi bound alone gives 16 for epsilon up to 2 log(1/delta), so 32 is on the safe side of it; C1^2 + 2 C^2 at C1 = C2 = C
is the sqrt(3) of the authors' code; where C1 and C2 differ their code has C1^2 + 2 C1 C2, and here the largest reading is
taken, C = max(C1, C2). Their code also clips e_t before it is divided by B (so its C2 is B times the one above), and calibrates
for int(log(epochs) + 1) times the steps; at the settings of its scripts its noise is less than half of the formula's all the
same.

*Why the formula needs its assumptions, and perhaps more.* Its second term falls with 1/N, like the first: an example would move
clip(e_t, C2) by about C2/B, and only if it was sampled. That is so while e_t stays inside the ball: then e_{t+1} holds one
batch and nothing older. Outside of it e_t keeps what every earlier batch put in; an example's shares add up, and leave within a
step or two when e_t comes back, with bounded gradients too (`tests/privacy/test_dice.py` makes such a run).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tacit.privacy.accounting import epsilon_of
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.schedules import Constant
from tacit.privacy.validation import UserError, check_count, check_delta, check_not_negative, check_positive

if TYPE_CHECKING:
    from tacit.privacy.randomness import Randomness
    from tacit.privacy.sampling import PoissonSampler

THEOREM_CONSTANT = 32.0  # see above: not checked against the paper's text
# of the Renyi bound 2 q^2 alpha / sigma^2 (Mironov, Talwar and Zhang 2019)
_LARGEST_RATE, _SMALLEST_MULTIPLIER = 0.2, 4.0

FORMULA = (
    "sigma_1^2 = 32 T (C1^2 + 2 max(C1, C2)^2) log(1/delta) / (N^2 epsilon^2); its constants were not checked against the "
    "paper's text"
)
ASSUMPTIONS = (
    "every example's gradient is bounded at every model along the way",
    "one example moves the clipped error by no more than its clipping norm divided by the batch size",
    "sampling amplifies privacy although the error depends on all earlier batches",
)


@dataclass(frozen=True)
class ErrorFeedback:
    """Clip each example's whole gradient at C1; the sum that is released holds B clip(e_t, C2) besides.

    *Guarantee.* Adding or removing one example, now or in any earlier batch, moves the clipped sum plus `batch_size` times an
    error clipped at `error_norm` by at most `sensitivity` = C1 + 2 B C2, whatever the error is.

    >>> clipping = ErrorFeedback(clipping_norm=1.0, error_norm=0.5, batch_size=100)
    >>> clipping.sensitivity, clipping.noise_stds(2.0)
    (101.0, (202.0,))
    """

    clipping_norm: float
    error_norm: float
    batch_size: float

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "error_norm", "batch_size"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        return (self.clipping_norm,)

    @property
    def sensitivity(self) -> float:
        return self.clipping_norm + 2 * self.batch_size * self.error_norm

    @property
    def stability(self) -> None:
        return None

    @property
    def amplified(self) -> bool:
        """Whether sampling amplifies: never, since the error holds examples of all earlier batches."""
        return False

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        return (noise_multiplier * self.sensitivity,)

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        return (0,) * len(names)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "error-feedback", **dataclasses.asdict(self)}


def dice_noise(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    examples: int,
    clipping_norm: float,
    error_norm: float,
    error_bound: float | None = None,
) -> float:
    """sigma_1, the standard deviation of the noise on the mean direction, that the authors' formula asks for.

    `error_bound` is their G', which bounds e_t if gradients are bounded; without it the largest noise of all is given.

    *Guarantee.* None but the authors', under `ASSUMPTIONS`; see the module for which of the constants are certain.
    `dice_epsilon_that_holds` says what this noise guarantees.

    >>> noise = dice_noise(epsilon=2.0, delta=1e-5, steps=100, examples=1000, clipping_norm=1.0, error_norm=1.0)
    >>> round(noise, 4)  # sqrt(32 * 100 * (1 + 2) * log(1e5)) / (1000 * 2)
    0.1662
    """
    budget = check_positive("epsilon", epsilon)
    return _formula(delta, steps, examples, clipping_norm, error_norm, error_bound) / budget


def dice_epsilon(
    *,
    noise_std: float,
    delta: float,
    steps: int,
    examples: int,
    clipping_norm: float,
    error_norm: float,
    error_bound: float | None = None,
) -> float:
    """The epsilon that the authors' formula gives for noise of this standard deviation: the inverse of `dice_noise`.

    *Guarantee.* As for `dice_noise`: the authors' claim under `ASSUMPTIONS`, no more.

    >>> round(dice_epsilon(noise_std=0.1662, delta=1e-5, steps=100, examples=1000, clipping_norm=1.0, error_norm=1.0), 3)
    2.0
    """
    noise = check_not_negative("noise_std", noise_std)
    wanted = _formula(delta, steps, examples, clipping_norm, error_norm, error_bound)
    return wanted / noise if noise > 0 else math.inf


def _formula(
    delta: float, steps: int, examples: int, clipping_norm: float, error_norm: float, error_bound: float | None
) -> float:
    """sigma_1 times epsilon: sqrt(32 T (C1^2 + 2 min(max(C1, C2), G')^2) log(1/delta)) / N."""
    own, fed_back = check_positive("clipping_norm", clipping_norm), check_positive("error_norm", error_norm)
    largest = max(own, fed_back)
    if error_bound is not None:
        largest = min(largest, check_positive("error_bound", error_bound))
    spread = THEOREM_CONSTANT * check_count("steps", steps) * math.log(1 / check_delta(delta))
    return math.sqrt(spread) * math.hypot(own, math.sqrt(2) * largest) / check_count("examples", examples)


def dice_epsilon_that_holds(
    *, noise_std: float, delta: float, steps: int, batch_size: float, clipping_norm: float, error_norm: float
) -> float:
    """The epsilon of so many releases with noise of this standard deviation on the mean direction, whatever the gradients are.

    *Guarantee.* An upper bound for adding or removing one example, without any assumption: that of `steps` Gaussian mechanisms
    of sensitivity C1/B + 2 C2, without amplification by sampling (see the module). Infinite when there is (almost) no noise.

    >>> round(dice_epsilon_that_holds(
    ...     noise_std=100.0, delta=1e-5, steps=100, batch_size=100, clipping_norm=1.0, error_norm=1.0), 2)
    0.73
    """
    clipping = ErrorFeedback(clipping_norm, error_norm, batch_size)
    multiplier = check_not_negative("noise_std", noise_std) * clipping.batch_size / clipping.sensitivity
    return epsilon_of(1.0, [(multiplier, check_count("steps", steps))], delta)


@dataclass(frozen=True, kw_only=True)
class DicePlan:
    """A whole DiceSGD run: N examples, expected batch size B, steps, C1 (`clipping_norm`), C2 (`error_norm`) and sigma_1.

    C2 bounds the error of the *mean* gradient, so it weighs B times as much as C1: `error_norm=clipping_norm / batch_size` is
    what the authors' code calls a C2 equal to C1.

    *Guarantee.* `accounted()` is the plan of the same releases in which nothing is amplified by sampling: its mechanism adds this
    noise, and its epsilon is the one that holds. `sampler` and `accounted` come from the same values.

    >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=0.01)
    >>> plan = plan.by_theorem(epsilon=3.0, delta=1e-5)
    >>> round(plan.epsilon_by_theorem(1e-5), 6), round(plan.epsilon(1e-5), 1), round(plan.epsilon_without_error(1e-5), 1)
    (3.0, 14.6, 0.3)
    """

    examples: int
    batch_size: float
    steps: int
    clipping_norm: float
    error_norm: float
    noise_std: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", check_count("examples", self.examples))
        object.__setattr__(self, "steps", check_count("steps", self.steps))
        for name in ("batch_size", "clipping_norm", "error_norm"):
            object.__setattr__(self, name, check_positive(name, getattr(self, name)))
        object.__setattr__(self, "noise_std", check_not_negative("noise_std", self.noise_std))
        if self.batch_size > self.examples:
            raise UserError(
                f"batch_size {self.batch_size:g} is larger than the {self.examples} training examples; "
                f"choose at most {self.examples}"
            )

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a step: B/N. Nothing that holds is made of it."""
        return self.batch_size / self.examples

    @property
    def clipping(self) -> ErrorFeedback:
        """How far one example can move the sum that is released."""
        return ErrorFeedback(self.clipping_norm, self.error_norm, self.batch_size)

    def accounted(self) -> PrivacyPlan:
        """The releases as the ledger and the certificate see them: sampling rate 1, and the multiplier sigma_1 / (C1/B + 2 C2).

        >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=1.0, noise_std=4.02)
        >>> plan.accounted().sample_rate, round(plan.accounted().noise_multiplier(0), 6)
        (1.0, 2.0)
        """
        return PrivacyPlan(
            sample_rate=1.0,
            steps=self.steps,
            clipping=self.clipping,
            noise=Constant(self.noise_std * self.batch_size / self.clipping.sensitivity),
            expected_batch_size=self.batch_size,
        )

    def by_theorem(self, *, epsilon: float, delta: float) -> DicePlan:
        """The same run with the noise that the authors' formula asks for. It holds under their assumptions alone."""
        return dataclasses.replace(self, noise_std=dice_noise(epsilon=epsilon, delta=delta, **self._constants()))

    def calibrated(self, *, epsilon: float, delta: float) -> DicePlan:
        """The same run with noise by which epsilon holds without assumptions: never exceeded, and missed by less than 0.5%.

        >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=0.01)
        >>> 0.995 * 3.0 < plan.calibrated(epsilon=3.0, delta=1e-5).epsilon(1e-5) <= 3.0
        True
        """
        unit = dataclasses.replace(self, noise_std=self.clipping.sensitivity / self.batch_size).accounted()
        multiplier = unit.calibrated(epsilon=epsilon, delta=delta).noise_multiplier(0)
        return dataclasses.replace(self, noise_std=multiplier * self.clipping.sensitivity / self.batch_size)

    def epsilon(self, delta: float) -> float:
        """The epsilon that holds for the whole run, without assumptions."""
        return self.accounted().epsilon(delta)

    def epsilon_by_theorem(self, delta: float) -> float:
        """The epsilon of the authors' formula for the whole run, under `ASSUMPTIONS`."""
        return dice_epsilon(noise_std=self.noise_std, delta=delta, **self._constants())

    def epsilon_without_error(self, delta: float) -> float:
        """The epsilon that the Gaussian accountant gives to someone who forgets e_t: it does *not* hold for this run."""
        multiplier = self.noise_std * self.batch_size / self.clipping_norm
        return epsilon_of(self.sample_rate, [(multiplier, self.steps)], delta)

    def assumptions(self) -> list[str]:
        """What `epsilon_by_theorem` rests on, and which conditions of its Renyi bound this run does not meet.

        >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=1.0, noise_std=0.01)
        >>> plan.assumptions()[-1]
        'the Renyi bound of the sampled Gaussian holds outside of its proof: it wants a noise multiplier of at least 4, not 0.577'
        """
        multiplier = self.noise_std * self.batch_size
        multiplier /= math.hypot(self.clipping_norm, math.sqrt(2) * max(self.clipping_norm, self.error_norm))
        outside = "the Renyi bound of the sampled Gaussian holds outside of its proof: it wants"
        unmet = []
        if self.sample_rate > _LARGEST_RATE:
            unmet.append(f"{outside} a sampling rate of at most {_LARGEST_RATE:g}, not {self.sample_rate:.3g}")
        if multiplier < _SMALLEST_MULTIPLIER:
            unmet.append(f"{outside} a noise multiplier of at least {_SMALLEST_MULTIPLIER:g}, not {multiplier:.3g}")
        return [*ASSUMPTIONS, *unmet]

    def sampler(self, randomness: Randomness) -> PoissonSampler:
        """The sampler of this run's batches.

        >>> from tacit.privacy import Randomness
        >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=1.0)
        >>> plan.sampler(Randomness.from_seed(0)).sample_rate
        0.1
        """
        from tacit.privacy.sampling import PoissonSampler

        return PoissonSampler(self.examples, self.sample_rate, randomness)

    def facts(self, delta: float) -> dict[str, Any]:
        """What the ledger's first line, and so the certificate, says of the run beside its epsilon, which is the one that holds.

        >>> plan = DicePlan(examples=1000, batch_size=100, steps=50, clipping_norm=1.0, error_norm=1.0, noise_std=0.0)
        >>> plan.facts(1e-5)["epsilon_by_the_theorem"] is None
        True
        """
        return {
            "method": "DiceSGD",
            "sample_rate": self.sample_rate,
            "noise_std": self.noise_std,
            "amplification": "none: the released direction depends on all earlier batches",
            "epsilon_by_the_theorem": _rounded(self.epsilon_by_theorem(delta)),
            "theorem": FORMULA,
            "assumptions_of_the_theorem": self.assumptions(),
            "epsilon_if_the_error_is_forgotten": _rounded(self.epsilon_without_error(delta)),
        }

    def _constants(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "examples": self.examples,
            "clipping_norm": self.clipping_norm,
            "error_norm": self.error_norm,
        }


def _rounded(epsilon: float) -> float | None:
    """Rounded, since machines differ in the last digits; None stands for infinity, which JSON does not have."""
    return round(epsilon, 4) if math.isfinite(epsilon) else None
