"""`tacit account`: the epsilon of so many steps with so much noise."""

from __future__ import annotations

import typer

from tacit.cli.shared import print_json, sample_rate_of, schedule_of, shown_epsilon, steps_of


def command(
    noise_multiplier: float | None = typer.Option(
        None, "--noise-multiplier", "-s", help="Noise std over sensitivity, the same at every step."
    ),
    schedule: str | None = typer.Option(
        None, "--schedule", metavar="KIND:FROM:TO", help="A noise schedule instead: constant:SIGMA or linear:FROM:TO."
    ),
    sample_rate: str = typer.Option(
        ..., "--sample-rate", "-q", metavar="Q", help="Chance of an example to take part in a step: 0.01 or 600/60000."
    ),
    steps: int | None = typer.Option(None, "--steps", "-t", help="Number of steps."),
    epochs: float | None = typer.Option(None, "--epochs", help="Passes over the data, instead of --steps."),
    delta: float = typer.Option(1e-5, "--delta", "-d", help="The delta of (epsilon, delta)."),
    accountant: str = typer.Option(
        "pld", "--accountant", help="pld (tight) or rdp (what most papers print); both are upper bounds."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """What epsilon do so many steps with so much noise cost?

    For DP-SGD with Poisson sampling and the Gaussian mechanism; neighbours differ by adding or removing one example.

    Example: tacit account --noise-multiplier 1.54 --sample-rate 1024/50000 --steps 1440 --delta 1e-5
    """
    from tacit.privacy.plan import PrivacyPlan

    rate = sample_rate_of(sample_rate)
    plan = PrivacyPlan(
        sample_rate=rate, steps=steps_of(steps, epochs, rate), noise=schedule_of(noise_multiplier, schedule)
    )
    epsilon = plan.epsilon(delta, accountant=accountant)
    if as_json:
        print_json(
            {
                "epsilon": epsilon,
                "delta": delta,
                "accountant": accountant,
                "noise_multiplier": noise_multiplier,
                "schedule": plan.noise.to_dict(),
                "sample_rate": rate,
                "steps": plan.steps,
                "neighbouring_relation": "add or remove one example",
            }
        )
    else:
        typer.echo(
            f"epsilon {shown_epsilon(epsilon)} at delta {delta:g} ({accountant.upper()}, {plan.steps} steps, q = {rate:.6g})"
        )
