"""tacit: clipped sum, ledger and noise, update; the pieces are those `PrivateTrainer` is made of."""

from __future__ import annotations

import math

from torch import Tensor, nn

from benchmarks.contestants.setup import NOISE_MULTIPLIER, Setup, sgd
from tacit import PrivateTrainer
from tacit.gradients import ClippedGradient
from tacit.privacy import Constant, Flat, Grouped, Ledger, PrivacyPlan, Randomness
from tacit.privacy.clipping import Clipping


def clipping_of(model: nn.Module, groups: int, clipping_norm: float) -> Clipping:
    """Flat, or as many groups as asked for (at most one a parameter), with neighbouring parameters together."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = min(groups, len(names))
    if groups == 1:
        return Flat(clipping_norm)
    members: list[list[str]] = [[] for _ in range(groups)]
    for i, name in enumerate(names):
        members[i * groups // len(names)].append(name)
    bound = clipping_norm / math.sqrt(groups)
    return Grouped(groups=tuple(map(tuple, members)), clipping_norms=(bound,) * groups)


def decay_of(model: nn.Module, rate: float) -> dict[str, float]:
    """So much weight decay of every parameter."""
    return {name: rate for name, parameter in model.named_parameters() if parameter.requires_grad}


class Tacit:
    """The private step of tacit, with noise from the operating system's randomness and a ledger in memory."""

    def __init__(self, setup: Setup, groups: int, noise: bool, decay: float = 0.0) -> None:
        self.setup, self.noise = setup, noise
        self.model = setup.model()
        self.clipping = clipping_of(self.model, groups, setup.clipping_norm)
        self.loss = nn.CrossEntropyLoss(reduction="none")
        self.optimizer = sgd(self.model)
        rates = decay_of(self.model, decay)
        self.gradient = ClippedGradient(self.model, loss=self.loss, clipping=self.clipping, weight_decay=rates)
        plan = PrivacyPlan(
            sample_rate=0.01,
            steps=10**6,
            clipping=self.clipping,
            noise=Constant(NOISE_MULTIPLIER),
            expected_batch_size=setup.batch,
        )
        ledger = Ledger.in_memory(plan, delta=1e-5)
        self.mechanism = plan.mechanism(Randomness.from_operating_system(), ledger)

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = self.setup.laid_out(inputs), targets

    def step(self) -> None:
        summed = self.gradient(self.inputs, self.targets)
        if self.noise:
            gradients = self.mechanism.release(summed).gradients
        else:
            gradients = {name: gradient / self.setup.batch for name, gradient in summed.gradients.items()}
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clipped_sum(self) -> dict[str, Tensor]:
        return dict(self.gradient(self.inputs, self.targets).gradients)

    def epoch(self) -> None:
        plan = PrivacyPlan.for_examples(
            len(self.inputs),
            batch_size=self.setup.batch,
            epochs=1,
            clipping=self.clipping,
            noise=Constant(NOISE_MULTIPLIER),
        )
        PrivateTrainer(self.model, optimizer=self.optimizer, loss=self.loss, plan=plan).fit((self.inputs, self.targets))


def make(setup: Setup, groups: int = 1, noise: bool = True, decay: float = 0.0) -> Tacit:
    return Tacit(setup, groups, noise, decay)
