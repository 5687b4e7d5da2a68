"""What a caller may rely on: refusals with reasons, chunks, examples by themselves, a model left as it was."""

from __future__ import annotations

import os
import random
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedGradient, kernels, reference
from tacit.privacy.clipping import Flat, Grouped
from tacit.privacy.validation import UserError

cross_entropy = nn.CrossEntropyLoss(reduction="none")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )


def examples(count: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 1, 6, 6, generator=generator)
    return inputs, torch.randint(5, (count,), generator=generator)


def clipped(model: nn.Module | None = None, **options: object) -> ClippedGradient:
    return ClippedGradient(model or network(), **{"loss": cross_entropy, "clipping": Flat(1.0), **options})  # type: ignore[arg-type]


def assert_same(a: object, b: object, tolerance: float = 1e-5) -> None:
    close = {"rtol": 10 * tolerance, "atol": tolerance}
    torch.testing.assert_close(dict(a.gradients), dict(b.gradients), **close)  # type: ignore[attr-defined]
    torch.testing.assert_close(a.norms, b.norms, rtol=0.13 * tolerance, atol=tolerance)  # type: ignore[attr-defined]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere they are built where they can be")
def test_the_kernels_are_built_where_there_is_a_compiler() -> None:
    """Otherwise their own tests would be passed over without a word."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if (shutil.which("gcc") or shutil.which("cc")) and headers.exists() and os.environ.get("TACIT_KERNELS") != "off":
        assert kernels.instruction_set() is not None, "make clean && make install builds them"


class Centred(nn.Module):
    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return x - (mean.detach() if self.detached else mean)


class Cumulated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class OnlyBackwards(nn.Module):
    """The values are untouched, the gradients are mixed."""

    def forward(self, x: Tensor) -> Tensor:
        mean = (x**2).mean(0)
        return x + mean - mean.detach()


class Divided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Centred(), r"'6' \(Centred\) mixes examples"),
        (Centred(detached=True), r"'6' \(Centred\) mixes examples"),
        (Cumulated(), r"'6' \(Cumulated\) mixes examples"),
        (nn.Softmax(dim=0), r"'6' \(Softmax\) mixes examples"),
        (OnlyBackwards(), "gradient at '5' .Linear. of one example depends on the others"),
        (Divided(), "how many others are in the batch"),
        (Counting(), r"'6' \(Counting\) changes its buffer 'mean'"),
    ],
)
@pytest.mark.parametrize("count", [1, 8])
def test_a_module_that_mixes_examples_is_refused_by_name(module: nn.Module, message: str, count: int) -> None:
    model = nn.Sequential(*network(), module)
    grad = clipped(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        grad(*examples(count))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_mixes_by_itself_is_named_as_the_model() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * x.mean()

    with pytest.raises(UserError, match=r"the model itself \(Mixing\) mixes examples"):
        clipped(Mixing())(*examples())


def test_a_loss_that_mixes_examples_is_refused() -> None:
    def mixing(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(outputs, targets)
        return losses / losses.detach().sum()

    with pytest.raises(UserError, match="the loss mixes examples"):
        clipped(loss=mixing)(*examples())


def test_mixing_is_found_even_if_all_examples_are_equal_or_not_finite() -> None:
    inputs, targets = examples()
    for batch in (inputs[:1].expand(8, 1, 6, 6), torch.zeros_like(inputs), torch.full_like(inputs, float("nan"))):
        with pytest.raises(UserError, match="mixes examples"):
            clipped(nn.Sequential(*network(), Centred()))(batch, targets[:1].expand(8))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm2d(4), r"'1.0' \(BatchNorm2d\) .* replace it: tacit.models.without_batch_norm\(model\)"),
        (nn.BatchNorm2d(4, affine=False, track_running_stats=False).eval(), "BatchNorm2d"),
        (type("Renamed", (nn.BatchNorm1d,), {})(4), "Renamed"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.LazyBatchNorm2d(), "not yet initialised"),
        (nn.LazyLinear(3), "not yet initialised"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(4, 2, max_norm=1.0), "max_norm=None"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
    ],
)
def test_layers_known_to_mix_or_remember_are_refused_by_name_at_once(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        clipped(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(module)))


def test_a_frozen_batch_norm_in_eval_mode_is_allowed_until_it_is_trained() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).eval().requires_grad_(False), *network())
    grad = clipped(model)
    inputs, targets = examples()
    assert_same(grad(inputs, targets), reference.clipped_sum(model, cross_entropy, Flat(1.0), inputs, targets))
    model.train()
    with pytest.raises(UserError, match="BatchNorm2d"):
        grad(inputs, targets)


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_not_one_value_an_example_is_refused(reduction: str, engine: str) -> None:
    with pytest.raises(UserError, match='use reduction="none"'):
        clipped(loss=nn.CrossEntropyLoss(reduction=reduction), engine=engine)(*examples(1))


def test_a_batch_whose_parts_do_not_fit_is_refused() -> None:
    inputs, targets = examples()
    with pytest.raises(UserError, match="same number of examples"):
        clipped()(inputs, targets[:3])
    with pytest.raises(UserError, match="must hold tensors"):
        clipped()(inputs, targets.numpy())


@pytest.mark.parametrize("bad", [0, -1, 2.5, True])
def test_a_physical_batch_size_is_a_whole_number_above_zero(bad: float) -> None:
    with pytest.raises(UserError, match="physical_batch_size"):
        clipped(physical_batch_size=bad)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'rules'"):
        clipped(engine="rule")


def test_groups_that_leave_a_parameter_out_are_refused() -> None:
    with pytest.raises(UserError, match="in no group"):
        clipped(clipping=Grouped((("0.*",),), (1.0,)))


def test_an_input_that_is_changed_in_place_after_use_is_refused_by_name() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return self.b(self.a(x) + x.mul_(3))

    grad = clipped(Changing(), loss=lambda outputs, t: outputs.sum(1))
    with pytest.raises(UserError, match=r"'a' \(Linear\) is changed in place"):
        grad(torch.randn(3, 4), torch.zeros(3))


@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap", "loop"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_physical_batch_size_does_not_change_the_sum(size: int, engine: str) -> None:
    expected = reference.clipped_sum(network(), cross_entropy, Flat(1.0), *examples())
    tolerance = 1e-3 if engine == "ghost" else 1e-5  # ghost norms allow for rounding
    assert_same(clipped(physical_batch_size=size, engine=engine)(*examples()), expected, tolerance)


def test_chunks_of_a_logical_batch_give_the_sum_of_one_call() -> None:
    inputs, targets = examples(10)
    chunks = [(inputs[a:b], targets[a:b]) for a, b in [(0, 4), (4, 4), (4, 5), (5, 10)]]
    assert_same(clipped().over(iter(chunks)), clipped()(inputs, targets))


@pytest.mark.parametrize("engine", ["auto", "ghost", "vmap", "loop"])
def test_an_empty_batch_gives_zeros_and_does_not_run_the_model(engine: str) -> None:
    model = network()
    model.register_forward_hook(lambda *_: pytest.fail("the model was run"))
    grad = clipped(model, engine=engine, clipping=Grouped((("0.*", "1.*"), ("5.*",)), (1.0, 2.0)))
    for summed in (grad(*examples(0)), grad.over([])):
        assert summed.norms.shape == (0, 2)
        assert summed.not_finite == 0
        assert {name: g.shape for name, g in summed.gradients.items()} == {
            n: p.shape for n, p in model.named_parameters()
        }
        assert not any(gradient.any() for gradient in summed.gradients.values())


@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap", "loop"])
def test_a_batch_without_one_finite_example_gives_zeros(engine: str) -> None:
    inputs, targets = examples()
    summed = clipped(engine=engine)(torch.full_like(inputs, float("nan")), targets)
    assert summed.not_finite == summed.examples == 8
    assert not any(gradient.any() for gradient in summed.gradients.values())


def test_no_forward_pass_is_larger_than_the_physical_batch() -> None:
    model, seen = network(), []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    clipped(model, physical_batch_size=4)(*examples(30))
    assert max(seen) == 4


def test_the_size_chosen_by_memory_shrinks_as_examples_grow() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )
    grad = clipped(model)
    sizes = [
        grad.physical_batch_size_for(torch.randn(2, 1, n, n), torch.zeros(2, dtype=torch.long)) for n in (8, 128, 256)
    ]
    assert 512 == sizes[0] > sizes[1] > sizes[2] >= 1
    assert clipped(physical_batch_size=7).physical_batch_size_for(*examples()) == 7


def test_an_examples_norm_does_not_depend_on_the_others() -> None:
    inputs, targets = examples()
    grad = clipped(clipping=Flat(0.1))
    together = grad(inputs, targets).norms
    others = examples(8, seed=1)[0] * 100
    others[2] = inputs[2]
    torch.testing.assert_close(grad(others, targets).norms[2], together[2])
    torch.testing.assert_close(grad(inputs[2:3], targets[2:3]).norms[0], together[2])


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
def test_the_model_is_left_as_it_was(engine: str) -> None:
    model = nn.Sequential(*network(), nn.Dropout(0.1), nn.PReLU())
    model[2].eval()
    model[5].weight.grad = torch.ones_like(model[5].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [set(vars(thing)) for thing in [*model.modules(), *model.parameters()]]
    modes = [m.training for m in model.modules()]
    clipped(model, engine=engine)(*examples())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert attributes == [set(vars(thing)) for thing in [*model.modules(), *model.parameters()]]
    assert modes == [m.training for m in model.modules()]
    assert hooks_of(model) == 0
    assert torch.equal(model[5].weight.grad, torch.ones_like(model[5].weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "5.weight")


def test_hooks_are_gone_after_an_exception() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("on purpose")

    model = nn.Sequential(*network(), nn.PReLU(), Failing())
    with pytest.raises(KeyError):
        clipped(model)(*examples())
    assert hooks_of(model) == 0


def test_a_probe_draws_no_random_numbers() -> None:
    model = nn.Sequential(*network(), nn.Dropout(0.5))
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    clipped(model).physical_batch_size_for(*examples())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # noqa: NPY002


def test_it_works_inside_no_grad() -> None:
    with torch.no_grad():
        found = clipped()(*examples())
    assert_same(found, clipped()(*examples()))
    assert not any(gradient.requires_grad for gradient in found.gradients.values())
