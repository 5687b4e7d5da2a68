"""A sample curriculum changes who takes part, and nothing of what is guaranteed; a sorted pass has no guarantee, and says so."""

import functools
import json
import os
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from tacit import PrivateTrainer
from tacit.gradients.batches import Batch
from tacit.learning import SampleCurriculum, Tail, Views
from tacit.learning.augmentation import Flip
from tacit.privacy import (
    Adaptive,
    Automatic,
    Flat,
    Grouped,
    LossDriven,
    PrivacyPlan,
    Randomness,
    UserError,
    accounting,
    composed_certificate,
    epsilon_of,
    verify,
)
from tacit.privacy.curricula import Table
from tacit.privacy.ledger import SORTED
from tacit.privacy.schedules import Constant
from tacit.training import Interrupted, Recipe, train
from tacit.training.curriculum import Participation, difficulties
from tacit.training.examples import TensorExamples
from tacit.training.sorted_passes import SortedPasses, logistic_losses

CROSS_ENTROPY = nn.CrossEntropyLoss(reduction="none")
EASY = SampleCurriculum("step", first=1.0, epochs=100.0)
LOGISTIC = SampleCurriculum("step", difficulty="logistic", first=1.0, epochs=2.0)


@functools.cache
def _epsilon(rate, levels, delta, whole):
    return epsilon_of(rate, levels, delta, whole=whole, accountant="rdp")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """The quicker accountant, asked once for the same question: here it is only compared with itself."""
    monkeypatch.setattr(
        accounting,
        "epsilon_of",
        lambda rate, levels, delta, whole=(), **_: _epsilon(rate, tuple(levels), delta, tuple(whole)),
    )


def blobs(examples=200, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(examples) % classes
    centres = 3 * torch.eye(classes, 5)
    return centres[targets] + 0.5 * torch.randn(examples, 5, generator=generator), targets


def plan_of(steps=20, sigma=1.0, **changes):
    defaults = {"sample_rate": 0.25, "expected_batch_size": 50, "clipping": Flat(1.0), "noise": Constant(sigma)}
    return PrivacyPlan(steps=steps, **{**defaults, **changes})


def network(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def trainer_of(plan=None, model=None, lr=0.5, **options):
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return PrivateTrainer(model, optimizer=optimizer, loss=CROSS_ENTROPY, plan=plan or plan_of(), **options)


def at_step(curriculum, step=0, plan=None):
    participation = Participation(curriculum, plan or plan_of(steps=1000))
    participation.begin_step(step)
    return participation


def without(tensors, place):
    return tuple(torch.cat([tensor[:place], tensor[place + 1 :]]) for tensor in tensors)


# who takes part depends on nobody else


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 100), st.integers(0, 99), st.integers(0, 99), st.integers(0, 2**16))
def test_nobody_else_decides_whether_an_example_takes_part_not_even_at_the_threshold_itself(count, border, gone, seed):
    model, (inputs, targets) = network(width=67), blobs(count, seed=seed)
    alone = torch.cat([difficulties(model, Batch.of(x[None], y[None])) for x, y in zip(inputs, targets)])
    threshold = alone[border % count].item()  # where the last digit of a difficulty decides
    participation = at_step(SampleCurriculum("step", first=threshold))
    together = participation.admitted(model, inputs, targets)
    assert torch.equal(together, alone <= threshold)
    neighbours = participation.admitted(model, *without((inputs, targets), gone % count))
    assert torch.equal(neighbours, without((together,), gone % count)[0])


def kept_of(trainer, examples, drawn):
    """The inputs that take part, of those drawn."""
    trainer._begin_step(0)
    chunks = list(trainer._chunks(TensorExamples(*examples), np.asarray(drawn)))
    return torch.cat([chunk[0] for chunk in chunks]) if chunks else torch.zeros(0, 5)


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 59), st.integers(0, 2**16), st.sampled_from([EASY, LOGISTIC]))
def test_on_neighbouring_data_sets_the_others_take_part_alike_and_the_sum_moves_by_at_most_its_sensitivity(
    gone, seed, curriculum
):
    examples = blobs(60, seed=seed)
    trainer = trainer_of(plan_of(steps=40), curriculum=curriculum, physical_batch_size=16)
    trainer._participation.prepare(trainer.model, examples[0])
    trainer._participation.warm_up = 0  # the regression as it is, after some steps that were released
    for parameter in [] if curriculum is EASY else trainer._participation.gradient.model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    drawn = np.flatnonzero(np.random.default_rng(seed).random(60) < 0.7)
    rest = drawn[drawn != gone]
    kept = {tuple(row) for row in kept_of(trainer, examples, drawn).tolist()}
    others = {tuple(row) for row in kept_of(trainer, without(examples, gone), rest - (rest > gone)).tolist()}
    assert kept <= {tuple(row) for row in examples[0][drawn].tolist()}
    assert others == kept - {tuple(examples[0][gone].tolist())}

    sums = [
        trainer._gradient.over(trainer._chunks(TensorExamples(*data), indices)).gradients
        for data, indices in ((examples, drawn), (without(examples, gone), rest - (rest > gone)))
    ]
    moved = torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()
    assert moved <= trainer.plan.clipping.sensitivity * (1 + 1e-5)


def test_nobody_takes_part_more_often_than_the_sampling_rate():
    inputs, targets = blobs(40)
    model, participation, plan = network(), at_step(EASY), plan_of(steps=1000)
    sampler, draws = plan.sampler(40, Randomness.from_seed(1)), 800
    counts = torch.zeros(40)
    rows = {tuple(row.tolist()): place for place, row in enumerate(inputs)}
    for _ in range(draws):
        drawn = sampler.draw()
        for row in participation.of(model, inputs[drawn], targets[drawn])[0].tolist():
            counts[rows[tuple(row)]] += 1
    spread = (plan.sample_rate * (1 - plan.sample_rate) / draws) ** 0.5
    # 5.5 standard deviations: fails by chance once in a million times, for 40 examples
    assert (counts / draws).max() < plan.sample_rate + 5.5 * spread
    taking_part = participation.admitted(model, inputs, targets)
    assert 0 < taking_part.sum() < 40
    assert (counts[~taking_part] == 0).all()
    assert (counts[taking_part] / draws).min() > plan.sample_rate - 5.5 * spread


@pytest.mark.parametrize("curriculum", [EASY, LOGISTIC])
def test_every_coin_of_a_whole_run_has_the_plans_rate(monkeypatch, curriculum):
    rates, bernoulli = set(), Randomness.bernoulli

    def watched(self, count, probability):
        rates.add(probability)
        return bernoulli(self, count, probability)

    monkeypatch.setattr(Randomness, "bernoulli", watched)
    plan = plan_of(steps=12)
    trainer_of(plan, curriculum=curriculum).fit(blobs(60))
    assert rates == {plan.sample_rate}


class Together(nn.Module):
    """In evaluation mode, and only then, each example's output depends on the others'."""

    def forward(self, outputs):
        return outputs if self.training else outputs - outputs.mean(dim=0)


def test_a_model_that_mixes_examples_when_it_is_evaluated_is_asked_for_one_at_a_time():
    model, (inputs, targets) = nn.Sequential(network(), Together()), blobs(50)
    participation = at_step(SampleCurriculum("step", first=1.0986))
    found = participation.admitted(model, inputs, targets)
    each = [participation.admitted(model, x[None], y[None]) for x, y in zip(inputs, targets)]
    assert torch.equal(found, torch.cat(each))


# difficulties leave no trace, and look at what they should


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1)))
    model[2].eval()
    before, state = torch.get_rng_state(), [p.clone() for p in model.parameters()]
    at_step(EASY).of(model, *blobs())
    assert [module.training for module in model] == [True, True, False]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), state, strict=True))


def test_difficulty_is_of_the_examples_as_they_are_and_only_those_kept_are_augmented():
    seen, augmented = [], []

    class Watched(nn.Linear):
        def forward(self, inputs):
            if not self.training:
                seen.append(inputs.detach().abs().max().item())
            return super().forward(inputs)

    def far(inputs, generator):
        augmented.append(len(inputs))
        return inputs + 1000

    inputs, targets = blobs()
    curriculum = SampleCurriculum("step", first=1.0, epochs=2.0)
    trainer = trainer_of(model=Watched(5, 3), augmentation=far, curriculum=curriculum)
    kept = kept_of(trainer, (inputs, targets), np.arange(200))
    assert max(seen) < 100
    assert augmented[0] == 32  # a look at the first examples
    assert len(kept) == sum(augmented[1:])
    assert len(kept) < 200
    seen.clear()
    trainer._begin_step(8)
    assert sum(len(targets) for _, targets in trainer._chunks(TensorExamples(inputs, targets), np.arange(200))) == 200
    assert seen == []  # without a threshold there is nothing to compute


def test_an_example_with_a_loss_that_is_not_finite_takes_no_part_and_changes_nothing_for_the_others():
    inputs, targets = blobs(50)
    inputs[7] = 3e38
    for curriculum in (EASY, SampleCurriculum("step", order="hard", first=0.5)):
        trainer = trainer_of(curriculum=curriculum, model=nn.Linear(5, 3))
        kept = kept_of(trainer, (inputs, targets), np.arange(50))
        assert kept.abs().max() < 100
        rest = kept_of(trainer, without((inputs, targets), 7), np.arange(49))
        assert torch.equal(kept, rest)


def test_a_step_in_which_nobody_takes_part_is_noise_alone_and_paid_for_like_any_other():
    nobody = SampleCurriculum("step", first=1e-9, epochs=100.0)
    trainer, free = (trainer_of(plan_of(sigma=1e-4), curriculum=curriculum) for curriculum in (nobody, None))
    start = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.fit(blobs())
    free.fit(blobs())
    moved, learned = (
        max((p - q).abs().max().item() for p, q in zip(t.model.parameters(), start, strict=True))
        for t in (trainer, free)
    )
    assert 0 < moved < 0.01 < learned
    assert trainer.certificate()["releases"] == 20


def test_what_has_no_cross_entropy_is_refused():
    with pytest.raises(UserError, match="one number a class"):
        at_step(EASY).of(nn.Linear(5, 3), blobs()[0], torch.zeros(200))


# the guarantee is the plan's


@pytest.mark.parametrize("curriculum", [EASY, LOGISTIC, SampleCurriculum("linear", order="hard")])
def test_a_curriculum_costs_nothing_and_stands_on_the_certificate(curriculum):
    plan = plan_of(noise=Table((3.0, 1.0)))  # with a curriculum of the noise as well
    trainer, plain = trainer_of(plan, curriculum=curriculum), trainer_of(plan)
    rows, others = trainer.fit(blobs()), plain.fit(blobs())
    found, expected = trainer.certificate(), plain.certificate()
    same = ("epsilon", "epsilon_rdp", "releases", "sampling", "noise", "clipping", "valid_for_release", "released")
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert found["valid_for_release"]
    assert found["facts"]["curriculum"] == curriculum.to_dict()
    assert {key for row in rows for key in row} == {key for row in others for key in row}  # not how many took part


def test_a_batch_of_the_callers_is_judged_like_any_other():
    inputs, targets = blobs()
    nobody = SampleCurriculum("step", first=1e-9, epochs=100.0)
    trainer = trainer_of(plan_of(sigma=1e-5), curriculum=nobody)
    assert max(g.abs().max() for g in trainer.step((inputs, targets)).gradients.values()) < 1e-4
    trainer = trainer_of(plan_of(sigma=1e-5), curriculum=LOGISTIC)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    assert trainer.step((inputs, targets)).gradients["weight"].shape == (3, 5)
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))


# the logistic regression of the first steps


def test_the_first_steps_train_the_regression_and_leave_the_network_its_schedule_and_its_average_alone():
    class Epochs(nn.CrossEntropyLoss):
        begun: tuple[int, ...] = ()

        def begin_epoch(self, epoch):
            self.begun = (*self.begun, epoch)

    model, loss = network(), Epochs(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = PrivateTrainer(
        model,
        optimizer=optimizer,
        loss=loss,
        plan=plan_of(steps=10, sigma=0.3),
        learning_rate_schedule=schedule,
        averaging=Tail(1.0),
        curriculum=LOGISTIC,
    )
    weights = []
    update = trainer._update
    trainer._update = lambda private: (update(private), weights.append(model[0].weight.clone()))
    trainer.fit(blobs())
    assert all(torch.equal(weight, network()[0].weight) for weight in weights[:4])  # an epoch is four steps
    assert not torch.equal(weights[4], weights[3])
    assert schedule.last_epoch == 6
    assert loss.begun == (0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert torch.allclose(model[0].weight, torch.stack(weights[4:]).mean(dim=0), atol=1e-6)
    held_out = blobs(seed=1)
    right = trainer._participation.gradient.model(held_out[0]).argmax(dim=1) == held_out[1]
    assert right.float().mean() > 0.8


@pytest.mark.parametrize(
    ("clipping", "noise"),
    [
        (Automatic(Flat(0.1)), Constant(1.0)),
        (Adaptive(1.0), Constant(1.0)),
        (Flat(1.0), LossDriven(1.0, 2.0, order=8.0, budget=50.0)),
    ],
)
def test_a_regression_is_trained_by_every_clipping_that_names_no_parameters(clipping, noise):
    trainer = trainer_of(plan_of(steps=8, clipping=clipping, noise=noise), curriculum=LOGISTIC)
    trainer.fit(blobs())
    assert trainer.certificate()["releases"] == 8
    assert trainer._participation.tensors["weight"].abs().max() > 0


def test_groups_by_name_and_a_regression_that_takes_all_steps_are_refused():
    groups = Grouped((("0.*",), ("2.*",)), (1.0, 1.0))
    for clipping in (groups, Automatic(groups)):
        with pytest.raises(UserError, match="leave privacy\\.groups out"):
            trainer_of(plan_of(clipping=clipping), curriculum=LOGISTIC)
        trainer_of(plan_of(clipping=clipping), curriculum=EASY).fit(blobs())
    with pytest.raises(UserError, match="4 of the plan's 4 steps"):
        trainer_of(plan_of(steps=4), curriculum=LOGISTIC)


def test_a_regression_takes_images_without_the_views_of_the_network():
    torch.manual_seed(0)
    images, targets = torch.randn(60, 1, 4, 4), torch.arange(60) % 3
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    views = Views(2, Flip())
    trainer = trainer_of(plan_of(steps=12), model=model, augmentation=views, curriculum=LOGISTIC)
    trainer.fit((images, targets))
    assert trainer._participation.tensors["weight"].shape == (3, 16)
    assert trainer.certificate()["releases"] == 12


# interruptions


class InterruptAt(torch.utils.data.TensorDataset):
    """Ctrl-C in the middle of a step, once so many examples were read."""

    def __init__(self, tensors, reads):
        super().__init__(*tensors)
        self.reads = reads

    def __getitem__(self, index):
        self.reads -= 1
        if self.reads == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


@pytest.mark.parametrize(("curriculum", "reads"), [(LOGISTIC, 120), (LOGISTIC, 400), (EASY, 300)])
def test_a_run_goes_on_in_the_middle_of_its_warm_up_or_its_curriculum(tmp_path, curriculum, reads):
    run = tmp_path / "run"
    first = trainer_of(run_directory=run, curriculum=curriculum, seed=3)
    with pytest.raises(Interrupted):
        first.fit(InterruptAt(blobs(), reads))
    made = verify(run)["releases"]
    assert 0 < made < 20
    if curriculum is LOGISTIC:
        assert (made < 4) == (reads == 120)
        with safe_open(run / "checkpoint" / "state.safetensors", framework="pt") as file:
            stored = file.get_tensor("curriculum.weight")
        assert stored.abs().max() > 0
    second = trainer_of(run_directory=run, curriculum=curriculum, seed=3, resume=True)
    second._opened(examples=200, evaluated_on_held_out=False)
    for name, tensor in first._participation.tensors.items():
        assert torch.equal(second._participation.tensors[name], tensor)
    second.fit(blobs())
    assert verify(run)["releases"] == 20
    assert verify(run)["epsilon"] == pytest.approx(plan_of().epsilon(1e-5), abs=2e-6)


def test_a_run_does_not_go_on_with_another_curriculum(tmp_path):
    run = tmp_path / "run"
    trainer_of(run_directory=run, curriculum=EASY).fit(blobs())
    with pytest.raises(UserError, match="curriculum"):
        trainer_of(run_directory=run, resume=True, curriculum=SampleCurriculum("step")).fit(blobs())


# the sorted pass has no privacy


def test_a_sorted_pass_takes_every_example_once_an_epoch_easy_ones_first_and_always_in_one_order():
    examples = TensorExamples(*blobs())
    passes = SortedPasses.of(examples, 0.03)
    batches = [passes.draw() for _ in range(66)]
    assert sorted(np.concatenate(batches[:33])) == list(range(200))
    assert {len(batch) for batch in batches} == {6, 7}
    assert all(np.array_equal(one, two) for one, two in zip(batches[:33], batches[33:], strict=True))
    losses = logistic_losses(*examples.batch())
    assert (np.diff(losses[np.concatenate(batches[:33])]) >= 0).all()
    later = SortedPasses.of(examples, 0.03, first=35)
    assert np.array_equal(later.draw(), batches[2])


def test_no_epsilon_holds_of_a_sorted_pass_and_everything_says_so(tmp_path, capsys):
    run = tmp_path / "run"
    trainer = trainer_of(plan_of(sigma=5.0), curriculum=SampleCurriculum(SORTED), run_directory=run)
    rows = trainer.fit(blobs(), progress=True)
    found = verify(run)
    assert (found["epsilon"], found["epsilon_rdp"], found["valid_for_release"]) == (None, None, False)
    assert any("sorted by a model that learned from them without noise" in reason for reason in found["void_because"])
    assert found["statement"].startswith("No differential privacy holds for this model: batches were taken in turn")
    assert "poisson" not in json.dumps(found["sampling"])
    assert all(row.get("epsilon") is None for row in rows)
    assert "epsilon" not in capsys.readouterr().err
    assert composed_certificate([run])["epsilon"] is None
    with pytest.raises(UserError, match="use fit"):
        trainer_of(curriculum=SampleCurriculum(SORTED)).step(blobs())


def test_a_sorted_pass_that_was_interrupted_has_no_epsilon_either(tmp_path):
    run, curriculum = tmp_path / "run", SampleCurriculum(SORTED)
    with pytest.raises(Interrupted):
        trainer_of(run_directory=run, curriculum=curriculum).fit(InterruptAt(blobs(), 200 + 330))
    assert verify(run)["epsilon"] is None
    with pytest.raises(UserError, match="curriculum"):
        trainer_of(run_directory=run, resume=True).fit(blobs())
    trainer_of(run_directory=run, resume=True, curriculum=curriculum).fit(blobs())
    assert (verify(run)["epsilon"], verify(run)["releases"]) == (None, 20)


# recipes


def test_a_recipe_names_a_curriculum(tmp_path):
    changes = ["privacy.epochs=4", "curriculum.name=linear", "curriculum.difficulty=logistic", "seed=0"]
    recipe = Recipe.load("digits", [*changes, "learning_rate_schedule.name=CosineAnnealingLR"])
    (tmp_path / "own.toml").write_text(recipe.to_toml())
    assert Recipe.load(tmp_path / "own.toml") == recipe
    run = train(recipe, tmp_path / "run")
    assert run.certificate["facts"]["curriculum"]["logistic_epochs"] == 1.0
    assert run.certificate["epsilon"] <= 3
    with safe_open(tmp_path / "run" / "checkpoint" / "state.safetensors", framework="pt") as file:
        state = json.loads(file.metadata()["tacit"])["state"]["learning_rate_schedule"]
    assert state["T_max"] == state["last_epoch"] == run.plan.steps - round(1 / run.plan.sample_rate)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["curriculum.first=2"], 'such as name = "linear"'),
        (["curriculum.name=linear", "curriculum.frist=2"], "did you mean 'first'"),
        (["curriculum.name=linear", "curriculum.first=two"], "curriculum.first: input should be a valid number"),
        (["curriculum.name=lienar"], "did you mean 'linear'"),
        (["curriculum.name=step", "privacy.error_norm=0.01"], "error feedback does not go with curriculum.name"),
        (["curriculum.name=step", "curriculum.difficulty=logistic", "curriculum.logistic_epochs=30"], "leaves none"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_told_before_anything_is_spent(tmp_path, changes, says):
    with pytest.raises(UserError, match=f"(?i){says}"):
        train(Recipe.load("digits", changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_does_not_promise_an_epsilon_for_a_sorted_pass(tmp_path, capsys):
    from tacit.cli.train import _conclude, _noise

    for name, promised in ((SORTED, False), ("linear", True)):
        recipe = Recipe.load("digits", [f"curriculum.name={name}", "privacy.epochs=1"])
        run = train(recipe, tmp_path / name)
        assert ("no epsilon holds" in _noise(recipe, run.plan)) is not promised
        _conclude(run, as_json=False)
        assert ("epsilon        none" in capsys.readouterr().out) is not promised
