"""A picture of schedules holds what was accounted, is written where it was asked for, and needs neither torch nor pyplot."""

import subprocess
import sys

import pytest

from tacit.privacy import Constant, Curriculum, Linear, PrivacyPlan, Table, UserError
from tacit.report.drawing import picture_path
from tacit.report.schedules import Comparison, schedule_figure

SHARED = {"sample_rate": 0.1, "steps": 40}


def plan(noise):
    return PrivacyPlan(**SHARED, noise=noise)


def drawn(plans):
    comparison = Comparison.of(plans, 1e-5, "rdp")
    figure = comparison.drawn()
    return comparison, figure, *figure.axes


def test_the_lines_are_the_noise_and_the_epsilon_of_the_schedule_and_of_its_constant():
    curriculum = plan(Curriculum("linear", 5.0, 2.0, 4))
    comparison, figure, noise, spent = drawn({"linear:5:2:4": curriculum})
    epsilon, constant = comparison.epsilons["linear:5:2:4"], comparison.constants["linear:5:2:4"]
    assert list(noise.lines[0].get_xdata()) == pytest.approx([step / 10 for step in range(41)])
    assert sorted(set(noise.lines[0].get_ydata()), reverse=True) == pytest.approx([5, 4, 3, 2])
    assert noise.lines[0].get_ydata()[10] == pytest.approx(4)  # from the first step of the second epoch on
    assert set(noise.lines[1].get_ydata()) == {constant}
    assert noise.lines[1].get_linestyle() == "--"
    for line in spent.lines:
        assert len(line.get_xdata()) == 21
        assert line.get_ydata()[-1] == pytest.approx(epsilon, rel=1e-3)
    shown = float(figure.get_suptitle().partition("epsilon ")[2].split()[0])
    assert epsilon <= shown < epsilon + 1e-4  # rounded up


def test_a_constant_is_one_line():
    _, _, noise, spent = drawn({"constant:2": plan(Constant(2.0))})
    assert (len(noise.lines), len(spent.lines)) == (1, 1)


def test_schedules_of_equal_cost_share_their_constant_and_all_are_in_the_legend():
    plans = {"down": plan(Table((4.0, 2.0))), "up": plan(Table((2.0, 4.0))), "line": plan(Linear(4.0, 2.0))}
    comparison, figure, noise, _ = drawn(plans)
    assert comparison.constants["down"] == comparison.constants["up"] != comparison.constants["line"]
    assert sum(line.get_linestyle() == "--" for line in noise.lines) == 2
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [label.partition(":")[0] for label in labels] == list(plans)


def test_a_dozen_schedules_are_told_apart():
    plans = {str(k): PrivacyPlan(sample_rate=0.1, steps=2, noise=Constant(1.0 + k)) for k in range(12)}
    _, _, noise, _ = drawn(plans)
    assert len({(line.get_color(), line.get_linestyle()) for line in noise.lines}) == 12


def test_a_schedule_without_an_epsilon_is_drawn_without_a_constant():
    comparison, figure, noise, _ = drawn({"linear:1:0": plan(Linear(1.0, 0.0))})
    assert comparison.constants == {"linear:1:0": None}
    assert len(noise.lines) == 1
    assert "epsilon none" in figure.get_suptitle()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_picture_is_the_same_file(tmp_path, suffix):
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        two_steps = PrivacyPlan(sample_rate=0.1, steps=2, noise=Constant(2.0))
        assert schedule_figure({"2": two_steps}, path, delta=1e-5, accountant="rdp") == path
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert (b"PNG" if suffix == "png" else b"<svg") in first


@pytest.mark.parametrize(
    ("name", "says"), [("a.pdf", "ends in .png or .svg"), ("a", "ends in"), ("b/a.png", "no folder")]
)
def test_a_picture_that_cannot_be_written_is_refused(tmp_path, name, says):
    with pytest.raises(UserError, match=says):
        picture_path(tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match="is a file"):
        picture_path(tmp_path / "folder.png")


def test_drawing_needs_no_torch_and_matplotlib_waits_until_it_is_asked_for(tmp_path):
    code = (
        "import sys\nfrom tacit.privacy import PrivacyPlan\nfrom tacit.report.schedules import schedule_figure\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plan = PrivacyPlan(sample_rate=0.1, steps=4)\n"
        "schedule_figure({'1': plan}, sys.argv[1], delta=1e-5, accountant='rdp')\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.svg")], check=True)
