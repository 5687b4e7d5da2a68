"""Several runs cost what their releases cost together, and the composition claims nothing that one of them cannot."""

import json
import shutil

import pytest

from tacit.privacy import (
    Constant,
    Flat,
    Ledger,
    Linear,
    LossDriven,
    PrivacyPlan,
    UserError,
    certificate_of,
    composed_certificate,
    composition,
    epsilon_of,
    epsilon_of_all,
)
from tacit.privacy.certificate import rounded_up
from tacit.privacy.ledger import SORTED


def plan_of(sample_rate=0.1, steps=4, noise=2.0, **changes):
    noise = Constant(noise) if isinstance(noise, float) else noise
    return PrivacyPlan(
        sample_rate=sample_rate, steps=steps, clipping=Flat(1.0), noise=noise, expected_batch_size=4, **changes
    )


@pytest.fixture
def run_of(tmp_path):
    """Makes finished run directories, as far as their guarantee goes."""

    def made(name, plan=None, delta=1e-5, reproducible=False, disclosed=None, sampled_by="tacit", **facts):
        plan, run = plan or plan_of(), tmp_path / name
        run.mkdir()
        ledger = Ledger.create(run / "ledger.jsonl", plan, delta=delta, reproducible=reproducible, **facts)
        if disclosed:
            ledger.record_disclosure(disclosed)
        for sigma in plan.whole_releases:
            ledger.record_whole_release(noise_multiplier=sigma, what="the statistics")
        for step in range(plan.steps):
            ledger.record_release(
                noise_multiplier=plan.noise_multiplier(step), sample_rate=plan.sample_rate, sampled_by=sampled_by
            )
        ledger.close()
        (run / "certificate.json").write_text(json.dumps(certificate_of(ledger.entries)))
        return run

    return made


def test_one_run_alone_costs_what_its_own_certificate_says(run_of):
    run = run_of("a", plan_of(steps=2, noise=Linear(4.0, 2.0), whole_releases=(9.0,)))
    own = json.loads((run / "certificate.json").read_text())
    found = composed_certificate([run])
    assert (found["epsilon"], found["epsilon_rdp"], found["delta"]) == (own["epsilon"], own["epsilon_rdp"], 1e-5)
    assert (found["releases"], found["whole_releases"], found["valid_for_release"]) == (2, 1, True)
    assert "All 3 releases of 1 run together" in found["statement"]


def test_with_a_run_of_which_no_epsilon_holds_none_holds_of_all(run_of):
    found = composed_certificate([run_of("a"), run_of("b", sampled_by=SORTED)])
    assert found["epsilon"] is found["epsilon_rdp"] is None
    assert found["valid_for_release"] is False
    assert "sorted" in found["statement"]


def test_two_runs_of_one_plan_cost_as_much_as_one_of_twice_the_length(run_of):
    found = composed_certificate([run_of("a"), run_of("b")])
    assert found["epsilon"] == rounded_up(epsilon_of(0.1, [(2.0, 8)], 1e-5))
    assert found["epsilon_rdp"] == rounded_up(epsilon_of(0.1, [(2.0, 8)], 1e-5, accountant="rdp"))
    assert all(found["epsilon"] > run["epsilon"] for run in found["runs"])
    assert found["epsilon"] < sum(run["epsilon"] for run in found["runs"])
    assert f"({found['epsilon']}, 1e-05)" in found["statement"]


def test_runs_at_different_rates_and_noises_compose_and_whole_releases_are_counted(run_of):
    plans = plan_of(noise=3.0), plan_of(0.3, 6, 2.5, whole_releases=(7.0,)), plan_of(0.3, 2, 2.5, whole_releases=(5.0,))
    runs = [run_of(str(number), plan) for number, plan in enumerate(plans)]
    found = composed_certificate(runs)
    parts = [(0.1, [(3.0, 4)]), (0.3, [(2.5, 8)])]
    assert found["epsilon"] == rounded_up(epsilon_of_all(parts, 1e-5, whole=[7.0, 5.0]))
    assert found["epsilon"] > rounded_up(epsilon_of_all(parts, 1e-5))
    assert (found["releases"], found["whole_releases"]) == (12, 2)
    assert "All 14 releases of 3 runs" in found["statement"]
    assert found["epsilon"] <= found["epsilon_rdp"]


def test_delta_is_the_smallest_of_the_runs_or_the_one_asked_for(run_of):
    runs = [run_of("a", delta=1e-5), run_of("b", delta=1e-6)]
    assert composed_certificate(runs)["delta"] == 1e-6
    assert composed_certificate(runs, 1e-4)["epsilon"] == rounded_up(epsilon_of(0.1, [(2.0, 8)], 1e-4))
    with pytest.raises(UserError, match="delta"):
        composed_certificate(runs, 0.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reproducible": True}, "known seed"),
        ({"disclosed": "the training loss"}, "the training loss was shown"),
        ({"plan": plan_of(noise=0.0)}, "no epsilon holds"),
    ],
)
def test_one_run_that_is_void_for_release_voids_the_whole_and_is_named(run_of, wrong, words):
    good, bad = run_of("good"), run_of("bad", **wrong)
    found = composed_certificate([good, bad])
    assert found["valid_for_release"] is False
    (reason,) = found["void_because"]
    assert reason.startswith(f"{bad}: ")
    assert words in reason
    assert not found["statement"].startswith("All")
    assert composed_certificate([good])["valid_for_release"] is True


def test_a_run_that_was_changed_or_interrupted_is_refused(run_of, tmp_path):
    good, other = run_of("good"), run_of("other")
    changed = shutil.copytree(other, tmp_path / "changed")
    path = changed / "certificate.json"
    path.write_text(path.read_text().replace('"epsilon": ', '"epsilon": 1'))
    with pytest.raises(UserError, match="changed after it was written"):
        composed_certificate([good, changed])
    Ledger.resume(other / "ledger.jsonl").close()
    with pytest.raises(UserError, match="interrupted"):
        composed_certificate([good, other])
    (other / "certificate.json").unlink()
    with pytest.raises(UserError, match="finish the run"):
        composed_certificate([good, other])


def test_a_run_that_goes_on_while_it_is_read_is_refused(run_of, monkeypatch):
    run = run_of("a")

    def slow(directory, verify=composition.verify):
        found = verify(directory)
        Ledger.resume(directory / "ledger.jsonl").close()
        return found

    monkeypatch.setattr(composition, "verify", slow)
    with pytest.raises(UserError, match="went on while it was read"):
        composed_certificate([run])


def test_no_run_and_the_same_run_twice_are_refused(run_of):
    run = run_of("a")
    with pytest.raises(UserError, match="at least one run directory"):
        composed_certificate([])
    with pytest.raises(UserError, match="same run directory"):
        composed_certificate([run, run_of("b"), run.parent / "b" / ".." / "a"])


def test_runs_on_other_numbers_of_examples_have_not_held_out_the_same(run_of):
    one, two = run_of("one", examples=40, evaluated_on_held_out=True), run_of("two", examples=50)
    found = composed_certificate([one, two])
    assert "different numbers of examples (40, 50)" in found["void_because"][0]
    quiet = run_of("quiet", examples=40)
    assert composed_certificate([quiet, two])["valid_for_release"], "nothing was measured"
    assert composed_certificate([one, quiet])["valid_for_release"], "the same examples"


def test_caveats_say_whose_they_are_and_that_the_examples_are_the_same(run_of):
    one, two = run_of("one", examples=40), run_of("two", examples=40, evaluated_on_held_out=True)
    found = composed_certificate([one, two], 0.03)["caveats"]
    assert "same examples" in found[0]
    assert [caveat for caveat in found if caveat.startswith(f"{two}: accuracies are exact figures")]
    assert [caveat for caveat in found if caveat.startswith("delta 0.03 is not below 1/n")], "of the delta asked for"
    assert not [caveat for caveat in found if "this run's ledger" in caveat]
    assert len(found) == len(set(found))


def test_a_copy_of_a_run_is_not_another_run(run_of, tmp_path):
    run = run_of("a")
    shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(UserError, match="copies of one run"):
        composed_certificate([run, tmp_path / "copy"])


def test_a_run_under_a_filter_is_added_by_its_whole_epsilon(run_of):
    """A composition of the multipliers that happened to be used would claim too little."""
    driven = plan_of(steps=40, noise=LossDriven(2.0, 2.0)).calibrated(epsilon=2.0, delta=1e-5)
    alone = composed_certificate([run_of("driven", plan=driven)])
    assert alone["epsilon"] == pytest.approx(driven.epsilon(1e-5), abs=2e-6)
    other = run_of("other", examples=40)
    both = composed_certificate([run_of("again", plan=driven), other])
    expected = driven.epsilon(5e-6) + epsilon_of(0.1, [(2.0, both["releases"] - alone["releases"])], 5e-6)
    assert both["epsilon"] == pytest.approx(expected, abs=1e-5)
    assert both["epsilon"] > alone["epsilon"]
