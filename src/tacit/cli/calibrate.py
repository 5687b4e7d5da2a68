"""`tacit calibrate`: the least noise that stays within an epsilon."""

from __future__ import annotations

from typing import Any

import typer

from tacit.cli.shared import equal_words, print_json, sample_rate_of, schedule_of, shown_epsilon, steps_of


def command(
    epsilon: float = typer.Option(..., "--epsilon", "-e", help="The epsilon not to exceed."),
    delta: float = typer.Option(1e-5, "--delta", "-d", help="The delta of (epsilon, delta)."),
    sample_rate: str = typer.Option(
        ..., "--sample-rate", "-q", metavar="Q", help="Chance of an example to take part in a step: 0.01 or 600/60000."
    ),
    steps: int | None = typer.Option(None, "--steps", "-t", help="Number of steps."),
    epochs: float | None = typer.Option(None, "--epochs", help="Passes over the data, instead of --steps."),
    schedule: str | None = typer.Option(
        None,
        "--schedule",
        metavar="KIND:FROM:TO",
        help="Keep the shape of this noise schedule and scale it, as in `tacit account`.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """How much noise keeps so many steps within epsilon?

    The answer never exceeds epsilon, and is within 0.5% of it.

    Example: tacit calibrate --epsilon 3 --delta 1e-5 --sample-rate 512/60000 --epochs 40
    """
    from tacit.privacy.plan import PrivacyPlan
    from tacit.privacy.schedules import Constant
    from tacit.privacy.spending import equal_constant

    rate = sample_rate_of(sample_rate)
    count = steps_of(steps, epochs, rate)
    shape = schedule_of(None if schedule else 1.0, schedule, count * rate)
    plan = PrivacyPlan(sample_rate=rate, steps=count, noise=shape)
    plan = plan.calibrated(epsilon=epsilon, delta=delta)
    reached = plan.epsilon(delta)
    constant = plan.noise.noise_multiplier if isinstance(plan.noise, Constant) else None
    equal = equal_constant(plan, delta) if constant is None else constant
    if as_json:
        print_json(
            {
                "epsilon": reached,
                "delta": delta,
                "noise_multiplier": constant,
                "schedule": plan.noise.to_dict(),
                "equal_constant": equal,
                "sample_rate": rate,
                "steps": plan.steps,
            }
        )
    else:
        fields = list(plan.noise.to_dict().items())[1:]
        words = ", ".join(f"{key} {_shown(value)}" for key, value in fields)
        found = f"noise schedule {words}" if constant is None else f"noise multiplier {constant:.5f}"
        typer.echo(
            f"{found} gives epsilon {shown_epsilon(reached)} at delta {delta:g} ({plan.steps} steps, q = {rate:.6g})"
        )
        if constant is None:
            typer.echo(f"  {equal_words(equal)}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)
