"""From recorded calls to a clipped sum: the norm of each example over all parameters first, then one weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tacit.gradients.batches import Batch, Loss, norm_dtype
from tacit.gradients.capture import Call, NoRule, Unit, backward, capture, check_graph
from tacit.gradients.contribution import Contribution, at_least_float32, squared_norms, weighted_sum
from tacit.gradients.generic import Layout, generic
from tacit.privacy.clipping import Clipping, clip_factors
from tacit.privacy.validation import UserError

Sums = dict[str, Tensor]


def contributions(call: Call, layout: Layout) -> dict[str, Contribution]:
    """What one call adds to the gradients of its unit's parameters, by their names in the model; nothing if it is not reached.

    *Guarantee.* Row i comes from example i's rows alone, and is in float32 or better.

    >>> from tacit.gradients.linear import linear
    >>> unit = Unit("fc", nn.Linear(2, 1), linear, {"bias": "fc.bias"})
    >>> call = Call(unit, leaves=[torch.ones(1, 2)], spec=None, gradients=[torch.ones(1, 1)])
    >>> contributions(call, Layout([0], [0]))["fc.bias"].per_example()
    tensor([[1.]])
    """
    unit = call.unit
    if all(gradient is None for gradient in call.gradients):
        return {}
    if unit.rule is None:
        found = generic(call, layout)
    else:
        inputs = next(leaf for leaf in call.leaves if isinstance(leaf, Tensor))
        (gradient,) = call.gradients
        assert gradient is not None
        gradient = at_least_float32(gradient)
        if inputs.is_floating_point():  # under autocast the two have different types
            dtype = torch.promote_types(inputs.dtype, gradient.dtype)
            inputs, gradient = inputs.to(dtype), gradient.to(dtype)
        found = unit.rule(unit.module, inputs, gradient)
    return {name: found[inner] for inner, name in unit.parameters.items()}


def by_parameter(calls: list[Call], layouts: list[Layout]) -> dict[str, list[Contribution]]:
    """The contributions of all calls, gathered by parameter: several where it is tied or its module is called again.

    *Guarantee.* None is left out.

    >>> by_parameter([], [])
    {}
    """
    found: dict[str, list[Contribution]] = {}
    for call, layout in zip(calls, layouts, strict=True):
        for name, contribution in contributions(call, layout).items():
            found.setdefault(name, []).append(contribution)
    return found


def is_ghost(uses: list[Contribution], strategy: str) -> bool:
    """Whether the norms of a parameter's gradients are found without holding these. Only for a single use: the norm of a
    *sum* of several does not follow from their norms.

    *Guarantee.* A choice of speed and memory alone.

    >>> is_ghost([Contribution(lambda: torch.zeros(1))], "ghost")
    False
    """
    ghost = uses[0].ghost if len(uses) == 1 else None
    return ghost is not None and (strategy == "ghost" or (strategy != "instantiate" and ghost.cheaper))


def clip_and_add(
    uses: dict[str, list[Contribution]],
    trainable: dict[str, nn.Parameter],
    clipping: Clipping,
    batch_size: int,
    strategy: str = "rules",
) -> tuple[Sums | None, Tensor]:
    """(sums by parameter, norms before clipping); no sums if a norm is not finite, since 0 times infinity is not 0.

    *Guarantee.* Example i enters group j with the factor min(1, C_j / norm_ij), where norm_ij is the norm of all of its
    gradient in that group.

    >>> from tacit.privacy.clipping import Flat
    >>> uses = {"w": [Contribution(lambda: torch.tensor([[3.0], [0.5]]))]}
    >>> clip_and_add(uses, {"w": nn.Parameter(torch.zeros(1))}, Flat(1.0), 2)
    ({'w': tensor([1.5000])}, tensor([[3.0000], [0.5000]]))
    """
    groups = dict(zip(trainable, clipping.group_of(list(trainable))))
    first = next(iter(trainable.values()))
    dtype = norm_dtype(trainable)
    squared = torch.zeros(batch_size, len(clipping.clipping_norms), dtype=dtype, device=first.device)
    finish: dict[str, Callable[[Tensor], Tensor]] = {}
    # Whatever precision the model runs in: norms and sums in half precision would not keep the sensitivity.
    with torch.autocast(first.device.type, enabled=False):
        for name, found in uses.items():
            ghost = found[0].ghost
            if is_ghost(found, strategy) and ghost is not None:
                squares, finish[name] = ghost.squared_norms(), ghost.weighted_sum
            else:
                gradients = found[0].per_example()
                for another in found[1:]:
                    gradients = gradients + another.per_example()
                squares, finish[name] = squared_norms(gradients), partial(weighted_sum, gradients)
            squared[:, groups[name]] += squares.to(squared)
        norms = squared.sqrt()
        if not norms.isfinite().all():
            return None, norms
        factors = clip_factors(norms, clipping)
        return {name: add(factors[:, groups[name]]) for name, add in finish.items()}, norms


def rules_sum(
    model: nn.Module,
    loss: Loss,
    trainable: dict[str, nn.Parameter],
    clipping: Clipping,
    batch: Batch,
    units: list[Unit],
    layouts: list[Layout],
    strategy: str,
) -> tuple[Sums | None, Tensor]:
    """One forward pass, one backward pass, then `clip_and_add`.

    *Guarantee.* As for `clip_and_add`; a batch that does not look as the probe found it raises `NoRule`.

    >>> from tacit.privacy.clipping import Flat
    >>> from tacit.gradients.capture import find_units
    >>> model = nn.Linear(1, 1, bias=False)
    >>> parameters = dict(model.named_parameters())
    >>> batch = Batch.of(torch.tensor([[0.5], [2.0]]), None)
    >>> units, layouts = find_units(model, parameters), [Layout([0], [0])]
    >>> rules_sum(model, lambda o, t: o[:, 0], parameters, Flat(1.0), batch, units, layouts, "rules")[0]
    {'weight': tensor([[1.5000]])}
    """
    calls, losses = capture(model, units, loss, batch)
    if len(calls) != len(layouts):
        raise NoRule("the model calls other modules than in its probe")
    for call, layout in zip(calls, layouts):
        _check_layout(call, layout, batch.size)
    check_graph(calls, losses, trainable)
    backward(calls, losses)
    return clip_and_add(by_parameter(calls, layouts), trainable, clipping, batch.size, strategy)


def _check_layout(call: Call, layout: Layout, size: int) -> None:
    shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in call.leaves] + call.shapes
    axes = layout.inputs + layout.outputs
    fits = len(shapes) == len(axes)
    for shape, axis in zip(shapes, axes):
        fits = fits and (axis is None or (shape is not None and len(shape) > axis and shape[axis] == size))
    if not fits:
        raise NoRule(f"{call.unit.described} has another layout than in its probe")


def check_strategy(engine: str, reason: str) -> None:
    """Refuse to fall back when the rules were asked for by name.

    *Guarantee.* A forced engine is the one that runs.

    >>> check_strategy("auto", "it is unusual")
    """
    if engine not in ("auto", "vmap", "loop"):
        raise UserError(f'engine={engine!r} cannot take this model: {reason}; use engine="auto"')
