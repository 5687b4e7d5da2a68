"""How well a model does on given examples, exactly, and how often to ask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.gradients.batches import Batch, losses_of, outputs_and_losses
from tacit.learning.losses import PerExampleLoss
from tacit.training.examples import Examples, Indices, as_examples, channels_last

_EVALUATING = 0.02  # the part of the work that evaluations may be
_EVALUATION_BATCH, _EVALUATION_NUMBERS = 512, 400_000  # examples, and on a CPU numbers of their inputs, at once


def evaluations_apart(training: int, held_out: int) -> int:
    """How many epochs lie between evaluations: one costs a forward pass, a third of a step's work, for each example.

    >>> evaluations_apart(60_000, 10_000), evaluations_apart(60_000, 1_000)
    (3, 1)
    """
    return max(1, math.ceil(held_out / 3 / (_EVALUATING * training)))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and every module back in its own afterwards.

    >>> model = nn.Dropout()
    >>> with evaluating(model): model.training
    False
    >>> model.training
    True
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def evaluate(model: nn.Module, dataset: Any, loss: PerExampleLoss) -> tuple[float, float]:
    """Accuracy and mean loss over a data set, exactly. On training data, the result is private.

    >>> inputs, targets = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    >>> accuracy, loss = evaluate(nn.Linear(2, 2), (inputs, targets), nn.CrossEntropyLoss(reduction="none"))
    >>> accuracy in (0.0, 1.0)
    True
    """
    examples = as_examples(dataset)
    device = next(model.parameters()).device
    with evaluating(model):
        right, total = 0, 0.0
        size = _evaluation_batch(examples, device)
        for start in range(0, len(examples), size):
            chosen = np.arange(start, min(start + size, len(examples)))
            inputs, targets = examples.batch(chosen, device)
            outputs, losses = outputs_and_losses(model, loss, Batch.of(channels_last(inputs), targets))
            right += int((outputs.argmax(dim=1) == targets).sum())
            total += float(losses.sum())
    return right / len(examples), total / len(examples)


def _evaluation_batch(examples: Examples, device: torch.device) -> int:
    """How many examples to evaluate at once: on a CPU, activations of more than a few large ones leave the cache.

    >>> _evaluation_batch(as_examples((torch.zeros(900, 3, 32, 32), torch.zeros(900))), torch.device("cpu"))
    130
    """
    if device.type != "cpu":
        return _EVALUATION_BATCH
    leaves = torch.utils._pytree.tree_leaves(examples.batch(np.arange(1), device)[0])
    numbers = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    return max(32, min(_EVALUATION_BATCH, _EVALUATION_NUMBERS // max(numbers, 1)))


@torch.no_grad()
def mean_loss(model: nn.Module, examples: Examples, loss: PerExampleLoss, indices: Indices) -> float | None:
    """The mean loss of a batch: private data, for `show_training_loss` alone."""
    if len(indices) == 0:
        return None
    inputs, targets = examples.batch(indices[:_EVALUATION_BATCH], next(model.parameters()).device)
    return float(losses_of(model, loss, Batch.of(inputs, targets)).mean())
