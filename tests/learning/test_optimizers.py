"""The second moment of a private gradient without its noise: what it converges to, and that nothing else changes."""

import pytest
import torch
from torch import nn

from tacit.learning import LearnsNoise, PrivateAdam, PrivateRMSprop
from tacit.privacy import Constant, Flat, Grouped, Linear, PrivacyPlan, UserError
from tacit.training import Interrupted, PrivateTrainer
from tacit.training.checkpoint import pack, unpack

LOSS = nn.CrossEntropyLoss(reduction="none")
COORDINATES = 200_000


def stepped(optimizer, parameter, gradients, stds):
    for gradient, std in zip(gradients, stds, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.learn_noise({parameter: std})
        optimizer.step()
    return optimizer


def noisy(mean, stds, seed=0):
    """Private gradients of one true value, with noise as the mechanism's, in many coordinates."""
    generator = torch.Generator().manual_seed(seed)
    return [mean + std * torch.randn(COORDINATES, generator=generator) for std in stds]


def uncorrected(optimizer, parameter, decay, steps):
    mean = optimizer.state[parameter]["second_moment"].mean().item()
    return mean / (1 - decay**steps) if isinstance(optimizer, PrivateAdam) else mean


KINDS = [(PrivateAdam, {"betas": (0.9, 0.95)}), (PrivateRMSprop, {"alpha": 0.95})]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("schedule", ["constant", "falling", "rising"])
def test_without_the_noise_the_second_moment_is_that_of_the_true_gradient(kind, options, schedule):
    """Over 200,000 coordinates its mean is off by as much as is allowed here with a probability below 1e-6."""
    steps, true = 120, 0.3
    first, last = {"constant": (1.0, 1.0), "falling": (2.0, 0.5), "rising": (0.5, 2.0)}[schedule]
    stds = [first + (last - first) * step / (steps - 1) for step in range(steps)]
    parameter = nn.Parameter(torch.zeros(COORDINATES))
    optimizer = stepped(kind([parameter], lr=0.0, **options), parameter, noisy(true, stds), stds)
    found = optimizer.second_moment(parameter).mean().item()
    assert found == pytest.approx(true**2, abs=0.01 if schedule == "rising" else 0.005)
    naive = uncorrected(optimizer, parameter, 0.95, steps)
    if schedule == "constant":
        assert naive == pytest.approx(true**2 + 1.0, abs=0.01)
    else:
        assert abs(naive - stds[-1] ** 2 - true**2) > 0.1, "to subtract the last step's variance would be wrong"


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_schedule_is_corrected_from_the_very_first_step(kind, options):
    stds = [4.0, 0.1, 2.0]
    parameter = nn.Parameter(torch.zeros(COORDINATES))
    optimizer = kind([parameter], lr=0.0, **options)
    for step, (gradient, std) in enumerate(zip(noisy(1.0, stds), stds), 1):
        stepped(optimizer, parameter, [gradient], [std])
        whole = 1.0 if kind is PrivateAdam else 1 - 0.95**step
        assert optimizer.second_moment(parameter).mean().item() == pytest.approx(whole, abs=0.3 * whole)


TWINS = [
    (PrivateAdam, torch.optim.Adam, {"lr": 0.05}),
    (PrivateAdam, torch.optim.Adam, {"lr": 0.05, "betas": (0.5, 0.9), "weight_decay": 0.1}),
    (PrivateAdam, torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (PrivateRMSprop, torch.optim.RMSprop, {"lr": 0.05}),
    (PrivateRMSprop, torch.optim.RMSprop, {"lr": 0.05, "alpha": 0.8, "weight_decay": 0.1, "momentum": 0.9}),
]


@pytest.mark.parametrize(("kind", "twin", "options"), TWINS)
def test_without_noise_and_with_a_tiny_floor_they_are_torchs(kind, twin, options):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    theirs = nn.Parameter(ours.detach().clone())
    private, plain = kind([ours], floor=1e-60, **options), twin([theirs], eps=0.0, **options)
    for _ in range(30):
        gradient = torch.randn(7, 5, dtype=torch.float64)
        stepped(private, ours, [gradient], [0.0])
        theirs.grad = gradient
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "twin", "options"), TWINS)
def test_without_noise_the_default_floor_leaves_them_torchs(kind, twin, options):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    theirs = nn.Parameter(ours.detach().clone())
    private, plain = kind([ours], **options), twin([theirs], **options)
    for step in range(30):
        gradient = torch.randn(7, 5, dtype=torch.float64)
        gradient[0] = 0 if step < 9 else gradient[0]  # a row that learns late
        stepped(private, ours, [gradient], [0.0])
        theirs.grad = gradient
        plain.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # as much as torch's eps of 1e-8 beside the root


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_default_floor_is_a_tenth_of_the_noise_that_is_subtracted(kind, options):
    """The first gradient is 0 and the others are far below their noise, so that the floor holds everywhere."""
    stds, gradients = [2.0, 1.0, 0.5], [0.0, 0.01, -0.02]
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = kind([parameter], lr=1.0, **options)
    noise = first = place = 0.0
    for step, (gradient, std) in enumerate(zip(gradients, stds, strict=True), 1):
        stepped(optimizer, parameter, [torch.tensor([gradient])], [std])
        noise = 0.95 * noise + 0.05 * std**2
        first = 0.9 * first + 0.1 * gradient
        if kind is PrivateAdam:
            place -= first / (1 - 0.9**step) / (0.1 * noise / (1 - 0.95**step)) ** 0.5
        else:
            place -= gradient / (0.1 * noise) ** 0.5
        assert optimizer.second_moment(parameter).item() < 0
        assert parameter.item() == pytest.approx(place, rel=1e-6)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**20])  # by which floats are scaled without rounding
def test_with_the_default_floor_only_the_ratio_of_gradient_to_noise_matters(kind, options, scale):
    stds = [1.0, 3.0, 0.3, 1.0]
    one, other = (nn.Parameter(torch.zeros(COORDINATES)) for _ in range(2))
    gradients = noisy(0.3, stds)
    stepped(kind([one], **options), one, gradients, stds)
    stepped(kind([other], **options), other, [scale * g for g in gradients], [scale * std for std in stds])
    assert one.any()
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_noise_too_little_for_its_square_divides_nothing_by_zero(kind, options):
    parameter = nn.Parameter(torch.zeros(3))
    stepped(kind([parameter], **options), parameter, [torch.tensor([1e-25, 0.0, 1e-30])], [1e-25])
    assert parameter.isfinite().all()


def test_decoupled_weight_decay_is_that_of_adamw():
    ours, theirs = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    private = PrivateAdam([ours], lr=0.1, floor=1e-60, weight_decay=0.5, decoupled_weight_decay=True)
    plain = torch.optim.AdamW([theirs], lr=0.1, eps=0.0, weight_decay=0.5)
    gradient = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    stepped(private, ours, [gradient], [0.0])
    theirs.grad = gradient
    plain.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [PrivateAdam, PrivateRMSprop])
def test_the_floor_holds_where_the_noise_is_larger_than_what_was_seen(kind):
    parameter = nn.Parameter(torch.zeros(1))
    stepped(kind([parameter], lr=1.0, floor=0.04), parameter, [torch.tensor([0.1])], [5.0])
    assert parameter.item() == pytest.approx(-0.1 / 0.2)


@pytest.mark.parametrize("kind", [PrivateAdam, PrivateRMSprop])
def test_a_step_without_being_told_of_its_noise_is_refused_and_moves_nothing(kind):
    one, two = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = kind([one, two])
    one.grad = two.grad = torch.ones(2)
    with pytest.raises(UserError, match="call learn_noise"):
        optimizer.step()
    optimizer.learn_noise({one: 1.0})
    with pytest.raises(UserError, match="call learn_noise"):
        optimizer.step()
    assert not one.any()
    assert not two.any()
    optimizer.learn_noise({one: 1.0, two: 1.0})
    optimizer.step()
    with pytest.raises(UserError, match="call learn_noise"):
        optimizer.step()
    two.grad = None
    optimizer.learn_noise({one: 1.0})
    optimizer.step()
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p: PrivateAdam(p, lr=-1),
        lambda p: PrivateAdam(p, betas=(0.9, 1.0)),
        lambda p: PrivateAdam(p, floor=0.0),
        lambda p: PrivateRMSprop(p, alpha=1.0),
        lambda p: PrivateRMSprop(p, momentum=-0.1),
        lambda p: PrivateRMSprop(p, momentum=1.0),
        lambda p: PrivateRMSprop(p, momentum=5),
        lambda p: PrivateRMSprop(p, floor=0.0),
        lambda p: PrivateAdam(p, decoupled_weight_decay="no"),
        lambda p: PrivateAdam(p, decoupled_weight_decay=1),
        lambda p: PrivateRMSprop(p).learn_noise({p[0]: -1.0}),
        lambda p: PrivateAdam(p).learn_noise({p[0]: float("nan")}),
    ],
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(UserError):
        wrong([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("kind", [PrivateAdam, PrivateRMSprop])
def test_a_second_moment_that_is_not_there_is_told_in_words(kind):
    moved, left, foreign = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = kind([moved, left])
    with pytest.raises(UserError, match="no second moment of this parameter before it has moved it"):
        optimizer.second_moment(moved)
    assert not optimizer.state, "to ask leaves nothing behind"
    stepped(optimizer, moved, [torch.ones(2)], [0.5])
    assert optimizer.second_moment(moved).shape == (2,)
    with pytest.raises(UserError, match="no second moment of this parameter before it has moved it"):
        optimizer.second_moment(left)
    for other in (foreign, "weight"):
        with pytest.raises(UserError, match="does not hold this parameter"):
            optimizer.second_moment(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [PrivateAdam, lambda p: PrivateRMSprop(p, momentum=0.9)])
def test_a_stored_state_goes_on_exactly_where_it_stopped(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator) for _ in range(6)]
    stds = [2.0, 1.5, 1.0, 0.7, 0.5, 0.3]
    whole, halves = (nn.Parameter(torch.ones(50, dtype=dtype)) for _ in range(2))
    stepped(kind([whole]), whole, gradients, stds)
    first = stepped(kind([halves]), halves, gradients[:3], stds[:3])
    tensors = {}
    stored = pack(first.state_dict(), tensors, "optimizer")
    second = kind([halves])
    second.load_state_dict(unpack(stored, tensors))
    with pytest.raises(UserError, match="call learn_noise"):
        second.step()
    stepped(second, halves, gradients[3:], stds[3:])
    assert torch.equal(whole, halves)
    assert second.state[halves]["second_moment"].dtype == torch.float32


def trainer_of(kind=PrivateAdam, plan=None, model=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(40, 50) if model is None else model
    plan = plan or plan_of()
    return PrivateTrainer(model, optimizer=kind(model.parameters(), lr=0.01), loss=LOSS, plan=plan, seed=1, **options)


def plan_of(**changes):
    defaults = {"sample_rate": 0.5, "steps": 12, "expected_batch_size": 45, "clipping": Flat(0.7)}
    return PrivacyPlan(**{**defaults, "noise": Constant(1.5), **changes})


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(90, 40, generator=generator), torch.arange(90) % 50


def test_the_mechanism_tells_the_optimizer_the_noise_of_the_mean_of_each_group_at_each_step(monkeypatch):
    told = []

    def listened(self, stds, learn=PrivateAdam.learn_noise):
        told.append(
            {name: stds[parameter] for name, parameter in trainer.model.named_parameters() if parameter in stds}
        )
        learn(self, stds)

    monkeypatch.setattr(PrivateAdam, "learn_noise", listened)
    clipping = Grouped((("weight",), ("bias",)), (0.3, 0.4), noise_shape=(1.0, 3.0))
    plan = plan_of(clipping=clipping, noise=Linear(3.0, 1.0), steps=5)
    trainer = trainer_of(plan=plan)
    trainer.fit(data())
    expected = [
        dict(zip(("weight", "bias"), (std / 45 for std in clipping.noise_stds(plan.noise_multiplier(step)))))
        for step in range(5)
    ]
    assert told == [pytest.approx(stds) for stds in expected]


@pytest.mark.parametrize("kind", [PrivateAdam, PrivateRMSprop])
def test_where_there_is_nothing_but_noise_the_corrected_second_moment_is_nothing(kind):
    """From sampler to optimizer: batches are empty, so every gradient is the mechanism's noise alone."""
    trainer = trainer_of(kind, plan=plan_of(sample_rate=1e-9, noise=Linear(3.0, 1.0), steps=40))
    trainer.fit(data())
    weight = trainer.model.weight
    noise = trainer.optimizer.state[weight]["noise_moment"]
    measured = trainer.optimizer.state[weight]["second_moment"].mean().item()
    assert measured == pytest.approx(noise, rel=0.05)  # 2000 coordinates, 40 steps: one part in 100, five times over
    parts = trainer.optimizer.second_moment(weight)
    assert (parts < 0).float().mean() > 0.3, "as often below as above"


def test_a_frozen_parameter_and_a_torch_optimizer_are_told_nothing():
    model = nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 50))
    model[0].weight.requires_grad_(False)
    trainer = trainer_of(model=model)
    trainer.fit(data())
    assert model[0].weight not in trainer.optimizer.state
    assert not isinstance(torch.optim.Adam(model.parameters()), LearnsNoise)
    trainer_of(torch.optim.Adam).fit(data())


@pytest.mark.parametrize("kind", [PrivateAdam, PrivateRMSprop])
def test_an_interrupted_run_goes_on_with_what_it_knew_of_the_noise(kind, tmp_path, monkeypatch):
    def stop_early(self, private, update=PrivateTrainer._update):
        update(self, private)
        self._stop.requested = self._mechanism.next_step == 8

    run = tmp_path / "run"
    plan = plan_of(noise=Linear(3.0, 1.0))
    first = trainer_of(kind, plan, run_directory=run)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateTrainer, "_update", stop_early)
        with pytest.raises(Interrupted):
            first.fit(data())
    again = trainer_of(kind, plan, run_directory=run, resume=True)
    again._opened(examples=90, evaluated_on_held_out=False)
    before, after = (t.optimizer.state[t.model.weight] for t in (first, again))
    assert before["noise_moment"] == after["noise_moment"] > 0
    assert torch.equal(before["second_moment"], after["second_moment"])
    again.close()
    sequel = trainer_of(kind, plan, run_directory=run, resume=True)
    sequel.fit(data())
    decay = 0.999 if kind is PrivateAdam else 0.99
    expected = 0.0
    for step in range(12):
        expected = decay * expected + (1 - decay) * (plan.noise_multiplier(step) * 0.7 / 45) ** 2
    assert sequel.optimizer.state[sequel.model.weight]["noise_moment"] == pytest.approx(expected)
    assert sequel.certificate()["releases"] == 12
