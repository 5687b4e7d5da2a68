"""Paper E's small experiments: one number, and linear regressions, trained with decay after the noise and before clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_WAYS = {"after noise": "after-noise", "before clipping": "before-clipping"}


def scalar() -> dict[str, Any]:
    """1/2 (theta - 3.8)^2 with bound R = 1, decay lambda = 0.5, and no noise: decay after clipping ends at R / lambda = 2,
    whatever is asked for, decay before it at the minimum of the regularised loss, 3.8 / 1.5.

    >>> lines = scalar()["panels"]["theta"]
    >>> round(lines["after noise"][-1][1], 2), round(lines["before clipping"][-1][1], 2)
    (2.0, 2.53)
    """
    import torch

    bound, rate, target = 1.0, 0.5, 3.8
    lines: dict[str, Any] = {}
    for label, when in _WAYS.items():
        weights = _trained(
            torch.ones(1, 1), torch.full((1, 1), target), bound, rate, when, lr=0.1, steps=300, sigma=0.0
        )
        lines[label] = [[step, float(weight[0, 0])] for step, weight in weights]
    ends = {label: curve[-1][1] for label, curve in lines.items()}
    lines |= {"R / lambda": bound / rate, "theta* / (1 + lambda)": target / (1 + rate)}
    return {
        "x": "step",
        "y": "theta",
        "panels": {"theta": lines},
        "sentences": [
            f"The scalar example (R = {bound:g}, lambda = {rate:g}, theta* = {target:g}, no noise): with decay after the noise "
            f"theta ends at {ends['after noise']:.4f}, and R / lambda is {bound / rate:.4f}; with decay before clipping at "
            f"{ends['before clipping']:.4f}, and theta* / (1 + lambda) is {target / (1 + rate):.4f}."
        ],
    }


def regression(true: Sequence[float]) -> dict[str, Any]:
    """1,000 examples y = <w, x> + noise, with x and the noise standard normal, as many to test on, and the paper's three settings
    of (R, lambda, learning rate) at noise multiplier 0.1; of batches and steps it says nothing: here batches of 100 and as many
    steps as R and the learning rate need to get to w."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.tensor([list(true)])

    def drawn() -> tuple[Any, Any]:
        inputs = torch.randn(1000, len(true), generator=generator)
        return inputs, inputs @ weight.t() + torch.randn(1000, 1, generator=generator)

    (inputs, targets), (test_inputs, test_targets) = drawn(), drawn()
    panels, ends = {}, []
    for bound, rate, lr in ((0.1, 0.01, 0.03), (0.01, 0.01, 0.1), (0.1, 0.1, 0.03)):
        steps = round(2.5 * float(weight.norm()) / (lr * bound))
        lines = {}
        for label, when in _WAYS.items():
            weights = _trained(inputs, targets, bound, rate, when, lr=lr, steps=steps, sigma=0.1, batch=100)
            lines[label] = [[step, float((test_inputs @ w.t() - test_targets).square().mean())] for step, w in weights]
        panels[f"R = {bound:g}, lambda = {rate:g}"] = lines
        ends.append(
            f"R = {bound:g}, lambda = {rate:g}: {lines['after noise'][-1][1]:.2f} after noise, "
            f"{lines['before clipping'][-1][1]:.2f} before clipping"
        )
    name = f"w = {', '.join(f'{value:g}' for value in true)}"
    return {
        "x": "step",
        "y": "test loss (mean square)",
        "scale": "log",
        "panels": panels,
        "sentences": [
            f"Linear regression ({name}; the noise in y has variance 1, which no test loss can be below): {'; '.join(ends)}."
        ],
    }


def _trained(
    inputs: Any,
    targets: Any,
    bound: float,
    rate: float,
    when: str,
    *,
    lr: float,
    steps: int,
    sigma: float,
    batch: int | None = None,
) -> list[tuple[int, Any]]:
    """The weights of a linear model without bias, from 0, at about a hundred steps along the way."""
    import torch
    from torch import nn

    from tacit.learning import WeightDecay
    from tacit.privacy import Constant, Flat, PrivacyPlan, Randomness
    from tacit.training import PrivateTrainer

    model = nn.Linear(inputs.shape[1], 1, bias=False)
    nn.init.zeros_(model.weight)
    rate_of_sampling = 1.0 if batch is None else batch / len(inputs)
    plan = PrivacyPlan(
        sample_rate=rate_of_sampling,
        steps=steps,
        expected_batch_size=rate_of_sampling * len(inputs),
        clipping=Flat(bound),
        noise=Constant(sigma),
    )
    half_square: Callable[[Any, Any], Any] = lambda outputs, wanted: 0.5 * (outputs - wanted).square().sum(dim=1)  # noqa: E731
    trainer = PrivateTrainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        loss=half_square,
        plan=plan,
        weight_decay=WeightDecay(rate, when),
        seed=0,
    )
    sampler = plan.sampler(len(inputs), Randomness.from_seed(0))
    found = [(0, model.weight.detach().clone())]
    for step in range(1, steps + 1):
        chosen = torch.as_tensor(sampler.draw())
        trainer.step((inputs[chosen], targets[chosen]))
        if step % max(steps // 100, 1) == 0 or step == steps:
            found.append((step, model.weight.detach().clone()))
    trainer.close()
    return found
