"""Only the mechanism makes a private gradient, and it pays before it releases."""

import copy
import dataclasses
import json
import resource

import numpy as np
import pytest
import torch

from tacit.privacy import (
    ClippedSum,
    Constant,
    Flat,
    GaussianMechanism,
    Grouped,
    Ledger,
    Linear,
    PrivacyPlan,
    PrivateGradient,
    Randomness,
    UserError,
    read_ledger,
)

PLAN = PrivacyPlan(sample_rate=0.1, steps=3, clipping=Flat(1.0), noise=Linear(3.0, 1.0), expected_batch_size=4)


def summed(clipping=PLAN.clipping, names=("w",)):
    return ClippedSum({name: torch.zeros(3) for name in names}, torch.zeros(0, len(clipping.clipping_norms)), clipping)


class Watched(Randomness):
    """Calls back before every draw of noise, and counts them."""

    def __init__(self, before=lambda: None, *, reproducible=False):
        self.before, self.draws, self.reproducible = before, 0, reproducible

    def normal(self, shape):
        self.before()
        self.draws += 1
        return np.ones(shape)


def test_the_ledger_line_is_on_the_disk_before_noise_is_drawn(tmp_path):
    path, seen = tmp_path / "ledger.jsonl", []

    def look():
        seen.append([entry["step"] for entry in read_ledger(path) if entry["kind"] == "release"])

    randomness = Watched(look)
    mechanism = PLAN.mechanism(randomness, Ledger.create(path, PLAN, delta=1e-5))
    for _ in range(3):
        mechanism.release(summed())
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_the_line_says_what_the_release_uses(tmp_path):
    ledger = Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=1e-5)
    mechanism = PLAN.mechanism(Randomness.from_seed(1), ledger)
    released = [mechanism.release(summed(), sampled_by=who) for who in ("tacit", "caller")]
    for step, (private, entry) in enumerate(zip(released, read_ledger(tmp_path / "ledger.jsonl")[1:])):
        assert private.step == entry["step"] == step
        assert private.noise_multiplier == entry["noise_multiplier"] == PLAN.noise_multiplier(step)
        assert private.noise_stds == {"w": PLAN.noise_multiplier(step) * 1.0}
        assert (entry["sample_rate"], entry["sampled_by"]) == (0.1, ("tacit", "caller")[step])
        assert entry["reproducible"] is True


def test_noise_of_the_operating_system_is_recorded_as_such():
    ledger = Ledger.in_memory(PLAN, delta=1e-5)
    PLAN.mechanism(Randomness.from_operating_system(), ledger).release(summed())
    assert ledger.entries[-1]["reproducible"] is False


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_releases_nothing_and_draws_no_noise_and_leaves_the_ledger_whole(tmp_path, room):
    path, randomness = tmp_path / "ledger.jsonl", Watched()
    ledger = Ledger.create(path, PLAN, delta=1e-5)
    mechanism = PLAN.mechanism(randomness, ledger)
    mechanism.release(summed())
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
    try:
        with pytest.raises(UserError, match="nothing was released"):
            mechanism.release(summed())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert randomness.draws == 1
    assert path.read_bytes() == before
    assert mechanism.next_step == 1
    mechanism.release(summed())
    assert len(read_ledger(path)) == 3


def test_a_closed_ledger_releases_nothing_and_draws_no_noise(tmp_path):
    randomness = Watched()
    ledger = Ledger.create(tmp_path / "ledger.jsonl", PLAN, delta=1e-5)
    mechanism = PLAN.mechanism(randomness, ledger)
    ledger.close()
    with pytest.raises(UserError, match="was closed"):
        mechanism.release(summed())
    assert randomness.draws == 0


def test_an_interruption_while_the_line_is_flushed_releases_nothing_and_is_counted_on_resumption(tmp_path, monkeypatch):
    path, randomness = tmp_path / "ledger.jsonl", Watched()
    mechanism = PLAN.mechanism(randomness, Ledger.create(path, PLAN, delta=1e-5))

    def interrupted(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tacit.privacy.ledger._flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mechanism.release(summed())
    with pytest.raises(UserError, match="was closed"):
        mechanism.release(summed())
    assert randomness.draws == 0
    PLAN.mechanism(randomness, Ledger.resume(path)).release(summed())
    assert [entry["kind"] for entry in read_ledger(path)] == ["open", "release", "resume", "release"]


def test_a_crash_after_the_line_over_counts_and_never_under_counts(tmp_path):
    def crash():
        raise MemoryError

    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, PLAN, delta=1e-5)
    with pytest.raises(MemoryError):
        PLAN.mechanism(Watched(crash), ledger).release(summed())
    ledger.close()
    resumed = PLAN.mechanism(Watched(), Ledger.resume(path))
    assert resumed.next_step == 1
    assert resumed.steps_left == 2


def test_the_budget_is_a_hard_stop_also_after_a_resumption(tmp_path):
    path, randomness = tmp_path / "ledger.jsonl", Watched()
    ledger = Ledger.create(path, PLAN, delta=1e-5)
    mechanism = PLAN.mechanism(randomness, ledger)
    for _ in range(3):
        mechanism.release(summed())
    for _ in range(2):
        with pytest.raises(UserError, match="budget is spent"):
            mechanism.release(summed())
        ledger.close()
        ledger = Ledger.resume(path)
        mechanism = PLAN.mechanism(randomness, ledger)
    assert randomness.draws == 3
    assert sum(entry["kind"] == "release" for entry in read_ledger(path)) == 3


@pytest.mark.parametrize(
    "other", [Flat(1.0000001), Flat(2.0), Grouped((("w",),), (1.0,)), Grouped((("w",),), (1.0,), noise_shape=(2.0,))]
)
def test_a_sum_clipped_otherwise_than_planned_is_refused_before_it_costs_anything(other):
    ledger, randomness = Ledger.in_memory(PLAN, delta=1e-5), Watched()
    with pytest.raises(UserError, match="the plan accounts for"):
        PLAN.mechanism(randomness, ledger).release(summed(other))
    assert (ledger.releases, randomness.draws) == (0, 0)


def test_a_parameter_without_a_group_is_refused_before_it_costs_anything():
    plan = dataclasses.replace(PLAN, clipping=Grouped((("a*",), ("b*",)), (1.0, 1.0)))
    ledger, randomness = Ledger.in_memory(plan, delta=1e-5), Watched()
    with pytest.raises(UserError, match="exactly one group"):
        plan.mechanism(randomness, ledger).release(summed(plan.clipping, names=("a1", "b1", "c1")))
    assert (ledger.releases, randomness.draws) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"sample_rate": 0.2},
        {"steps": 4},
        {"clipping": Flat(2.0)},
        {"noise": Constant(1.0)},
        {"expected_batch_size": 5.0},
    ],
)
def test_a_ledger_opened_for_another_plan_is_refused(change):
    ledger = Ledger.in_memory(dataclasses.replace(PLAN, **change), delta=1e-5)
    with pytest.raises(UserError, match="another"):
        PLAN.mechanism(Randomness.from_seed(0), ledger)


def test_a_plan_without_an_expected_batch_size_cannot_train():
    plan = dataclasses.replace(PLAN, expected_batch_size=None)
    with pytest.raises(UserError, match="expected_batch_size"):
        GaussianMechanism(plan, Randomness.from_seed(0), Ledger.in_memory(plan, delta=1e-5))


def test_a_private_gradient_is_made_by_the_mechanism_alone():
    genuine = PLAN.mechanism(Randomness.from_seed(0), Ledger.in_memory(PLAN, delta=1e-5)).release(summed())
    fields = {"gradients": {"w": torch.zeros(3)}, "step": 0, "noise_multiplier": 3.0, "noise_stds": {"w": 3.0}}
    with pytest.raises(TypeError, match="alone"):
        PrivateGradient(**fields)
    with pytest.raises(TypeError, match="alone"):
        PrivateGradient(**fields, _seal=object())
    with pytest.raises(TypeError, match="alone"):
        dataclasses.replace(genuine, gradients=fields["gradients"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        genuine.gradients = fields["gradients"]
    assert not any("seal" in name for name in vars(genuine))
    assert torch.equal(copy.copy(genuine).gradients["w"], genuine.gradients["w"])


def test_releasing_leaves_the_sum_as_it_was():
    clipped = summed()
    PLAN.mechanism(Randomness.from_seed(0), Ledger.in_memory(PLAN, delta=1e-5)).release(clipped)
    assert (clipped.gradients["w"] == 0).all()


def test_a_resumed_run_draws_fresh_noise_for_the_step_it_repeats(tmp_path):
    path, drawn = tmp_path / "ledger.jsonl", []
    for _ in range(3):
        ledger = Ledger.resume(path) if path.exists() else Ledger.create(path, PLAN, delta=1e-5)
        mechanism = PLAN.mechanism(Randomness.from_seed(5, launch=ledger.launches), ledger)
        drawn.append(tuple(mechanism.release(summed()).gradients["w"].tolist()))
        ledger.close()
    assert len(set(drawn)) == 3
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()].count("release") == 3
