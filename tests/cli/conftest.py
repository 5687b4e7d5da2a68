"""The command line as a user has it: a process of its own, with its exit status and what it prints."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def tacit():
    def run(*arguments, cwd=None, timeout=300, check=None):
        command = [sys.executable, "-c", "from tacit.cli import main; main()", *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check is not None:
            assert done.returncode == check, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def finished(tacit, tmp_path_factory):
    """A small finished run on the embedded digits."""
    directory = tmp_path_factory.mktemp("runs") / "digits"
    tacit("train", "--out", directory, "--epochs", 6, "--set", "model.name=linear", check=0)
    return directory
