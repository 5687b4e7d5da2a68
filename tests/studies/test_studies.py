"""Studies: finished runs are not run again, interrupted ones go on, and tables and sentences say what was found."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tacit import studies
from tacit.cli import app
from tacit.privacy import PrivacyPlan, UserError, equal_constant
from tacit.privacy.schedules import schedule_from_text
from tacit.report.figures import (
    accuracy_curves,
    all_figures,
    band,
    final_figures,
    fit_figures,
    inside_figures,
    sweep_figures,
)
from tacit.report.tables import markdown, rows, sentences
from tacit.studies import STUDIES, Comparison, Printed, Study, Variant
from tacit.studies.curricula import EQUAL, EQUAL_BY_RDP
from tacit.studies.runner import Task, finished_examples, finished_of, run_examples, run_study, run_task, tasks_of
from tacit.studies.statistics import compared, paired
from tacit.studies.study import Example, Sweep
from tacit.training.recipe import Recipe

BASE = {"privacy": {"noise_multiplier": 2.0, "batch_size": 256, "epochs": 2}, "optimizer": {"name": "SGD", "lr": 0.3}}
TOY = Study(
    "toy",
    "A Paper",
    [
        Variant("digits/tanh", BASE, seeds=2, printed=Printed(99.0, 1.0, "one run")),
        Variant("digits/relu", {**BASE, "model": {"activation": "relu"}}, seeds=2),
        Variant("other/sse", {**BASE, "loss": {"name": "sum-of-squares"}}),
    ],
    [Comparison("digits/tanh", "digits/relu", "tanh does better")],
    {"digits": ["digits/tanh", "digits/relu"]},
)


def result(variant, seed, accuracy, epochs=3):
    curve = [
        {"epoch": float(e), "step": e, "epsilon": e / 2, "test_accuracy": accuracy - (epochs - e) / 10}
        for e in range(1, epochs + 1)
    ]
    recipe = {"privacy": {"epochs": epochs}}
    return {
        "variant": variant,
        "seed": seed,
        "test_accuracy": accuracy,
        "epsilon": 1.5,
        "epsilon_rdp": 1.6,
        "recipe": recipe,
        "curve": curve,
    }


def test_every_variant_of_every_study_is_a_recipe_that_can_be_built():
    from tacit.learning import make_loss
    from tacit.training.building import build_model

    shapes = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
    epsilons: dict[str, float] = {}  # most variants share their plan with others
    for study in STUDIES.values():
        for variant in study.variants:
            recipe = variant.recipe(seed=0)
            model = build_model(recipe.model, shapes[recipe.data.source], 10)
            make_loss(recipe.loss.name, **(recipe.loss.model_extra or {}))
            sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
            examples = 50_000 if recipe.data.source == "cifar10" else 60_000
            plan = recipe.feedback_plan(examples) or recipe.plan(examples, sizes)
            key = json.dumps(plan.to_dict()) if isinstance(plan, PrivacyPlan) else variant.name
            epsilon = epsilons.setdefault(key, epsilons.get(key) or plan.epsilon(1e-5))
            if variant.claimed is not None:
                assert epsilon > 2 * variant.claimed
            elif study.name == "weight-decay":  # which prints none
                assert variant.printed is None or epsilon <= variant.printed.epsilon
            else:
                assert epsilon <= 3 or variant.name.endswith("not-private")


@pytest.mark.parametrize("shape", EQUAL)
def test_the_constants_of_the_curricula_cost_as_much_as_the_schedules_that_they_stand_for(shape):
    schedule = schedule_from_text(f"{shape}:5:1:20")
    plan = PrivacyPlan(sample_rate=0.01, steps=2000, noise=schedule)
    assert equal_constant(plan, 1e-5, accountant="rdp") == pytest.approx(EQUAL_BY_RDP[shape], abs=1e-9)
    assert equal_constant(plan, 1e-5) == pytest.approx(EQUAL[shape], abs=1e-9)
    values = STUDIES["curricula"].variant(f"noise/falling-{shape}").values
    assert values["privacy"]["schedule"] == f"{shape}:5:1:20"


def test_a_line_is_laid_through_accuracies_against_the_logarithm_of_epsilon(tmp_path):
    study = Study(
        "toy", "A Paper", [Variant(f"a/{k}", BASE) for k in range(4)], fits={"all": [f"a/{k}" for k in range(4)]}
    )
    epsilons, accuracies = (0.5, 1.0, 2.0, 4.0), (0.90, 0.921, 0.939, 0.96)
    results = [{**result(f"a/{k}", 0, accuracies[k]), "epsilon": epsilons[k]} for k in range(4)] + [
        {**result("a/0", 1, 0.5), "epsilon": None}
    ]  # for which none holds
    (sentence,) = sentences(study, results)
    assert "Pearson 1.000, p = 0.00046" in sentence
    assert "of 4 runs" in sentence
    assert {path.name for path in fit_figures(study, results, tmp_path)} == {"toy-all-fit.png", "toy-all-fit.svg"}
    assert fit_figures(study, results[:2], tmp_path) == []


def test_a_sweep_is_drawn_over_what_it_varies(tmp_path):
    sweep = Sweep("decay", {"before": {"a/0": 0.1, "a/1": 1.0}, "after": {"a/2": 0.1}})
    study = Study("toy", "A Paper", [Variant(f"a/{k}", BASE) for k in range(3)], sweeps={"decay": sweep})
    results = [result(f"a/{k}", seed, 0.9 + k / 100) for k in range(2) for seed in range(2)]
    assert [path.name for path in sweep_figures(study, results, tmp_path)] == [
        "toy-decay-sweep.png",
        "toy-decay-sweep.svg",
    ]
    assert sweep_figures(study, [], tmp_path) == []
    with pytest.raises(UserError, match="no variant 'a/9'"):
        Study("toy", "A Paper", [], sweeps={"decay": Sweep("decay", {"before": {"a/9": 1.0}})})


def test_small_experiments_are_run_once_and_told(tmp_path):
    runs = []

    def experiment():
        runs.append(1)
        lines = {"curve": [[0, 1.0], [1, 2.0]], "limit": 2.0}
        return {"x": "step", "y": "height", "panels": {"one": lines}, "sentences": ["It ends at 2."]}

    study = Study("toy", "A Paper", [], examples=[Example("small", experiment)])
    run_examples(study, tmp_path, only=["other"])
    assert not runs
    run_examples(study, tmp_path)
    run_examples(study, tmp_path, only=["small"])
    assert len(runs) == 1
    found = finished_examples(study, tmp_path)
    assert "- It ends at 2." in markdown(study, [], found)
    assert [path.name for path in all_figures(study, [], tmp_path, found)] == [
        "toy-small-example.png",
        "toy-small-example.svg",
    ]


def test_the_command_runs_a_small_experiment_by_its_name(tmp_path):
    command = ["reproduce", "weight-decay", "--only", "scalar", "--out", str(tmp_path)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "theta ends at 2.0000" in shown.output
    assert [path.name for path in (tmp_path / "weight-decay").glob("*.json")] == ["example-scalar.json"]
    listed = CliRunner().invoke(app, ["reproduce", "weight-decay", "--list"]).output
    assert "regression-2" in listed
    assert "mnist-lambda/before-5" in listed


def test_what_is_drawn_together_differs_in_model_or_loss_alone_and_so_shares_its_epsilon():
    for study in STUDIES.values():
        for name in study.curves:
            values = [study.variant(member).values for member in study.curves[name]]
            if all("epsilon" in other["privacy"] for other in values):
                assert len({other["privacy"]["epsilon"] for other in values}) == 1
                continue
            for section in ("data", "privacy", "optimizer"):
                assert all(other[section] == values[0][section] for other in values) or name == "literal"


def test_every_run_has_a_file_of_its_own():
    for study in STUDIES.values():
        tasks = tasks_of(study, Path("x"))
        assert len({task.path for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    ("group", "lr", "batch", "epochs", "sigma", "threshold", "beta", "gamma"),
    [
        ("cifar10", 1, 1024, 30, 1.54, 7, 11, 5),
        ("fashion-mnist", 4, 2048, 40, 2.15, 0, 1, 5),
        ("mnist", 0.5, 512, 40, 1.23, 0, 1, 5),
        ("scatter-cifar10", 4, 8192, 60, 5.67, 2, 1, 2),
        ("scatter-fashion-mnist", 4, 2048, 40, 2.15, 2, 51, 2),
        ("scatter-mnist", 1, 1024, 25, 1.35, 2, 11, 2),
    ],
)
def test_paper_as_settings_are_those_of_its_table(group, lr, batch, epochs, sigma, threshold, beta, gamma):
    values = STUDIES["losing-less"].variant(f"{group}/tailored-tanh").values
    privacy, loss = values["privacy"], values["loss"]
    assert (values["optimizer"]["lr"], privacy["batch_size"], privacy["epochs"]) == (lr, batch, epochs)
    assert (privacy["noise_multiplier"], privacy["clipping_norm"]) == (sigma, 0.1)
    assert (loss["threshold_epoch"], loss["beta"], loss["gamma"]) == (threshold, beta, gamma)


def test_seeds_go_round_so_that_every_variant_has_a_first_run_early():
    names = [(task.variant.name, task.seed) for task in tasks_of(TOY, Path("x"))]
    assert names[:3] == [("digits/tanh", 0), ("digits/relu", 0), ("other/sse", 0)]
    assert len(names) == 5
    assert [task.variant.name for task in tasks_of(TOY, Path("x"), only=["other"])] == ["other/sse"]
    assert [task.variant.name for task in tasks_of(TOY, Path("x"), only=["*/relu"], seeds=1)] == ["digits/relu"]


def test_a_finished_run_is_not_run_again_and_a_changed_one_is(tmp_path):
    started = []
    tasks = tasks_of(TOY, tmp_path / "out", only=["other"])

    def run(tasks):
        return run_study(
            tasks, data_dir=None, runs=tmp_path / "runs", started=lambda task, *_: started.append(task.name)
        )

    first = run(tasks)
    assert started == ["other-sse-seed0"]
    assert json.loads(tasks[0].path.read_text()) == first[0]
    assert first[0]["releases"] == first[0]["planned_releases"]
    assert [row["epoch"] for row in first[0]["curve"]] == pytest.approx([1, 2], abs=0.2)
    assert not (tmp_path / "runs" / "toy" / "other-sse-seed0").exists()
    assert run(tasks) == first
    assert len(started) == 1
    changed = Variant("other/sse", {**BASE, "loss": {"name": "huber"}})
    run([Task(TOY, changed, 0, tmp_path / "out")])
    assert len(started) == 2


def test_the_table_is_of_the_groups_asked_for_and_the_page_of_all_that_is_finished(tmp_path, monkeypatch):
    monkeypatch.setitem(studies.STUDIES, "toy", TOY)
    monkeypatch.chdir(tmp_path)
    for only in ("digits/relu", "other"):
        done = CliRunner().invoke(app, ["reproduce", "toy", "--only", only, "--seeds", "1"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
    assert "digits/relu" not in done.output
    assert "other/sse" in done.output
    page = (tmp_path / "results" / "toy" / "README.md").read_text()
    assert "digits/relu" in page
    assert "other/sse" in page
    assert [run["variant"] for run in finished_of(TOY, tmp_path / "results")] == ["digits/relu", "other/sse"]


def test_the_same_run_of_another_study_is_taken_over(tmp_path):
    twin = Study("twin", "Another Paper", [Variant("digits/the-same", BASE)])
    task = tasks_of(TOY, tmp_path / "out", only=["digits/tanh"])[0]
    first = run_task(task, data_dir=None, runs=tmp_path / "runs")
    started = []
    (found,) = run_study(
        tasks_of(twin, tmp_path / "out"), data_dir=None, runs=tmp_path / "runs", started=lambda *_: started.append(1)
    )
    assert not started
    assert (found["study"], found["variant"], found["curve"]) == ("twin", "digits/the-same", first["curve"])


def test_a_setting_that_came_later_does_not_undo_finished_runs(tmp_path):
    task = tasks_of(TOY, tmp_path / "out", only=["other"])[0]
    found = run_task(task, data_dir=None, runs=tmp_path / "runs")
    del found["recipe"]["data"]["held_out"]  # as if there had been no such setting then
    task.path.write_text(json.dumps(found))
    assert task.finished() == found
    found["recipe"]["optimizer"]["lr"] = 7.0
    task.path.write_text(json.dumps(found))
    assert task.finished() is None


def test_a_run_killed_after_its_last_step_is_measured_all_the_same(tmp_path):
    from tacit.training.run import train

    task = tasks_of(TOY, tmp_path / "out", only=["other"])[0]
    directory = tmp_path / "runs" / "toy" / task.name
    train(task.recipe(), directory)
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))
    found = run_task(task, data_dir=None, runs=tmp_path / "runs")
    assert found["curve"][-1]["step"] == found["planned_releases"]
    assert directory.with_name(f"{directory.name}.old1").exists(), "put aside, not lost"


def test_the_same_seed_gives_the_same_result(tmp_path):
    task = tasks_of(TOY, tmp_path / "out", only=["other"])[0]
    one, two = (run_task(task, data_dir=None, runs=tmp_path / str(i)) for i in range(2))
    assert [row["test_accuracy"] for row in one["curve"]] == [row["test_accuracy"] for row in two["curve"]]
    assert one["epsilon"] == two["epsilon"]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    from tacit.training.interruption import Interrupted
    from tacit.training.run import train
    from tacit.training.trainer import PrivateTrainer

    task = tasks_of(TOY, tmp_path / "out", only=["other"])[0]
    directory = tmp_path / "runs" / "toy" / task.name
    steps = 0

    def stop_early(self, private, update=PrivateTrainer._update):
        nonlocal steps
        update(self, private)
        steps += 1
        self._stop.requested = steps == 4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateTrainer, "_update", stop_early)
        with pytest.raises(Interrupted):
            train(task.recipe(), directory)
        found = run_task(task, data_dir=None, runs=tmp_path / "runs")
    assert steps == found["planned_releases"], "no step was made twice"
    other = Recipe.load("digits")
    other_directory = tmp_path / "again" / "toy" / task.name
    train(other.model_copy(update={"privacy": other.privacy.model_copy(update={"epochs": 1.0})}), other_directory)
    assert run_task(task, data_dir=None, runs=tmp_path / "again")["variant"] == "other/sse", (
        "a stranger's run is not taken"
    )


def test_a_table_has_ours_beside_the_papers():
    results = [result("digits/tanh", 0, 0.95), result("digits/tanh", 1, 0.97), result("digits/relu", 0, 0.9)]
    first, second = rows(TOY, results)
    assert (first["min"], first["median"], first["max"], first["runs"]) == ("95.00%", "96.00%", "97.00%", "2")
    assert first["paper"] == "99 at 1 (one run)"
    assert first["ours at that epsilon"] == "86.00%", "the second of three epochs"
    assert (first["epsilon"], first["by RDP"]) == ("1.50", "1.60")
    assert second["paper"] == second["ours at that epsilon"] == ""
    assert "| digits/tanh | 95.00% |" in markdown(TOY, results)
    assert "| digits/tanh | 76.00% | 76.00% | 86.00% | 86.00% | 96.00% | 96.00% | 96.00% |" in markdown(TOY, results)
    assert "Nothing was run yet" in markdown(TOY, [])


def test_sentences_say_whether_a_claim_holds():
    def said(better, worse):
        results = [result("digits/tanh", i, a) for i, a in enumerate(better)]
        return sentences(TOY, results + [result("digits/relu", i, a) for i, a in enumerate(worse)])[0]

    high, low = [0.95, 0.951, 0.949, 0.952, 0.95], [0.93, 0.931, 0.929, 0.932, 0.928]
    assert "2.04 points above" in said(high, low)
    assert said(high, low).endswith("the claim holds at the 1% level.")
    assert said(low, high).endswith("the claim does not hold at the 1% level.")
    assert said(high, high).endswith("chance may explain it at the 1% level.")
    assert said(high[:1], low[:1]).endswith("1 run each are too few for a test at the 1% level.")
    assert "5 and 3 runs" in said(high, low[:3])


def test_pairs_of_one_seed_are_compared_where_seeds_differ_more_than_variants_do():
    seeds = {0: 0.93, 1: 0.95, 2: 0.91, 3: 0.94, 4: 0.92}
    better = {seed: value + 0.004 + 0.0003 * seed for seed, value in seeds.items()}
    assert compared(list(better.values()), list(seeds.values())).p_value > 0.5
    assert paired(better, seeds) < 0.001
    assert paired(seeds, better) == paired(better, seeds), "two-sided"
    assert paired(better, {seed + 4: value for seed, value in seeds.items()}) is None, "one seed in common"
    assert paired(seeds, seeds) is None
    assert paired({**seeds, 2: 0.1}, better) is None, "no normal differences"
    only = {seed: better[seed] for seed in (0, 1, 2)}
    assert paired(only, seeds) == paired(only, {seed: seeds[seed] for seed in only}), "the rest does not count"


def test_the_test_that_applies_is_taken():
    normal, shifted = [0.1, 0.2, 0.3, 0.25, 0.15], [0.5, 0.6, 0.7, 0.65, 0.55]
    assert compared(normal, shifted).test == "t-test"
    skewed = [0.1, 0.1001, 0.1002, 0.1001, 0.4]
    verdict = compared(skewed, shifted)
    assert verdict.test == "Mann-Whitney"
    assert verdict.p_value == pytest.approx(2 / 252), (
        "all five below all five, one way of 252 on either side; ties do no harm"
    )
    assert compared([0.1, 0.1, 0.1, 0.4], shifted).p_value is None, "four against five cannot reach 1%"
    wide = [0.0, 1.0, 0.5, 0.2, 0.8]
    assert compared(wide, [0.5, 0.501, 0.499, 0.5005, 0.4995]).test == "Welch's t-test"
    constant = compared([0.5] * 5, [0.6] * 5)
    assert (constant.test, constant.normality, constant.equal_variances) == ("Mann-Whitney", None, None)
    assert constant.significant
    assert compared([0.5] * 5, [0.5] * 5).p_value == pytest.approx(1.0)


def test_a_band_spans_the_seeds_at_the_epochs_that_all_have():
    found = band([result("a", 0, 0.9)["curve"] and result("a", 0, 0.9), result("a", 1, 0.8, epochs=2)])
    assert [point[0] for point in found] == [0.5, 1.0]
    assert found[1] == (1.0, pytest.approx(0.8), pytest.approx(0.8), pytest.approx(0.8))


def test_figures_are_drawn_as_png_and_svg(tmp_path):
    results = [result(name, seed, 0.9 - seed / 50) for name in ("digits/tanh", "digits/relu") for seed in range(2)]
    made = accuracy_curves(TOY, results, tmp_path)
    assert [path.name for path in made] == ["toy-digits-accuracy.png", "toy-digits-accuracy.svg"]
    assert made[0].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in made[1].read_text()
    again = accuracy_curves(TOY, results, tmp_path / "again")
    assert again[1].read_bytes() == made[1].read_bytes(), "the same results are the same picture"


def test_final_accuracies_are_drawn_where_curves_do_not_tell_all(tmp_path):
    results = [result("digits/tanh", 0, 0.9), result("digits/tanh", 1, 0.92), result("digits/relu", 0, 0.8)]
    assert final_figures(TOY, results, tmp_path) == []
    made = final_figures(TOY, [*results, result("other/sse", 0, 0.7)], tmp_path)
    assert [path.name for path in made] == ["toy-other-final.png", "toy-other-final.svg"]
    study = Study("toy", "A Paper", TOY.variants, curves={"digits": ["digits/tanh"]})
    drawn = final_figures(study, results, tmp_path)[1].read_text()
    assert drawn.index("<!-- relu -->") < drawn.index("<!-- tanh -->"), "the best at the top, which is drawn last"


def test_what_happens_inside_is_measured_and_drawn(tmp_path):
    looked = Variant("digits/inside", BASE, diagnostics=32)
    places = {f"at/{i}": (float(i % 2), float(i // 2), 0.0) for i in range(4)}
    surface = [Variant(name, BASE) for name in places]
    study = Study(
        "toy", "A Paper", [looked, *surface], inside={"digits": ["digits/inside"]}, surface=places, axes="sto"
    )
    task = tasks_of(study, tmp_path / "out", only=["digits"])[0]
    found = run_task(task, data_dir=None, runs=tmp_path / "runs")
    assert found == json.loads(task.path.read_text()) == task.finished()
    assert [row["epoch"] for row in found["diagnostics"]] == [row["epoch"] for row in found["curve"]]
    assert found["resumed"] == 0
    results = [found, *(result(name, 0, 0.9 + i / 100) for i, name in enumerate(places))]
    made = [path.name for path in all_figures(study, results, tmp_path / "figures")]
    assert [name for name in made if name.endswith(".png")] == [
        "toy-digits-norms.png",
        "toy-digits-gradients.png",
        "toy-digits-confusion.png",
        "toy-surface.png",
    ]
    assert inside_figures(study, [result("at/0", 0, 0.9)], tmp_path) == []


def test_a_run_without_noise_is_told_to_have_no_epsilon():
    (row,) = rows(TOY, [{**result("digits/tanh", 0, 0.95), "epsilon": None}])
    assert row["epsilon"] == "none holds"


def test_a_study_that_names_what_is_not_there_is_refused():
    with pytest.raises(UserError, match="did you mean 'digits/tanh'"):
        Study("toy", "A Paper", TOY.variants, [Comparison("digits/tnh", "digits/relu", "")])
    with pytest.raises(UserError, match="same name"):
        Study("toy", "A Paper", [TOY.variants[0]] * 2)


def test_the_command_runs_a_study_and_ends_with_table_figures_and_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(studies.STUDIES, "toy", TOY)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["reproduce", "toy", "--only", "digits", "--seeds", "1", "--epochs", "1"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    assert "digits/tanh" in done.output
    assert "too few for a test" in done.output
    assert sorted(path.name for path in (tmp_path / "results" / "toy" / "trial-of-1-epochs").iterdir()) == [
        "README.md",
        "digits-relu-seed0.json",
        "digits-tanh-seed0.json",
        "toy-digits-accuracy.png",
        "toy-digits-accuracy.svg",
    ]
    assert not (tmp_path / "results" / "toy" / "README.md").exists(), "a trial is kept apart"


def test_the_command_lists_and_refuses(monkeypatch):
    monkeypatch.setitem(studies.STUDIES, "toy", TOY)
    runner = CliRunner()
    assert "losing-less" in runner.invoke(app, ["reproduce", "--list"]).output
    assert "digits/relu" in runner.invoke(app, ["reproduce", "toy", "--list"]).output
    for arguments, words in [
        (["reproduce"], "say which study"),
        (["reproduce", "losing-les"], "did you mean 'losing-less'"),
        (["reproduce", "toy", "--only", "digts"], "did you mean 'digits'"),
        (["reproduce", "toy", "--seeds", "0"], "--seeds"),
    ]:
        with pytest.raises(UserError, match=words):
            runner.invoke(app, arguments, catch_exceptions=False)


def test_paper_cs_settings_are_those_of_its_text():
    study = STUDIES["private-optimizers"]
    values = study.variant("resnet20/rmsprop").values
    assert values["privacy"] == {
        "epsilon": 3.0, "delta": 1e-5, "batch_size": 4096, "epochs": 50, "clipping_norm": 1.0, "groups": 40
    }  # fmt: skip
    assert values["optimizer"] == {"name": "RMSprop", "lr": 8e-4, "momentum": 0.9, "weight_decay": 1e-4}
    assert values["learning_rate_schedule"]["eta_min"] == 9e-5
    assert values["averaging"]["decay"] == 0.95
    rungs = [study.variant(name).values for name in study.curves["ladder"]]
    assert [rung["privacy"]["batch_size"] for rung in rungs] == [256, 256, 256, 512, 1024, 1024]
    assert [rung["model"]["name"] for rung in rungs] == ["resnet-20-plain", "resnet-20-norm"] + ["resnet-20"] * 4


def test_the_literal_variants_have_the_noise_that_the_paper_adds():
    """2.8 times each group's norm: by the plan's own standard deviations, not by what the study computed."""
    study = STUDIES["private-optimizers"]
    sizes = {f"layer{j}.weight": 10 for j in range(40)}
    for name, divisors in (("literal/grouped", [1] * 40), ("literal/grouped-per-layer", range(1, 41))):
        plan = study.variant(name).recipe(seed=0).plan(50_000, sizes)
        stds = plan.clipping.noise_stds(plan.noise_multiplier(0))
        assert list(stds) == pytest.approx([2.8 / divisor for divisor in divisors])
        assert plan.epsilon(1e-5, accountant="rdp") > 160


def test_a_claimed_epsilon_stands_beside_the_one_that_holds():
    study = Study("toy", "A Paper", [Variant("digits/literal", BASE, claimed=3.0), Variant("digits/honest", BASE)])
    table = rows(study, [result("digits/literal", 0, 0.9), result("digits/honest", 0, 0.8)])
    assert [(row["epsilon claimed"], row["epsilon"]) for row in table] == [("3", "1.50"), ("", "1.50")]
    assert "epsilon claimed" in markdown(study, [result("digits/literal", 0, 0.9)])
    assert "epsilon claimed" not in rows(TOY, [result("digits/tanh", 0, 0.9)])[0]
