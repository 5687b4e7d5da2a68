"""A look at a model before its first real use: where its examples lie, what it needs, and whether it mixes them.

A handful of runs on a few examples, once for each new signature (structure and shapes of the inputs, training mode,
trainable parameters). It leaves the model and the random states as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.gradients.batches import Batch, Loss
from tacit.gradients.capture import Call, NoRule, Unit, backward, check_graph, find_units
from tacit.gradients.generic import Layout, recomputed
from tacit.gradients.memory import BUDGET, fitting, rules_bytes, whole_model_bytes
from tacit.gradients.mixing import (
    DEPENDS_ON_SIZE,
    Run,
    Subject,
    agree,
    check_exchange,
    check_loss_alone,
    check_part,
    chosen,
    rows_of,
)
from tacit.gradients.sandbox import Sandbox
from tacit.privacy.validation import UserError

_T = TypeVar("_T")
_HALF = (torch.float16, torch.bfloat16)
CROWD = 32  # as many examples are compared at most,
CROWD_BYTES = 2**26  # and no more than eight if they need more memory than this
SEEDS = 6  # as many random states are tried


@dataclass
class Route:
    """How batches of one signature are computed: by `rules`, by `vmap` over the whole model, or in a `loop`.

    *Guarantee.* `engine` is "rules" only if every unit's examples lie where the rules look for them. It changes,
    by `step_down`, when a later batch shows that it does not hold.

    >>> Route(units=[]).engine
    'rules'
    """

    units: list[Unit]
    layouts: list[Layout] = field(default_factory=list)  # of the calls, in their order
    engine: str = "rules"
    reason: str = ""
    bytes_per_example: int = 0
    fitting: int | None = None  # how many examples fit in memory, once that was looked up
    conclusive: bool = True
    kept: dict[int, bool] = field(default_factory=dict)  # by the place of a call: whether decay takes what it gives

    def step_down(self, engine: str) -> None:
        """From now on by a slower engine, which asks less of the model."""
        self.engine = engine
        self.fitting = None


def probe(
    model: nn.Module, loss: Loss, trainable: dict[str, nn.Parameter], batch: Batch, largest: int | None = None
) -> Route:
    """Run the model on a few examples, and refuse it if one example's loss or gradient depends on another's.

    *Guarantee.* What was tried: each of three examples exchanged in turn and, if the rules are used, each half of up to 32 (at
    most `largest`, fewer if they are big); the losses, and the inputs, outputs and output gradients of all units, stayed the
    same for the others. If random numbers are drawn, the losses did so under six other random states; if none are, an example's
    loss was the same in the whole and in a part of a batch. So was the loss by itself, on given outputs, where it can be called
    so. No parameter or buffer changed, and no tensor attribute by what the examples were. In half precision all this is done on
    a copy in float32, where there can be one. A model that mixes examples only for inputs, weights or batches unlike these is
    not found out.

    >>> class Centred(nn.Module):
    ...     def forward(self, x): return x - x.mean(0)
    >>> model = nn.Sequential(nn.Linear(2, 2), Centred())
    >>> probe(model, lambda o, t: o.sum(1), dict(model.named_parameters()), Batch.of(torch.rand(4, 2), None))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: '1' (Centred) mixes examples: ...
    """
    precise = _in_float32(model, loss, batch)
    if precise is not None:
        try:
            with torch.autocast(_device(batch).type, enabled=False):
                route = _probed(*precise, list(trainable), largest)
            route.units = find_units(model, trainable)
            return route
        except UserError:
            raise
        except Exception:  # it insists on half precision
            pass
    return _probed(model, loss, batch, list(trainable), largest)


def _probed(model: nn.Module, loss: Loss, batch: Batch, names: list[str], largest: int | None) -> Route:
    parameters = dict(model.named_parameters())
    trainable = {name: parameters[name] for name in names}
    route = Route(find_units(model, trainable))
    pool, crowd = chosen(batch, min(CROWD, batch.size)), chosen(batch, CROWD)
    with Sandbox(model, loss, batch) as sandbox:
        subject = Subject(model, loss, route.units, sandbox)
        three = crowd.rows(slice(0, 3))
        small, small_bytes = _weighed(lambda: subject.run(three.rows(slice(0, 2))))
        large, large_bytes = _weighed(lambda: subject.run(three))
        route.conclusive = bool(large.losses.isfinite().all())
        others = [check_exchange(subject, large, [k], pool) for k in range(3)]
        room = largest or fitting(2 * (large_bytes - small_bytes), _device(batch))
        if large.random:
            few = crowd.rows(slice(0, max(3, min(8, room))))
            for seed in range(SEEDS):
                check_exchange(subject, subject.run(few, seed), list(range(few.size // 2)), pool)
        elif not agree(small.losses, large.losses[:2]):
            raise UserError(DEPENDS_ON_SIZE)
        axes = _output_axes(small, large)
        check_loss_alone(subject, large, [0, 1], axes)
        for run in [large, *(other for other, _ in others)]:
            backward(run.calls, run.losses)
        try:
            route.layouts = _layouts(small.calls, large.calls, int(getattr(loss, "views", 1)))
            for other, kept in others:
                _check_rows(large, other, route.layouts, kept)
            check_graph(large.calls, large.losses, trainable)
            _check_generic(large.calls, route.layouts)
            route.bytes_per_example = rules_bytes(large.calls, route.layouts, trainable, large_bytes - small_bytes)
            size = min(room, max(8, CROWD_BYTES // (route.bytes_per_example + 1)), CROWD)
            if size > 3:
                _check_crowd(subject, crowd.rows(slice(0, size)), pool, route.layouts, axes)
        except NoRule as reason:  # then each example is run by itself, and a crowd does not matter
            route.engine, route.reason = "vmap", str(reason)
            route.bytes_per_example = whole_model_bytes(trainable, large_bytes - small_bytes)
    return route


def _check_crowd(subject: Subject, crowd: Batch, pool: Batch, layouts: list[Layout], axes: list[int | None]) -> None:
    """Mixing that needs more than three examples: each half must be as it was with another half beside it, and with none."""
    whole = subject.run(crowd)
    backward(whole.calls, whole.losses)
    rows, middle = list(range(crowd.size)), crowd.size // 2
    for half, rest in ((rows[:middle], rows[middle:]), (rows[middle:], rows[:middle])):
        other, kept = check_exchange(subject, whole, rest, pool)
        backward(other.calls, other.losses)
        _check_rows(whole, other, layouts, kept)
        check_loss_alone(subject, whole, half, axes)
        if not whole.random:
            check_part(subject, whole, half)


def _in_float32(model: nn.Module, loss: Loss, batch: Batch) -> tuple[nn.Module, Loss, Batch] | None:
    """Copies without half precision, whose rounding would hide what mixes weakly; None where there is none, or no room."""
    tensors = [*model.parameters(), *(leaf for leaf in batch.leaves if isinstance(leaf, Tensor))]
    halves = any(tensor.dtype in _HALF for tensor in tensors)
    if not (halves or torch.is_autocast_enabled(_device(batch).type)):
        return None
    if 4 * sum(parameter.numel() for parameter in model.parameters()) > BUDGET:
        return None

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value

    try:
        model, loss = copy.deepcopy((model, loss))
    except Exception:
        return None
    for root in (model, loss):
        for module in root.modules() if isinstance(root, nn.Module) else ():
            module._apply(widened, recurse=False)  # type: ignore[no-untyped-call]
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    vars(module)[name] = widened(value)
    return model, loss, Batch([widened(leaf) for leaf in batch.leaves], batch.spec, batch.size)


def _device(batch: Batch) -> torch.device:
    return next(leaf.device for leaf in batch.leaves if isinstance(leaf, Tensor))


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


def _layouts(small: list[Call], large: list[Call], declared: int) -> list[Layout]:
    """Where the examples lie, from the shapes in a batch of two and in one of three; `declared` is how many views an example has,
    as the loss says."""
    if [call.unit.name for call in small] != [call.unit.name for call in large]:
        raise NoRule("the model calls other modules in batches of another size")
    layouts = []
    for two, three in zip(small, large):
        who = three.unit.described
        if len(two.leaves) != len(three.leaves) or len(two.outputs) != len(three.outputs):
            raise NoRule(f"{who} is called otherwise in batches of another size")
        views = _views(two, three, declared)
        layout = Layout(
            [_axis(a, b, who, views) for a, b in zip(two.leaves, three.leaves)],
            [_axis(a, b, who, views) for a, b in zip(two.outputs, three.outputs)],
            views=views,
        )
        reached = [axis for axis, gradient in zip(layout.outputs, three.gradients) if gradient is not None]
        tensors = [axis for leaf, axis in zip(three.leaves, layout.inputs) if isinstance(leaf, Tensor)]
        if None in reached or all(axis is None for axis in tensors):
            raise NoRule(f"{who} does not see one example at a time")
        if three.unit.rule is not None and (tensors != [0] or layout.outputs != [0]):
            raise NoRule(f"{who} has its examples elsewhere than on the first axis")
        layouts.append(layout)
    return layouts


def _views(two: Call, three: Call, declared: int) -> int:
    """How many rows an example has at a layer with a rule: as many as it has views, which the engine itself put one after the
    other, or one. Rows of another number were made by the model, and may be shared out otherwise in another batch."""
    first, second = two.outputs[0], three.outputs[0]
    if three.unit.rule is None or not isinstance(first, Tensor) or not isinstance(second, Tensor) or not first.dim():
        return 1
    return declared if (first.shape[0], second.shape[0]) == (2 * declared, 3 * declared) else 1


def _axis(two: Any, three: Any, who: str, views: int = 1) -> int | None:
    if not isinstance(three, Tensor):
        return None
    if not isinstance(two, Tensor) or two.dim() != three.dim():
        raise NoRule(f"{who} has another layout in batches of another size")
    differing = [axis for axis in range(three.dim()) if two.shape[axis] != three.shape[axis]]
    if not differing:
        return None
    if len(differing) > 1 or (two.shape[differing[0]], three.shape[differing[0]]) != (2 * views, 3 * views):
        raise NoRule(f"{who} has no axis that is the examples alone")
    return differing[0]


def _output_axes(small: Run, large: Run) -> list[int | None]:
    """Where the examples lie in what the loss is given; nowhere, if that cannot be told."""
    two, three = pytree.tree_leaves(small.outputs), pytree.tree_leaves(large.outputs)
    try:
        return [_axis(a, b, "the output") for a, b in zip(two, three, strict=True)]
    except (NoRule, ValueError):
        return [None] * len(three)


def _check_rows(run: Run, other_run: Run, layouts: list[Layout], kept: list[int]) -> None:
    """The examples that were kept must be where they were, and as they were, at every unit."""
    calls, others, size = run.calls, other_run.calls, run.batch.size
    if [call.unit.name for call in calls] != [call.unit.name for call in others] or len(calls) != len(layouts):
        raise NoRule("the model calls other modules for other examples")
    index = torch.tensor(kept)
    for call, other, layout in zip(calls, others, layouts):
        rows = _rows_of_examples(index, layout.views)
        for a, b, axis in zip(call.leaves + call.outputs, other.leaves + other.outputs, layout.inputs + layout.outputs):
            if axis is None:
                continue
            length = size * layout.views
            if not all(isinstance(t, Tensor) and t.dim() > axis and t.shape[axis] == length for t in (a, b)):
                raise NoRule(f"{call.unit.described} has another layout in batches of another size")
            if not agree(rows_of(a, axis, rows), rows_of(b, axis, rows)):
                raise NoRule(f"{call.unit.described} does not keep the examples in their order")
    for call, other, layout in reversed(list(zip(calls, others, layouts))):  # the last one lies nearest to what mixes
        for a, b, axis in zip(call.gradients, other.gradients, layout.outputs):
            if a is None and b is None:
                continue
            rows = _rows_of_examples(index, layout.views)
            if a is None or b is None or axis is None or not agree(rows_of(a, axis, rows), rows_of(b, axis, rows)):
                # views may be in another order; each example by itself is right in any case
                if layout.views > 1:
                    raise NoRule(f"{call.unit.described} does not keep the views of an example together")
                raise UserError(
                    f"the gradient at {call.unit.described} of one example depends on the others: what comes after it mixes "
                    "examples, so no clipping bounds what one example does"
                )


def _rows_of_examples(index: Tensor, views: int) -> Tensor:
    return (index.unsqueeze(1) * views + torch.arange(views)).flatten()


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
                raise NoRule(
                    f"{call.unit.described} cannot be computed one example at a time ({type(error).__name__})"
                ) from error
            if not all(agree(a, b) for a, b in zip(wanted, again)):
                raise NoRule(f"{call.unit.described} computes something else the second time")
