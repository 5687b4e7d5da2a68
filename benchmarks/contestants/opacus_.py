"""Opacus: per-example gradients by hooks, functorch or expanded weights, or ghost clipping in two backward passes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.utils import prepare_module, register_grad_sampler
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contestants.setup import NOISE_MULTIPLIER, Setup, sgd
from tacit.models import WeightStandardizedConv2d

warnings.filterwarnings("ignore")


@register_grad_sampler(WeightStandardizedConv2d)
def _standardized_conv(
    module: WeightStandardizedConv2d, activations: list[Tensor], backprops: Tensor
) -> dict[Any, Tensor]:
    """Opacus has no rule for this layer: its own one for convolutions, and the chain rule for what became of the weights."""
    with torch.device("meta"):
        plain = nn.Conv2d(
            module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding, bias=False
        )
    plain.weight = module.weight
    found = compute_conv_grad_sample(plain, activations, backprops)
    _, pull_back = torch.func.vjp(lambda w: standardized(w, module.eps), module.weight.detach())
    found[module.weight] = torch.func.vmap(pull_back)(found[module.weight])[0]
    return found


def standardized(weight: Tensor, eps: float) -> Tensor:
    """The weights as `WeightStandardizedConv2d` standardises them."""
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(weight[0].numel() * (variance + eps))


def _prepared(setup: Setup) -> nn.Module:
    """The network, with what keeps ghost clipping from failing: it takes only contiguous indices of an embedding."""
    model = setup.model()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda _, inputs: tuple(tensor.contiguous() for tensor in inputs))
    return model


class Opacus:
    """The wrapped model and optimizer, as `PrivacyEngine` makes them, without secure noise (which is slower).

    Micro-batches are done as its `BatchMemoryManager` does: a skipped step after all pieces but the last.
    """

    loader: DataLoader | None

    def __init__(self, setup: Setup, mode: str) -> None:
        self.setup, self.mode = setup, mode
        self.ghost = mode == "ghost"
        common = {"max_grad_norm": setup.clipping_norm, "use_ghost_clipping": True} if self.ghost else {}
        self.model = prepare_module(_prepared(setup), mode, batch_first=True, loss_reduction="mean", **common)
        wrapper = DPOptimizerFastGradientClipping if self.ghost else DPOptimizer
        self.optimizer = wrapper(
            sgd(self.model),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=setup.clipping_norm,
            expected_batch_size=setup.batch,
        )
        self.loss = nn.CrossEntropyLoss()
        if self.ghost:
            self.loss = DPLossFastGradientClipping(self.model, self.optimizer, self.loss)

    def load(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = self.setup.laid_out(inputs), targets
        self.loader = None

    def step(self) -> None:
        left = -(-len(self.inputs) // (self.setup.physical or len(self.inputs)))
        for inputs, targets in self.setup.pieces(self.inputs, self.targets):
            left -= 1
            self.optimizer.signal_skip_step(do_skip=left > 0)
            self._step(inputs, targets)

    def clipped_sum(self) -> dict[str, Tensor]:
        self.loss(self.model(self.inputs), self.targets).backward()
        if not self.ghost:
            self.optimizer.clip_and_accumulate()
        named = self.model._module.named_parameters()
        return {name: p.grad if self.ghost else p.summed_grad for name, p in named}

    def epoch(self) -> None:
        if self.loader is None:
            self._make_private()
        assert self.loader is not None
        for inputs, targets in self.loader:
            self._step(self.setup.laid_out(inputs), targets)

    def _make_private(self) -> None:
        """The library's own way, with its Poisson-sampling loader."""
        model = _prepared(self.setup)
        made = PrivacyEngine(secure_mode=False).make_private(
            module=model,
            optimizer=sgd(model),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(self.inputs, self.targets), batch_size=self.setup.batch),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=self.setup.clipping_norm,
            poisson_sampling=True,
            grad_sample_mode=self.mode,
        )
        if self.ghost:
            self.model, self.optimizer, self.loss, self.loader = made
        else:
            self.model, self.optimizer, self.loader = made

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        loss = self.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make(setup: Setup, mode: str) -> Opacus:
    return Opacus(setup, mode)
