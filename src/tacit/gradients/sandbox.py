"""What a model keeps from one run to the next: watched, so that no example stays in it, and put back after a probe."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tacit.gradients.batches import Batch, Loss, modules_of
from tacit.gradients.refusals import described
from tacit.privacy.validation import UserError

Key = tuple[str, str, str]  # who holds it, as what ("parameter", "buffer", "attribute"), under which name
_MACHINERY = frozenset(vars(nn.Module()))  # what every module has: its dicts of parameters, modules, hooks


def remembered(model: nn.Module, loss: Loss) -> dict[Key, list[Tensor]]:
    """All tensors that the modules of the model, and of the loss if it is a module, hold: also in lists and dicts.

    *Guarantee.* None is left out but those inside objects that are neither modules nor plain containers.

    >>> model = nn.Flatten()
    >>> model.mean = torch.zeros(1)
    >>> remembered(model, lambda outputs, targets: outputs)
    {('the model itself (Flatten)', 'attribute', 'mean'): [tensor([0.])]}
    """
    found: dict[Key, list[Tensor]] = {}
    for who, module in _named_modules(model, loss):
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module))):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    found[who, kind, name] = [value]
                elif isinstance(value, (list, tuple, dict)) and name not in _MACHINERY:
                    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
                    if tensors:
                        found[who, kind, name] = tensors
    return found


@contextmanager
def unchanged(model: nn.Module, loss: Loss) -> Iterator[None]:
    """Refuse a model or loss that writes to a parameter or a buffer while it runs. Cheap: no value is looked at.

    *Guarantee.* What is written in place or replaced is noticed, unless it is written through `.data`, for which the probe looks.

    >>> model = nn.Linear(1, 1)
    >>> with unchanged(model, lambda outputs, targets: outputs), torch.no_grad():
    ...     _ = model.bias.add_(1)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the model itself (Linear) changes its parameter 'bias' when it runs, ...
    """
    before = _versions(model, loss)
    yield
    after = _versions(model, loss)
    for place in {**before, **after}:
        (old, version), (new, new_version) = before.get(place, (None, -1)), after.get(place, (None, -1))
        if old is not new or version != new_version:
            module, kind, name = place
            who = next(who for who, other in _named_modules(model, loss) if other is module)
            raise UserError(_refusal((who, kind, name)))


class Sandbox:
    """A place to run a model and leave no trace: random states, parameters, buffers and attributes are put back.

    *Guarantee.* `check` refuses a run that changed a parameter or buffer, and one that left a tensor in an attribute which
    another run with as many other examples did not leave there: it depends on them. Values are compared, however written.

    >>> model = nn.Linear(1, 1)
    >>> with Sandbox(model, lambda outputs, targets: outputs, Batch.of(torch.zeros(1, 1), None)) as sandbox:
    ...     model.bias.data += 1
    ...     sandbox.check(1)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the model itself (Linear) changes its parameter 'bias' when it runs, ...
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch) -> None:
        devices = {leaf.device for leaf in batch.leaves if isinstance(leaf, Tensor)}
        self._fork = torch.random.fork_rng([device for device in devices if device.type == "cuda"])
        self._model, self._loss = model, loss
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor that is held twice is copied once
        before = remembered(model, loss)
        for tensor in (tensor for tensors in before.values() for tensor in tensors):
            if id(tensor) not in self._copies:
                self._copies[id(tensor)] = (tensor, tensor.detach().clone())
        self._before = {key: [self._copies[id(tensor)][1] for tensor in tensors] for key, tensors in before.items()}
        self._attributes: dict[tuple[int, int | None], dict[Key, list[Tensor]]] = {}  # as runs of one kind leave them
        self._containers: list[tuple[Any, Any]] = []
        for _, module in _named_modules(model, loss):
            own = [value for name, value in vars(module).items() if name not in _MACHINERY]
            for container in (vars(module), module._parameters, module._buffers, *own):
                if isinstance(container, (dict, list)):
                    self._containers.append((container, container.copy()))

    def __enter__(self) -> Sandbox:
        self._fork.__enter__()
        self._cuda = torch.cuda.is_available()
        self._states = _random_states(self._cuda)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._put_back()
        _set_random_states(self._states)
        self._fork.__exit__(*exception)

    def restart(self, seed: int | None = None) -> None:
        """Everything as it was, with the same random numbers again; or those of a seed."""
        self._put_back()
        _set_random_states(self._states)
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
        self._started = _random_states(self._cuda)

    def drew_random_numbers(self) -> bool:
        """Since the restart."""
        now, then = _random_states(self._cuda), self._started
        tensors = all(torch.equal(a, b) for a, b in zip([now[0], *now[1]], [then[0], *then[1]]))
        return not (tensors and now[2] == then[2] and _same_words(now[3], then[3]))

    def check(self, size: int, seed: int | None = None) -> None:
        """After a run with so many examples."""
        now = remembered(self._model, self._loss)
        attributes = {key: [t.detach().clone() for t in value] for key, value in now.items() if key[1] == "attribute"}
        other = self._attributes.setdefault((size, seed), attributes)
        for key in {**self._before, **now, **other}:
            if key[1] == "attribute":
                kept = _all_same(attributes.get(key, []), other.get(key, []))
            else:
                kept = _all_same(now.get(key, []), self._before.get(key, []))
            if not kept:
                raise UserError(_refusal(key))

    def _put_back(self) -> None:
        for container, copy in self._containers:
            if isinstance(container, list):
                container[:] = copy
                continue
            for name in [name for name in container if name not in copy]:
                del container[name]
            for name, value in copy.items():
                if container.get(name) is not value:
                    container[name] = value
        with torch.no_grad():
            for tensor, saved in self._copies.values():
                if tensor.shape != saved.shape:
                    tensor.data = saved.clone()
                elif not same(tensor, saved):
                    tensor.copy_(saved)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values; nan is nan here.

    *Guarantee.* Exact.

    >>> same(torch.tensor([float("nan")]), torch.tensor([float("nan")])), same(torch.zeros(1), torch.zeros(2))
    (True, False)
    """
    a, b = a.detach(), b.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _all_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(same(a, b) for a, b in zip(some, others))


def _refusal(key: Key) -> str:
    who, kind, name = key
    return (
        f"{who} changes its {kind} {name!r} when it runs, by what the examples are: so the training data leave with the model "
        "and have no noise; replace the module, or put it in eval mode"
    )


def _named_modules(model: nn.Module, loss: Loss) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        yield described(name, module), module
    inside = set(model.modules())
    for name, module in loss.named_modules() if isinstance(loss, nn.Module) else ():
        if module not in inside:
            yield (f"{described(name, module)} of the loss" if name else f"the loss ({type(module).__name__})"), module


def _versions(model: nn.Module, loss: Loss) -> dict[tuple[nn.Module, str, str], tuple[Tensor | None, int]]:
    """The parameters and buffers, and how often each was written to."""
    modules = [*modules_of(model), *(modules_of(loss) if isinstance(loss, nn.Module) else ())]
    return {
        (module, kind, name): (t, 0 if t is None or t.is_inference() else t._version)
        for module in modules
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, t in held.items()
    }


def _random_states(cuda: bool) -> tuple[Any, Any, Any, Any]:
    devices = torch.cuda.get_rng_state_all() if cuda else []
    return torch.get_rng_state(), devices, random.getstate(), np.random.get_state()  # noqa: NPY002


def _same_words(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other))


def _set_random_states(states: tuple[Any, Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1]):
        torch.cuda.set_rng_state(state, device)
    random.setstate(states[2])
    np.random.set_state(states[3])  # noqa: NPY002
