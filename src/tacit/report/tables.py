"""Tables: ours beside the paper's, at the end and where we had spent the paper's epsilon, and what the statistics say."""

from __future__ import annotations

import math
import statistics as st
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tacit.studies.statistics import Verdict, compared, fitted, paired
from tacit.studies.study import Comparison, Study, Variant

Results = Sequence[Mapping[str, Any]]
Examples = Mapping[str, Mapping[str, Any]]
_EPSILONS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


def by_variant(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    """Results of each variant, by seed.

    >>> list(by_variant([{"variant": "b", "seed": 1}, {"variant": "b", "seed": 0}]).values())
    [[{'variant': 'b', 'seed': 0}, {'variant': 'b', 'seed': 1}]]
    """
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        found[result["variant"]].append(result)
    return {name: sorted(runs, key=lambda run: run["seed"]) for name, runs in found.items()}


def accuracies(runs: Results) -> list[float]:
    """The final accuracies.

    >>> accuracies([{"test_accuracy": 0.9}])
    [0.9]
    """
    return [run["test_accuracy"] for run in runs]


def rows(study: Study, results: Results) -> list[dict[str, str]]:
    """One row a variant that was run: min, median, max and median absolute deviation (MAD) of the final accuracies, the epsilons,
    and what the paper printed.

    Where we had not spent more than the paper's epsilon before the end, the last column is the median then.
    """
    found = []
    runs_of = by_variant(results)
    for variant in study.variants:
        runs = runs_of.get(variant.name)
        if not runs:
            continue
        values = accuracies(runs)
        printed = variant.printed
        found.append(
            {
                "variant": variant.name,
                "min": f"{min(values):.2%}",
                "median": f"{st.median(values):.2%}",
                "max": f"{max(values):.2%}",
                "MAD": _deviation(values),
                "runs": str(len(values)),
                "epochs": f"{runs[-1]['recipe']['privacy']['epochs']:g}",
                **({"epsilon claimed": _claimed(variant)} if any(v.claimed for v in study.variants) else {}),
                "epsilon": _epsilon([run["epsilon"] for run in runs]),
                "by RDP": _epsilon([run["epsilon_rdp"] for run in runs]),
                "paper": "" if printed is None else f"{printed.accuracy:g} at {printed.epsilon:g} ({printed.what})",
                "ours at that epsilon": "" if printed is None else _at(printed.epsilon, runs),
            }
        )
    return found


def _deviation(values: Sequence[float]) -> str:
    """The median absolute deviation; of one run there is none."""
    middle = st.median(values)
    return "" if len(values) == 1 else f"{st.median(abs(value - middle) for value in values):.2%}"


def _claimed(variant: Variant) -> str:
    return "" if variant.claimed is None else f"{variant.claimed:g}"


def for_screen(row: Mapping[str, str]) -> dict[str, str]:
    """A row in fewer columns, which fit a terminal.

    >>> row = {"variant": "mnist/a", "min": "97.90%", "median": "98.00%", "max": "98.10%", "runs": "5", "epochs": "40"}
    >>> for_screen({**row, "epsilon": "2.99", "by RDP": "3.27", "paper": "", "ours at that epsilon": ""})["accuracy"]
    '97.90% 98.00% 98.10%'
    """
    found = {"variant": row["variant"], "accuracy": row["median"]}
    if row["runs"] != "1":
        found["accuracy"] = f"{row['min']} {row['median']} {row['max']}"
    found["epsilon"] = row["epsilon"] + (f" (claimed: {row['epsilon claimed']})" if row.get("epsilon claimed") else "")
    found["paper"] = row["paper"] and f"{row['paper']}; ours then {row['ours at that epsilon']}"
    return found


def _at(epsilon: float, runs: Results) -> str:
    """The median accuracy when at most this epsilon was spent."""
    found = []
    for run in runs:
        within = [point for point in run["curve"] if point["epsilon"] is not None and point["epsilon"] <= epsilon]
        if within:
            found.append(within[-1]["test_accuracy"])
    return f"{st.median(found):.2%}" if found else "—"


def _epsilon(found: Sequence[float | None]) -> str:
    numbers = [epsilon for epsilon in found if epsilon is not None]
    return f"{max(numbers):.2f}" if len(numbers) == len(found) else "none holds"


def markdown(study: Study, results: Results, examples: Examples | None = None) -> str:
    """The study's table, its comparisons and their sentences, as Markdown."""
    table = rows(study, results)
    if not table and not examples:
        return f"## {study.name}\n\n{study.paper}.\n\nNothing was run yet: `tacit reproduce {study.name}`.\n"
    lines = [f"## {study.name}", "", f"{study.paper}.", ""]
    if table:
        lines += [_line(table[0]), _line("---" for _ in table[0]), *(_line(row.values()) for row in table)]
    said = [f"- {sentence}" for sentence in sentences(study, results, examples)]
    return "\n".join([*lines, "", *said, "", *_along(study, results)]) + "\n"


def _along(study: Study, results: Results) -> list[str]:
    """What is drawn as curves, as numbers: the median accuracy when at most so much was spent."""
    runs_of = by_variant(results)
    names = [name for group in study.curves.values() for name in group if name in runs_of]
    if not names:
        return []
    heads = ["median accuracy at epsilon", *(f"{epsilon:g}" for epsilon in _EPSILONS)]
    lines = [_line(heads), _line("---" for _ in heads)]
    return lines + [_line([name, *(_at(epsilon, runs_of[name]) for epsilon in _EPSILONS)]) for name in names]


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def paired_by_seed(comparison: Comparison, results: Results) -> float | None:
    """The p-value of a paired test over the seeds that both variants have, if there is one.

    >>> paired_by_seed(Comparison("a/one", "a/other", "it helps"), [])
    """
    one, other = (
        {run["seed"]: run["test_accuracy"] for run in results if run["variant"] == name}
        for name in (comparison.better, comparison.worse)
    )
    return paired(one, other)


def verdicts(study: Study, results: Results) -> list[tuple[Comparison, Verdict]]:
    """What the statistics say of each comparison whose two variants were run."""
    runs_of = by_variant(results)
    return [
        (comparison, compared(accuracies(runs_of[comparison.better]), accuracies(runs_of[comparison.worse])))
        for comparison in study.comparisons
        if comparison.better in runs_of and comparison.worse in runs_of
    ]


def sentences(study: Study, results: Results, examples: Examples | None = None) -> list[str]:
    """Each comparison in plain words: what the paper says, what was found, and whether chance explains it; then the lines that
    were fitted, and what the small experiments said."""
    found = []
    for comparison, verdict in verdicts(study, results):
        points = 100 * verdict.difference
        what = (
            f"{comparison.whose}: {comparison.claim}. Here {comparison.better} ends {abs(points):.2f} points "
            f"{'above' if points >= 0 else 'below'} {comparison.worse} in the mean"
        )
        if verdict.p_value is None:
            found.append(f"{what}; {verdict.count} are too few for a test at the 1% level.")
            continue
        if comparison.alike:
            holds = "the claim does not hold" if verdict.significant else "nothing speaks against the claim"
        elif verdict.significant:
            holds = "the claim holds" if points > 0 else "the claim does not hold"
        else:
            holds = "chance may explain it"
        by_seed = paired_by_seed(comparison, results)
        found.append(
            f"{what} ({verdict.test}, p = {verdict.p_value:.2g}, {verdict.count}; Shapiro-Wilk {_p(verdict.normality)}, "
            f"Levene {_p(verdict.equal_variances)}{'' if by_seed is None else f'; paired by seed p = {by_seed:.2g}'}): "
            f"{holds} at the 1% level."
        )
    for name in study.fits:
        line = fitted(*log_points(study, results, name))
        if line is not None:
            found.append(
                f"Accuracy against log epsilon ({name}): Pearson {line.correlation:.3f}, p = {line.p_value:.2g}, of "
                f"{line.points} runs; {100 * line.slope:.2f} points for every factor e."
            )
    return found + [sentence for example in (examples or {}).values() for sentence in example["sentences"]]


def log_points(study: Study, results: Results, name: str) -> tuple[list[float], list[float]]:
    """Of the runs that a fit is of: the logarithms of epsilon, and the accuracies.

    >>> study = Study("toy", "A Paper", [Variant("a/b", {})], fits={"all": ["a/b"]})
    >>> log_points(study, [{"variant": "a/b", "seed": 0, "epsilon": 1.0, "test_accuracy": 0.9}], "all")
    ([0.0], [0.9])
    """
    runs_of = by_variant(results)
    runs = [run for member in study.fits[name] for run in runs_of.get(member, ()) if run["epsilon"]]
    return [math.log(run["epsilon"]) for run in runs], accuracies(runs)


def _p(value: float | None) -> str:
    return "not tested" if value is None else f"{value:.2g}"
