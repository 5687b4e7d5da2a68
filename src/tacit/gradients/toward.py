"""Weight decay before clipping: an example's gradient is g + lambda theta, and is clipped as such.

Its squared norm is |g|^2 + 2 lambda <g, theta> + lambda^2 |theta|^2. For a layer y_t = W a_t + b, <g, W> is sum_t <g_t, W a_t> =
sum_t <g_t, y_t - b>, with g_t the output gradient: no per-example gradient is needed for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.contribution import at_least_float32, squared_norms, total


class Decay:
    """What is added to every example's gradient: so many times the parameter, by name. Made anew when parameters have changed.

    *Guarantee.* It comes from the parameters alone, which are public. Lengths are computed in double precision.

    >>> decay = Decay({"w": nn.Parameter(torch.tensor([3.0, 4.0]))}, {"w": 0.5})
    >>> decay.length("w"), decay.square("w"), decay.add_to(torch.ones(2), "w")
    (5.0, 6.25, tensor([2.5000, 3.0000]))
    """

    def __init__(self, trainable: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        self.rates = {name: rate for name, rate in rates.items() if rate and name in trainable}
        # all at once: one after the other between other work, each takes several times as long
        self.parameters = {name: trainable[name].detach() for name in self.rates}
        if {parameter.dtype for parameter in self.parameters.values()} != {torch.float32}:
            self.parameters = {name: at_least_float32(parameter) for name, parameter in self.parameters.items()}
        self._lengths: dict[str, float] = {}
        self._total: tuple[Tensor, float] | None = None

    def __bool__(self) -> bool:
        return bool(self.rates)

    def length(self, name: str) -> float:
        """|theta|"""
        if name not in self._lengths:
            parameter = self.parameters[name]
            if kernels.usable(parameter):
                self._lengths[name] = math.sqrt(kernels.square(parameter))
            else:
                self._lengths[name] = float(torch.linalg.vector_norm(parameter, dtype=torch.float64))
        return self._lengths[name]

    def square(self, name: str) -> float:
        """rate^2 |theta|^2"""
        return (self.rates[name] * self.length(name)) ** 2

    def add_to(self, gradient: Tensor, name: str, factor: float = 1.0) -> Tensor:
        """The gradient, or a row of them, with factor * rate * theta added in place."""
        return gradient.add_(self.parameters[name], alpha=factor * self.rates[name])

    def total(self, factors: Tensor) -> float:
        """What the factors of a group add up to: not computed again for those that were asked for last."""
        if self._total is None or self._total[0] is not factors:
            self._total = factors, total(factors)
        return self._total[1]


class Toward:
    """Asks a rule for `Contribution.along`, or for a way that has the decay in it already: `decay` of the weight of this `name`.
    `kept` is what the call gave, if it was kept. If it was not, and is asked for, it is computed once more, and `wanted` says so
    of the call's `place`, unless it says something of it already.

    *Guarantee.* Outputs are the call's own, kept or computed once more.

    >>> toward = Toward(Decay({"w": nn.Parameter(torch.tensor([3.0, 4.0]))}, {"w": 0.5}), "w")
    >>> toward.length, toward.rate
    (5.0, 0.5)
    """

    def __init__(
        self, decay: Decay, name: str, kept: Tensor | None = None, wanted: dict[int, bool] | None = None, place: int = 0
    ) -> None:
        self.decay, self.name, self.kept, self.wanted, self.place = decay, name, kept, wanted, place
        self.weight, self.rate = decay.parameters[name], decay.rates[name]

    def outputs(self, again: Callable[[], Tensor]) -> Tensor:
        """What the call gave, which is then forgotten here; computed `again` if it was not kept."""
        kept, self.kept = self.kept, None
        if kept is not None:
            return kept
        if self.wanted is not None:
            self.wanted.setdefault(self.place, True)
        return again()

    @property
    def length(self) -> float:
        return self.decay.length(self.name)

    @property
    def square(self) -> float:
        return self.decay.square(self.name)


def along_outputs(
    outputs: Tensor, gradients: Tensor, toward: Toward, bias: Tensor | None, inputs_size: Tensor, window: int
) -> Tensor:
    """Of a layer with the channels on axis 1 of its outputs: <G, W> of each example, and what rounding may have taken from
    it. `bias` is what is in the outputs beside W a_t; `inputs_size` is sum_t |a_t|^2, or more ([batch]); `window` is K, how many
    numbers a_t has.

    A sum of n products is wrong by at most n eps/2 times the sum of their sizes. An output is a sum of K products and a bias, and
    what comes after it is added up in double precision; the sizes together are within |W| sqrt(sum |a_t|^2 sum |g_t|^2) +
    |b| sqrt(T sum |g_t|^2) for T positions.

    *Guarantee.* Row i comes from row i of `outputs` and `gradients` alone.

    >>> y, g = torch.tensor([[3.0]]), torch.tensor([[2.0]])
    >>> toward = Toward(Decay({"w": nn.Parameter(torch.ones(1, 1))}, {"w": 0.1}), "w")
    >>> along_outputs(y, g, toward, torch.tensor([1.0]), torch.tensor([4.0]), 1)
    tensor([4.0000], dtype=torch.float64)
    """
    values = (gradients * outputs).flatten(1).sum(dim=1, dtype=torch.float64)
    own = squared_norms(gradients).double()
    error = toward.length * (inputs_size.double() * own).sqrt()
    if bias is not None:
        positions = math.prod(gradients.shape[2:])
        values = values - gradients.reshape(*gradients.shape[:2], -1).sum(dim=2, dtype=torch.float64) @ bias.double()
        error = error + float(torch.linalg.vector_norm(bias)) * (positions * own).sqrt()
    return values + (window + 8) * torch.finfo(gradients.dtype).eps / 2 * error
