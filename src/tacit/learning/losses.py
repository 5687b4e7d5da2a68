"""Losses. Each gives one value an example, `loss(logits, targets) -> [batch]`, so that gradients can be clipped one by one.

Those of "Losing Less: A Loss for Differentially Private Deep Learning" (PoPETs 2023) are here as parts, and `TailoredLoss` puts
them together; every ablation of the paper is another combination of the same parts.

A loss that also wants the hidden layers says so (`wants_hidden`), and is called `loss(logits, targets, layers)`: the gradient
engine hands it what its own forward pass computed. A loss that changes with time has `begin_epoch`, which the trainer calls:
the epoch is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.gradients.batches import LayerOutput
from tacit.learning.named import make_named
from tacit.privacy.validation import UserError, check_choice, check_positive

PerExampleLoss = Callable[..., Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p_true, with p the softmax of the logits.

    >>> cross_entropy(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.6931])
    """
    return functional.cross_entropy(logits, targets, reduction="none")


def sum_of_squares(logits: Tensor, targets: Tensor) -> Tensor:
    """1/2 * sum_d (logit_d - y_d)^2, with y the one-hot label: on logits, not on probabilities.

    >>> sum_of_squares(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    tensor([2.])
    """
    return 0.5 * _errors(logits, targets).square().sum(dim=1)


def sum_of_absolutes(logits: Tensor, targets: Tensor) -> Tensor:
    """sum_d |logit_d - y_d|.

    >>> sum_of_absolutes(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    tensor([2.])
    """
    return _errors(logits, targets).abs().sum(dim=1)


class Huber:
    """sum_d of e^2 / (2 beta) where |e| < beta and |e| - beta/2 elsewhere, with e = logit_d - y_d.

    For beta to 0 it is the sum of absolutes; with large beta, beta times it is the sum of squares.

    >>> Huber(beta=0.5)(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    tensor([1.7500])
    """

    def __init__(self, beta: float = 1.0) -> None:
        self.beta = check_positive("beta", beta)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        errors = _errors(logits, targets)
        return functional.smooth_l1_loss(errors, torch.zeros_like(errors), reduction="none", beta=self.beta).sum(dim=1)


class Focal:
    """-(1 - p_true)^gamma * log p_true, with p the softmax of the logits; gamma 0 is the cross-entropy.

    An example's gradient is that of the cross-entropy times (1 - p)^(gamma - 1) * (1 - p - gamma p log p), with p for p_true. So
    where both are clipped, both give the same; an example that is nearly learned gives less.

    >>> Focal(gamma=2.0)(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.1733])
    """

    def __init__(self, gamma: float = 2.0) -> None:
        if not 0 <= gamma < math.inf:
            raise UserError(f"gamma must be at least 0 and finite, not {gamma}")
        self.gamma = float(gamma)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        logs = functional.log_softmax(logits, dim=1)
        true = logs.gather(1, targets.unsqueeze(1)).squeeze(1)
        # 1 - p from the other classes' logarithms: exact also where p is nearly 1, where its power has no finite slope otherwise
        others = logs.scatter(1, targets.unsqueeze(1), -math.inf).logsumexp(dim=1)
        return -torch.exp(self.gamma * others) * true


class TemperedLogistic:
    """log(1 + exp(-T y s)) for two classes: y is 1 for class 1 and -1 for class 0, s the score ([batch] or [batch, 1]).

    Its gradient is at most T times the norm of the features, so that clipping at C >= T leaves features of norm 1 alone
    (Papernot et al., 2021).

    >>> TemperedLogistic(1.0)(torch.zeros(1, 1), torch.tensor([1]))
    tensor([0.6931])
    """

    def __init__(self, inverse_temperature: float = 1.0) -> None:
        self.inverse_temperature = check_positive("inverse_temperature", inverse_temperature)

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        if scores.dim() == 2 and scores.shape[1] == 1:
            scores = scores.squeeze(1)
        if scores.dim() != 1:
            raise UserError(f"the tempered logistic loss takes one score an example, not {list(scores.shape[1:])}")
        signs = 2 * targets.to(scores.dtype) - 1
        return functional.softplus(-self.inverse_temperature * signs * scores)


def _errors(logits: Tensor, targets: Tensor) -> Tensor:
    # not functional.one_hot, which looks at the values, so that torch.func cannot take it
    return logits - (torch.arange(logits.shape[1], device=targets.device) == targets.unsqueeze(1)).to(logits.dtype)


class Regularizer(Protocol):
    """A penalty an example, from the layers; the last one gives the logits."""

    def __call__(self, layers: Sequence[LayerOutput]) -> Tensor: ...


class PreactivationPenalty:
    """sum_m |h_m|^2 / d_m over the hidden layers, with d_m units each; or, "plain", of |h_m| / d_m.

    The paper's equation leaves open whether it is squared; a result says which one it used.

    >>> layers = [LayerOutput(torch.tensor([[3.0, 4.0]]), torch.zeros(2, 1)), LayerOutput(torch.ones(1, 2), torch.zeros(2, 2))]
    >>> PreactivationPenalty()(layers), PreactivationPenalty("plain")(layers)
    (tensor([12.5000]), tensor([2.5000]))
    """

    def __init__(self, norm: str = "squared") -> None:
        self.norm = check_choice("norm", norm, ["plain", "squared"])

    def __call__(self, layers: Sequence[LayerOutput]) -> Tensor:
        if len(layers) < 2:
            raise UserError(
                "the model has no hidden layer, so there is no pre-activation to penalise; use another loss"
            )
        found = []
        for layer in layers[:-1]:
            units = layer.output
            if units.dim() < 2:
                raise UserError("a hidden layer gives no row an example, so there is no pre-activation to penalise")
            every = tuple(range(1, units.dim()))  # flattened, maps with their channels last would be copied
            size = (
                units.square().sum(dim=every) if self.norm == "squared" else torch.linalg.vector_norm(units, dim=every)
            )
            found.append(size / units.shape[1:].numel())
        return torch.stack(found).sum(dim=0)


class WeightPenalty:
    """sum_m |W_m|^2 / d_m over all layers, the last one too, with d_m weights each: what weight decay would be, for comparison.

    >>> WeightPenalty()([LayerOutput(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))])
    tensor([12.5000])
    """

    def __call__(self, layers: Sequence[LayerOutput]) -> Tensor:
        if not layers:
            raise UserError("the model has no linear or convolutional layer, so there is no weight to penalise")
        penalties = [layer.weight.square().sum() / layer.weight.numel() for layer in layers]
        return torch.stack(penalties).sum().expand(len(layers[0].output))


_PARTS = ("none", "cross-entropy", "sum-of-squares", "sum-of-absolutes", "focal", "huber")


def _part(role: str, name: str, gamma: float, huber_beta: float) -> PerExampleLoss | None:
    parts: dict[str, PerExampleLoss | None] = {
        "none": None,
        "cross-entropy": cross_entropy,
        "sum-of-squares": sum_of_squares,
        "sum-of-absolutes": sum_of_absolutes,
        "focal": Focal(gamma),
        "huber": Huber(huber_beta),
    }
    return parts[check_choice(role, name, _PARTS)]


def _penalty(name: str, norm: str) -> Regularizer | None:
    check_choice("penalty", name, ["none", "preactivations", "weights"])
    return None if name == "none" else PreactivationPenalty(norm) if name == "preactivations" else WeightPenalty()


class TailoredLoss:
    """alpha * late + (1 - alpha) * early + (1 - alpha) / beta * penalty, with alpha = sigmoid(epoch - threshold_epoch).

    As the paper has it: early is the sum of squares, which pulls logits to their targets while much is to be learned; late is the
    focal loss, which looks at the hard examples; the penalty keeps hidden pre-activations small. `early`, `late` and `penalty`
    exchange the parts ("none" leaves one out).

    >>> loss = TailoredLoss(threshold_epoch=2, beta=1.0, gamma=2.0)
    >>> loss.alpha  # before the first epoch ends
    0.11920292202211755
    >>> loss.begin_epoch(20)
    >>> loss.alpha > 0.999
    True
    """

    def __init__(
        self,
        threshold_epoch: float = 0.0,
        beta: float = 1.0,
        gamma: float = 2.0,
        *,
        norm: str = "squared",
        early: str = "sum-of-squares",
        late: str = "focal",
        penalty: str = "preactivations",
        huber_beta: float = 1.0,
    ) -> None:
        self.threshold_epoch = float(threshold_epoch)
        self.beta = check_positive("beta", beta)
        self._early = _part("early", early, gamma, huber_beta)
        self._late = _part("late", late, gamma, huber_beta)
        self._penalty = _penalty(penalty, norm)
        if self._early is None and self._late is None:
            raise UserError("a loss needs an early or a late part; without both nothing is learned")
        self.begin_epoch(0)

    @property
    def wants_hidden(self) -> bool:
        """Whether it is called with the layers."""
        return self._penalty is not None

    def begin_epoch(self, epoch: int) -> None:
        """The curriculum's place; epochs are counted from 0."""
        self.alpha = 1 / (1 + math.exp(min(self.threshold_epoch - epoch, 700.0)))

    def __call__(self, logits: Tensor, targets: Tensor, layers: Sequence[LayerOutput] = ()) -> Tensor:
        found = [
            weight * part(logits, targets)
            for weight, part in ((self.alpha, self._late), (1 - self.alpha, self._early))
            if part is not None
        ]
        if self._penalty is not None:
            found.append((1 - self.alpha) / self.beta * self._penalty(layers))
        return torch.stack(found).sum(dim=0)


LOSSES: Mapping[str, Callable[..., PerExampleLoss]] = {
    "cross-entropy": lambda: nn.CrossEntropyLoss(reduction="none"),
    "sum-of-squares": lambda: sum_of_squares,
    "sum-of-absolutes": lambda: sum_of_absolutes,
    "huber": Huber,
    "focal": Focal,
    "tailored": TailoredLoss,
}


def make_loss(name: str, **options: Any) -> PerExampleLoss:
    """The loss of this name, with its options.

    >>> make_loss("focal", gamma=5.0).gamma
    5.0
    >>> make_loss("focal", gama=5.0)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the loss 'focal' has no option 'gama'; did you mean 'gamma'? (it takes: gamma)
    """
    return make_named("loss", LOSSES, name, options)
