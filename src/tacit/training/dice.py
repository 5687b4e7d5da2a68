"""DiceSGD as a baseline for studies: the private trainer, with what clipping cut off fed back into later steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tacit.gradients import ClippedGradient
from tacit.learning.averaging import Averaging
from tacit.learning.losses import PerExampleLoss
from tacit.learning.weight_decay import WeightDecay
from tacit.privacy.clipping import Flat
from tacit.privacy.dice import DicePlan
from tacit.privacy.dice_mechanism import DiceMechanism
from tacit.privacy.ledger import Ledger
from tacit.privacy.mechanism import GaussianMechanism, PrivateGradient
from tacit.privacy.randomness import Randomness
from tacit.privacy.sampling import PoissonSampler
from tacit.privacy.validation import UserError, check_delta
from tacit.training.trainer import PrivateTrainer

_UNREACHED = Flat(1e30)  # a float32 norm overflows long before, and such an example is left out of both sums


class DiceTrainer(PrivateTrainer):
    """Trains by DiceSGD. Its certificate's epsilon is the one that holds without assumptions, and is most often useless.

    What the method's authors claim for the same noise stands beside it, under `facts`, with what that rests on. Each step takes
    two passes over its batch, one for the clipped and one for the unclipped sum. A run that is resumed begins with an error of 0
    again: the error is private, so no checkpoint holds it.

    *Guarantee.* As for `PrivateTrainer`: whatever the optimizer sees was released by the plan's mechanism, and paid for in the
    ledger beforehand, at a sensitivity that counts the error and without amplification by sampling.

    >>> import torch
    >>> inputs, targets = torch.randn(64, 3), torch.randint(0, 2, (64,))
    >>> model = nn.Linear(3, 2)
    >>> plan = DicePlan(examples=64, batch_size=16, steps=8, clipping_norm=1.0, error_norm=1.0)
    >>> trainer = DiceTrainer(
    ...     model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=nn.CrossEntropyLoss(reduction="none"),
    ...     plan=plan.by_theorem(epsilon=3.0, delta=1e-5),
    ... )
    >>> history = trainer.fit((inputs, targets))
    >>> certificate = trainer.certificate()
    >>> certificate["facts"]["dice"]["epsilon_by_the_theorem"], round(certificate["epsilon"])
    (3.0, 121)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer,
        loss: PerExampleLoss,
        plan: DicePlan,
        delta: float = 1e-5,
        learning_rate_schedule: LRScheduler | None = None,
        averaging: Averaging | None = None,
        weight_decay: WeightDecay | None = None,
        seed: int | None = None,
        run_directory: str | os.PathLike[str] | None = None,
        resume: bool = False,
        physical_batch_size: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer=optimizer,
            loss=loss,
            plan=plan.accounted(),
            delta=delta,
            learning_rate_schedule=learning_rate_schedule,
            averaging=averaging,
            weight_decay=weight_decay,
            seed=seed,
            run_directory=run_directory,
            resume=resume,
            physical_batch_size=physical_batch_size,
            facts={**(facts or {}), "dice": plan.facts(check_delta(delta))},
        )
        self.dice = plan
        self._unclipped = ClippedGradient(
            model,
            loss=loss,
            clipping=_UNREACHED,
            physical_batch_size=physical_batch_size,
            weight_decay=self._rates,
        )
        self._feedback: DiceMechanism | None = None

    @property
    def sample_rate(self) -> float:
        """The share of the training examples that a batch holds, in expectation; the account takes it for 1."""
        return self.dice.sample_rate

    def _opened(self, **facts: Any) -> tuple[GaussianMechanism, Ledger, Randomness]:
        if facts["examples"] not in (None, self.dice.examples):
            raise UserError(
                f"the plan is for {self.dice.examples} training examples, there are {facts['examples']}; make one for these"
            )
        return super()._opened(**facts)

    def _sampler(self, examples: int, randomness: Randomness) -> PoissonSampler:
        return self.dice.sampler(randomness)

    def _release(self, chunks: Iterator[Any] | Sequence[Any], *, sampled_by: str) -> PrivateGradient:
        if self._feedback is None:
            assert self._mechanism is not None
            self._feedback = DiceMechanism(self._mechanism)
        batch = list(chunks)  # for two passes
        clipped, unclipped = self._gradient.over(batch), self._unclipped.over(batch)
        return self._feedback.release(clipped, unclipped, sampled_by=sampled_by)
