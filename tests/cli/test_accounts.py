"""`account`, `calibrate`, `verify` and help answer rightly and at once."""

import json

import pytest
from typer.testing import CliRunner

from tacit.cli import app
from tacit.privacy import UserError


def run(*arguments):
    """In this process, which has dp-accounting imported already."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result


def answer(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "accountant", "epsilon"),
    [
        (1.54, "1024/50000", 1440, "rdp", 2.585),
        (1.38, "600/60000", 2000, "rdp", 1.641),
        (1.54, "1024/50000", 1440, "pld", 2.365),
    ],
)
def test_account_gives_the_known_epsilons(sigma, rate, steps, accountant, epsilon):
    found = answer("account", "-s", sigma, "-q", rate, "--steps", steps, "--delta", 1e-5, "--accountant", accountant)
    assert found["epsilon"] == pytest.approx(epsilon, abs=5e-4)
    assert (found["delta"], found["noise_multiplier"], found["steps"]) == (1e-5, sigma, steps)


def test_pld_is_below_rdp_for_the_second_setting_too():
    arguments = ("account", "-s", 1.38, "-q", "600/60000", "--epochs", 20)
    assert answer(*arguments)["epsilon"] < answer(*arguments, "--accountant", "rdp")["epsilon"]


def test_a_schedule_is_accounted_and_costs_less_than_its_least_noise():
    shared = ("-q", 0.01, "--steps", 100)
    low, mixed = answer("account", "-s", 1, *shared), answer("account", "--schedule", "linear:2:1", *shared)
    assert 0 < mixed["epsilon"] < low["epsilon"]


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(3, "512/60000", 4688), (1, 0.01, 500), (8, 0.1, 100)])
def test_calibrate_never_exceeds_the_target_and_comes_within_half_a_per_cent(epsilon, rate, steps):
    found = answer("calibrate", "-e", epsilon, "-q", rate, "--steps", steps)
    assert 0.995 * epsilon <= found["epsilon"] <= epsilon
    again = answer("account", "-s", repr(found["noise_multiplier"]), "-q", rate, "--steps", steps)
    assert again["epsilon"] == found["epsilon"]


def test_calibrate_keeps_the_shape_of_a_schedule():
    found = answer("calibrate", "-e", 2, "-q", 0.01, "--steps", 3, "--schedule", "linear:2:1")
    assert found["schedule"]["first"] == pytest.approx(2 * found["schedule"]["last"])
    assert found["epsilon"] <= 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("account", "-s", 1, "-q", 1.5, "--steps", 5), "sample_rate must be above 0 and at most 1"),
        (("account", "-s", 1, "-q", "1/0", "--steps", 5), "fraction"),
        (("account", "-s", -1, "-q", 0.1, "--steps", 5), "noise_multiplier must be a finite number above 0"),
        (("account", "-s", 1, "-q", 0.1, "--steps", 5, "--delta", 1), "delta must lie strictly between 0 and 1"),
        (("account", "-s", 1, "-q", 0.1, "--steps", 0), "steps must be a whole number"),
        (("account", "-s", 1, "-q", 0.1), "either --steps or --epochs"),
        (("account", "-q", 0.1, "--steps", 5), "either --noise-multiplier or --schedule"),
        (("account", "--schedule", "linar:1:2", "-q", 0.1, "--steps", 5), "did you mean 'linear'"),
        (("account", "-s", 1, "-q", 0.1, "--steps", 5, "--accountant", "pdl"), "did you mean 'pld'"),
        (("calibrate", "-e", -1, "-q", 0.1, "--steps", 5), "epsilon must be a finite number above 0"),
        (("calibrate", "-e", 1e-9, "-q", 0.1, "--steps", 5, "-d", 1e-9), "cannot be reached|too small to be told"),
        (("calibrate", "-e", 1, "-q", 0.001, "--steps", 5, "-d", 0.1), "smaller delta"),
        (("verify", "no-such-directory"), "no run directory"),
    ],
)
def test_bad_input_is_told_in_one_sentence(arguments, says):
    with pytest.raises(UserError, match=says) as refusal:
        run(*arguments)
    assert "\n" not in str(refusal.value)


def test_errors_go_to_stderr_with_status_2_and_no_traceback(tacit):
    done = tacit("account", "-s", 1, "-q", 2, "--steps", 5)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tacit: sample_rate must be above 0 and at most 1, not 2.0\n"


@pytest.mark.parametrize(
    "command", ["train", "evaluate", "predict", "ensemble", "verify", "account", "calibrate", "recipes", "data"]
)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 8


def test_what_needs_no_torch_does_not_import_it(tacit, finished):
    import subprocess
    import sys

    for arguments in (
        ["--help"],
        ["account", "-s", "1", "-q", "0.1", "--steps", "5"],
        ["verify", str(finished)],
        ["recipes"],
    ):
        code = (
            "import sys\nfrom tacit.cli import main\nsys.argv = ['tacit', *sys.argv[1:]]\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
            "assert 'torch' not in sys.modules, 'torch'"
        )
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


PAPER = ("account", "-s", 2.8, "-q", "4096/50000", "--steps", 600, "--accountant", "rdp")


def test_forty_groups_with_noise_of_their_own_cost_what_they_cost():
    """The settings of the paper on private optimizers, which it calls epsilon 3."""
    flat, grouped = answer(*PAPER), answer(*PAPER, "--groups", 40)
    assert flat["epsilon"] == pytest.approx(3.455, abs=1e-3)
    assert grouped["epsilon"] == pytest.approx(166.34, abs=0.01)
    assert grouped["epsilon_if_it_were_flat"] == pytest.approx(flat["epsilon"])
    assert grouped["noise_multiplier"] == pytest.approx(2.8 / 40**0.5)
    assert (flat["groups"], flat["epsilon_if_it_were_flat"]) == (1, flat["epsilon"])
    assert answer(*PAPER, "--groups", 40, "--per-layer")["epsilon"] > 1000 * grouped["epsilon"]
    words = run(*PAPER, "--groups", 40).stdout
    assert "epsilon 166.34" in words
    assert "it would be 3.4554" in words


def test_groups_may_have_norms_and_noise_of_their_own():
    shared = ("-q", 0.01, "--steps", 100)
    given = answer("account", "--clipping-norms", "3,4", "--noise-stds", "10,10", *shared)
    assert given["epsilon"] == answer("account", "-s", 2, *shared)["epsilon"]
    assert answer("account", "-s", 2, "--groups", 1, *shared)["epsilon"] == given["epsilon"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-s", 1, "--per-layer"), "say how many with --groups"),
        (("-s", 1, "--groups", 3, "--clipping-norms", "1,2"), "must agree"),
        (("-s", 1, "--groups", 0), "--groups must be a whole number of at least 1"),
        (("-s", 1, "--clipping-norms", "1,x"), "numbers with commas between them"),
        (("-s", 1, "--clipping-norms", "1,-2"), "above 0"),
        (("-s", 1, "--noise-stds", "1,2"), "leave --noise-multiplier"),
        (("--noise-stds", "1,2"), "give --clipping-norms too"),
    ],
)
def test_groups_that_do_not_fit_are_told(options, message):
    with pytest.raises(UserError, match=message):
        run("account", *options, "-q", 0.1, "--steps", 10)


@pytest.mark.parametrize("schedule", ["exponential:5:1", "linear:5:1:4", "linear:5:1", "loss-driven:1:3"])
def test_every_schedule_is_calibrated_and_shown(schedule):
    shared = ("-e", 2, "-q", 0.05, "--epochs", 4, "--schedule", schedule)
    assert 1.9 < answer("calibrate", *shared)["epsilon"] <= 2
    assert "noise schedule" in run("calibrate", *shared).stdout


def test_a_curriculum_has_the_epochs_of_the_run():
    found = answer("account", "--schedule", "exponential:5:1", "-q", "600/60000", "--epochs", 20, "--accountant", "rdp")
    assert found["epsilon"] == pytest.approx(2.613, abs=1e-3)
    assert found["schedule"]["epochs"] == 20


CURRICULUM = ("-q", "600/60000", "--epochs", 20, "--accountant", "rdp")


def test_account_says_which_constant_costs_as_much():
    arguments = ("account", "--schedule", "piecewise:5:1", *CURRICULUM)
    found = answer(*arguments)
    assert found["equal_constant"] == pytest.approx(1.3806, abs=1.01e-4)
    assert (
        f"\n  a constant noise multiplier of {found['equal_constant']:.4f} would cost as much\n"
        in run(*arguments).stdout
    )
    assert answer("account", "-s", repr(found["equal_constant"]), *CURRICULUM)["epsilon"] <= found["epsilon"]
    constant = ("account", "-s", 1.38, *CURRICULUM)
    assert answer(*constant)["equal_constant"] == 1.38
    assert "would cost" not in run(*constant).stdout


def test_calibrate_says_which_constant_costs_as_much():
    arguments = ("-q", 0.05, "--epochs", 4, "--schedule", "table:3,1,2")
    words = run("calibrate", "-e", 2, *arguments).stdout
    found = answer("calibrate", "-e", 2, *arguments)
    assert f"a constant noise multiplier of {found['equal_constant']:.4f} would cost as much" in words
    assert answer("account", "-s", repr(found["equal_constant"]), *arguments[:4])["epsilon"] <= found["epsilon"]
    constant = answer("calibrate", "-e", 2, *arguments[:4])
    assert constant["equal_constant"] == constant["noise_multiplier"]


def test_several_schedules_are_a_line_each_and_one_object_with_a_list():
    names = ["quadratic:5:1", "table:5,4,3,2,1", "linear:3:0"]
    arguments = ("account", *(word for name in names for word in ("--schedule", name)), *CURRICULUM)
    lines = run(*arguments).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == names
    assert "epsilon 1.32" in lines[0]
    assert "as much" in lines[1]
    assert "epsilon none" in lines[2]
    found = answer(*arguments)["accounts"]
    assert [account["epsilon"] for account in found] == [
        answer("account", "--schedule", name, *CURRICULUM)["epsilon"] for name in names
    ]
    assert found[2]["epsilon"] is None


def test_account_draws_and_prints_together(tmp_path):
    shared = ("-q", 0.1, "--epochs", 4, "--accountant", "rdp", "--plot")
    found = answer("account", "--schedule", "quadratic:5:2", *shared, tmp_path / "noise.png")
    assert found["epsilon"] > 0
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")
    run("account", "-s", 1.5, *shared, tmp_path / "noise.svg")
    assert "<svg" in (tmp_path / "noise.svg").read_text()


@pytest.mark.parametrize(("name", "says"), [("noise.jpeg", "ends in .png or .svg"), ("none/noise.png", "no folder")])
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, name, says):
    with pytest.raises(UserError, match=says) as refusal:
        run("account", "-s", 1, "-q", 0.1, "--steps", 10**7, "--plot", tmp_path / name)
    assert "\n" not in str(refusal.value)


def test_groups_of_a_schedule_are_compared_with_a_constant_at_one_norm():
    shared = ("-q", 0.1, "--epochs", 4, "--accountant", "rdp")
    found = answer("account", "--schedule", "table:8,4", "--groups", 4, *shared)
    assert found["equal_constant"] == answer("account", "--schedule", "table:4,2", *shared)["equal_constant"]
    assert (
        "clipped at one norm"
        in run("account", "--schedule", "table:8,4", "--groups", 4, *shared).stdout.splitlines()[1]
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--epochs", "1e308", "--noise-multiplier", 1),
        ("--steps", 10**30, "--noise-multiplier", 1),
        ("--steps", 10**12, "--schedule", "linear:5:1"),
        ("--steps", 10, "--noise-multiplier", 1, "--groups", 10**12),
    ],
)
def test_what_no_machine_could_count_is_refused_in_a_sentence(options):
    with pytest.raises(UserError, match=r"at most|more than"):
        run("account", "--sample-rate", "1e-3", *options)
