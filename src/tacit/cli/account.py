"""`tacit account`: the epsilon of so many steps with so much noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from tacit.cli.shared import equal_words, numbers_of, print_json, sample_rate_of, schedule_of, shown_epsilon, steps_of
from tacit.privacy.clipping import effective_multiplier
from tacit.privacy.schedules import Constant, NoiseSchedule
from tacit.privacy.validation import UserError, check_count, check_positive

if TYPE_CHECKING:
    from tacit.privacy.plan import PrivacyPlan


MOST_GROUPS = 10**6
"""Each has a norm of its own in memory; a group a parameter of a large model is far fewer."""


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
        if max(counts, default=1) > MOST_GROUPS:
            raise UserError(f"there can be at most {MOST_GROUPS} groups; no model has so many parameters to group")
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


@dataclass(frozen=True)
class Account:
    """What one noise schedule costs: its epsilon, that of the same noise without groups (`claimed`), and the constant that costs
    as much."""

    plan: PrivacyPlan
    delta: float
    accountant: str
    grouping: Grouping
    epsilon: float
    claimed: float | None
    equal_constant: float

    @classmethod
    def of(
        cls,
        noise: NoiseSchedule,
        rate: float,
        steps: int,
        delta: float,
        accountant: str,
        grouping: Grouping,
        *,
        stated: bool = True,
    ) -> Self:
        """Account so many steps; without groups, or where the noise of each is `stated` otherwise, nothing else is claimed.

        >>> account = Account.of(Constant(1.38), 600 / 60000, 2000, 1e-5, "rdp", Grouping(1, 1.0))
        >>> account.lines()
        ['epsilon 1.6409 at delta 1e-05 (RDP, 2000 steps, q = 0.01)']
        """
        from tacit.privacy.plan import PrivacyPlan
        from tacit.privacy.spending import equal_constant

        plan = PrivacyPlan(sample_rate=rate, steps=steps, noise=noise.scaled(grouping.worth))
        epsilon = plan.epsilon(delta, accountant=accountant)
        claimed = None
        if grouping.count > 1 and stated:
            claimed = dataclasses.replace(plan, noise=noise).epsilon(delta, accountant=accountant)
        constant = plan.noise.noise_multiplier if isinstance(plan.noise, Constant) else None
        equal = equal_constant(plan, delta, accountant=accountant) if constant is None else constant
        return cls(plan, delta, accountant, grouping, epsilon, claimed, equal)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        noise = self.plan.noise
        return {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "accountant": self.accountant,
            "noise_multiplier": noise.noise_multiplier if isinstance(noise, Constant) else None,
            "schedule": noise.to_dict(),
            "equal_constant": self.equal_constant,
            "sample_rate": self.plan.sample_rate,
            "steps": self.plan.steps,
            "neighbouring_relation": "add or remove one example",
            "groups": self.grouping.count,
            "epsilon_if_it_were_flat": self.epsilon if self.grouping.count == 1 else self.claimed,
        }

    def lines(self) -> list[str]:
        """What people read."""
        plan, noise = self.plan, self.plan.noise
        about = f"({self.accountant.upper()}, {plan.steps} steps, q = {plan.sample_rate:.6g})"
        found = [f"epsilon {shown_epsilon(self.epsilon)} at delta {self.delta:g} {about}"]
        if not isinstance(noise, Constant) and math.isfinite(self.epsilon):
            at_one_norm = ", with the whole gradient clipped at one norm" if self.grouping.count > 1 else ""
            found.append(equal_words(self.equal_constant) + at_one_norm)
        if self.grouping.count > 1:
            constant = f"a noise multiplier of {noise.noise_multiplier:.4g}" if isinstance(noise, Constant) else None
            worth = constant or f"{self.grouping.worth:.4g} of the stated noise"
            found.append(f"{self.grouping.count} groups: together {worth}")
        if self.claimed is not None:
            found.append(f"it would be {shown_epsilon(self.claimed)} if the whole gradient were clipped at one norm")
        return found


def command(
    noise_multiplier: float | None = typer.Option(
        None, "--noise-multiplier", "-s", help="Noise std over sensitivity, the same at every step."
    ),
    schedule: list[str] | None = typer.Option(
        None,
        "--schedule",
        metavar="KIND:FROM:TO",
        help="A noise schedule instead: constant:SIGMA, linear:FROM:TO (step by step), or one level an epoch: exponential, "
        "piecewise, quadratic or logarithmic:FROM:TO, or linear:FROM:TO:EPOCHS; or table:SIGMA,SIGMA,..., each for an equal "
        "part of the steps. May be given several times, to compare.",
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
    plot: Path | None = typer.Option(
        None,
        "--plot",
        metavar="FILE",
        help="Draw the noise by epoch and the epsilon spent by then, beside the constant of equal epsilon: a .png or .svg file.",
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
      tacit account --schedule exponential:5:1 --schedule linear:1:5:20 --sample-rate 600/60000 --epochs 20 --plot noise.png
    """
    if plot is not None:
        from tacit.report.drawing import picture_path

        picture_path(plot)  # refused before anything is computed
    rate = sample_rate_of(sample_rate)
    grouping = Grouping.of(groups, clipping_norms, noise_stds, per_layer)
    if noise_stds is not None:
        if noise_multiplier is not None or schedule:
            raise UserError("--noise-stds is the noise itself; leave --noise-multiplier and --schedule out")
        if clipping_norms is None:
            raise UserError("--noise-stds is worth as much as it is beside the norms; give --clipping-norms too")
        noise_multiplier = 1.0
    count = steps_of(steps, epochs, rate)
    texts: Sequence[str | None] = schedule or [None]
    noises = {text: schedule_of(noise_multiplier, text, count * rate) for text in texts}
    accounts = {
        text or f"constant:{noise_multiplier:g}": Account.of(
            noise, rate, count, delta, accountant, grouping, stated=noise_stds is None
        )
        for text, noise in noises.items()
    }
    if plot is not None:
        from tacit.report.schedules import schedule_figure

        plans = {name: account.plan for name, account in accounts.items()}
        schedule_figure(plans, plot, delta=delta, accountant=accountant)
    if as_json:
        found = [account.to_dict() for account in accounts.values()]
        print_json(found[0] if len(found) == 1 else {"accounts": found})
        return
    for name, account in accounts.items():
        lines = account.lines()
        typer.echo("\n  ".join(lines) if len(accounts) == 1 else f"{name}: {'; '.join(lines)}")
