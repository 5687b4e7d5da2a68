"""What was measured: one small JSON a run, and the README's table made from them.

python results/tables.py collect RUN_DIR    # RUN_DIR -> results/<name of the directory>.json
python results/tables.py readme             # write the table into README.md
python results/tables.py docs               # write docs/results.md from what `tacit reproduce` left in results/<study>/
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent
README = RESULTS.parent / "README.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
# Runs of studies that the README shows too: each takes an hour, and nobody needs it twice.
OF_STUDIES = ("losing-less/cifar10-ce-tanh-seed0.json", "losing-less/cifar10-tailored-tanh-seed0.json")


def collect(run: Path) -> None:
    """The figures of one run directory, none of them private."""
    certificate = json.loads((run / "certificate.json").read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    figures = {
        **described(tomllib.loads((run / "recipe.toml").read_text())),
        "epochs_run": last["epoch"],
        "test_accuracy": last["test_accuracy"],
        "epsilon": certificate["epsilon"],
        "epsilon_rdp": certificate["epsilon_rdp"],
        "delta": certificate["delta"],
        "releases": certificate["releases"],
        "planned_releases": certificate["planned_releases"],
        "valid_for_release": certificate["valid_for_release"],
        "seconds": last["seconds"],
        "hardware": "2 CPU cores, shared",
    }
    (RESULTS / f"{run.name}.json").write_text(json.dumps(figures, indent=2) + "\n")


def described(recipe: dict[str, Any]) -> dict[str, Any]:
    """What of a recipe is worth a word."""
    return {
        "data": recipe["data"]["source"],
        "model": recipe["model"]["name"],
        "activation": recipe["model"]["activation"],
        "features": recipe["model"].get("features"),
        "loss": recipe["loss"]["name"],
        "privacy": recipe["privacy"],
        "optimizer": recipe["optimizer"],
    }


def measured() -> list[dict[str, Any]]:
    """Every run that the README shows, by data set and model."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    for path in (RESULTS / name for name in OF_STUDIES):
        if path.exists():
            result = json.loads(path.read_text())
            found.append({**result, **described(result["recipe"]), "epochs_run": result["curve"][-1]["epoch"]})
    return sorted(found, key=lambda row: (row["data"], row["model"], row["loss"]))


def table() -> str:
    """The README's table, one row a run."""
    lines = [
        "| data | model | epochs | test accuracy | epsilon (PLD) | epsilon (RDP) | delta | minutes, 2 cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in measured():
        planned = row["privacy"]["epochs"]
        epochs = (
            f"{planned:g}" if row["releases"] == row["planned_releases"] else f"{row['epochs_run']:.0f} of {planned:g}"
        )
        parts = [row["model"], row["activation"], row["loss"]]
        if row.get("features"):
            parts = [f"{row['model']} on {row['features']}", row["loss"]]
        lines.append(
            f"| {row['data']} | {', '.join(parts)} | {epochs} | {row['test_accuracy']:.2%} "
            f"| {row['epsilon']:.2f} | {row['epsilon_rdp']:.2f} | {row['delta']:g} | {row['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def page(draw: bool = False) -> str:
    """docs/results.md: every study, its table, what the statistics say, and its figures."""
    from tacit.report.figures import all_figures
    from tacit.report.tables import markdown
    from tacit.studies import STUDIES
    from tacit.studies.runner import finished_examples, finished_of

    parts = [
        "# What was measured\n\nMade by `python results/tables.py docs` from `results/`, where each run is one small file. Every "
        "run has a known seed, for research. Epsilon is the PLD one at delta 1e-5, for adding or removing one example, "
        "everything paid but the choice of the papers' hyper-parameters; the RDP one, which the papers use, stands beside it. "
        "Accuracies are those of the whole test set after the last step, in per cent: minimum, median and maximum over the seeds."
    ]
    for study in STUDIES.values():
        folder, results, examples = RESULTS / study.name, finished_of(study, RESULTS), finished_examples(study, RESULTS)
        parts.append(markdown(study, results, examples).strip())
        figures = all_figures(study, results, folder, examples) if draw else sorted(folder.glob("*.png"))
        parts += [
            f"![{path.stem}](../results/{study.name}/{path.name})" for path in sorted(figures) if path.suffix == ".png"
        ]
        notes = folder / "NOTES.md"
        if notes.exists():
            parts.append(notes.read_text().strip())
    return "\n\n".join(parts) + "\n"


def readme_with_table(text: str) -> str:
    """The README's text with the table of today between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"] and len(sys.argv) == 3:
        collect(Path(sys.argv[2]))
    elif sys.argv[1:] == ["readme"]:
        README.write_text(readme_with_table(README.read_text()))
    elif sys.argv[1:] == ["docs"]:
        (RESULTS.parent / "docs" / "results.md").write_text(page(draw=True))
    else:
        sys.exit(__doc__)
