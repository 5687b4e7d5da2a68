"""Whatever holds examples, as the trainer sees it: a length, and a batch for some indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from tacit.privacy.validation import UserError

Indices = NDArray[np.int64]


@runtime_checkable
class Examples(Protocol):
    """What `fit` needs of a data set; `tacit.data.Dataset` is one."""

    def __len__(self) -> int: ...

    def batch(self, indices: Any = None, device: Any = "cpu") -> tuple[Any, Tensor]:
        """The inputs and the targets of these examples."""


class TensorExamples:
    """A pair of tensors or arrays, inputs and targets.

    >>> len(TensorExamples(torch.zeros(5, 2), torch.zeros(5)))
    5
    """

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = torch.as_tensor(inputs), torch.as_tensor(targets)
        if len(self.inputs) != len(self.targets):
            raise UserError(
                f"there are {len(self.inputs)} inputs but {len(self.targets)} targets; give one each an example"
            )
        if self.inputs.is_floating_point() and not torch.isfinite(self.inputs).all():
            raise UserError("the inputs hold NaN or infinite values; remove those examples or mend them")

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Any = None, device: Any = "cpu") -> tuple[Tensor, Tensor]:
        """These examples, on the device."""
        chosen = slice(None) if indices is None else torch.as_tensor(indices)
        return self.inputs[chosen].to(device), self.targets[chosen].to(device)


class CollatedExamples:
    """A map-style torch data set of (input, target) pairs."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Any = None, device: Any = "cpu") -> tuple[Any, Any]:
        """These examples, collated and on the device."""
        chosen: Sequence[int] = range(len(self)) if indices is None else [int(i) for i in indices]
        inputs, targets = default_collate([self.dataset[i] for i in chosen])
        return _to(inputs, device), _to(targets, device)


def as_examples(dataset: Any) -> Examples:
    """A tacit data set, a pair (inputs, targets), or a map-style torch data set, as `Examples`.

    >>> len(as_examples((torch.zeros(5, 2), torch.zeros(5))))
    5
    """
    examples: Examples
    if isinstance(dataset, Examples):
        examples = dataset
    elif isinstance(dataset, tuple | list) and len(dataset) == 2:
        examples = TensorExamples(*dataset)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        examples = CollatedExamples(dataset)
    else:
        raise UserError(
            f"cannot train on {type(dataset).__name__}; give a tacit Dataset, (inputs, targets), or a torch data set"
        )
    if len(examples) == 0:
        raise UserError("the data set is empty; there is nothing to train on")
    return examples


def shares_memory(first: Examples, second: Examples) -> bool:
    """Whether two data sets are one, or hold the same arrays.

    >>> inputs, targets = torch.zeros(4, 2), torch.zeros(4)
    >>> whole, half, other = (TensorExamples(inputs[rows], targets[rows]) for rows in (slice(4), slice(2), slice(2, 4)))
    >>> shares_memory(whole, half), shares_memory(half, other)
    (True, False)
    """

    if first is second or getattr(first, "dataset", first) is getattr(second, "dataset", second):
        return True
    return any(a < d and c < b for a, b in _extents(first) for c, d in _extents(second))


def _extents(examples: Examples) -> list[tuple[int, int]]:
    """Where in memory each array of a data set begins and ends."""
    found = []
    for value in vars(examples).values():
        if isinstance(value, Tensor | np.ndarray) and len(value):
            tensor = torch.as_tensor(value)
            span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()))
    return found


def channels_last(inputs: Any) -> Any:
    """Images with their channels last in memory, in which convolutions are faster on a CPU; anything else as it is.

    >>> channels_last(torch.zeros(2, 3, 8, 8)).stride()
    (192, 1, 24, 3)
    """

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    return torch.utils._pytree.tree_map_only(Tensor, laid_out, inputs)


def _to(value: Any, device: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
