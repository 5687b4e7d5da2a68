"""A batch of examples as a pytree: tensors whose first axis is the example, and plain values that all examples share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tacit.privacy.validation import UserError

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples, flattened.

    *Guarantee.* `rows` keeps or drops whole examples: inputs and targets stay together.

    >>> batch = Batch.of({"image": torch.zeros(4, 2)}, torch.arange(4))
    >>> batch.size, batch.rows(slice(1, 3)).tree()
    (4, ({'image': tensor([[0., 0.], [0., 0.]])}, tensor([1, 2])))
    """

    leaves: list[Any]
    spec: pytree.TreeSpec
    size: int

    @classmethod
    def of(cls, inputs: Any, targets: Any) -> Batch:
        leaves, spec = pytree.tree_flatten((inputs, targets))
        sizes = set()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.dim() == 0:
                    raise UserError("every tensor of a batch must have the examples on its first axis; one has no axis")
                sizes.add(leaf.shape[0])  # not len, which asks more
            elif not isinstance(leaf, (bool, int, float, str, type(None))):
                raise UserError(f"a batch must hold tensors, not {type(leaf).__name__}; use torch.as_tensor")
        if len(sizes) != 1:
            found = ", ".join(map(str, sorted(sizes))) or "no tensor"
            raise UserError(
                f"inputs and targets must have the same number of examples on their first axis, not {found}"
            )
        return cls(leaves, spec, sizes.pop())

    def tree(self) -> tuple[Any, Any]:
        """(inputs, targets) as they came."""
        inputs, targets = pytree.tree_unflatten(self.leaves, self.spec)
        return inputs, targets

    def rows(self, index: slice | Tensor) -> Batch:
        """Some of the examples."""
        leaves = [leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        return Batch(leaves, self.spec, sizes[0])

    def signature(self) -> Hashable:
        """What a model may look at besides the values: structure, shapes of one example, types, shared values."""
        described = [
            (tuple(leaf.shape[1:]), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        ]
        return str(self.spec), tuple(described)


class LayerOutput(NamedTuple):
    """A layer as a loss sees it: what came out of it before its activation, [batch, ...], and its weight.

    *Guarantee.* Plain data.

    >>> LayerOutput(torch.zeros(4, 3), torch.zeros(3, 2)).output.shape
    torch.Size([4, 3])
    """

    output: Tensor
    weight: Tensor


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def losses_of(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """One loss an example, [batch].

    *Guarantee.* A loss that is not one value an example is refused.

    >>> batch = Batch.of(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    >>> losses_of(nn.Linear(2, 3), nn.CrossEntropyLoss(), batch)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the loss must give one value an example, a tensor of shape [4], not [];
    use reduction="none"
    """
    return outputs_and_losses(model, loss, batch)[1]


def outputs_and_losses(model: nn.Module, loss: Loss, batch: Batch) -> tuple[Any, Tensor]:
    """What the model gives, and one loss an example.

    A loss with a true `wants_hidden` is called `loss(outputs, targets, layers)`, with the linear and convolutional layers in the
    order in which they ended: the very tensors of this forward pass, with their graph. All but the last are hidden.

    A loss with `views` = K > 1 is of examples that are K views each: every input is [batch, K, ...], the model is given batch * K
    rows, and the loss what it made of them as [batch, K, ...] (layers as well), to give one value an example.

    *Guarantee.* As for `losses_of`; the hooks are gone when it returns or raises.

    >>> class Energy:
    ...     wants_hidden = True
    ...     def __call__(self, outputs, targets, layers): return layers[0].output.square().sum(dim=1)
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> outputs_and_losses(model, Energy(), Batch.of(torch.zeros(4, 2), None))[1].shape
    torch.Size([4])
    """
    inputs, targets = batch.tree()
    layers: list[LayerOutput] = []
    versions: list[int] = []
    wanted, views = bool(getattr(loss, "wants_hidden", False)), int(getattr(loss, "views", 1))
    if views > 1:
        inputs = _side_by_side(inputs, views)
    handles = _recording(model, layers, versions) if wanted else []
    try:
        if isinstance(inputs, (tuple, list)):
            outputs = model(*inputs)
        elif isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if any(layer.output._version != version for layer, version in zip(layers, versions)):
        raise UserError(
            "what a layer gives is changed in place, so the loss cannot see it; use activations that are not in place"
        )
    if views > 1:
        by_view = partial(_by_view, batch.size, views)
        outputs = pytree.tree_map_only(Tensor, by_view, outputs)
        layers = [LayerOutput(by_view(layer.output), layer.weight) for layer in layers]
    losses = loss(outputs, targets, layers) if wanted else loss(outputs, targets)
    if not isinstance(losses, Tensor) or losses.shape != (batch.size,):
        found = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(
            f"the loss must give one value an example, a tensor of shape [{batch.size}], not {found}; "
            'use reduction="none"'
        )
    return outputs, losses


def _side_by_side(inputs: Any, views: int) -> Any:
    """[batch, views, ...] to [batch * views, ...], an example's views one after the other."""

    def rows(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != views:
            raise UserError(
                f"inputs of {views} views an example must be [batch, {views}, ...], not {list(tensor.shape)}"
            )
        return tensor.flatten(0, 1)

    return pytree.tree_map_only(Tensor, rows, inputs)


def _by_view(examples: int, views: int, tensor: Tensor) -> Tensor:
    """[batch * views, ...] back to [batch, views, ...]."""
    if not tensor.dim() or len(tensor) != examples * views:
        raise UserError(
            f"with {views} views an example, what the model gives, and each layer that the loss wants to see, must have a row "
            f"for each: {examples * views} for {examples} examples, not the shape {list(tensor.shape)}"
        )
    return tensor.view(examples, views, *tensor.shape[1:])


def _recording(model: nn.Module, layers: list[LayerOutput], versions: list[int]) -> list[Any]:
    """Let every linear and convolutional layer note what it gives."""

    def record(module: nn.Module, _: Any, output: Tensor) -> None:
        assert isinstance(module, LAYERS)
        layers.append(LayerOutput(output, module.weight))
        versions.append(output._version)

    # first of all hooks, as the engine's own: what the layer computed, not what another hook made of it
    return [
        module.register_forward_hook(record, prepend=True) for module in modules_of(model) if isinstance(module, LAYERS)
    ]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and all modules in it, each once, in any order; quicker than `model.modules()`, which makes up their names.

    *Guarantee.* None is left out.

    >>> len(modules_of(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))))
    4
    """
    found = {model: None}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get a gradient, by name; one that is tied appears once, under its first name.

    *Guarantee.* None is left out without a word: a model without any is refused.

    >>> list(trainable_parameters(nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise UserError("the model has no trainable parameter; set requires_grad on those that should be trained")
    for name, parameter in found.items():
        if not parameter.is_floating_point():
            raise UserError(f"the parameter {name!r} must hold real floating-point numbers, not {parameter.dtype}")
    return found


def call_with(module: nn.Module, parameters: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
    """`module(*args, **kwargs)` with other values for some of its parameters, wherever these occur in it.

    `functional_call` would find the tied places itself, but puts wrong values back where one *module* has two names.

    *Guarantee.* The module has its own parameters again when it returns or raises.

    >>> call_with(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[3.0]])}, (torch.ones(1, 1),), {})
    tensor([[3.]])
    """
    values = {id(module.get_parameter(name)): value for name, value in parameters.items()}
    places = {
        f"{prefix}.{name}" if prefix else name: values[id(parameter)]
        for prefix, inner in module.named_modules()  # each module once
        for name, parameter in inner._parameters.items()
        if id(parameter) in values
    }
    return functional_call(module, places, args, kwargs, tie_weights=False)


def norm_dtype(parameters: dict[str, nn.Parameter]) -> torch.dtype:
    """The type of the norms: the widest of the parameters', at least float32.

    *Guarantee.* No norm is rounded to half precision.

    >>> norm_dtype(dict(nn.Linear(2, 3).bfloat16().named_parameters()))
    torch.float32
    """
    dtype = torch.float32
    for other in {parameter.dtype for parameter in parameters.values()} - {dtype}:
        dtype = torch.promote_types(dtype, other)
    return dtype
