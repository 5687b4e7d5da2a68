"""The README shows what is there: its Python runs as it stands, its commands exist, its table is that of `results/`."""

import importlib.util
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from tacit.cli import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_its_python_runs_as_it_stands(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    accuracy, epsilon = re.search(r"test accuracy ([\d.]+)% at epsilon ([\d.]+), delta 1e-05", printed).groups()
    assert float(accuracy) > 80
    assert float(epsilon) <= 3
    assert names["summed"].sensitivity == 1.0
    data, trainer = names["data"], names["trainer"]  # of the last block, which does not call fit itself
    assert trainer.fit(data.train, validate_on=data.test)[-1]["test_accuracy"] > 0.6
    assert trainer.certificate()["epsilon"] <= 3


def test_its_commands_and_their_options_exist():
    commands = re.findall(r"^    tacit (.+?)(?:\s+#.*)?$", README, flags=re.MULTILINE)
    assert len(commands) >= 7
    for line in commands:
        name, *arguments = shlex.split(line)
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).stdout
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert option in shown, line


def tables_module():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "results" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables


def test_the_page_of_results_is_made_from_the_results():
    assert (ROOT / "docs" / "results.md").read_text() == tables_module().page()


def test_its_table_is_made_from_the_results():
    assert tables_module().readme_with_table(README) == README
    assert README.count("\n| ") >= 5, "a heading and at least four runs"


def test_its_speeds_are_made_from_the_results_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.report import readme_with_summary

    assert readme_with_summary(README, ROOT / "benchmarks" / "results") == README
    assert "| **tacit** |" in README
