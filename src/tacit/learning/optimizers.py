"""Adaptive optimizers that take the noise out of their second moment: its variance is known, since the mechanism chose it.

A private gradient is g_t + s_t * z_t with z_t ~ N(0, 1), so the running average of its square estimates E[g^2] + s^2. Where s^2
is the larger part, an adaptive optimizer divides every coordinate by about the same s and adapts to nothing. Here the average of
s_t^2, with the very weights that the squares have, is subtracted first (Tang, Shpilevskiy and Lécuyer, "DP-AdamBC: Your DP-Adam
Is Actually DP-SGD (Unless You Apply Bias Correction)", 2024, for a constant s; a schedule is corrected exactly too). It costs no
privacy: only private gradients and public numbers are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.privacy.validation import UserError, check_not_negative, check_positive

_SHARE = 0.1  # of the noise's variance, where no floor is given
_WITHOUT_NOISE = 1e-8**2  # torch's eps, which stands beside a root
_SMALLEST = torch.finfo(torch.float32).tiny  # what is less would be rounded to 0


@runtime_checkable
class LearnsNoise(Protocol):
    """An optimizer that wants to know, before each step, how much noise the mechanism put on the gradient of each parameter.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> isinstance(PrivateAdam([parameter]), LearnsNoise), isinstance(torch.optim.Adam([parameter]), LearnsNoise)
    (True, False)
    """

    def learn_noise(self, stds: Mapping[Tensor, float]) -> None:
        """The standard deviation s_t of the noise on each coordinate of the *mean* gradient of each parameter."""


class _Corrected(Optimizer):
    """What both optimizers share: the noise they are told, once a step, and state that keeps its precision."""

    _stds: Mapping[Tensor, float] | None = None  # of the step to come

    def learn_noise(self, stds: Mapping[Tensor, float]) -> None:
        """Hear, before each step, the standard deviation of the noise on each parameter's mean gradient."""
        self._stds = {parameter: check_not_negative("noise std", std) for parameter, std in stds.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update by the gradients that the parameters hold, with the noise that `learn_noise` told of."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if self._stds is None or not all(parameter in self._stds for _, parameter in moved):
            raise UserError(
                f"{type(self).__name__} does not know the noise of every gradient of this step; call "
                "learn_noise({parameter: std, ...}) before each step, as PrivateTrainer does"
            )
        for group, parameter in moved:
            precise = torch.promote_types(parameter.dtype, torch.float32)
            self._move(group, parameter, parameter.grad.to(precise), self._stds[parameter] ** 2)
        self._stds = None
        return loss

    def second_moment(self, parameter: Tensor) -> Tensor:
        """The estimate of E[g^2] without the noise, before the floor: it may be negative. There is none before the first step."""
        for group in self.param_groups:
            if any(parameter is other for other in group["params"]):
                state = self.state.get(parameter, {})
                if "second_moment" not in state:
                    raise UserError(
                        f"{type(self).__name__} has no second moment of this parameter before it has moved it; "
                        "ask after a step that has a gradient of it"
                    )
                return self._estimate(group, state)
        raise UserError(f"{type(self).__name__} does not hold this parameter; ask for one that it was made with")

    def _estimate(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        estimate: Tensor = state["second_moment"] - state["noise_moment"]
        return estimate.div_(self._weight(group, state))

    def _root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """What a gradient is divided by: sqrt(max(v - n, gamma)), with a gamma made from the very n that is subtracted."""
        floor = group["floor"]
        if floor is None:
            noise = state["noise_moment"] / self._weight(group, state)
            floor = max(_SHARE * noise, _SMALLEST) if noise else _WITHOUT_NOISE
        return self._estimate(group, state).clamp_(min=floor).sqrt_()

    def _weight(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        """How much of a whole average v and n are, having begun at 0; 1 where that is left as it is."""
        return 1.0

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, variance: float) -> None:
        raise NotImplementedError

    def _remember(self, state: dict[str, Any], gradient: Tensor, variance: float, decay: float) -> None:
        """v <- decay * v + (1 - decay) * gradient^2, and n, of the noise's variance, with the same weights."""
        if "second_moment" not in state:
            state["second_moment"], state["noise_moment"] = torch.zeros_like(gradient), 0.0
        state["second_moment"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
        state["noise_moment"] = decay * state["noise_moment"] + (1 - decay) * variance

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a stored state. What torch would round to a parameter's half precision is kept as it was stored."""
        super().load_state_dict(state_dict)
        stored = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(stored, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


class PrivateAdam(_Corrected):
    """Adam whose second moment is that of the gradient without its noise, never below a floor gamma.

    With the private gradient g_t (plus weight_decay * theta), its noise s_t, and betas b1 and b2::

        m_t = b1 * m_(t-1) + (1 - b1) * g_t
        v_t = b2 * v_(t-1) + (1 - b2) * g_t^2
        n_t = b2 * n_(t-1) + (1 - b2) * s_t^2
        gamma_t = 0.1 * n_t / (1 - b2^t), or the floor that is given
        theta <- theta - lr * m_t / (1 - b1^t) / sqrt(max((v_t - n_t) / (1 - b2^t), gamma_t))

    `decoupled_weight_decay` makes it AdamW: theta <- (1 - lr * weight_decay) * theta instead, before the update.

    gamma is in the place of Adam's eps, and matters as much as lr: where a gradient drowns in its noise, v - n is about 0, often
    below, and the step is lr * m / sqrt(gamma). The farther gamma lies below s^2, the wilder such coordinates move; far above all
    of v - n, it makes SGD of the whole. So it is a tenth of the noise's variance, whatever the scale of the gradients, if `floor`
    is None, and the same number at every step if `floor` is one. Without any noise (n = 0) it is 1e-16, torch's eps squared.

    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = PrivateAdam([parameter], lr=0.1)
    >>> parameter.grad = torch.tensor([0.5])
    >>> optimizer.learn_noise({parameter: 0.3})
    >>> optimizer.step()
    >>> round(optimizer.second_moment(parameter).item(), 6), round(parameter.item(), 6)
    (0.16, -0.125)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        first, second = betas
        if not isinstance(decoupled_weight_decay, bool):
            raise UserError(f"decoupled_weight_decay must be true or false, not {decoupled_weight_decay!r}")
        defaults = {
            "lr": check_not_negative("lr", lr),
            "betas": (_check_decay("betas[0]", first), _check_decay("betas[1]", second)),
            "floor": None if floor is None else check_positive("floor", floor),
            "weight_decay": check_not_negative("weight_decay", weight_decay),
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults)

    def _weight(self, group: dict[str, Any], state: dict[str, Any]) -> float:
        return float(1 - group["betas"][1] ** state["step"])

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, variance: float) -> None:
        (first, second), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
        state = self.state[parameter]
        if weight_decay and group["decoupled_weight_decay"]:
            parameter.mul_(1 - lr * weight_decay)
        elif weight_decay:
            gradient = gradient.add(parameter, alpha=weight_decay)
        if "step" not in state:
            state["step"], state["first_moment"] = 0, torch.zeros_like(gradient)
        state["step"] += 1
        state["first_moment"].lerp_(gradient, 1 - first)
        self._remember(state, gradient, variance, second)
        update = state["first_moment"] / self._root(group, state)
        parameter.sub_(update, alpha=lr / (1 - first ** state["step"]))


class PrivateRMSprop(_Corrected):
    """RMSprop whose second moment is that of the gradient without its noise, never below a floor gamma.

    With the private gradient g_t (plus weight_decay * theta) and its noise s_t::

        v_t = alpha * v_(t-1) + (1 - alpha) * g_t^2
        n_t = alpha * n_(t-1) + (1 - alpha) * s_t^2
        gamma_t = 0.1 * n_t, or the floor that is given
        b_t = momentum * b_(t-1) + g_t / sqrt(max(v_t - n_t, gamma_t))
        theta <- theta - lr * b_t

    Of gamma and `floor` holds what `PrivateAdam` says. v and n start at 0, as in torch, so that the first steps are longer.

    >>> parameter = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = PrivateRMSprop([parameter], lr=0.1, alpha=0.75)
    >>> parameter.grad = torch.tensor([0.5])
    >>> optimizer.learn_noise({parameter: 0.3})
    >>> optimizer.step()
    >>> round(optimizer.second_moment(parameter).item(), 6), round(parameter.item(), 6)
    (0.04, -0.25)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        floor: float | None = None,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        defaults = {
            "lr": check_not_negative("lr", lr),
            "alpha": _check_decay("alpha", alpha),
            "floor": None if floor is None else check_positive("floor", floor),
            "weight_decay": check_not_negative("weight_decay", weight_decay),
            "momentum": _check_decay("momentum", momentum),
        }
        super().__init__(params, defaults)

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, variance: float) -> None:
        state = self.state[parameter]
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        self._remember(state, gradient, variance, group["alpha"])
        update = gradient / self._root(group, state)
        if group["momentum"]:
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(gradient)
            update = state["momentum"].mul_(group["momentum"]).add_(update)
        parameter.sub_(update, alpha=group["lr"])


PRIVATE_OPTIMIZERS: Mapping[str, type[Optimizer]] = {"PrivateAdam": PrivateAdam, "PrivateRMSprop": PrivateRMSprop}


def _check_decay(name: str, value: float) -> float:
    if not check_not_negative(name, value) < 1:
        raise UserError(f"{name} must be at least 0 and below 1, not {value!r}")
    return float(value)
