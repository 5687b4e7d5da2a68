"""The picture of an attack: how many it finds of those that took part, at how many wrong accusations; both on log axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tacit.privacy.meaning import most_true_positives
from tacit.report.drawing import COLOURS, new_figure, picture_path, save_figure


def draw_roc(
    false_positive_rates: Any,
    true_positive_rates: Any,
    *,
    epsilon: float,
    delta: float,
    examples: int,
    title: str,
    path: str | Path,
) -> Path:
    """Draw the curve of an attack, the line of guessing, and the bound that (epsilon, delta) sets to every attack.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     options = {"epsilon": 1.0, "delta": 1e-5, "examples": 100, "title": "toy", "path": f"{folder}/roc.png"}
    ...     draw_roc([0.0, 0.1, 1.0], [0.0, 0.2, 1.0], **options).name
    'roc.png'
    """
    place = picture_path(path)
    smallest = 10.0 ** np.floor(np.log10(max(min(1 / examples, 0.01), 1e-5)))
    rates = np.geomspace(smallest, 1, 200)
    figure, grid = new_figure(1, 1, (5.6, 5.2))
    axes = grid[0][0]
    bound = [most_true_positives(epsilon, delta, float(rate)) for rate in rates]
    axes.fill_between(rates, bound, 1.0, color=COLOURS[1], alpha=0.12, linewidth=0)
    claim = f"claim: no attack is above (epsilon {epsilon:.3g}, delta {delta:g})"
    axes.plot(rates, bound, color=COLOURS[1], linestyle="--", linewidth=1.3, label=claim)
    # In steps, and from the first point that a logarithm can show.
    axes.plot(false_positive_rates, true_positive_rates, color=COLOURS[0], drawstyle="steps-post", label="this attack")
    axes.plot(rates, rates, color="grey", linewidth=1.0, linestyle=":", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(smallest, 1), ylim=(smallest, 1))
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
    axes.grid(alpha=0.3, which="major")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", fontsize=8.5)
    save_figure(figure, place)
    return place
