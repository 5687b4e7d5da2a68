"""Weight decay for private training: in each example's gradient before it is clipped, or of the weights after the noise.

The usual, decoupled decay, theta <- (1 - lr * rate) theta - lr * gradient, shrinks the weights while clipping bounds what pulls
them back. Where every example's gradient is longer than the bound C, the two balance at a length of C / rate, whatever the data
say. Decay before clipping is the gradient of loss + rate / 2 |theta|^2, example by example: clipping then bounds both together,
and the balance is that of the regularised loss (Guo, "Differential Privacy Meets Weight Decay", 2024). It is free: rate * theta
is public.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.optim import Optimizer

from tacit.privacy.validation import UserError, check_choice, check_not_negative

WHEN = ("before-clipping", "after-noise")


@dataclass(frozen=True)
class WeightDecay:
    """So much decay, of the parameters whose names match one of the patterns (all by default).

    >>> decay = WeightDecay(0.01, parameters=["*weight"])
    >>> decay.rates(nn.Linear(2, 1))
    {'weight': 0.01}
    """

    rate: float
    when: str = "before-clipping"
    parameters: Sequence[str] = ("*",)

    def __post_init__(self) -> None:
        check_not_negative("weight_decay.rate", self.rate)
        check_choice("weight_decay.when", self.when, WHEN)
        if isinstance(self.parameters, str) or not self.parameters:
            raise UserError(
                f'weight_decay.parameters must be a list of name patterns such as ["*weight"], not {self.parameters!r}'
            )

    def rates(self, model: nn.Module) -> dict[str, float]:
        """The rate of every trainable parameter that decays, by its name; a pattern that matches none is refused."""
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        for pattern in self.parameters:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"weight_decay.parameters: {pattern!r} matches no parameter that learns (there are: {', '.join(names)})"
                )
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.parameters)]
        return dict.fromkeys(chosen, self.rate)

    @torch.no_grad()
    def shrink(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Decay after noise, for one step: every parameter that decays times 1 - lr * rate, with the learning rate of its group.

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(model.weight, 8.0)
        >>> WeightDecay(0.5, "after-noise").shrink(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> model.weight.item()
        6.0
        """
        decaying = {id(model.get_parameter(name)) for name in self.rates(model)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in decaying:
                    parameter.mul_(1 - group["lr"] * self.rate)
