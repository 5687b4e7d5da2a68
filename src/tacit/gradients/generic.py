"""The rule for everything without a rule: compute the module again, one example at a time, and differentiate it.

It needs to know where in each argument and output the examples lie; the probe has found that out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from tacit.gradients.batches import call_with
from tacit.gradients.capture import Call
from tacit.gradients.contribution import Contribution, at_least_float32


@dataclass
class Layout:
    """On which axis the examples lie in each argument and each output of a call (None: shared by all examples).

    *Guarantee.* Found by comparing batches of different sizes, so that an axis is never mistaken for the examples because it
    happens to be as long. `one_by_one` says that `vmap` has failed for this module; `views`, how many rows of the first axis, one
    after the other, each example has: more than one only for a layer with a rule.

    >>> Layout([0, None], [0]).one_by_one
    False
    """

    inputs: list[int | None]
    outputs: list[int | None]
    one_by_one: bool = False
    views: int = 1


def generic(call: Call, layout: Layout) -> dict[str, Contribution]:
    """Per-example gradients of a module's parameters: the vector-Jacobian product of each example by itself.

    *Guarantee.* Each example's gradient is computed from its own slices of arguments and output gradients, as a batch of one.

    >>> from torch import nn
    >>> from tacit.gradients.capture import Unit
    >>> unit = Unit("act", nn.PReLU(), None, {"weight": "act.weight"})
    >>> leaves, spec = pytree.tree_flatten(((torch.tensor([[-2.0], [3.0]]),), {}))
    >>> call = Call(unit, leaves, spec, gradients=[torch.ones(2, 1)])
    >>> generic(call, Layout([0], [0]))["weight"].per_example()
    tensor([[-2.],
            [ 0.]])
    """

    @cache
    def gradients() -> dict[str, Tensor]:
        return recomputed(call, layout)[0]

    return {name: Contribution(lambda name=name: gradients()[name]) for name in call.unit.parameters}  # type: ignore[misc]


def recomputed(call: Call, layout: Layout) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Per-example gradients by parameter, and the outputs that have a gradient as they came out this time.

    *Guarantee.* As for `generic`.

    >>> from torch import nn
    >>> from tacit.gradients.capture import Unit
    >>> leaves, spec = pytree.tree_flatten(((torch.tensor([[-2.0], [3.0]]),), {}))
    >>> call = Call(Unit("", nn.PReLU(), None, {"weight": "weight"}), leaves, spec, gradients=[torch.ones(2, 1)])
    >>> recomputed(call, Layout([0], [0]))[1]
    [tensor([[-0.5000],
            [ 3.0000]])]
    """
    module = call.unit.module
    parameters = {inner: module.get_parameter(inner).detach() for inner in call.unit.parameters}
    batched = [i for i, axis in enumerate(layout.inputs) if axis is not None]
    wanted = [i for i, gradient in enumerate(call.gradients) if gradient is not None]
    if not wanted:
        batch = call.leaves[batched[0]].shape[layout.inputs[batched[0]]]
        return {inner: at_least_float32(p.new_zeros(batch, *p.shape)) for inner, p in parameters.items()}, []
    input_axes = [_known(layout.inputs[i]) for i in batched]
    output_axes = [_known(layout.outputs[i]) for i in wanted]
    cotangents = [_known(call.gradients[i]) for i in wanted]

    def outputs(values: dict[str, Tensor], rows: list[Tensor]) -> list[Tensor]:
        leaves = list(call.leaves)
        for i, row in zip(batched, rows):
            leaves[i] = row
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        found = pytree.tree_leaves(call_with(module, values, args, kwargs))
        return [found[i] for i in wanted]

    def one(rows: list[Tensor], directions: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        # vmap takes the example axis away; the module expects a batch, so each example gets it back, of length one
        rows = [row.unsqueeze(axis) for row, axis in zip(rows, input_axes)]
        found, pullback, *_ = vjp(lambda values: outputs(values, rows), parameters)
        directions = [d.unsqueeze(axis) for d, axis in zip(directions, output_axes)]
        return pullback(directions)[0], [o.movedim(axis, 0)[0] for o, axis in zip(found, output_axes)]

    arguments = [call.leaves[i] for i in batched]
    if not layout.one_by_one:
        try:
            every = vmap(one, in_dims=(input_axes, output_axes), randomness="different")
            gradients, found = every(arguments, cotangents)
            found = [o.movedim(0, axis) for o, axis in zip(found, output_axes)]
            return {inner: at_least_float32(g) for inner, g in gradients.items()}, found
        except (RuntimeError, ValueError, NotImplementedError) as error:
            layout.one_by_one = True
            warnings.warn(  # the exception's own words may quote examples
                f"{call.unit.described} has no rule and torch.func.vmap cannot take it ({type(error).__name__}); its gradients "
                "are computed one example after the other, which is exact and slow",
                stacklevel=2,
            )
    each = []
    for i in range(arguments[0].shape[input_axes[0]]):
        values = {inner: p.clone().requires_grad_() for inner, p in parameters.items()}
        with torch.enable_grad():
            found = outputs(values, [a.narrow(axis, i, 1) for a, axis in zip(arguments, input_axes)])
            rows = [c.narrow(axis, i, 1) for c, axis in zip(cotangents, output_axes)]
            value = torch.stack([(o * row).sum() for o, row in zip(found, rows)]).sum()
        gs = [torch.zeros_like(p) for p in parameters.values()]
        if value.requires_grad:
            gs = list(torch.autograd.grad(value, list(values.values()), allow_unused=True, materialize_grads=True))
        each.append((gs, found))
    stacked = [at_least_float32(torch.stack(gs)) for gs in zip(*(gs for gs, _ in each))]
    joined = [torch.cat(rows, dim=axis).detach() for rows, axis in zip(zip(*(o for _, o in each)), output_axes)]
    return dict(zip(parameters, stacked)), joined


def _known(value: Any) -> Any:
    assert value is not None  # the probe has made sure of it
    return value
