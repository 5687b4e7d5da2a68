"""fastDP (awslabs/fast-differential-privacy): it is not on PyPI, and takes part only where someone has installed it.

Written from its documentation and never run by us; the comparison with the reference says whether it does what it should.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from benchmarks.contestants.setup import NOISE_MULTIPLIER, Setup, sgd

try:
    from fastDP import PrivacyEngine
except ImportError as error:
    raise RuntimeError("not installed: it is on no package index, only on GitHub") from error


class FastDP:
    """Book-keeping in one backward pass, with ghost norms or instantiation chosen layer by layer."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = setup.model()
        self.optimizer = sgd(self.model)
        engine = PrivacyEngine(
            self.model,
            batch_size=setup.batch,
            sample_size=100 * setup.batch,
            epochs=1,
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=setup.clipping_norm,
            clipping_fn="Abadi",
            clipping_mode="MixOpt",
            clipping_style="all-layer",
        )
        engine.attach(self.optimizer)

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = self.setup.laid_out(inputs), targets

    def step(self) -> None:
        functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clipped_sum(self) -> dict[str, Tensor]:
        functional.cross_entropy(self.model(self.inputs), self.targets).backward()
        return {name: p.private_grad for name, p in self.model.named_parameters()}

    def epoch(self) -> None:
        raise NotImplementedError("it has no sampler of its own")


def make(setup: Setup) -> FastDP:
    return FastDP(setup)
