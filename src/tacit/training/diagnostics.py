"""What happens inside a network while it learns, for research: these numbers read private data, so they void a certificate.

The figures of papers A and B are made of them: norms of weights, pre-activations and activations by layer; norms of per-example
gradients; how far clipping turns their sum; how curved the loss is along the path; which classes are taken for which.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedGradient
from tacit.gradients.batches import LAYERS, Batch, losses_of
from tacit.learning.losses import PerExampleLoss
from tacit.privacy.clipping import Clipping
from tacit.training.evaluation import evaluating
from tacit.training.examples import Examples, channels_last

# of gradient norms; what lies outside goes to the ends
BINS = [10.0**exponent for exponent in np.arange(-4, 3.01, 0.25)]


@torch.no_grad()
def layer_norms(model: nn.Module, inputs: Tensor) -> dict[str, dict[str, float]]:
    """By layer: the norm of its weight, and the mean norms, over the examples, of what it gives and of the activation after it.

    The activation is what the next linear or convolutional layer is given; the last layer has none.

    >>> found = layer_norms(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)), torch.zeros(3, 2))
    >>> found["0"]["preactivation"], sorted(found["0"])
    (0.0, ['activation', 'preactivation', 'weight'])
    """
    found: dict[str, dict[str, float]] = {}
    previous: list[str] = []
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        def hook(layer: nn.Module, args: Any, output: Tensor) -> None:
            if previous:
                found[previous[-1]]["activation"] = _mean_norm(args[0])
            found[name] = {"weight": float(layer.weight.norm()), "preactivation": _mean_norm(output)}  # type: ignore[operator]
            previous.append(name)

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            watch(name, module)
    try:
        with evaluating(model):
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _mean_norm(rows: Tensor) -> float:
    return float(rows.flatten(1).norm(dim=1).mean())


def gradient_figures(
    model: nn.Module, loss: PerExampleLoss, clipping: Clipping, inputs: Any, targets: Tensor
) -> dict[str, Any]:
    """The histogram of per-example gradient norms over `BINS`, and the cosine between the clipped and the unclipped sum.

    >>> from tacit.privacy import Flat
    >>> found = gradient_figures(nn.Linear(1, 1), lambda o, t: o[:, 0], Flat(100.0), torch.ones(3, 1), torch.zeros(3))
    >>> sum(found["gradient_norms"]), round(found["cosine"], 6)
    (3, 1.0)
    """
    summed = ClippedGradient(model, loss=loss, clipping=clipping)(inputs, targets)
    norms = summed.norms.double().square().sum(dim=1).sqrt()
    edges = torch.tensor(BINS[1:-1], dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(norms.cpu(), edges), minlength=len(BINS) - 1)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = losses_of(model, loss, Batch.of(inputs, targets)).sum()
    plain = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
    clipped = torch.cat([summed.gradients[name].flatten() for name in parameters]).double()
    unclipped = torch.cat([gradient.flatten() for gradient in plain]).double()
    cosine = float(clipped @ unclipped / (clipped.norm() * unclipped.norm()).clamp(min=1e-300))
    return {"gradient_norms": counts.tolist(), "median_gradient_norm": float(norms.median()), "cosine": cosine}


def sharpness(
    model: nn.Module, loss: PerExampleLoss, inputs: Any, targets: Tensor, *, iterations: int = 20, seed: int = 0
) -> float:
    """The largest singular value of the mean loss's Hessian, by power iteration.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> inputs = torch.tensor([[2.0, 0.0], [0.0, 1.0]])  # the Hessian of the mean of (w x)^2 is diag(4, 1)
    >>> round(sharpness(model, lambda o, t: o[:, 0].square(), inputs, torch.zeros(2), iterations=50), 4)
    4.0
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean = losses_of(model, loss, Batch.of(inputs, targets)).mean()
    gradients = torch.autograd.grad(mean, parameters, create_graph=True, allow_unused=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(seed)
    vector = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in parameters]
    size = 0.0
    for _ in range(iterations):
        length = math.sqrt(sum(float(v.square().sum()) for v in vector))
        if length == 0.0:
            return 0.0
        vector = [v / length for v in vector]
        product = torch.autograd.grad(gradients, parameters, vector, retain_graph=True, allow_unused=True)
        vector = [torch.zeros_like(p) if v is None else v.detach() for v, p in zip(product, parameters)]
        size = math.sqrt(sum(float(v.square().sum()) for v in vector))
    return size


@torch.no_grad()
def confusion(model: nn.Module, examples: Examples, classes: int, *, batch: int = 512) -> list[list[int]]:
    """How many examples of each class (row) are taken for each (column).

    >>> from tacit.training.examples import as_examples
    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.eye_(model.weight)
    >>> confusion(model, as_examples((torch.eye(2), torch.tensor([0, 0]))), 2)
    [[1, 1], [0, 0]]
    """
    device = next(model.parameters()).device
    found = torch.zeros(classes, classes, dtype=torch.long)
    with evaluating(model):
        for start in range(0, len(examples), batch):
            inputs, targets = examples.batch(np.arange(start, min(start + batch, len(examples))), device)
            taken = model(channels_last(inputs)).argmax(dim=1)
            found += torch.bincount((targets * classes + taken).cpu(), minlength=classes**2).view(classes, classes)
    return found.tolist()


def class_spread(matrix: list[list[int]]) -> float:
    """The standard deviation of the accuracies by class.

    >>> class_spread([[9, 1], [3, 7]])
    0.1
    """
    accuracies = [row[i] / sum(row) for i, row in enumerate(matrix) if sum(row)]
    return round(float(np.std(accuracies)), 6)


def diagnosed(
    model: nn.Module,
    loss: PerExampleLoss,
    clipping: Clipping,
    examples: Examples,
    count: int,
    held_out: Examples | None,
) -> dict[str, Any]:
    """Everything above, on the first `count` training examples, and the confusion on held-out ones."""
    inputs, targets = examples.batch(np.arange(min(count, len(examples))), next(model.parameters()).device)
    inputs = channels_last(inputs)
    found: dict[str, Any] = {
        "layers": layer_norms(model, inputs),
        **gradient_figures(model, loss, clipping, inputs, targets),
        "sharpness": sharpness(model, loss, inputs, targets),
    }
    if held_out is not None:
        found["confusion"] = confusion(model, held_out, model(inputs[:1]).shape[1])
        found["class_spread"] = class_spread(found["confusion"])
    return found
