"""JAX Privacy: `clipped_grad` and `gaussian_privatizer` with optax, jitted as one function; and JAX without privacy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition
from jax_privacy.clipping import clipped_grad
from torch import Tensor

from benchmarks.contestants.jax_translation import Params, images_to_jax, to_torch, translated
from benchmarks.contestants.setup import LEARNING_RATE, MOMENTUM, NOISE_MULTIPLIER, Setup

_PADDING = (
    32  # Poisson batches are padded to a multiple of this, as in the library's own example: few shapes to compile
)


class JaxPrivacy:
    """One compiled step; buffers of parameters and optimizer state are given up to it."""

    def __init__(self, setup: Setup, private: bool) -> None:
        self.setup, self.private = setup, private
        self.params, apply = translated(setup.model())

        def loss(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(apply(params, inputs), targets).mean()

        self.gradient = clipped_grad(
            loss,
            l2_clip_norm=setup.clipping_norm,
            batch_argnums=(1, 2),
            normalize_by=setup.batch,
            microbatch_size=setup.physical,
        )
        privatizer = noise_addition.gaussian_privatizer(
            stddev=NOISE_MULTIPLIER * self.gradient.l2_norm_bound, prng_key=jax.random.key(0)
        )
        optimizer = optax.sgd(LEARNING_RATE, momentum=MOMENTUM)
        self.state = (optimizer.init(self.params), privatizer.init(self.params))

        def step(params: Params, state: Any, inputs: jax.Array, targets: jax.Array, padding: Any) -> tuple[Params, Any]:
            optimizer_state, noise_state = state
            if private:
                summed = self.gradient(params, inputs, targets, is_padding_example=padding)
                gradients, noise_state = privatizer.update(summed, noise_state)
            else:
                gradients = jax.grad(loss)(params, inputs, targets)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state)
            return optax.apply_updates(params, updates), (optimizer_state, noise_state)

        self.compiled = jax.jit(step, donate_argnums=(0, 1))

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = images_to_jax(inputs), jnp.asarray(targets.numpy().astype(np.int32))
        self.padding = jnp.zeros(len(inputs), bool)

    def step(self) -> None:
        self._step(self.inputs, self.targets, self.padding)

    def clipped_sum(self) -> dict[str, Tensor]:
        summed = jax.jit(self.gradient)(self.params, self.inputs, self.targets)
        return {name: to_torch(value) * self.setup.batch for name, value in summed.items()}

    def epoch(self) -> None:
        count, inputs, targets = len(self.inputs), np.asarray(self.inputs), np.asarray(self.targets)
        rate = self.setup.batch / count
        strategy = batch_selection.CyclicPoissonSampling(sampling_prob=rate, iterations=round(1 / rate))
        for drawn in strategy.batch_iterator(count):
            indices = batch_selection.pad_to_multiple_of(drawn, _PADDING)
            padding = indices == -1
            chosen = np.where(padding, 0, indices)
            self._step(jnp.asarray(inputs[chosen]), jnp.asarray(targets[chosen]), jnp.asarray(padding))

    def _step(self, inputs: jax.Array, targets: jax.Array, padding: jax.Array) -> None:
        self.params, self.state = self.compiled(self.params, self.state, inputs, targets, padding)
        jax.block_until_ready(self.params)


def make(setup: Setup, private: bool = True) -> JaxPrivacy:
    return JaxPrivacy(setup, private)
