"""Pictures of what was measured, as PNG and SVG."""

from __future__ import annotations

import math
import statistics as st
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.report.drawing import COLOURS as _COLOURS
from tacit.report.drawing import new_figure as _figure
from tacit.report.drawing import save_figure
from tacit.report.tables import by_variant, log_points
from tacit.studies.statistics import fitted
from tacit.studies.study import Study
from tacit.training.diagnostics import BINS


def all_figures(
    study: Study,
    results: Sequence[Mapping[str, Any]],
    folder: Path,
    examples: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Every picture of the study for which there are results."""
    draws = (accuracy_curves, final_figures, inside_figures, surface_figure, sweep_figures, fit_figures)
    made = [path for draw in draws for path in draw(study, results, folder)]
    return made + [path for name, found in (examples or {}).items() for path in _example(study, name, found, folder)]


def accuracy_curves(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Accuracy against epsilon, one picture a group: the median over the seeds, in a band from the lowest to the highest."""
    runs_of = by_variant(results)
    made = []
    for group, names in study.curves.items():
        present = [name for name in names if name in runs_of]
        if present:
            curves = {name: band(runs_of[name]) for name in present}
            printed = {name: study.variant(name).printed for name in present}
            made += _drawn(f"{study.name}: {group}", curves, printed, folder / f"{study.name}-{group}-accuracy")
    return made


def band(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, float, float]]:
    """(epsilon, lowest, median, highest accuracy) at each epoch that all runs have measured.

    >>> curve = [{"epoch": 1.0, "epsilon": 0.5, "test_accuracy": 0.9}]
    >>> band([{"curve": curve}, {"curve": [{**curve[0], "test_accuracy": 0.8}]}])
    [(0.5, 0.8, 0.8500000000000001, 0.9)]
    """
    values: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        for row in run["curve"]:
            if row.get("epsilon") is not None and "test_accuracy" in row:
                values[row["epoch"]].append((row["epsilon"], row["test_accuracy"]))
    found = []
    for epoch in sorted(values):
        if len(values[epoch]) == len(runs):
            heights = [accuracy for _, accuracy in values[epoch]]
            epsilon = max(epsilon for epsilon, _ in values[epoch])
            found.append((epsilon, min(heights), st.median(heights), max(heights)))
    return found


def final_figures(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """The final accuracies of all variants of a group, one dot a run, the best median at the top.

    A group of which all is drawn as curves or as a surface is not drawn again.
    """
    runs_of = by_variant(results)
    repeated = {name for names in study.inside.values() for name in names} | set(study.surface)
    repeated |= {name for sweep in study.sweeps.values() for name in sweep.names}
    made: list[Path] = []
    for group in dict.fromkeys(variant.group for variant in study.variants):
        names = [v.name for v in study.variants if v.group == group and v.name in runs_of and v.name not in repeated]
        if set(names) <= set(study.curves.get(group, ())):
            continue
        values = {name: [100 * run["test_accuracy"] for run in runs_of[name]] for name in names}
        names.sort(key=lambda name: st.median(values[name]))
        figure, grid = _figure(1, 1, (7, 1.2 + 0.28 * len(names)))
        axes = grid[0][0]
        for row, name in enumerate(names):
            colour = _COLOURS[0] if name in study.curves.get(group, ()) else _COLOURS[6]
            axes.plot(values[name], [row] * len(values[name]), "o", color=colour, alpha=0.6, markersize=5)
            axes.plot(st.median(values[name]), row, "|", color=colour, markersize=13)
        axes.set(
            yticks=range(len(names)), xlabel="test accuracy after the last step, %", title=f"{study.name}: {group}"
        )
        axes.set_yticklabels([name.partition("/")[2] for name in names], fontsize=8)
        axes.grid(alpha=0.3)
        made += _saved(figure, folder / f"{study.name}-{group}-final")
    return made


def inside_figures(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """What happens inside the networks while they learn, a few pictures a group, from the first seed of each variant."""
    runs_of = by_variant(results)
    made: list[Path] = []
    for group, names in study.inside.items():
        rows = {name: runs_of[name][0]["diagnostics"] for name in names if name in runs_of}
        rows = {name: found for name, found in rows.items() if found}
        if rows:
            stem = folder / f"{study.name}-{group}"
            made += _layer_norms(f"{study.name}: {group}", rows, stem.with_name(f"{stem.name}-norms"))
            norms = {name: study.variant(name).values["privacy"].get("clipping_norm") for name in rows}
            made += _gradients(f"{study.name}: {group}", rows, norms, stem.with_name(f"{stem.name}-gradients"))
            made += _confusions(f"{study.name}: {group}", rows, stem.with_name(f"{stem.name}-confusion"))
    return made


def surface_figure(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Accuracy over the coordinates of the study's surface: the first two as axes, one panel for each value of the third."""
    runs_of = by_variant(results)
    values = {
        place: st.median(run["test_accuracy"] for run in runs_of[name])
        for name, place in study.surface.items()
        if name in runs_of
    }
    if not values:
        return []
    columns, rows, panels = (sorted({place[axis] for place in values}) for axis in range(3))
    figure, grid = _figure(1, len(panels), (3.4 * len(panels), 3.2))
    low, high = 100 * min(values.values()), 100 * max(values.values())
    image = None
    for axes, panel in zip(grid[0], panels):
        cells = [[100 * values.get((x, y, panel), math.nan) for x in columns] for y in rows]
        image = axes.imshow(cells, origin="lower", vmin=low, vmax=high, cmap="viridis", aspect="auto")
        for i, row in enumerate(cells):
            for j, cell in enumerate(row):
                if not math.isnan(cell):
                    dark = cell < (low + high) / 2
                    axes.text(
                        j, i, f"{cell:.1f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
                    )
        axes.set(
            xticks=range(len(columns)), yticks=range(len(rows)), xlabel=study.axes[0], ylabel=study.axes[1],
            title=f"{study.axes[2]} {panel:g}",
        )  # fmt: skip
        axes.set_xticklabels([f"{x:g}" for x in columns])
        axes.set_yticklabels([f"{y:g}" for y in rows])
    figure.colorbar(image, ax=grid[0], label="test accuracy, %")
    return _saved(figure, folder / f"{study.name}-surface")


def sweep_figures(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Final accuracies over the number that a sweep varies, one line a way to train: the median, in a band from the lowest to the
    highest."""
    runs_of = by_variant(results)
    made: list[Path] = []
    for name, sweep in study.sweeps.items():
        figure, grid = _figure(1, 1, (7, 4.5))
        axes = grid[0][0]
        for colour, (label, line) in zip(_COLOURS, sweep.lines.items()):
            places = sorted((place, member) for member, place in line.items() if member in runs_of)
            heights = [[100 * run["test_accuracy"] for run in runs_of[member]] for _, member in places]
            if not places:
                continue
            xs = [place for place, _ in places]
            axes.plot(xs, [st.median(h) for h in heights], "o-", color=colour, label=label, linewidth=1.5, markersize=4)
            axes.fill_between(
                xs, [min(h) for h in heights], [max(h) for h in heights], color=colour, alpha=0.2, linewidth=0
            )
        if not axes.lines:
            continue
        axes.set(xscale="log", xlabel=sweep.axis, ylabel="test accuracy, %", title=f"{study.name}: {name}")
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
        made += _saved(figure, folder / f"{study.name}-{name}-sweep")
    return made


def fit_figures(study: Study, results: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Final accuracies against epsilon, on a logarithmic axis, with the line through them and its 95% band."""
    made: list[Path] = []
    for name in study.fits:
        xs, ys = log_points(study, results, name)
        line = fitted(xs, ys)
        if line is None:
            continue
        figure, grid = _figure(1, 1, (7, 4.5))
        axes = grid[0][0]
        axes.plot([math.exp(x) for x in xs], [100 * y for y in ys], "o", color=_COLOURS[0], alpha=0.6, markersize=5)
        steps = [min(xs) + (max(xs) - min(xs)) * k / 50 for k in range(51)]
        where, middle = [math.exp(x) for x in steps], [100 * line.height(x) for x in steps]
        aside = [100 * line.half_width(x) for x in steps]
        axes.plot(where, middle, color=_COLOURS[1], linewidth=1.5)
        low, high = ([m + sign * w for m, w in zip(middle, aside)] for sign in (-1, 1))
        axes.fill_between(where, low, high, color=_COLOURS[1], alpha=0.2, linewidth=0)
        title = f"{study.name}: {name}\nPearson {line.correlation:.3f}, p = {line.p_value:.2g}, {line.points} runs"
        axes.set(xscale="log", xlabel="epsilon (PLD, delta 1e-5)", ylabel="test accuracy, %", title=title)
        axes.grid(alpha=0.3)
        made += _saved(figure, folder / f"{study.name}-{name}-fit")
    return made


def _example(study: Study, name: str, found: Mapping[str, Any], folder: Path) -> list[Path]:
    """The curves of a small experiment, one panel beside the other; a line without a curve is a number, drawn dotted."""
    panels = found["panels"]
    if not panels:
        return []
    columns = min(len(panels), 3)
    figure, grid = _figure(-(-len(panels) // columns), columns, (4.2 * columns, 3.6 * -(-len(panels) // columns)))
    for axes, (title, lines) in zip(grid.flat, panels.items()):
        for colour, (label, points) in zip(_COLOURS, lines.items()):
            if isinstance(points, int | float):
                axes.axhline(points, color=colour, linestyle=":", linewidth=1.2, label=label)
            else:
                axes.plot(*zip(*points), color=colour, linewidth=1.5, label=label)
        axes.set(xlabel=found["x"], ylabel=found["y"], title=title, yscale=found.get("scale", "linear"))
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
    return _saved(figure, folder / f"{study.name}-{name}-example")


def _layer_norms(title: str, rows: Mapping[str, Any], stem: Path) -> list[Path]:
    """Norms of weights, pre-activations and activations, one column a layer."""
    kinds = ("weight", "preactivation", "activation")
    layers = list(next(iter(rows.values()))[0]["layers"])
    figure, grid = _figure(len(kinds), len(layers), (2.6 * len(layers), 6.5))
    for axes_row, kind in zip(grid, kinds):
        for axes, layer in zip(axes_row, layers):
            for colour, (name, epochs) in zip(_COLOURS, rows.items()):
                points = [(row["epoch"], row["layers"].get(layer, {}).get(kind)) for row in epochs]
                points = [(x, y) for x, y in points if y is not None]
                if points:
                    axes.plot(*zip(*points), color=colour, linewidth=1.3, label=name)
            axes.grid(alpha=0.3)
            axes.set_ylim(bottom=0)
            if not axes.lines:
                axes.set_axis_off()
            elif kind == kinds[0]:
                axes.set_title(f"layer {layer}", fontsize=9)
        axes_row[0].set_ylabel(f"{kind} norm")
    for column in grid.T:
        lowest = [axes for axes in column if axes.lines][-1]
        lowest.set_xlabel("epoch")
    figure.suptitle(title)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return _saved(figure, stem)


def _gradients(title: str, rows: Mapping[str, Any], norms: Mapping[str, Any], stem: Path) -> list[Path]:
    """Per-example gradient norms early and late (dotted: where they are clipped), their median, the cosine that clipping leaves,
    and the loss's curvature."""
    figure, grid = _figure(2, 3, (13, 6.5))
    for colour, (name, epochs) in zip(_COLOURS, rows.items()):
        for axes, row in ((grid[0][0], epochs[0]), (grid[0][1], epochs[-1])):
            total = sum(row["gradient_norms"]) or 1
            axes.stairs([count / total for count in row["gradient_norms"]], BINS, color=colour, label=name)
            if isinstance(norms[name], float) and BINS[0] < norms[name] < BINS[-1]:
                axes.axvline(norms[name], color=colour, linestyle=":", linewidth=1)
        times = [row["epoch"] for row in epochs]
        for axes, key in (
            (grid[0][2], "median_gradient_norm"),
            (grid[1][0], "cosine"),
            (grid[1][1], "sharpness"),
            (grid[1][2], "class_spread"),
        ):
            axes.plot(times, [row.get(key, math.nan) for row in epochs], color=colour, linewidth=1.3, label=name)
    for axes, when in ((grid[0][0], "first"), (grid[0][1], "last")):
        axes.set(xscale="log", xlabel=f"gradient norm, after the {when} epoch", ylabel="part of the examples")
    grid[0][2].set(yscale="log", xlabel="epoch", ylabel="median gradient norm")
    grid[1][0].set(xlabel="epoch", ylabel="cosine of clipped and unclipped sum")
    grid[1][1].set(yscale="log", xlabel="epoch", ylabel="largest singular value of the Hessian")
    grid[1][2].set(xlabel="epoch", ylabel="deviation of the classes' accuracies")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title)
    return _saved(figure, stem)


def _confusions(title: str, rows: Mapping[str, Any], stem: Path) -> list[Path]:
    """Which held-out classes are taken for which, early and late, each row adding up to 1, with the spread of accuracies."""
    moments = {name: _moments(epochs) for name, epochs in rows.items()}
    most = max(map(len, moments.values()))
    if not most:
        return []
    figure, grid = _figure(most, len(rows), (max(3.2 * len(rows), 4.8), 3.4 * most))  # room for the title
    for column, (name, epochs) in enumerate(moments.items()):
        for axes, row in zip(grid[:, column], epochs):
            shares = [[count / max(sum(line), 1) for count in line] for line in row["confusion"]]
            axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
            axes.set_title(f"{name}\nepoch {row['epoch']:g}, spread {row['class_spread']:.3f}", fontsize=8)
            axes.set(xlabel="taken for", ylabel="class")
        for axes in grid[len(epochs) :, column]:
            axes.set_axis_off()
    figure.suptitle(f"{title}, held-out examples")
    return _saved(figure, stem)


def _moments(epochs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The second and the twentieth epoch, as in paper A, or the last."""
    found = [row for row in epochs if "confusion" in row]
    wanted = [min(found, key=lambda row, at=at: abs(row["epoch"] - at)) for at in (2, 20)] if found else []  # type: ignore[misc]
    return [row for i, row in enumerate(wanted) if row not in wanted[:i]]


def _drawn(title: str, curves: dict[str, Any], printed: dict[str, Any], stem: Path) -> list[Path]:
    figure, grid = _figure(1, 1, (7, 4.5))
    axes = grid[0][0]
    for colour, (name, points) in zip(_COLOURS, curves.items()):
        epsilons, low, middle, high = (list(column) for column in zip(*points)) if points else ([], [], [], [])
        axes.plot(epsilons, [100 * value for value in middle], color=colour, label=name, linewidth=1.5)
        axes.fill_between(
            epsilons, [100 * v for v in low], [100 * v for v in high], color=colour, alpha=0.2, linewidth=0
        )
        number = printed[name]
        if number is not None:
            axes.plot(
                [number.epsilon], [number.accuracy], "x", color=colour, markersize=8, label=f"{name}, in the paper"
            )
    axes.set(xlabel="epsilon (PLD, delta 1e-5)", ylabel="test accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    return _saved(figure, stem)


def _saved(figure: Any, stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    made = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for path in made:
        save_figure(figure, path)
    return made
