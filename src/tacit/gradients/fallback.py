"""Any model at all, without rules: the whole of it differentiated for each example by `torch.func`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import grad, vmap

from tacit.gradients.batches import Batch, Loss, call_with, losses_of
from tacit.gradients.contribution import at_least_float32


def per_example_gradients(
    model: nn.Module, loss: Loss, trainable: dict[str, nn.Parameter], batch: Batch
) -> dict[str, Tensor]:
    """One gradient an example, [batch, *shape], of every trainable parameter.

    *Guarantee.* The model is given each example as a batch of one, so that it cannot mix examples.

    >>> import torch
    >>> model = nn.Linear(1, 1)
    >>> batch = Batch.of(torch.tensor([[3.0], [5.0]]), None)
    >>> per_example_gradients(model, lambda o, t: o[:, 0], dict(model.named_parameters()), batch)["weight"].flatten()
    tensor([3., 5.])
    """
    tensors = [i for i, leaf in enumerate(batch.leaves) if isinstance(leaf, Tensor)]

    def one_loss(parameters: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        leaves = list(batch.leaves)
        for i, row in zip(tensors, rows):
            leaves[i] = row.unsqueeze(0)
        caller = _Functional(model, parameters)
        return losses_of(caller, loss, Batch(leaves, batch.spec, 1)).sum()

    parameters = {name: p.detach() for name, p in trainable.items()}
    rows = [batch.leaves[i] for i in tensors]
    found = vmap(grad(one_loss), in_dims=(None, 0), randomness="different")(parameters, rows)
    return {name: at_least_float32(gradient) for name, gradient in found.items()}


class _Functional(nn.Module):
    """The model with other values for its parameters."""

    def __init__(self, model: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = model  # whose layers a loss may want to see
        self._call: Callable[[Any, Any], Any] = partial(call_with, model, parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(args, kwargs)
