"""opake: `vmap` of the functional model's gradient, clipped, summed, noised, in its functional optimizer."""

from __future__ import annotations

import torch
import torchopt
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.dpsgd.sampling import PoissonSampler
from opake.functional import make_functional
from opake.optimizers import sgd
from opake.random import key
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contestants.setup import LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, Setup


class Opake:
    """The loop of its README, with momentum."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        model = setup.model()
        self.names = [name for name, _ in model.named_parameters()]
        forward, self.params = make_functional(model, disable_autograd_tracking=True)

        def loss(params: tuple[Tensor, ...], example: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(forward(params, example.unsqueeze(0)), target.unsqueeze(0))

        self.gradient, self.clip_state = clipped_grad(
            loss,
            clipping_norm=setup.clipping_norm,
            batch_argnums=(1, 2),
            normalize_by=setup.batch,
            microbatch_size=setup.physical,
        )
        self.noise, self.noise_state = gaussian_noise(noise_multiplier=NOISE_MULTIPLIER, key=key(42))
        self.optimizer = sgd(lr=LEARNING_RATE, momentum=MOMENTUM)
        self.optimizer_state = self.optimizer.init(self.params)
        self.epochs = 0

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = self.setup.laid_out(inputs), targets

    def step(self) -> None:
        self._step(self.inputs, self.targets)

    def clipped_sum(self) -> dict[str, Tensor]:
        summed, _ = self.gradient(self.params, self.inputs, self.targets, state=self.clip_state)
        return {name: value * self.setup.batch for name, value in zip(self.names, summed.pytree, strict=True)}

    def epoch(self) -> None:
        data, self.epochs = TensorDataset(self.inputs, self.targets), self.epochs + 1
        rate = self.setup.batch / len(data)
        sampler = PoissonSampler(data, sample_rate=rate, n_steps=round(1 / rate), key=key(self.epochs))
        for inputs, targets in DataLoader(data, batch_sampler=sampler):
            self._step(self.setup.laid_out(inputs), targets)

    @torch.no_grad()
    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        summed, self.clip_state = self.gradient(self.params, inputs, targets, state=self.clip_state)
        noisy, self.noise_state = self.noise(summed, self.noise_state)
        updates, self.optimizer_state = self.optimizer.update(noisy, self.optimizer_state, params=self.params)
        self.params = torchopt.apply_updates(self.params, updates, inplace=True)


def make(setup: Setup) -> Opake:
    return Opake(setup)
