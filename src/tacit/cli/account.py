"""`tacit account`: the epsilon of so many steps with so much noise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import typer

from tacit.cli.shared import numbers_of, print_json, sample_rate_of, schedule_of, shown_epsilon, steps_of
from tacit.privacy.clipping import effective_multiplier
from tacit.privacy.schedules import Constant
from tacit.privacy.validation import UserError, check_count, check_positive


@dataclass(frozen=True)
class Grouping:
    """How many groups there are, and the multiplier that their noise is worth together: that of the standard deviations given, or
    else of noise as large as each group's own norm.

    >>> Grouping.of(4, None, None, False)
    Grouping(count=4, worth=0.5)
    """

    count: int
    worth: float

    @classmethod
    def of(cls, groups: int | None, norms_text: str | None, stds_text: str | None, per_layer: bool) -> Self:
        """From the options of the command, which must agree."""
        norms = None if norms_text is None else numbers_of("--clipping-norms", norms_text)
        stds = None if stds_text is None else numbers_of("--noise-stds", stds_text)
        counts = {len(values) for values in (norms, stds) if values is not None}
        counts |= set() if groups is None else {check_count("--groups", groups)}
        if len(counts) > 1:
            raise UserError(f"--groups, --clipping-norms and --noise-stds must agree, not {sorted(counts)}")
        if not counts and per_layer:
            raise UserError("--per-layer is of groups; say how many with --groups")
        count = counts.pop() if counts else 1
        bounds = [check_positive("each of --clipping-norms", norm) for norm in norms or [1.0] * count]
        noise = [check_positive("each of --noise-stds", std) for std in stds or bounds]
        if per_layer:
            noise = [std / (j + 1) for j, std in enumerate(noise)]
        return cls(count, effective_multiplier(bounds, noise))


def command(
    noise_multiplier: float | None = typer.Option(
        None, "--noise-multiplier", "-s", help="Noise std over sensitivity, the same at every step."
    ),
    schedule: str | None = typer.Option(
        None,
        "--schedule",
        metavar="KIND:FROM:TO",
        help="A noise schedule instead: constant:SIGMA, linear:FROM:TO (step by step), or one level an epoch: exponential, "
        "piecewise, quadratic or logarithmic:FROM:TO, or linear:FROM:TO:EPOCHS.",
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
    groups: int | None = typer.Option(
        None,
        "--groups",
        metavar="K",
        help="The gradient is clipped in K groups, each at a norm of its own, and each gets noise of the stated multiplier times "
        "*its own* norm.",
    ),
    clipping_norms: str | None = typer.Option(
        None,
        "--clipping-norms",
        metavar="C,C,...",
        help="The groups' norms, if they are not all the same, or with --noise-stds.",
    ),
    noise_stds: str | None = typer.Option(
        None,
        "--noise-stds",
        metavar="S,S,...",
        help="The groups' noise itself, one standard deviation each, instead of --noise-multiplier.",
    ),
    per_layer: bool = typer.Option(
        False, "--per-layer", help="The noise of group j = 0, 1, ... is divided by j + 1, as by layer."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """What epsilon do so many steps with so much noise cost?

    For DP-SGD with Poisson sampling and the Gaussian mechanism; neighbours differ by adding or removing one example.

    An example has a gradient in every group, so noise that is in proportion to each group's own norm is worth less than it looks:
    of K equal groups, by a factor of sqrt(K). What is printed is what holds.

    Examples:
      tacit account --noise-multiplier 1.54 --sample-rate 1024/50000 --steps 1440 --delta 1e-5
      tacit account --noise-multiplier 2.8 --groups 40 --sample-rate 4096/50000 --steps 600 --accountant rdp
    """
    from tacit.privacy.plan import PrivacyPlan

    rate = sample_rate_of(sample_rate)
    grouping = Grouping.of(groups, clipping_norms, noise_stds, per_layer)
    if noise_stds is not None:
        if noise_multiplier is not None or schedule is not None:
            raise UserError("--noise-stds is the noise itself; leave --noise-multiplier and --schedule out")
        if clipping_norms is None:
            raise UserError("--noise-stds is worth as much as it is beside the norms; give --clipping-norms too")
        noise_multiplier = 1.0
    count = steps_of(steps, epochs, rate)
    noise = schedule_of(noise_multiplier, schedule, count * rate)
    plan = PrivacyPlan(sample_rate=rate, steps=count, noise=noise.scaled(grouping.worth))
    epsilon = plan.epsilon(delta, accountant=accountant)
    claimed = None
    if grouping.count > 1 and noise_stds is None:
        claimed = dataclasses.replace(plan, noise=noise).epsilon(delta, accountant=accountant)
    if as_json:
        print_json(
            {
                "epsilon": epsilon,
                "delta": delta,
                "accountant": accountant,
                "noise_multiplier": plan.noise.noise_multiplier if isinstance(plan.noise, Constant) else None,
                "schedule": plan.noise.to_dict(),
                "sample_rate": rate,
                "steps": plan.steps,
                "neighbouring_relation": "add or remove one example",
                "groups": grouping.count,
                "epsilon_if_it_were_flat": epsilon if grouping.count == 1 else claimed,
            }
        )
        return
    typer.echo(
        f"epsilon {shown_epsilon(epsilon)} at delta {delta:g} ({accountant.upper()}, {plan.steps} steps, q = {rate:.6g})"
    )
    if grouping.count > 1:
        worth = (
            "" if not isinstance(plan.noise, Constant) else f" a noise multiplier of {plan.noise.noise_multiplier:.4g}"
        )
        typer.echo(f"  {grouping.count} groups: together{worth or f' {grouping.worth:.4g} of the stated noise'}")
    if claimed is not None:
        typer.echo(f"  it would be {shown_epsilon(claimed)} if the whole gradient were clipped at one norm")
