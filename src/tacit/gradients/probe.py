"""A look at a model before its first real use: where its examples lie, what it needs, and whether it mixes them.

A handful of runs on two or three examples, once for each new signature (structure and shapes of the inputs, training
mode, trainable parameters). It leaves parameters, buffers and random states as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.gradients.batches import Batch, Loss
from tacit.gradients.capture import Call, NoRule, Unit, backward, capture, check_graph, find_units, hooks
from tacit.gradients.generic import Layout, recomputed
from tacit.gradients.memory import rules_bytes, whole_model_bytes
from tacit.gradients.refusals import described
from tacit.privacy.validation import UserError

_T = TypeVar("_T")


@dataclass
class Plan:
    """How batches of one signature are computed: by `rules`, by `vmap` over the whole model, or in a `loop`.

    *Guarantee.* `engine` is "rules" only if every unit's examples lie where the rules look for them.

    >>> Plan(units=[]).engine
    'rules'
    """

    units: list[Unit]
    layouts: list[Layout] = field(default_factory=list)  # of the calls, in their order
    engine: str = "rules"
    reason: str = ""
    bytes_per_example: int = 0
    conclusive: bool = True


def probe(model: nn.Module, loss: Loss, trainable: dict[str, nn.Parameter], batch: Batch) -> Plan:
    """Run the model on a few examples, and refuse it if one example's loss or gradient depends on another's.

    *Guarantee.* With each of three examples exchanged in turn, the losses, and the inputs, outputs and output gradients of all
    units, stayed the same for the other two; so did the loss of an example between batches of two and of three. Buffers did not
    change. A model that mixes examples only for inputs unlike these is not found out.

    >>> class Centred(nn.Module):
    ...     def forward(self, x): return x - x.mean(0)
    >>> model = nn.Sequential(nn.Linear(2, 2), Centred())
    >>> probe(model, lambda o, t: o.sum(1), dict(model.named_parameters()), Batch.of(torch.rand(4, 2), None))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: '1' (Centred) mixes examples: ...
    """
    plan = Plan(find_units(model, trainable))
    three = _examples(batch, 3)
    with _Sandbox(model, batch) as sandbox:

        def run(examples: Batch) -> tuple[list[Call], Tensor]:
            sandbox.restart()
            calls, losses = capture(model, plan.units, loss, examples, probing=True)
            sandbox.check_buffers()
            return calls, losses

        (small, fewer), small_bytes = _weighed(lambda: run(three.rows(slice(0, 2))))
        (large, losses), large_bytes = _weighed(lambda: run(three))
        plan.conclusive = bool(losses.isfinite().all())
        random_numbers = sandbox.drew_random_numbers()
        runs = []
        for k in range(3):
            kept = [i for i in range(3) if i != k]
            exchanged = _exchanged(three, k)
            calls, other_losses = run(exchanged)
            if not _agree(losses[kept], other_losses[kept]):
                raise UserError(_culprit(model, run, three, exchanged, kept))
            backward(calls, other_losses)
            runs.append((calls, kept))
        if not random_numbers and not _agree(fewer, losses[:2]):
            raise UserError(
                "the loss of an example depends on how many others are in the batch, so no clipping bounds what one example "
                "does; do not divide by the batch size"
            )
        backward(large, losses)
        try:
            plan.layouts = _layouts(small, large)
            for calls, kept in runs:
                _check_rows(large, calls, plan.layouts, kept)
            check_graph(large, losses, trainable)
            _check_generic(large, plan.layouts)
            plan.bytes_per_example = rules_bytes(large, plan.layouts, trainable, large_bytes - small_bytes)
        except NoRule as reason:
            plan.engine, plan.reason = "vmap", str(reason)
            plan.bytes_per_example = whole_model_bytes(trainable, large_bytes - small_bytes)
    return plan


class _Sandbox:
    """What a probe must leave as it was: random states and buffers."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        devices = {leaf.device for leaf in batch.leaves if isinstance(leaf, Tensor)}
        self._fork = torch.random.fork_rng([device for device in devices if device.type == "cuda"])
        self._others = (random.getstate(), np.random.get_state())  # noqa: NPY002
        self._buffers = [
            (name, module, key, value, None if value is None else value.clone())
            for name, module in model.named_modules()
            for key, value in module._buffers.items()
        ]

    def __enter__(self) -> _Sandbox:
        self._fork.__enter__()
        self._state = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return self

    def __exit__(self, *exception: Any) -> None:
        self._restore_others()
        for _, module, key, value, copy in self._buffers:
            if value is not None and not _same(value, copy):
                with torch.no_grad():
                    value.copy_(copy)
            module._buffers[key] = value
        self._fork.__exit__(*exception)

    def restart(self) -> None:
        """The same random numbers again."""
        torch.set_rng_state(self._state)
        for device, state in enumerate(self._cuda):
            torch.cuda.set_rng_state(state, device)
        self._restore_others()

    def drew_random_numbers(self) -> bool:
        """Since the restart."""
        moved = [torch.cuda.get_rng_state(device) for device in range(len(self._cuda))]
        return not all(torch.equal(a, b) for a, b in zip([self._state, *self._cuda], [torch.get_rng_state(), *moved]))

    def check_buffers(self) -> None:
        for name, module, key, _, copy in self._buffers:
            if not _same(module._buffers.get(key), copy):
                raise UserError(
                    f"{described(name, module)} changes its buffer {key!r} in a forward pass, so the training data leave with "
                    "the model and have no noise; replace the module, or put it in eval mode"
                )

    def _restore_others(self) -> None:
        random.setstate(self._others[0])
        np.random.set_state(self._others[1])  # noqa: NPY002


def _weighed(run: Callable[[], _T]) -> tuple[_T, int]:
    """What a forward pass gives, and how many bytes it keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would be kept alive by its own graph

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, sum(kept.values())


def _examples(batch: Batch, count: int) -> Batch:
    """So many examples of the batch, in turn, with numbers for what is not finite."""
    rows = batch.rows(torch.arange(count) % batch.size)
    leaves = [
        torch.nan_to_num(leaf, 0.0, 1.0, -1.0) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in rows.leaves
    ]
    return Batch(leaves, rows.spec, count)


def _exchanged(batch: Batch, k: int) -> Batch:
    """The batch with another example in place of example k: its neighbour, or where that is the same, something like it."""
    leaves = []
    for leaf in batch.leaves:
        if isinstance(leaf, Tensor):
            old, neighbour = leaf[k], leaf[(k + 1) % batch.size]
            choices = [neighbour, old.flatten().roll(1).view_as(old)]
            if old.is_floating_point():
                choices += [0.5 * old, old + 1]
            elif not old.is_complex() and old.dtype != torch.bool:
                choices += [(old - 1).clamp(min=0)]  # a class or a token that exists if this one does
            new = next((choice for choice in choices if not torch.equal(choice, old)), old)
            leaf = torch.cat([leaf[:k], new.unsqueeze(0), leaf[k + 1 :]])
        leaves.append(leaf)
    return Batch(leaves, batch.spec, batch.size)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _agree(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding that another order of summation may bring."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or a.numel() == 0:
        return _same(a, b)
    tolerance = float(torch.finfo(a.dtype).eps) ** 0.5
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _layouts(small: list[Call], large: list[Call]) -> list[Layout]:
    """Where the examples lie, from the shapes in a batch of two and in one of three."""
    if [call.unit.name for call in small] != [call.unit.name for call in large]:
        raise NoRule("the model calls other modules in batches of another size")
    layouts = []
    for two, three in zip(small, large):
        who = three.unit.described
        if len(two.leaves) != len(three.leaves) or len(two.outputs) != len(three.outputs):
            raise NoRule(f"{who} is called otherwise in batches of another size")
        layout = Layout(
            [_axis(a, b, who) for a, b in zip(two.leaves, three.leaves)],
            [_axis(a, b, who) for a, b in zip(two.outputs, three.outputs)],
        )
        reached = [axis for axis, gradient in zip(layout.outputs, three.gradients) if gradient is not None]
        tensors = [axis for leaf, axis in zip(three.leaves, layout.inputs) if isinstance(leaf, Tensor)]
        if None in reached or all(axis is None for axis in tensors):
            raise NoRule(f"{who} does not see one example at a time")
        if three.unit.rule is not None and (tensors != [0] or layout.outputs != [0]):
            raise NoRule(f"{who} has its examples elsewhere than on the first axis")
        layouts.append(layout)
    return layouts


def _axis(two: Any, three: Any, who: str) -> int | None:
    if not isinstance(three, Tensor):
        return None
    if not isinstance(two, Tensor) or two.dim() != three.dim():
        raise NoRule(f"{who} has another layout in batches of another size")
    differing = [axis for axis in range(three.dim()) if two.shape[axis] != three.shape[axis]]
    if not differing:
        return None
    if len(differing) > 1 or (two.shape[differing[0]], three.shape[differing[0]]) != (2, 3):
        raise NoRule(f"{who} has no axis that is the examples alone")
    return differing[0]


def _check_rows(calls: list[Call], others: list[Call], layouts: list[Layout], kept: list[int]) -> None:
    """The examples that were kept must be where they were, and as they were, at every unit."""
    if [call.unit.name for call in calls] != [call.unit.name for call in others]:
        raise NoRule("the model calls other modules for other examples")
    index = torch.tensor(kept)
    for call, other, layout in zip(calls, others, layouts):
        for a, b, axis in zip(call.leaves + call.outputs, other.leaves + other.outputs, layout.inputs + layout.outputs):
            if axis is not None and not _agree(_rows(a, axis, index), _rows(b, axis, index)):
                raise NoRule(f"{call.unit.described} does not keep the examples in their order")
    for call, other, layout in reversed(list(zip(calls, others, layouts))):  # the last one lies nearest to what mixes
        for a, b, axis in zip(call.gradients, other.gradients, layout.outputs):
            if a is None and b is None:
                continue
            if a is None or b is None or axis is None or not _agree(_rows(a, axis, index), _rows(b, axis, index)):
                raise UserError(
                    f"the gradient at {call.unit.described} of one example depends on the others: what comes after it mixes "
                    "examples, so no clipping bounds what one example does"
                )


def _rows(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    return tensor.detach().index_select(axis, index.to(tensor.device))


def _check_generic(calls: list[Call], layouts: list[Layout]) -> None:
    """A module that is computed again must give the same again, one example at a time."""
    for call, layout in zip(calls, layouts):
        if call.unit.rule is None:
            if call.drew_random_numbers:
                raise NoRule(f"{call.unit.described} draws random numbers, which would be others the second time")
            wanted = [output for output, gradient in zip(call.outputs, call.gradients) if gradient is not None]
            try:
                again = recomputed(call, layout)[1]
            except Exception as error:
                raise NoRule(f"{call.unit.described} cannot be computed one example at a time: {error}") from error
            if not all(_agree(a, b) for a, b in zip(wanted, again)):
                raise NoRule(f"{call.unit.described} computes something else the second time")


def _culprit(model: nn.Module, run: Callable[[Batch], object], one: Batch, other: Batch, kept: list[int]) -> str:
    """Name the first module whose inputs agree in the kept examples while its outputs do not."""

    def trace(batch: Batch) -> list[tuple[str, nn.Module, list[Tensor], list[Tensor]]]:
        seen: list[tuple[str, nn.Module, list[Tensor], list[Tensor]]] = []
        arrived: dict[str, list[list[Tensor]]] = {}

        def tensors(tree: Any) -> list[Tensor]:
            found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
            return [t.detach()[kept].clone() for t in found if t.dim() and len(t) == batch.size]

        with hooks() as handles:
            for name, module in model.named_modules():
                before = lambda _, args, kwargs, name=name: arrived.setdefault(name, []).append(tensors((args, kwargs)))  # noqa: E731
                after = lambda m, _, __, output, name=name: seen.append((name, m, arrived[name].pop(), tensors(output)))  # noqa: E731
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after, with_kwargs=True))
            run(batch)
        return seen

    why = "mixes examples: one example's result depends on the others, so no clipping bounds what one example does"
    for (name, module, inputs, outputs), (_, _, other_inputs, other_outputs) in zip(trace(one), trace(other)):
        same_inputs = all(_agree(a, b) for a, b in zip(inputs, other_inputs))
        if same_inputs and not all(_agree(a, b) for a, b in zip(outputs, other_outputs)):
            return f"{described(name, module)} {why}; replace it by something that looks at one example at a time"
    return f"the loss {why}; give a loss that looks at one example at a time"
