"""DiceSGD trains, undoes the bias of clipping, and is certified for what it really releases."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tacit.privacy import DicePlan, Flat, PrivacyPlan, UserError, read_ledger, verify
from tacit.privacy.schedules import Constant
from tacit.training import DiceTrainer, PrivateTrainer

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")


def blobs(examples=200, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % classes
    centres = 3 * torch.eye(classes, 5)
    return centres[targets] + 0.5 * torch.randn(examples, 5, generator=generator), targets


def plan_of(**changes):
    defaults = {
        "examples": 200,
        "batch_size": 50,
        "steps": 20,
        "clipping_norm": 0.2,
        "error_norm": 0.5,
        "noise_std": 0.05,
    }
    return DicePlan(**{**defaults, **changes})


def trainer_of(plan=None, lr=0.5, model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return DiceTrainer(model, optimizer=optimizer, loss=CROSS_ENTROPY, plan=plan or plan_of(), **options)


# one number to learn, from three examples that want it at 0, 0 and 9


class Number(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs):
        return self.linear(inputs)


INPUTS, WISHES = torch.ones(3, 1, dtype=torch.float64), torch.tensor([0.0, 0.0, 9.0], dtype=torch.float64)


def half_square(outputs, targets):
    return 0.5 * (outputs[:, 0] - targets).square()


def learned(kind, plan, steps, lr=0.2):
    model = Number()
    trainer = kind(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loss=half_square, plan=plan, seed=0)
    trainer.fit((INPUTS, WISHES))
    assert trainer.certificate()["releases"] == steps
    return float(model.linear.weight.detach())


def test_it_finds_the_mean_where_clipping_alone_stays_at_a_wrong_point():
    """Clipped at 1 the gradients balance at 1/2: 1/2 + 1/2 - 1 = 0. The mean, where they really balance, is 3."""
    clipped = PrivacyPlan(sample_rate=1.0, steps=400, clipping=Flat(1.0), noise=Constant(0.0), expected_batch_size=3)
    assert learned(PrivateTrainer, clipped, 400) == pytest.approx(0.5, abs=1e-6)
    dice = DicePlan(examples=3, batch_size=3, steps=400, clipping_norm=1.0, error_norm=1.0, noise_std=0.0)
    assert learned(DiceTrainer, dice, 400) == pytest.approx(3.0, abs=1e-6)


def test_it_follows_a_slow_and_plain_recursion_in_double_precision():
    clipping_norm, error_norm, lr, steps = 0.7, 0.4, 0.1, 60
    x, error = 0.0, 0.0
    for _ in range(steps):
        gradients = [x - wish for wish in WISHES.tolist()]
        fed_back = max(-error_norm, min(error_norm, error))
        direction = sum(max(-clipping_norm, min(clipping_norm, g)) for g in gradients) / 3 + fed_back
        error += sum(gradients) / 3 - direction
        x -= lr * direction
    plan = DicePlan(
        examples=3, batch_size=3, steps=steps, clipping_norm=clipping_norm, error_norm=error_norm, noise_std=0.0
    )
    assert learned(DiceTrainer, plan, steps, lr) == pytest.approx(x, abs=1e-10)
    assert abs(error) > error_norm  # so it was clipped


@pytest.mark.parametrize("error_norm", [1e-3, 10.0])
def test_unclipped_it_is_plain_sgd_on_the_same_batches_with_the_same_noise(error_norm):
    plan = plan_of(clipping_norm=1e4, error_norm=error_norm)
    trainer = trainer_of(plan, seed=3)
    twin = copy.deepcopy(trainer.model)
    noise = plan.noise_std * plan.batch_size / 1e4
    plain = PrivateTrainer(
        twin,
        optimizer=torch.optim.SGD(twin.parameters(), lr=0.5),
        loss=CROSS_ENTROPY,
        plan=PrivacyPlan(sample_rate=0.25, steps=20, clipping=Flat(1e4), noise=Constant(noise), expected_batch_size=50),
        seed=3,
    )
    for each in (trainer, plain):
        each.fit(blobs())
    assert torch.allclose(trainer.model.weight, twin.weight, atol=1e-5)


def test_it_learns_and_its_history_holds_one_row_an_epoch_with_the_epsilon_that_holds():
    plan = plan_of(steps=40)
    trainer = trainer_of(plan)
    history = trainer.fit(blobs(), validate_on=blobs(seed=1))
    assert history[-1]["test_accuracy"] > 0.9
    assert [row["step"] for row in history] == list(range(4, 41, 4))
    assert [row["epoch"] for row in history] == list(range(1, 11))
    assert history[-1]["epsilon"] == pytest.approx(plan.epsilon(1e-5), rel=0.05)
    assert history[-1]["epsilon"] > 100 * plan.epsilon_without_error(1e-5)


def test_its_run_directory_verifies_and_states_both_epsilons(tmp_path):
    plan = plan_of().by_theorem(epsilon=3.0, delta=1e-5)
    trainer_of(plan, run_directory=tmp_path / "run").fit(blobs())
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    releases = [entry for entry in entries if entry["kind"] == "release"]
    assert len(releases) == plan.steps
    expected = plan.noise_std / (plan.clipping_norm / plan.batch_size + 2 * plan.error_norm)
    assert {entry["sample_rate"] for entry in releases} == {1.0}
    assert all(entry["noise_multiplier"] == pytest.approx(expected) for entry in releases)
    certificate = verify(tmp_path / "run")
    assert certificate["epsilon"] == pytest.approx(plan.epsilon(1e-5), abs=1e-5)
    assert certificate["valid_for_release"]
    assert certificate["facts"]["dice"] == json.loads(json.dumps(plan.facts(1e-5)))
    assert certificate["facts"]["dice"]["epsilon_by_the_theorem"] == 3.0 < certificate["epsilon"]


def test_the_error_is_in_no_file_and_a_resumed_run_begins_with_none(tmp_path):
    trainer = trainer_of(run_directory=tmp_path / "run")
    made = 0

    def stopping(private, update=trainer._update):
        nonlocal made
        update(private)
        made += 1
        if made == 8:
            trainer._save()
            raise MemoryError

    trainer._update = stopping
    with pytest.raises(MemoryError):
        trainer.fit(blobs())
    assert any(float(part.abs().sum()) > 0 for part in trainer._feedback._error.values())
    with safe_open(tmp_path / "run" / "checkpoint" / "state.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["model.bias", "model.weight"]
    resumed = trainer_of(run_directory=tmp_path / "run", resume=True)
    resumed._opened(examples=200, evaluated_on_held_out=False)
    assert resumed._feedback is None
    resumed.close()
    resumed = trainer_of(run_directory=tmp_path / "run", resume=True)
    resumed.fit(blobs())
    assert verify(tmp_path / "run")["releases"] == 20
    kinds = [entry["kind"] for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    assert kinds.count("release") == 20


def test_data_of_another_size_than_the_plans_are_refused_before_anything_is_written(tmp_path):
    trainer = trainer_of(run_directory=tmp_path / "run")
    with pytest.raises(UserError, match="for 200 training examples, there are 100"):
        trainer.fit(blobs(100))
    assert not (tmp_path / "run").exists()


def test_an_example_whose_gradient_is_not_finite_is_in_neither_sum():
    inputs, targets = blobs()
    spoilt = torch.cat([inputs, torch.full((1, 5), 3e38)]), torch.cat([targets, targets[:1]])
    clean, other = (trainer_of(plan_of(noise_std=0.0)) for _ in range(2))
    for _ in range(5):
        clean.step((inputs, targets))
        other.step(spoilt)
    assert torch.allclose(clean.model.weight, other.model.weight, atol=1e-6)
