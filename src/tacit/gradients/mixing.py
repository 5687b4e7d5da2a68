"""Whether a model mixes examples: runs in which some examples are exchanged or absent, compared on those that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.gradients.batches import Batch, Loss
from tacit.gradients.capture import Call, Unit, capture, hooks
from tacit.gradients.refusals import described
from tacit.gradients.sandbox import Sandbox, same
from tacit.privacy.validation import UserError

_WHY = "mixes examples: one example's result depends on the others, so no clipping bounds what one example does"
DEPENDS_ON_SIZE = (
    "the loss of an example depends on how many others are in the batch, so no clipping bounds what one example "
    "does; do not divide by the batch size"
)


@dataclass(frozen=True)
class Run:
    """What one run gave: the calls of the units, the losses, what the loss was given, and whether random numbers were drawn.

    `outputs` is a tuple: what the model gave, and the layers if the loss wants them.

    *Guarantee.* `outputs` share no memory with the graph.

    >>> Run(Batch.of(torch.zeros(1), None), None, [], torch.zeros(1), outputs=None, random=False).losses
    tensor([0.])
    """

    batch: Batch
    seed: int | None
    calls: list[Call]
    losses: Tensor
    outputs: Any
    random: bool


@dataclass(frozen=True)
class Subject:
    """A model and a loss that are being probed, in a sandbox.

    *Guarantee.* Every run begins in the same state, and one that changes this state is refused.

    >>> model, batch, loss = nn.Dropout(0.5), Batch.of(torch.ones(4, 2), None), lambda outputs, targets: outputs[:, 0]
    >>> with Sandbox(model, loss, batch) as sandbox:
    ...     Subject(model, loss, [], sandbox).run(batch).random
    True
    """

    model: nn.Module
    loss: Loss
    units: list[Unit]
    sandbox: Sandbox

    def run(self, batch: Batch, seed: int | None = None) -> Run:
        given: list[Any] = []

        def watched(outputs: Any, targets: Any, *layers: Any) -> Tensor:
            given.append(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (outputs, *layers)))
            return self.loss(outputs, targets, *layers)

        watched.wants_hidden = getattr(self.loss, "wants_hidden", False)  # type: ignore[attr-defined]
        watched.views = getattr(self.loss, "views", 1)  # type: ignore[attr-defined]
        self.sandbox.restart(seed)
        calls, losses = capture(self.model, self.units, watched, batch, probing=True)
        random = self.sandbox.drew_random_numbers()
        self.sandbox.check(batch.size, seed)
        return Run(batch, seed, calls, losses, given[0], random)


def chosen(batch: Batch, count: int) -> Batch:
    """So many examples of the batch, in turn, those with different targets first; numbers for what is not finite.

    *Guarantee.* Two targets that occur in the batch occur among two examples or more (where a target has at most 64 numbers).

    >>> chosen(Batch.of(torch.arange(4.0), torch.tensor([0, 0, 0, 1])), 3).tree()
    (tensor([0., 3., 1.]), tensor([0, 1, 0]))
    """
    order = list(range(batch.size))
    for target in pytree.tree_leaves(batch.tree()[1]):
        if isinstance(target, Tensor) and target[0].numel() <= 64:
            first: dict[Any, int] = {}
            for i, row in enumerate(target.reshape(batch.size, -1).tolist()):
                first.setdefault(tuple(row), i)
            firsts = set(first.values())
            order = [i for i in order if i in firsts] + [i for i in order if i not in firsts]
    rows = batch.rows(torch.tensor([order[i % batch.size] for i in range(count)]))
    leaves = [
        torch.nan_to_num(leaf, 0.0, 1.0, -1.0) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
        for leaf in rows.leaves
    ]
    return Batch(leaves, rows.spec, count)


def exchanged(batch: Batch, rows: list[int], pool: Batch) -> list[Batch]:
    """The batch with others in place of some examples, in versions of which the first that runs is to be taken.

    Others come from the pool, from the other end first. Where all have the same class, the class above or below may exist or
    not; the last version keeps it.

    *Guarantee.* All other rows stay as they are.

    >>> batch = Batch.of(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))
    >>> [version.tree() for version in exchanged(batch, [0], batch)]
    [(tensor([1., 1.]), tensor([1, 0])), (tensor([1., 1.]), tensor([0, 0]))]
    """
    versions: list[Batch] = []
    whole_numbers = any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in batch.leaves)
    for step in (1, -1, 0) if whole_numbers else (0,):
        leaves = [
            _exchanged(leaf, rows, others, step) if isinstance(leaf, Tensor) else leaf
            for leaf, others in zip(batch.leaves, pool.leaves)
        ]
        versions.append(Batch(leaves, batch.spec, batch.size))
    return [v for v in versions[:-1] if not _equal(v, versions[-1])] + versions[-1:]


def _equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.leaves, other.leaves) if isinstance(a, Tensor))


def _exchanged(leaf: Tensor, rows: list[int], others: Tensor, step: int) -> Tensor:
    new = leaf.clone()
    for k in rows:
        choices = (choice for choice in _choices(leaf, k, others, step) if not torch.equal(choice, leaf[k]))
        new[k] = next(choices, leaf[k])
    return new


def _choices(leaf: Tensor, k: int, others: Tensor, step: int) -> Any:
    old, start = leaf[k], len(leaf) - 1 - k
    for i in range(len(others)):
        yield others[(start + i) % len(others)]
    yield old.flatten().roll(1).view_as(old)
    if old.is_floating_point():
        yield 0.5 * old
        yield old + 1
    elif old.dtype == torch.bool:
        if step and old.dim() == 0:
            yield ~old
    # a class that does not exist is an exception on a CPU, but the end of the process on a GPU
    elif not old.is_complex() and (
        (step < 0 and old.min() > 0) or (step > 0 and old.min() >= 0 and old.device.type == "cpu")
    ):
        yield old + step


def check_exchange(subject: Subject, run: Run, rows: list[int], pool: Batch) -> tuple[Run, list[int]]:
    """Run it again with other examples in some rows, and refuse it if a loss of the rest is another now.

    *Guarantee.* Gives the other run, and the rows that were kept.

    >>> model, batch = nn.Softmax(dim=0), Batch.of(torch.rand(4, 2), None)
    >>> with Sandbox(model, len, batch) as sandbox:
    ...     subject = Subject(model, lambda outputs, targets: outputs[:, 0], [], sandbox)
    ...     check_exchange(subject, subject.run(batch), [0], batch)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the model itself (Softmax) mixes examples: ...
    """
    kept = [i for i in range(run.batch.size) if i not in rows]
    *bold, last = exchanged(run.batch, rows, pool)
    other = None
    for version in bold:
        try:
            other = subject.run(version, run.seed)
            break
        except UserError:
            raise
        except Exception:  # this class does not exist
            continue
    other = other or subject.run(last, run.seed)
    if not agree(run.losses[kept], other.losses[kept]):
        raise UserError(_culprit(subject, run, other, kept, kept))
    return other, kept


def check_part(subject: Subject, run: Run, rows: list[int]) -> None:
    """Refuse a model that draws no random numbers if some of the examples by themselves have other losses.

    *Guarantee.* The examples in `rows` have the losses they have in the whole batch.

    >>> model, batch = nn.Softmax(dim=0), Batch.of(torch.rand(4, 2), None)
    >>> with Sandbox(model, len, batch) as sandbox:
    ...     subject = Subject(model, lambda outputs, targets: outputs[:, 0], [], sandbox)
    ...     check_part(subject, subject.run(batch), [0, 1])
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the model itself (Softmax) mixes examples: ...
    """
    part = subject.run(run.batch.rows(torch.tensor(rows)), run.seed)
    if not agree(run.losses[rows], part.losses):
        raise UserError(_culprit(subject, run, part, rows, list(range(len(rows)))))


def check_loss_alone(subject: Subject, run: Run, rows: list[int], axes: list[int | None]) -> None:
    """Refuse a loss that gives some of the same outputs and targets by themselves another value, whatever the model draws.

    `axes` says where the examples lie in the outputs. A loss that draws random numbers itself, or that cannot be called with
    a part of the outputs, is passed over.

    *Guarantee.* A loss that divides by the batch size is refused.

    >>> model, batch = nn.Dropout(0.1), Batch.of(torch.ones(4, 20), None)
    >>> with Sandbox(model, len, batch) as sandbox:
    ...     subject = Subject(model, lambda outputs, targets: outputs.sum(1) / len(outputs), [], sandbox)
    ...     check_loss_alone(subject, subject.run(batch), [0, 1], [0])
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the loss of an example depends on how many others are in the batch, ...
    """
    leaves, spec = pytree.tree_flatten(run.outputs)
    index = torch.tensor(rows)
    some = [leaf if axis is None else rows_of(leaf, axis, index) for leaf, axis in zip(leaves, axes)]
    if all(axis is None for axis in axes):
        return
    subject.sandbox.restart(run.seed)
    try:
        outputs, *layers = pytree.tree_unflatten([_copied(leaf) for leaf in leaves], spec)
        together = subject.loss(outputs, run.batch.tree()[1], *layers)
        outputs, *layers = pytree.tree_unflatten(some, spec)
        part = subject.loss(outputs, run.batch.rows(index).tree()[1], *layers)
    except Exception:
        return
    if not subject.sandbox.drew_random_numbers() and not agree(together[rows], part):
        raise UserError(DEPENDS_ON_SIZE)


def agree(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding that another order of summation may bring.

    *Guarantee.* Numbers that differ by more than 0.03 % of the largest (in float32) do not agree.

    >>> agree(torch.tensor([1.0]), torch.tensor([1.0001])), agree(torch.tensor([1.0]), torch.tensor([1.001]))
    (True, False)
    """
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if torch.equal(a, b):  # mostly so: the same kernels on the same shapes
        return True
    if not a.is_floating_point():
        return same(a, b)
    tolerance = float(torch.finfo(a.dtype).eps) ** 0.5
    finite = a[a.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def rows_of(tensor: Tensor, axis: int, index: Tensor) -> Tensor:
    """Some examples of a tensor that has them on this axis.

    *Guarantee.* A copy.

    >>> rows_of(torch.tensor([[1, 2, 3]]), 1, torch.tensor([0, 2]))
    tensor([[1, 3]])
    """
    return tensor.detach().index_select(axis, index.to(tensor.device))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True)
class _Step:
    """A module's call, seen from outside: what some examples were before it and after it."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def _culprit(subject: Subject, run: Run, other: Run, rows: list[int], other_rows: list[int]) -> str:
    """Name the first module whose inputs agree in the same examples while its outputs do not."""
    for one, two in zip(_steps(subject, run, rows), _steps(subject, other, other_rows)):
        same_inputs = all(agree(a, b) for a, b in zip(one.inputs, two.inputs))
        if same_inputs and not all(agree(a, b) for a, b in zip(one.outputs, two.outputs)):
            return (
                f"{described(one.name, one.module)} {_WHY}; replace it by something that looks at one example at a time"
            )
    return f"the loss {_WHY}; give a loss that looks at one example at a time"


def _steps(subject: Subject, run: Run, rows: list[int]) -> list[_Step]:
    """All calls of modules in this run, in the order in which they ended."""
    steps: list[_Step] = []
    entered: list[list[Tensor]] = []  # by calls that have not ended: they end in reverse order

    def tensors(tree: Any) -> list[Tensor]:
        found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
        return [t.detach()[rows].clone() for t in found if t.dim() and len(t) == run.batch.size]

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(tensors((args, kwargs)))

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any, __: Any, output: Any) -> None:
            steps.append(_Step(name, module, entered.pop(), tensors(output)))

        return hook

    with hooks() as handles:
        for name, module in subject.model.named_modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
        subject.run(run.batch, run.seed)
    return steps
