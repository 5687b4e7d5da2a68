"""The trainer updates by private gradients alone, pays for each, and ends within its plan."""

import hashlib
import json
import os
import signal
import time

import pytest
import torch
from torch import nn

from tacit import PrivateTrainer
from tacit.data import load
from tacit.privacy import Flat, Grouped, PrivacyPlan, Randomness, UserError, accounting, read_ledger, verify
from tacit.privacy.schedules import Constant, Linear
from tacit.training import Interrupted
from tacit.training import trainer as training
from tacit.training.evaluation import evaluate

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


def blobs(examples=200, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % classes
    centres = 3 * torch.eye(classes, 5)
    return centres[targets] + 0.5 * torch.randn(examples, 5, generator=generator), targets


def plan_of(steps=20, sigma=1.0, **changes):
    defaults = {"sample_rate": 0.25, "expected_batch_size": 50, "clipping": Flat(1.0), "noise": Constant(sigma)}
    return PrivacyPlan(steps=steps, **{**defaults, **changes})


def trainer_of(plan=None, lr=0.5, model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return PrivateTrainer(model, optimizer=optimizer, loss=CROSS_ENTROPY, plan=plan or plan_of(), **options)


def test_it_learns_and_its_history_holds_one_row_an_epoch():
    trainer = trainer_of(plan_of(steps=40, sigma=0.5))
    history = trainer.fit(blobs(), validate_on=blobs(seed=1))
    assert history[-1]["test_accuracy"] > 0.95
    assert [row["step"] for row in history] == list(range(4, 41, 4))
    assert trainer.certificate()["releases"] == 40


def test_the_training_loss_is_nowhere_unless_it_is_asked_for(tmp_path):
    trainer_of(run_directory=tmp_path / "run").fit(blobs(), validate_on=blobs(seed=1))
    everything = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"training_loss" not in everything
    assert b"not_finite" not in everything
    assert verify(tmp_path / "run")["valid_for_release"]


def test_a_shown_training_loss_is_on_the_certificate_before_it_is_shown(tmp_path):
    trainer = trainer_of(run_directory=tmp_path / "run", show_training_loss=True)
    history = trainer.fit(blobs())
    assert history[0]["training_loss"] > 0
    certificate = verify(tmp_path / "run")
    assert not certificate["valid_for_release"]
    assert "training loss" in certificate["void_because"][0]
    kinds = [entry["kind"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert kinds.index("disclosure") < kinds.index("release")


def test_a_seed_repeats_a_run_exactly_and_voids_its_certificate():
    weights = []
    for _ in range(2):
        trainer = trainer_of(seed=5)
        trainer.fit(blobs())
        weights.append(trainer.model.weight.clone())
    assert torch.equal(*weights)
    assert not trainer.certificate()["valid_for_release"]


def test_without_a_seed_no_two_runs_are_the_same():
    weights = []
    for _ in range(2):
        trainer = trainer_of()
        trainer.fit(blobs())
        weights.append(trainer.model.weight.clone())
    assert not torch.equal(*weights)


def test_an_empty_batch_is_a_step_like_any_other():
    plan = plan_of(steps=5, sample_rate=1e-9)
    trainer = trainer_of(plan)
    before = trainer.model.weight.clone()
    trainer.fit(blobs(10))
    assert trainer.certificate()["releases"] == 5
    assert not torch.equal(before, trainer.model.weight)


def test_a_batch_of_ones_own_works_and_is_said_on_the_certificate():
    trainer = trainer_of()
    private = trainer.step(blobs())
    assert set(private.gradients) == {"weight", "bias"}
    trainer.step((torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)))
    assert "chosen by the caller" in trainer.certificate()["void_because"][0]


def test_the_budget_is_a_hard_stop():
    trainer = trainer_of(plan_of(steps=2))
    trainer.step(blobs())
    trainer.step(blobs())
    before = trainer.model.weight.clone()
    with pytest.raises(UserError, match="budget is spent"):
        trainer.step(blobs())
    assert torch.equal(before, trainer.model.weight)


def test_frozen_parameters_stay_and_grouped_clipping_trains():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    plan = plan_of(clipping=Grouped((("0.*",), ("2.*",)), (0.5, 1.0), noise_shape=(1.0, 2.0)), noise=Linear(2.0, 1.0))
    trainer = trainer_of(plan, model=model)
    trainer.fit(blobs())
    assert torch.equal(before, model[0].weight)
    assert len(trainer.certificate()["noise"]["levels"]) == plan.steps


def test_only_the_models_own_parameters_can_be_optimized():
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    with pytest.raises(UserError, match="not the model's"):
        PrivateTrainer(model, optimizer=torch.optim.SGD(other.parameters(), lr=1), loss=CROSS_ENTROPY, plan=plan_of())


def test_a_model_that_mixes_examples_is_refused_before_anything_is_spent(tmp_path):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(UserError, match="without_batch_norm"):
        trainer_of(model=model, run_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_data_are_refused_in_words():
    inputs, targets = blobs()
    with pytest.raises(UserError, match="empty"):
        trainer_of().fit((inputs[:0], targets[:0]))
    with pytest.raises(UserError, match="NaN"):
        trainer_of().fit((inputs * float("nan"), targets))
    with pytest.raises(UserError, match="199 targets"):
        trainer_of().fit((inputs, targets[1:]))
    with pytest.raises(UserError, match="cannot train on"):
        trainer_of().fit(7)
    with pytest.raises(UserError, match="nothing to certify"):
        trainer_of().certificate()


def test_a_torch_data_set_of_pairs_trains_too():
    inputs, targets = blobs()
    trainer = trainer_of()
    trainer.fit(torch.utils.data.TensorDataset(inputs, targets))
    assert evaluate(trainer.model, (inputs, targets), CROSS_ENTROPY)[0] > 0.8


def test_any_physical_batch_size_trains_the_same_model():
    weights = []
    for size in (3, 1000):
        trainer = trainer_of(seed=1, physical_batch_size=size)
        trainer.fit(blobs())
        weights.append(trainer.model.weight.clone())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


class _InterruptAt(torch.utils.data.Dataset):
    """Sends this process a Ctrl-C when it is read for the n-th time."""

    def __init__(self, data, reads):
        self.data, self.reads = data, reads

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        self.reads -= 1
        if self.reads == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return self.data[0][index], self.data[1][index]


def test_an_interrupted_run_loses_no_step_and_its_sequel_makes_the_rest(tmp_path):
    run = tmp_path / "run"
    trainer = trainer_of(seed=3, run_directory=run)
    with pytest.raises(Interrupted):
        trainer.fit(_InterruptAt(blobs(), reads=400))
    made = len([e for e in read_ledger(run / "ledger.jsonl") if e["kind"] == "release"])
    assert 0 < made < 20
    assert verify(run)["releases"] == made
    stopped_at = trainer.model.weight.clone()

    sequel = trainer_of(seed=3, run_directory=run, resume=True)
    sequel.model.weight.data.zero_()
    sequel.fit(blobs())
    assert not torch.equal(stopped_at, sequel.model.weight)
    assert verify(run)["releases"] == 20

    whole = trainer_of(seed=3)
    whole.fit(blobs())
    assert not torch.equal(whole.model.weight, sequel.model.weight)


def test_no_number_of_noise_serves_two_launches_of_a_seed(tmp_path, monkeypatch):
    """With the same noise twice, the difference of two releases would have none."""
    drawn, normal = [], Randomness.normal

    def watched(self, shape):
        drawn.append(normal(self, shape))
        return drawn[-1]

    monkeypatch.setattr(Randomness, "normal", watched)
    with pytest.raises(Interrupted):
        trainer_of(seed=3, run_directory=tmp_path / "run").fit(_InterruptAt(blobs(), reads=400))
    launched = len(drawn)
    trainer_of(seed=3, run_directory=tmp_path / "run", resume=True).fit(blobs())
    assert 0 < launched < len(drawn)
    numbers = [number for draw in drawn for number in draw.tolist()]
    assert len(set(numbers)) == len(numbers)


def test_resuming_takes_up_weights_optimizer_and_learning_rate(tmp_path):
    run = tmp_path / "run"
    first = trainer_of(run_directory=run)
    first.learning_rate_schedule = torch.optim.lr_scheduler.ExponentialLR(first.optimizer, 0.9)
    with pytest.raises(Interrupted):
        first.fit(_InterruptAt(blobs(), reads=400))
    again = trainer_of(run_directory=run, resume=True)
    again.learning_rate_schedule = torch.optim.lr_scheduler.ExponentialLR(again.optimizer, 0.9)
    again._opened(examples=200, evaluated_on_held_out=False)
    assert torch.equal(first.model.weight, again.model.weight)
    assert again.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"] < 0.5
    buffers = [next(iter(t.optimizer.state.values()))["momentum_buffer"] for t in (first, again)]
    assert torch.equal(*buffers)
    again.close()


def test_a_run_cannot_be_resumed_with_another_plan_model_data_or_optimizer(tmp_path):
    run = tmp_path / "run"
    trainer = trainer_of(run_directory=run)
    with pytest.raises(Interrupted):
        trainer.fit(_InterruptAt(blobs(), reads=400))
    with pytest.raises(UserError, match="exists already"):
        trainer_of(run_directory=run)
    with pytest.raises(UserError, match="another plan or other data"):
        trainer_of(plan_of(sigma=2.0), run_directory=run, resume=True).fit(blobs())
    with pytest.raises(UserError, match="another plan or other data"):
        trainer_of(run_directory=run, resume=True).fit(blobs(100))
    other = trainer_of(model=nn.Sequential(nn.Linear(5, 3)), run_directory=run, resume=True)
    with pytest.raises(UserError, match="checkpoint of another model"):
        other.fit(blobs())


def test_a_damaged_checkpoint_or_a_cut_ledger_is_refused(tmp_path):
    run = tmp_path / "run"
    trainer_of(run_directory=run).fit(blobs())
    checkpoint, ledger = run / "checkpoint" / "state.safetensors", run / "ledger.jsonl"
    content, lines = checkpoint.read_bytes(), ledger.read_bytes().splitlines(keepends=True)

    def refused(says):
        trainer = trainer_of(run_directory=run, resume=True)
        with pytest.raises(UserError, match=says):
            trainer.fit(blobs())

    checkpoint.write_bytes(content[: len(content) // 2])
    refused("damaged or was not written")
    checkpoint.write_bytes(content)
    ledger.write_bytes(b"".join(lines[:-5]))
    refused("the ledger was cut")


@pytest.mark.parametrize(
    ("lost", "plan", "message"),
    [
        (1, None, "the ledger was cut"),
        (3, None, "the ledger was cut"),
        (1, plan_of(sigma=9.0), "another plan"),  # the attempt takes the place of the entry that is lost
        (3, plan_of(sigma=9.0), "another plan"),
    ],
)
def test_a_refused_resumption_of_a_cut_ledger_makes_no_certificate_that_says_less(tmp_path, lost, plan, message):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        trainer_of(run_directory=run).fit(_InterruptAt(blobs(), reads=400))
    certificate, ledger = (run / "certificate.json").read_bytes(), run / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-lost]))
    with pytest.raises(UserError, match=message):
        trainer_of(plan, run_directory=run, resume=True).fit(blobs())
    assert (run / "certificate.json").read_bytes() == certificate
    with pytest.raises(UserError, match="belongs to another ledger"):
        verify(run)


def test_figures_of_releases_that_the_ledger_has_lost_are_noticed(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        trainer_of(run_directory=run).fit(_InterruptAt(blobs(), reads=400))
    made = verify(run)["releases"]
    with open(run / "metrics.jsonl", "a") as metrics:  # measured, and killed before the next checkpoint
        metrics.write(json.dumps({"step": made + 1}) + "\n")
    with pytest.raises(UserError, match="holds figures of releases that are missing"):
        trainer_of(run_directory=run, resume=True).fit(blobs())


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    first = trainer_of(run_directory=tmp_path / "run")
    first._opened(examples=200, evaluated_on_held_out=False)
    with pytest.raises(UserError, match="another process"):
        trainer_of(run_directory=tmp_path / "run", resume=True).fit(blobs())
    first.close()


def test_metrics_survive_a_line_cut_short(tmp_path):
    from tacit.training.directory import RunDirectory, read_metrics

    directory = RunDirectory(tmp_path)
    directory.metrics.write_text('{"step": 1}\n{"ste')
    directory.append_metrics({"step": 2})
    assert read_metrics(directory.metrics) == [{"step": 1}, {"step": 2}]


def test_the_embedded_digits_train_well_at_epsilon_3(tmp_path):
    from tacit.training import Recipe, load_model, train

    run = train(Recipe.load("digits", ["seed=0"]), tmp_path / "run")
    assert run.certificate["epsilon"] <= 3
    assert run.metrics[-1]["test_accuracy"] >= 0.9
    model, facts = load_model(tmp_path / "run")
    test = load("digits").test
    assert evaluate(model, test, CROSS_ENTROPY)[0] == run.metrics[-1]["test_accuracy"]
    assert facts["classes"] == list(test.classes)
    assert json.loads((tmp_path / "run" / "certificate.json").read_text()) == run.certificate


def test_measuring_on_training_examples_is_a_disclosure():
    inputs, targets = blobs()
    for data, other, told in (
        ((inputs, targets), (inputs, targets), True),
        ((inputs[:100], targets[:100]), (inputs[50:], targets[50:]), True),
        ((inputs[:100], targets[:100]), (inputs[100:], targets[100:]), False),
    ):
        trainer = trainer_of()
        trainer.fit(data, validate_on=other)
        assert trainer.certificate()["valid_for_release"] is not told


def test_no_certificate_stands_beside_a_run_that_goes_on(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        trainer_of(run_directory=run).fit(_InterruptAt(blobs(), reads=400))
    assert verify(run)["releases"] < 20

    class Broken(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            raise MemoryError

    with pytest.raises(MemoryError):
        trainer_of(run_directory=run, resume=True).fit(Broken(*blobs()))
    assert not (run / "certificate.json").exists()
    trainer_of(run_directory=run, resume=True).fit(blobs())
    assert verify(run)["releases"] == 20


def test_a_lost_checkpoint_is_not_replaced_by_an_untrained_model(tmp_path):
    run = tmp_path / "run"
    trainer_of(run_directory=run).fit(blobs())
    (run / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(UserError, match="is missing"):
        trainer_of(run_directory=run, resume=True).fit(blobs())


def test_a_refused_resumption_leaves_a_finished_runs_certificate_valid(tmp_path):
    run = tmp_path / "run"
    trainer_of(run_directory=run).fit(blobs())
    before = verify(run)
    with pytest.raises(UserError, match="other data"):
        trainer_of(run_directory=run, resume=True).fit(blobs(100))
    (run / "checkpoint" / "state.safetensors").unlink()
    with pytest.raises(UserError, match="is missing"):
        trainer_of(run_directory=run, resume=True).fit(blobs())
    after = verify(run)
    assert after["valid_for_release"]
    assert all(after[key] == before[key] for key in ("epsilon", "releases", "model_sha256"))


def test_the_certificate_names_the_models_file(tmp_path):
    run = tmp_path / "run"
    trainer_of(run_directory=run).fit(blobs())
    model = run / "model.safetensors"
    assert verify(run)["model_sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="not the model"):
        verify(run)


def test_layers_in_eval_mode_stay_there():
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[1].eval()
    trainer_of(model=model).fit(blobs(), validate_on=blobs(seed=1))
    assert [module.training for module in model] == [True, False, True]


def test_a_model_in_half_precision_is_updated_by_sums_in_full_precision():
    trainer = trainer_of(model=nn.Linear(5, 3).bfloat16())
    inputs, targets = blobs()
    private = trainer.step((inputs.bfloat16(), targets))
    assert {gradient.dtype for gradient in private.gradients.values()} == {torch.float32}
    assert trainer.model.weight.dtype == torch.bfloat16


class _Counted:
    """A data set that counts how often, and for how many examples, it is asked."""

    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data[0])

    def batch(self, indices=None, device="cpu"):
        self.asked.append(len(indices))
        return self.data[0][indices], self.data[1][indices]


def test_examples_are_gathered_once_a_step_but_for_one_look_at_the_first_batch():
    plan, data = plan_of(steps=10), _Counted(blobs())
    trainer = trainer_of(plan)
    trainer.fit(data)
    assert data.asked[0] == 32
    assert len(data.asked) == 1 + plan.steps


def test_epsilon_and_a_checkpoint_are_there_at_the_end_however_long_they_take(tmp_path, monkeypatch):
    """Both may take a small share of a run's time; where they would take more, only the last epoch has them."""
    saved, accounted = [], []
    save, account = training.save_tensors, accounting.epsilon_of

    def slow_save(path, tensors, facts):
        if facts:  # not the finished model
            saved.append(facts["ledger"]["entries"])
        time.sleep(0.3 if len(saved) == 1 else 0)
        save(path, tensors, facts)

    def slow_account(rate, levels, delta, **options):
        if options["coarse"]:  # along the way, not for the certificate
            accounted.append(sum(count for _, count in levels))
        time.sleep(0.5 if len(accounted) == 1 else 0)
        return account(rate, levels, delta, **options)

    monkeypatch.setattr(training, "save_tensors", slow_save)
    monkeypatch.setattr(accounting, "epsilon_of", slow_account)
    trainer = trainer_of(run_directory=tmp_path / "run")
    history = trainer.fit(blobs(), validate_on=blobs(seed=1), evaluate_every=1)
    assert ["epsilon" in row for row in history] == [True, False, False, False, True]
    assert all("test_accuracy" in row for row in history)
    assert accounted == [4, 20]
    assert history[-1]["epsilon"] == pytest.approx(verify(tmp_path / "run")["epsilon"], rel=1e-2)
    # after the opening of the ledger, and after its twentieth release
    assert saved == [1, 21]
    monkeypatch.undo()
    again = trainer_of(run_directory=tmp_path / "run", resume=True)
    assert again.fit(blobs(), validate_on=blobs(seed=1)) == []


def test_a_checkpoint_that_costs_little_is_made_every_epoch(tmp_path, monkeypatch):
    saved = []
    save = training.save_tensors
    monkeypatch.setattr(training, "_SAVING", 1e9)
    monkeypatch.setattr(
        training, "save_tensors", lambda path, tensors, facts: (saved.append(facts), save(path, tensors, facts))
    )
    trainer_of(run_directory=tmp_path / "run").fit(blobs())
    assert [facts["ledger"]["entries"] - 1 for facts in saved if facts] == [0, 4, 8, 12, 16, 20]


def test_held_out_data_are_measured_as_often_as_asked_and_always_at_the_ends():
    def measured(**options):
        history = trainer_of().fit(blobs(), validate_on=blobs(seed=1), **options)
        return [row["epoch"] for row in history if "test_accuracy" in row]

    assert measured(evaluate_every=2) == [1, 2, 4, 5]
    assert measured() == [1, 5], "as many held-out as training examples: every twelfth epoch, and the ends"
    with pytest.raises(UserError, match="evaluate_every"):
        measured(evaluate_every=0)
