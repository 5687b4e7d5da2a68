"""The mechanism, audited: nothing but canaries, each along a coordinate of its own, through tacit's own training loop.

`PrivateTrainer` draws the batches, clips, writes the ledger and adds the noise, by the plan that is audited; the attacker sits
where the optimizer does, and sees what it sees. So a mistake in the sampler, the clipping, the mechanism or the accountant shows
as an epsilon above the claim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.audit.listening import Listener, check_audible, renamed, strengths_at
from tacit.audit.scores import Scores
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import check_count
from tacit.training.trainer import PrivateTrainer

_LOUD = 1e3  # times the bound: what a canary's gradient has before it is clipped
CANARIES = 50_000  # in one training
INDEPENDENT_BY_CLAIM = (
    "the canaries of one training are independent, as the sampler's coins and the noise of different coordinates are if tacit "
    "does what it claims"
)


class OwnCoordinates(nn.Module):
    """For each clipping group one number a canary, which has a gradient for that canary alone.

    >>> OwnCoordinates(canaries=3, groups=2)(torch.tensor([2, 0])).shape
    torch.Size([2, 2])
    """

    def __init__(self, canaries: int, groups: int) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.Embedding(canaries, 1) for _ in range(groups))
        for table in self.groups:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]

    def forward(self, identities: Tensor) -> Tensor:
        return torch.cat([table(identities) for table in self.groups], dim=1)


def attack_mechanism(
    plan: PrivacyPlan,
    *,
    delta: float,
    canaries: int = CANARIES,
    trainings: int = 1,
    seed: int | None = None,
    advance: Callable[[float], Any] = lambda trainings: None,
) -> dict[str, Scores]:
    """The scores of a white-box attack on this plan: in each training, each canary takes part in the data by a fair coin.

    Nothing is learned (the learning rate is 0), so that a canary's gradient is C along its own coordinate in every step, the
    worst that one example can do. `advance` hears of each part of a training that is done. With a `seed`, everything repeats.

    >>> plan = PrivacyPlan(sample_rate=0.5, steps=10, expected_batch_size=50)
    >>> scores = attack_mechanism(plan, delta=1e-5, canaries=100, seed=0)
    >>> {kind: len(found) for kind, found in scores.items()}
    {'likelihood ratio': 100, 'spread over the steps': 100}
    """
    check_audible(plan)
    check_count("canaries", canaries, at_least=2)
    parts = [
        _one_training(plan, delta, canaries, seed_of(seed, training), advance)
        for training in range(check_count("trainings", trainings))
    ]
    return {kind: Scores.together([part[kind] for part in parts]) for kind in parts[0]}


def seed_of(seed: int | None, training: int) -> int | None:
    """A seed for each training of an audit; without one, the operating system's randomness.

    >>> seed_of(2, 3), seed_of(None, 3)
    (2000009, None)
    """
    return None if seed is None else seed * 1_000_003 + training


def _one_training(
    plan: PrivacyPlan, delta: float, canaries: int, seed: int | None, advance: Callable[[float], Any]
) -> dict[str, Scores]:
    norms = plan.clipping.clipping_norms
    names = {group: f"groups.{group}.weight" for group in range(len(norms))}
    own = dataclasses.replace(
        plan,
        clipping=renamed(plan.clipping, names),
        expected_batch_size=plan.expected_batch_size or 1.0,
        whole_releases=(),  # which no canary's gradient is in
    )
    model = OwnCoordinates(canaries, len(norms))
    loud = _LOUD * max(norms)
    took_part = np.random.default_rng(seed).random(canaries) < 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    listener, step = Listener(canaries, own.sample_rate), 0

    def listen(*_: object) -> None:
        nonlocal step
        strengths, stds = strengths_at(own, step)
        size = own.expected_batch_size or 1.0
        released = [parameter.grad.flatten().double().numpy() for parameter in model.parameters()]  # type: ignore[union-attr]
        listener.hear([sums * (size / std) for sums, std in zip(released, stds)], strengths)
        step += 1
        advance(1 / own.steps)

    optimizer.register_step_pre_hook(listen)
    trainer = PrivateTrainer(
        model,
        optimizer=optimizer,
        loss=lambda outputs, _: loud * outputs.sum(dim=1),
        plan=own,
        delta=delta,
        seed=seed,
        physical_batch_size=canaries,  # they are numbers, and need no memory
    )
    identities = torch.from_numpy(np.flatnonzero(took_part))
    trainer.fit((identities, torch.zeros(len(identities))))
    return listener.scores(took_part)
