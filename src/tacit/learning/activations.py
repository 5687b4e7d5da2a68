"""Activations by name. Bounded ones keep gradients small, which clipping rewards: tanh is the default everywhere.

A tempered sigmoid, s * sigmoid(T x) - o, bounds what a layer hands on by its scale s, and how fast it saturates by its inverse
temperature T (Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tacit.privacy.validation import UserError, check_choice, check_positive

Activation = Callable[[], nn.Module]


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(inverse_temperature * x) - offset; (2, 2, 1), the default, is tanh exactly.

    >>> x = torch.linspace(-3, 3, 7)
    >>> torch.equal(TemperedSigmoid(2.0, 2.0, 1.0)(x), torch.tanh(x))
    True
    >>> TemperedSigmoid(1.58, 3.0, 0.71)(torch.zeros(1))
    tensor([0.0800])
    """

    def __init__(self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale = check_positive("scale", scale)
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)
        self.offset = float(offset)

    def forward(self, x: Tensor) -> Tensor:
        if (self.scale, self.inverse_temperature, self.offset) == (2.0, 2.0, 1.0):
            return torch.tanh(x)
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"scale={self.scale}, inverse_temperature={self.inverse_temperature}, offset={self.offset}"


# The averages over the best of the paper's searches, one a data set.
TEMPERED: Mapping[str, tuple[float, float, float]] = {
    "tempered-mnist": (1.97, 2.27, 1.15),
    "tempered-fashion-mnist": (2.27, 2.61, 1.28),
    "tempered-cifar10": (1.58, 3.00, 0.71),
}

ACTIVATIONS: Mapping[str, Activation] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    **{name: partial(TemperedSigmoid, *numbers) for name, numbers in TEMPERED.items()},
}


def activation_of(description: str | Sequence[str]) -> Activation:
    """The activation of a name; of `tempered:SCALE:INVERSE_TEMPERATURE:OFFSET`; or of a list, which gives one a hidden layer.

    >>> activation_of("tempered:2:2:1")()
    TemperedSigmoid(scale=2.0, inverse_temperature=2.0, offset=1.0)
    >>> in_turn = activation_of(["relu", "tanh"])
    >>> in_turn(), in_turn()
    (ReLU(), Tanh())
    """
    if isinstance(description, str):
        return _one(description)
    return InTurn([_one(name) for name in description])


def _one(name: str) -> Activation:
    kind, *numbers = name.split(":")
    if kind == "tempered" and numbers:
        try:
            scale, inverse_temperature, offset = map(float, numbers)
        except ValueError:
            raise UserError(
                f"a tempered sigmoid is written tempered:SCALE:INVERSE_TEMPERATURE:OFFSET, such as tempered:2:2:1, not {name!r}"
            ) from None
        return partial(TemperedSigmoid, scale, inverse_temperature, offset)
    return ACTIVATIONS[check_choice("activation", name, ACTIVATIONS)]


class InTurn:
    """Another activation each time it is asked, in the order of a network's hidden layers.

    >>> activations = InTurn([nn.Tanh])
    >>> activations(), activations.left
    (Tanh(), 0)
    """

    def __init__(self, activations: Sequence[Activation]) -> None:
        self._activations = list(activations)
        self.given = 0

    @property
    def left(self) -> int:
        """How many were not asked for."""
        return len(self._activations) - self.given

    def __call__(self) -> nn.Module:
        if not self.left:
            raise UserError(
                f"the network has more hidden layers than the {len(self._activations)} activations in model.activation; "
                "give one each, or a single name for all"
            )
        self.given += 1
        return self._activations[self.given - 1]()
