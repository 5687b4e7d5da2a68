"""Activations by name. Bounded ones keep gradients small, which clipping rewards: tanh is the default everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
}
