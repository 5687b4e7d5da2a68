"""A picture of noise schedules: how much noise there is when, and what is spent by then, beside constants of equal epsilon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.schedules import Constant
from tacit.privacy.spending import epsilon_along, equal_constant
from tacit.report.drawing import COLOURS, new_figure, picture_path, save_figure

_MOST_PLACES = 2000  # at which a long schedule is drawn
_LONGEST_NAME = 24
_MANY = (*COLOURS, "#7f7f7f", "#8b4513")  # nine: as many schedules as the paper on curricula has
_STYLES = ("-", ":", "-.")  # of the second and the third nine; dashes are for constants


def schedule_figure(
    plans: Mapping[str, PrivacyPlan], path: str | Path, *, delta: float, accountant: str = "pld"
) -> Path:
    """Draw the noise multipliers of these plans by epoch, and the epsilon that they have spent by then, as PNG or SVG. Dashed, in
    the colour of the first schedule that costs as much, is the constant noise multiplier of equal epsilon.

    >>> import tempfile
    >>> from tacit.privacy import Curriculum
    >>> plan = PrivacyPlan(sample_rate=0.1, steps=40, noise=Curriculum("linear", 5.0, 2.0, epochs=4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = schedule_figure({"linear:5:2:4": plan}, f"{folder}/noise.png", delta=1e-5, accountant="rdp")
    ...     print(made.name, made.read_bytes()[1:4])
    noise.png b'PNG'
    """
    path = picture_path(path)
    figure = Comparison.of(plans, delta, accountant).drawn()
    save_figure(figure, path)
    return path


@dataclass(frozen=True)
class Comparison:
    """What is drawn: of each plan its name, epsilon and equal constant (none for a constant, or where there is no epsilon)."""

    plans: Mapping[str, PrivacyPlan]
    epsilons: Mapping[str, float]
    constants: Mapping[str, float | None]
    delta: float
    accountant: str

    @classmethod
    def of(cls, plans: Mapping[str, PrivacyPlan], delta: float, accountant: str) -> Self:
        """With every plan accounted.

        >>> Comparison.of({"1.0": PrivacyPlan(sample_rate=0.1, steps=40)}, 1e-5, "rdp").constants
        {'1.0': None}
        """
        epsilons = {name: plan.epsilon(delta, accountant=accountant) for name, plan in plans.items()}
        constants = {
            name: None
            if isinstance(plan.noise, Constant) or not math.isfinite(epsilons[name])
            else equal_constant(plan, delta, accountant=accountant)
            for name, plan in plans.items()
        }
        return cls(plans, epsilons, constants, delta, accountant)

    def drawn(self) -> Any:
        """The figure: noise on the left, epsilon on the right, one legend below."""
        alone = len(self.plans) == 1
        figure, grid = new_figure(1, 2, (8, 3.9 + 0.2 * math.ceil(len(self.plans) / 2)))
        noise, spent = grid[0]
        seen: set[float] = set()
        for place, (name, plan) in enumerate(self.plans.items()):
            colour, style = _MANY[place % len(_MANY)], _STYLES[place // len(_MANY) % len(_STYLES)]
            look = {"color": colour, "linestyle": style, "linewidth": 1.6}
            noise.plot(*_multipliers(plan), drawstyle="steps-post", label=self._label(name), **look)
            spent.plot(*self._spent(plan), **look)
            constant = self.constants[name]
            if constant is not None and constant not in seen:
                seen.add(constant)
                look = {"color": COLOURS[1] if alone else colour, "linestyle": "--", "linewidth": 1.1}
                noise.axhline(constant, label=f"constant {constant:.4f}" if alone else None, **look)
                spent.plot(*self._spent(dataclasses.replace(plan, noise=Constant(constant))), **look)
        noise.set(xlabel="epoch", ylabel="noise multiplier")
        spent.set(xlabel="epoch", ylabel=f"epsilon spent ({self.accountant.upper()}, delta {self.delta:g})")
        for axes in (noise, spent):
            axes.grid(alpha=0.3)
            axes.set_ylim(bottom=0)
            axes.margins(x=0.02)
        figure.get_layout_engine().set(wspace=0.06)
        figure.suptitle(self._title(), fontsize=11)
        figure.legend(*noise.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8.5)
        return figure

    def _label(self, name: str) -> str:
        if len(self.plans) == 1:
            return _short(name)
        constant = self.constants[name]
        alike = "" if constant is None else f", as constant {constant:.4f}"
        return f"{_short(name)}: epsilon {_shown(self.epsilons[name])}{alike}"

    def _title(self) -> str:
        if len(self.plans) > 1:
            return f"{len(self.plans)} noise schedules, and the constants of equal epsilon (dashed)"
        (name, epsilon), *_ = self.epsilons.items()
        return f"{_short(name)}: epsilon {_shown(epsilon)} at delta {self.delta:g} ({self.accountant.upper()})"

    def _spent(self, plan: PrivacyPlan) -> tuple[list[float], list[float]]:
        # Twenty points on the coarse grid: nobody sees the difference.
        along = epsilon_along(plan, self.delta, points=20, accountant=self.accountant)
        return [steps * plan.sample_rate for steps, _ in along], [epsilon for _, epsilon in along]


def _multipliers(plan: PrivacyPlan) -> tuple[list[float], list[float]]:
    """Epochs and the multipliers from there on; the last holds to the end."""
    count = min(plan.steps, _MOST_PLACES)
    steps = [place * plan.steps // count for place in range(count)]
    values = [plan.noise_multiplier(step) for step in steps]
    return [step * plan.sample_rate for step in [*steps, plan.steps]], [*values, plan.noise_multiplier(plan.steps - 1)]


def _short(name: str) -> str:
    """A long table of one's own would leave no room for anything else."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _shown(epsilon: float) -> str:
    """Rounded up, so as never to claim less."""
    return f"{math.ceil(epsilon * 1e4 - 1e-5) / 1e4:.4f}" if math.isfinite(epsilon) else "none"
