"""The slow and obvious way to a clipped sum: a loop over the examples, each a batch of one.

Every fast path is tested against it. It checks nothing, remembers nothing and is short enough to be believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tacit.gradients.batches import Batch, Loss, losses_of, norm_dtype, trainable_parameters
from tacit.privacy.clipping import Clipping, clip_factors
from tacit.privacy.mechanism import ClippedSum


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    clipping: Clipping,
    inputs: Any,
    targets: Any,
    weight_decay: Mapping[str, float] | None = None,
) -> ClippedSum:
    """The sum over examples of the gradient, clipped in each group: sum_i min(1, C_j / ||g_i,j||) g_i,j.

    `weight_decay` is by name: so many times the parameter is added to each example's gradient of it beforehand.

    *Guarantee.* Each example is seen by itself, so that whatever the model does, adding or removing an example adds or
    removes one vector of norm at most C_j in group j. A gradient that is not finite adds nothing and is counted.

    >>> from tacit.privacy.clipping import Flat
    >>> model = nn.Linear(1, 1, bias=False)
    >>> loss = lambda outputs, targets: (outputs * targets).sum(dim=1)
    >>> summed = clipped_sum(model, loss, Flat(1.0), torch.tensor([[0.5], [2.0]]), torch.ones(2, 1))
    >>> summed.gradients["weight"], summed.norms.flatten()
    (tensor([[1.5000]]), tensor([0.5000, 2.0000]))
    """
    parameters = trainable_parameters(model)
    groups = clipping.group_of(list(parameters))
    dtype = norm_dtype(parameters)
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in parameters.items()
    }
    batch = Batch.of(inputs, targets)
    norms = next(iter(sums.values())).new_zeros(batch.size, len(clipping.clipping_norms), dtype=dtype)
    for i in range(batch.size):
        gradients = one_gradient(model, loss, parameters, batch.rows(slice(i, i + 1)))
        for name, rate in (weight_decay or {}).items():
            gradients[name] = gradients[name].to(sums[name].dtype) + rate * parameters[name].detach()
        for j in range(norms.shape[1]):
            members = [g.to(dtype).flatten() for g, group in zip(gradients.values(), groups) if group == j]
            norms[i, j] = torch.linalg.vector_norm(torch.cat(members))
        if not norms[i].isfinite().all():
            continue
        factors = clip_factors(norms[i : i + 1], clipping)[0]
        for (name, gradient), group in zip(gradients.items(), groups):
            sums[name] += factors[group].to(sums[name].dtype) * gradient
    not_finite = int((~norms.isfinite().all(dim=1)).sum())
    return ClippedSum(sums, norms=norms, clipping=clipping, not_finite=not_finite)


def one_gradient(
    model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], example: Batch
) -> dict[str, Tensor]:
    """The gradient of one example (a batch of one); zero for parameters that the loss does not reach.

    *Guarantee.* Nothing but this example is seen, and no `.grad` is touched.

    >>> model = nn.Linear(1, 1)
    >>> example = Batch.of(torch.tensor([[3.0]]), None)
    >>> one_gradient(model, lambda outputs, targets: outputs[:, 0], dict(model.named_parameters()), example)
    {'weight': tensor([[3.]]), 'bias': tensor([1.])}
    """
    with torch.enable_grad():
        value = losses_of(model, loss, example).sum()
        if not value.requires_grad:
            return {name: torch.zeros_like(p) for name, p in parameters.items()}
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found)
    return {name: torch.zeros_like(p) if g is None else g.detach() for (name, p), g in pairs}
