"""A torch network as a JAX function: `torch.fx` writes down what the network does, and each operation has its JAX twin here.

Images are NHWC and kernels HWIO, as XLA likes them; only `flatten` goes back to torch's order, so that the weights agree.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor, fx, nn
from torch.nn import functional

from tacit.models import WeightStandardizedConv2d

Params = dict[str, jax.Array]

_CONV = ("NHWC", "HWIO", "NHWC")
_AXES = {0: 0, 1: 3, 2: 1, 3: 2}  # where an axis of NCHW is in NHWC


def to_jax(tensor: Tensor) -> jax.Array:
    """A tensor or a kernel in JAX's order."""
    array = tensor.detach().numpy()
    return jnp.asarray(np.transpose(array, (2, 3, 1, 0)) if array.ndim == 4 else array)


def images_to_jax(inputs: Tensor) -> jax.Array:
    """A batch of inputs in JAX's order."""
    array = inputs.contiguous().numpy()
    return jnp.asarray(np.transpose(array, (0, 2, 3, 1)) if array.ndim == 4 else array)


def to_torch(array: jax.Array) -> Tensor:
    """A parameter or its gradient in torch's order."""
    found = np.asarray(array)
    return torch.from_numpy(np.ascontiguousarray(np.transpose(found, (3, 2, 0, 1)) if found.ndim == 4 else found))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _conv(x: jax.Array, w: jax.Array, b: jax.Array | None, stride: Any, padding: Any, groups: int = 1) -> jax.Array:
    pads = [(p, p) for p in _pair(padding)]
    y = lax.conv_general_dilated(x, w, _pair(stride), pads, dimension_numbers=_CONV, feature_group_count=groups)
    return y if b is None else y + b


def _pool(x: jax.Array, kernel: Any, stride: Any, largest: bool) -> jax.Array:
    window = (1, *_pair(kernel), 1)
    strides = (1, *_pair(stride or kernel), 1)
    if largest:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "VALID")
    return lax.reduce_window(x, 0.0, lax.add, window, strides, "VALID") / (window[1] * window[2])


def _normalised(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)


def _group_norm(x: jax.Array, groups: int, w: Any, b: Any, eps: float) -> jax.Array:
    n, h, width, c = x.shape
    y = _normalised(x.reshape(n, h, width, groups, c // groups), (1, 2, 4), eps).reshape(x.shape)
    return y if w is None else y * w + b


def _layer_norm(x: jax.Array, w: Any, b: Any, eps: float) -> jax.Array:
    y = _normalised(x, (-1,), eps)
    return y if w is None else y * w + b


def _standardised(w: jax.Array, eps: float) -> jax.Array:
    """A kernel as `WeightStandardizedConv2d` has it: mean 0 and variance 1 / fan-in over each filter."""
    fan_in = w.shape[0] * w.shape[1] * w.shape[2]
    return _normalised(w, (0, 1, 2), eps) / fan_in**0.5


def _attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(query @ jnp.swapaxes(key, -1, -2) / query.shape[-1] ** 0.5, axis=-1)
    return weights @ value


def _flatten(x: jax.Array, start_dim: int = 0) -> jax.Array:
    if x.ndim == 4 and start_dim == 1:  # images, in torch's order
        x = x.transpose(0, 3, 1, 2)
    return x.reshape(*x.shape[:start_dim], -1)


ACTIVATIONS: dict[type[nn.Module], Callable[[jax.Array], jax.Array]] = {
    nn.Tanh: jnp.tanh,
    nn.ReLU: jax.nn.relu,
    nn.SiLU: jax.nn.silu,
    nn.Identity: lambda x: x,
}


def _module(module: nn.Module, name: str, p: Params, x: jax.Array) -> jax.Array:
    """One leaf module."""
    w, b = p.get(f"{name}.weight"), p.get(f"{name}.bias")
    if isinstance(module, nn.Conv2d):
        assert w is not None
        if isinstance(module, WeightStandardizedConv2d):
            w = _standardised(w, module.eps)
        return _conv(x, w, b, module.stride, module.padding, module.groups)
    if isinstance(module, nn.Linear):
        assert w is not None
        y = x @ w.T
        return y if b is None else y + b
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
        return _pool(x, module.kernel_size, module.stride, isinstance(module, nn.MaxPool2d))
    if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
        return x.mean((1, 2), keepdims=True)
    if isinstance(module, nn.GroupNorm):
        return _group_norm(x, module.num_groups, w, b, module.eps)
    if isinstance(module, nn.LayerNorm):
        return _layer_norm(x, w, b, module.eps)
    if isinstance(module, nn.Embedding):
        assert w is not None
        return w[x]
    if isinstance(module, nn.Flatten):
        return _flatten(x, 1)
    if type(module).__name__ == "_Padded":  # the shortcut of ResNet-20
        return jnp.pad(x[:, :: module.stride, :: module.stride], ((0, 0), (0, 0), (0, 0), (0, module.more)))
    if type(module).__name__ == "_Embedded":  # tokens and positions of the transformer
        return p[f"{name}.tokens.weight"][x] + p[f"{name}.positions.weight"][: x.shape[1]]
    if isinstance(module, nn.GELU):
        return jax.nn.gelu(x, approximate=module.approximate == "tanh")
    for kind, activation in ACTIVATIONS.items():
        if isinstance(module, kind):
            return activation(x)
    raise NotImplementedError(f"the translation to JAX knows no {type(module).__name__}")


def _mean(x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return x.mean(tuple(_AXES[d % 4] for d in dims) if x.ndim == 4 else dims, keepdims=keepdim)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.getitem: lambda x, index: x[index],
    torch.add: operator.add,
    functional.scaled_dot_product_attention: _attention,
    torch.flatten: _flatten,
}

METHODS: dict[str, Callable[..., Any]] = {
    "mean": _mean,
    "flatten": _flatten,
    "permute": lambda x, *axes: x.transpose(*axes),
    "transpose": lambda x, a, b: jnp.swapaxes(x, a, b),
    "unflatten": lambda x, dim, sizes: x.reshape(*x.shape[: dim % x.ndim], *sizes, *x.shape[dim % x.ndim + 1 :]),
}


class _Tracer(fx.Tracer):
    """Looks into a network, but not into its layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, nn.Conv2d) or type(m).__name__ in ("_Padded", "_Embedded")
        return known or super().is_leaf_module(m, module_qualified_name)


def translated(model: nn.Module) -> tuple[Params, Callable[[Params, jax.Array], jax.Array]]:
    """The parameters by their torch names, and `apply(params, inputs)`."""
    graph = _Tracer().trace(model)
    modules = dict(model.named_modules())
    params = {name: to_jax(p) for name, p in model.named_parameters()}
    constants = {name: to_jax(b) for name, b in model.named_buffers()}

    def apply(p: Params, inputs: jax.Array) -> jax.Array:
        values: dict[str, Any] = {}
        for node in graph.nodes:
            args, kwargs = (fx.map_arg(a, lambda n: values[n.name]) for a in (node.args, node.kwargs))
            target = node.target
            if node.op == "placeholder":
                values[node.name] = inputs
            elif node.op == "get_attr":
                values[node.name] = p[target] if target in p else constants[target]
            elif node.op == "call_module":
                values[node.name] = _module(modules[target], target, p, *args, **kwargs)
            elif node.op == "output":
                return args[0]
            else:
                known: dict[Any, Callable[..., Any]] = METHODS if node.op == "call_method" else FUNCTIONS
                if target not in known:
                    raise NotImplementedError(f"the translation to JAX knows no {target}")
                values[node.name] = known[target](*args, **kwargs)
        raise AssertionError("a graph ends with its output")

    return params, apply
