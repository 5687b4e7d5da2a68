"""What the probe finds out: models that remember examples, and models that mix them when it is hard to see."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tacit.gradients import ClippedGradient
from tacit.privacy.clipping import Flat
from tacit.privacy.validation import UserError

cross_entropy = nn.CrossEntropyLoss(reduction="none")


def clipped(model: nn.Module, loss: Callable[..., Tensor] = cross_entropy, **options: Any) -> ClippedGradient:
    return ClippedGradient(model, loss=loss, clipping=Flat(1.0), **options)


def examples(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def around(module: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 3))


# ---- what stays in the model


class ActNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.started = nn.Parameter(torch.zeros(4)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.bias.data.copy_(-x.detach().mean(0))
            self.started = True
        return x + self.bias


class FirstMean(nn.Module):
    mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().sum())
        return x


class LateBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            self.mean.copy_(x.detach().mean(0))
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ActNorm, r"'1' \(ActNorm\) changes its parameter 'bias' when it runs, by what the examples are"),
        (FirstMean, r"'1' \(FirstMean\) changes its attribute 'mean'"),
        (Collecting, r"'1' \(Collecting\) changes its attribute 'seen'"),
        (LateBuffer, r"'1' \(LateBuffer\) changes its buffer 'mean'"),
    ],
)
def test_a_module_that_keeps_something_of_the_examples_is_refused_and_put_back(
    module: Callable[[], nn.Module], message: str
) -> None:
    model = around(module())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: str(value) for name, value in vars(model[1]).items()}
    with pytest.raises(UserError, match=message):
        clipped(model)(*examples())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert attributes == {name: str(value) for name, value in vars(model[1]).items()}


@pytest.mark.parametrize(
    ("module", "message"),
    [(FirstMean, r"the loss \(Remembering\) changes its attribute 'mean'"), (LateBuffer, "loss changes its buffer")],
)
def test_a_loss_that_keeps_something_of_the_examples_is_refused(module: Any, message: str) -> None:
    class Remembering(FirstMean):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module()

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            if module is FirstMean:
                super().forward(outputs)
            else:
                self.inner(nn.functional.pad(outputs, (0, 1)))
            return cross_entropy(outputs, targets)

    with pytest.raises(UserError, match=message):
        clipped(around(nn.Tanh()), Remembering())(*examples())


class Armed(nn.Module):
    """It begins to write after its probe."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.armed = kind, False
        self.register_buffer("count", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.kind == "written":
            self.count.add_(1)
        if self.armed and self.kind == "replaced":
            self.count = torch.zeros(())
        return x * self.scale


@pytest.mark.parametrize(
    ("engine", "kind"),  # torch.func itself refuses to write in place
    [("auto", "written"), ("auto", "replaced"), ("vmap", "replaced"), ("loop", "written"), ("loop", "replaced")],
)
def test_a_buffer_that_changes_in_a_later_batch_is_refused(engine: str, kind: str) -> None:
    model = around(Armed(kind))
    grad = clipped(model, engine=engine)
    grad(*examples())
    model[1].armed = True
    with pytest.raises(UserError, match=r"'1' \(Armed\) changes its buffer 'count' when it runs"):
        grad(*examples())


class Caching(nn.Module):
    """Tables that depend on shapes alone, in the ways people keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table, self.tables = 0, None, {}

    def forward(self, x: Tensor) -> Tensor:
        if self.length != len(x):
            self.length, self.table = len(x), torch.arange(x.shape[1]) * torch.ones(len(x), 1)
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(len(x), 1)
        return x * self.table * self.tables[len(x)]


def test_tables_that_do_not_depend_on_the_examples_may_be_kept() -> None:
    clipped(around(Caching()))(*examples())


# ---- what mixes


def weighted_by_frequency(outputs: Tensor, targets: Tensor) -> Tensor:
    share = (targets == targets[:1]).float().mean()
    return cross_entropy(outputs, targets) * (1 + share)


@pytest.mark.parametrize("common", [0, 1, 2])
@pytest.mark.parametrize("others", [0, 4])
@pytest.mark.parametrize("count", [1, 64])
def test_a_loss_that_counts_classes_is_refused_however_rare_they_are(common: int, others: int, count: int) -> None:
    inputs, targets = examples(count)[0], torch.full((count,), common)
    targets[count - others :] = (common + 1) % 3
    with pytest.raises(UserError, match="the loss mixes examples"):
        clipped(around(nn.Tanh()), weighted_by_frequency)(inputs, targets)


@pytest.mark.parametrize("target", [0, -100])
def test_a_class_that_has_no_neighbour_is_left_alone(target: int) -> None:
    model = nn.Sequential(nn.Embedding(1, 4), nn.Flatten(), nn.Linear(8, 1))
    summed = clipped(model)(torch.zeros(6, 2, dtype=torch.long), torch.full((6,), target))
    assert summed.norms.shape == (6, 1)


class Mixup(nn.Module):
    def __init__(self, permutation: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.permutation = permutation

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.5 * x[self.permutation(len(x))]


@pytest.mark.parametrize(
    "permutation",
    [torch.randperm, lambda n: torch.tensor(random.sample(range(n), n)), lambda n: torch.tensor(np.random.permutation(n))],  # noqa: NPY002
)  # fmt: skip
def test_random_mixing_is_found_from_every_random_state(permutation: Callable[[int], Tensor]) -> None:
    for seed in range(25):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        with pytest.raises(UserError, match=r"'0' \(Mixup\) mixes examples"):
            clipped(nn.Sequential(Mixup(permutation), nn.Linear(4, 3)))(*examples())


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Dropout(0.1)])
@pytest.mark.parametrize("least", [1, 4])
def test_a_loss_divided_by_the_batch_size_is_refused(module: nn.Module, least: int) -> None:
    def divided(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) / max(len(targets), least)

    with pytest.raises(UserError, match="how many others are in the batch"):
        clipped(around(module), divided)(*examples())


class Capacity(nn.Module):
    """The first four active examples pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x * ((x.sum(1) > 0).cumsum(0) <= 4).unsqueeze(1)


class ManyCentred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) > 3 else x


class ManyMixedBackwards(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = (x**2).mean(0) * (len(x) > 3)
        return x + mean - mean.detach()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Capacity(), r"'1' \(Capacity\) mixes examples"),
        (nn.Sequential(nn.Dropout(0.1), ManyCentred()), r"'1.1' \(ManyCentred\) mixes examples"),
        (ManyMixedBackwards(), "gradient at '0' .Linear. of one example depends on the others"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 16}])
def test_mixing_that_needs_more_than_three_examples_is_found(
    module: nn.Module, message: str, options: dict[str, int]
) -> None:
    with pytest.raises(UserError, match=message):
        clipped(around(module), **options)(*examples())


class Weakly(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * x.mean(0)


def test_weak_mixing_is_found_in_half_precision() -> None:
    inputs, targets = examples()
    with pytest.raises(UserError, match=r"'1' \(Weakly\) mixes examples"):
        clipped(around(Weakly()).bfloat16())(inputs.bfloat16(), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UserError, match=r"'1' \(Weakly\) mixes examples"):
        clipped(around(Weakly()))(inputs, targets)


def test_a_half_precision_model_without_a_float32_copy_is_probed_as_it_is() -> None:
    class Single(nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one of me")

        def forward(self, x: Tensor) -> Tensor:
            return x

    class Cumulated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    class Insisting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.eye(4, dtype=torch.bfloat16)

    inputs, targets = examples()
    for module in (Single(), Insisting()):
        assert clipped(around(module).bfloat16())(inputs.bfloat16(), targets).norms.isfinite().all()
        with pytest.raises(UserError, match="mixes examples"):
            clipped(around(nn.Sequential(module, Cumulated())).bfloat16())(inputs.bfloat16(), targets)


# ---- what is said


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise RuntimeError("patient 4711")
        return x * self.scale


class UsedElsewhere(nn.Module):
    """Its weight is used outside the layer, so that no rule holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.telling = nn.Linear(4, 4), Telling()

    def forward(self, x: Tensor) -> Tensor:
        return self.telling(nn.functional.linear(x, self.layer.weight))


@pytest.mark.parametrize("module", [Telling, UsedElsewhere])
def test_warnings_do_not_quote_exceptions_which_may_quote_examples(module: Callable[[], nn.Module]) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        clipped(around(module()))(*examples(5))
    messages = [str(w.message) for w in warned if "one example after the other" in str(w.message)]
    assert messages
    assert all("(RuntimeError)" in message and "4711" not in message for message in messages)
