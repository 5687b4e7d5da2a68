"""`train`, `evaluate`, `predict`, `verify` on real runs, and whatever a user can get wrong about them."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from tacit import cli
from tacit.privacy import read_ledger


def test_a_run_directory_holds_what_the_contract_names(finished):
    names = {item.name for item in finished.iterdir()}
    assert names == {
        "recipe.toml",
        "ledger.jsonl",
        "certificate.json",
        "metrics.jsonl",
        "model.safetensors",
        "checkpoint",
    }


def test_verify_passes_on_an_honest_run_and_evaluate_agrees_with_its_metrics(tacit, finished):
    verified = json.loads(tacit("verify", finished, "--json", check=0).stdout)
    assert verified["verified"] is True
    assert verified["epsilon"] <= 3
    assert verified["valid_for_release"] is True
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    found = json.loads(tacit("evaluate", finished, "--json", check=0).stdout)
    assert found["test_accuracy"] == last["test_accuracy"]


def test_an_edited_certificate_or_ledger_fails_verification(tacit, finished, tmp_path):
    for name, old, new in (
        ("certificate.json", b'"epsilon": ', b'"epsilon": 0.'),
        ("ledger.jsonl", b'"step":3', b'"step":4'),
    ):
        copy = tmp_path / name
        copy.mkdir()
        for item in ("certificate.json", "ledger.jsonl"):
            (copy / item).write_bytes((finished / item).read_bytes())
        (copy / name).write_bytes((finished / name).read_bytes().replace(old, new, 1))
        done = tacit("verify", copy)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1


def test_predictions_are_the_models_for_images_and_arrays(tacit, finished, tmp_path):
    from tacit.data import load

    test = load("digits").test
    Image.fromarray(test.images[0, 0]).save(tmp_path / "one.png")
    np.savez(tmp_path / "many.npz", x=test.images)
    done = tacit("predict", finished, tmp_path / "one.png", tmp_path / "many.npz", "--json", check=0)
    predictions = json.loads(done.stdout)["predictions"]
    assert len(predictions) == 1 + len(test)
    assert predictions[0]["label"] == predictions[1]["label"]
    right = np.mean([p["label"] == test.classes[label] for p, label in zip(predictions[1:], test.labels)])
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert right == pytest.approx(last["test_accuracy"])


def test_a_folder_of_images_goes_from_training_to_prediction(tacit, tmp_path):
    generator = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for i in range(60):
            pixels = generator.normal(level, 20, size=(16, 16)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / name / f"{i}.png")
    run = tmp_path / "run"
    changes = ["--set", "model.name=small-cnn", "--set", "privacy.sample_rate=0.5", "--set", "optimizer.lr=2"]
    done = tacit(
        "train", "images", "--dataset", tmp_path / "scans", "--epochs", 10, "--epsilon", 8, *changes, "--out", run
    )
    assert done.returncode == 0, done.stderr
    sample = tmp_path / "scans" / "dark" / "0.png"
    assert tacit("predict", run, sample, check=0).stdout.split("\t")[1] == "dark"
    tacit("verify", run, check=0)


def test_delta_of_one_over_n_or_more_is_a_warning(tacit, tmp_path):
    done = tacit(
        "train", "--epochs", 1, "--delta", 0.01, "--set", "model.name=linear", "--out", tmp_path / "run", check=0
    )
    assert "warning: delta 0.01 is not below 1/n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsuch"], "unknown recipe 'nonsuch'"),
        (["mnits"], "did you mean 'mnist'"),
        (["--epsilon", "0"], "epsilon must be a finite number above 0"),
        (["--delta", "2"], "delta must lie strictly between 0 and 1"),
        (["--set", "privacy.batch_size=100000"], "larger than the 1495 training examples"),
        (["--set", "privacy.batch_size=none", "--set", "privacy.sample_rate=1.5"], "less than or equal to 1"),
        (["--set", "optimizer.learning_rate=1"], "SGD has no argument 'learning_rate'"),
        (["--set", "optimizer.name=SDG"], "did you mean 'SGD'"),
        (["--set", "model.name=small-cn"], "did you mean 'small-cnn'"),
        (["--set", "model.activation=tan"], "did you mean 'tanh'"),
        (["--set", "loss.name=entropy"], "unknown loss"),
        (["--device", "gpu7"], "no device 'gpu7'"),
        (["--resume"], "--resume --out RUN_DIR"),
        (["--dataset", "no/such/folder"], "no/such/folder"),
        (["--physical-batch-size", "0"], "physical_batch_size must be a whole number"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2_and_leaves_nothing(tacit, tmp_path, arguments, says):
    done = tacit("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("ledger.jsonl"))


def _npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.full((50, 4), np.nan), "y": np.arange(50) % 2}, "NaN"),
        ({"x": np.zeros((50, 4)), "y": np.arange(50) % 2 - 1}, "0..k-1"),
        ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "empty"),
        ({"x": np.zeros((50, 4)), "y": np.zeros(49, int)}, "49"),
    ],
)
def test_bad_data_are_refused_by_name(tacit, tmp_path, arrays, says):
    done = tacit("train", "table", "--dataset", _npz(tmp_path / "bad.npz", **arrays), cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_images_of_differing_shapes_are_named_and_resizing_is_offered(tacit, tmp_path):
    for name, size in (("a", 8), ("b", 9)):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("L", (size, size)).save(tmp_path / "set" / name / "0.png")
    done = tacit("train", "images", "--dataset", tmp_path / "set", cwd=tmp_path)
    assert done.returncode == 2
    assert "data.resize" in done.stderr


def test_a_run_directory_that_exists_is_left_alone(tacit, finished):
    before = {item: item.read_bytes() for item in finished.rglob("*") if item.is_file()}
    done = tacit("train", "--out", finished)
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert {item: item.read_bytes() for item in finished.rglob("*") if item.is_file()} == before


def test_resuming_with_other_settings_is_refused(tacit, finished):
    done = tacit("train", "--resume", "--out", finished, "--epsilon", 9)
    assert done.returncode == 2
    assert "other settings" in done.stderr


def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(tmp_path):
    limit = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1))\nfrom tacit.cli import main; main()"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(size, *arguments):
        command = [sys.executable, "-c", limit, str(size), "train", *arguments, "--out", str(tmp_path / "run")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    first = [
        "--epochs",
        "6",
        "--set",
        "model.name=linear",
        "--set",
        "privacy.epsilon=none",
        "--set",
        "privacy.noise_multiplier=3",
    ]
    done = run(10_000, *first)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "make room" in done.stderr
    assert 0 < len(read_ledger(tmp_path / "run" / "ledger.jsonl")) < 37
    done = run(-1, "--resume")
    assert done.returncode == 0, done.stderr


def test_ctrl_c_saves_says_how_to_go_on_and_loses_no_step(tacit, tmp_path):
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        "from tacit.cli import main; main()",
        "train",
        "--out",
        str(run),
        "--epochs",
        "200",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"tacit train --resume --out {run}" in errors
    verified = json.loads(tacit("verify", run, "--json", check=0).stdout)
    released = verified["releases"]
    assert 0 < released < verified["planned_releases"]
    assert verified["epsilon"] < 3


def test_resuming_where_there_is_no_run_is_refused_unless_it_says_what_to_train(tacit, tmp_path):
    done = tacit("train", "--resume", "--out", tmp_path / "nothere")
    assert done.returncode == 2
    assert "no run to continue" in done.stderr
    assert not (tmp_path / "nothere").exists()


def test_a_wrong_start_leaves_no_directory_behind(tacit, tmp_path):
    done = tacit("train", "--set", "optimizer.lr=nan", "--out", tmp_path / "run")
    assert (done.returncode, (tmp_path / "run").exists()) == (2, False)
    assert "finite" in done.stderr
    done = tacit("train", "--set", "optimizer.lr=abc", "--out", tmp_path / "run")
    assert (done.returncode, (tmp_path / "run").exists()) == (2, False)


def test_own_data_may_move_and_vectors_find_their_recipe(tacit, tmp_path):
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(400, 4)).astype(np.float32)
    data = _npz(tmp_path / "table.npz", x=inputs, y=(inputs[:, 0] > 0).astype(int))
    tacit("train", "--dataset", "table.npz", "--epochs", 2, "--out", "run", cwd=tmp_path, check=0)
    assert "linear" in (tmp_path / "run" / "recipe.toml").read_text()
    tacit("evaluate", tmp_path / "run", check=0)
    data.rename(tmp_path / "moved.npz")
    assert tacit("evaluate", tmp_path / "run").returncode == 2
    tacit("evaluate", tmp_path / "run", "--dataset", tmp_path / "moved.npz", check=0)
    tacit("train", "--resume", "--dataset", tmp_path / "moved.npz", "--out", tmp_path / "run", check=0)


def test_the_recipes_for_own_data_ask_for_them(tacit, tmp_path):
    done = tacit("train", "images", cwd=tmp_path)
    assert done.returncode == 2
    assert "--dataset FOLDER" in done.stderr


@pytest.fixture
def handlers():
    """What `main` does with signals ends with the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("raised", "status", "says"),
    [
        (MemoryError(), 2, "tacit: there is not enough memory; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "tacit: there is not enough memory; "),
        (OSError(errno.EIO, "Input/output error", "x"), 2, "tacit: Input/output error (x); "),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})(),
            2,
            "tacit: a library stopped midway",
        ),
    ],
)
def test_what_the_machine_lacks_is_told_in_one_sentence(monkeypatch, capsys, raised, status, says):
    def fails():
        raise raised

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert said.startswith(says)
    assert said.count("\n") == 1


@pytest.mark.usefixtures("handlers")
def test_who_is_terminated_says_so_as_if_by_ctrl_c(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_where_it_expects_nothing_says_so(monkeypatch, capsys, number):
    monkeypatch.setattr("tacit.training.recipe.named_recipes", lambda: signal.raise_signal(number))
    monkeypatch.setattr(sys, "argv", ["tacit", "recipes"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.usefixtures("handlers")
def test_an_error_of_tacits_own_is_not_taken_for_one_of_the_machine(monkeypatch):
    def fails():
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main()
