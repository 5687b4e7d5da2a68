"""Several views an example: the norm that is clipped is that of their mean, whatever layer they pass through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.gradients import ClippedGradient, kernels, reference
from tacit.gradients.standardized import WeightStandardizedConv2d
from tacit.learning import MeanOverViews, TailoredLoss, cross_entropy
from tacit.models import resnet
from tacit.privacy.clipping import Flat, Grouped
from tacit.privacy.validation import UserError

EXAMPLES, VIEWS = 5, 3


class Tokens(nn.Module):
    """Embedding, layer normalisation, and a linear layer at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.hidden, self.head = (
            nn.Embedding(9, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 4),
            nn.Linear(4, 10),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.norm(self.embedding(tokens)))).mean(dim=1))


def images(*shape: int) -> Tensor:
    return torch.randn(EXAMPLES, VIEWS, *shape)


# one a rule, with what makes its path special; the name says which
MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 10)), images(7)),
    "linear with positions": lambda: (nn.Sequential(nn.Linear(7, 6), nn.Flatten(), nn.Linear(24, 10)), images(4, 7)),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10)),
        images(3, 6, 6),
    ),
    "conv with a stride": lambda: (
        nn.Sequential(nn.Conv2d(2, 20, 3, stride=2), nn.Flatten(), nn.Linear(80, 10)),
        images(2, 6, 6),
    ),
    "conv in groups": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 16, 10)),
        images(4, 6, 6),
    ),
    "conv of a row": lambda: (nn.Sequential(nn.Conv1d(2, 5, 3), nn.Flatten(), nn.Linear(20, 10)), images(2, 6)),
    "standardised conv": lambda: (
        nn.Sequential(WeightStandardizedConv2d(3, 16, 3, padding=1), nn.Flatten(), nn.Linear(16 * 36, 10)),
        images(3, 6, 6),
    ),
    "standardised conv in groups": lambda: (
        nn.Sequential(WeightStandardizedConv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8 * 16, 10)),
        images(4, 6, 6),
    ),
    "group norm": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 16, 10)),
        images(3, 6, 6),
    ),
    "instance norm": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(64, 10)
        ),
        images(3, 6, 6),
    ),
    "tokens": lambda: (Tokens(), torch.randint(0, 9, (EXAMPLES, VIEWS, 5))),
    "residual": lambda: (resnet((3, 8, 8), 10, depth=8), images(3, 8, 8)),
    "no rule": lambda: (nn.Sequential(nn.Linear(7, 6), nn.PReLU(), nn.Linear(6, 10)), images(7)),
}
BY_RULES = sorted(set(MODELS) - {"no rule"})


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model, inputs, torch.arange(EXAMPLES) % 10


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("engine", ["auto", "ghost", "instantiate", "vmap", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_views_give_the_same_as_the_reference(
    name: str, engine: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "no rule" and engine in ("ghost", "instantiate"):
        pytest.skip("cannot be forced")
    if not compiled:
        if engine in ("vmap", "loop"):
            pytest.skip("does not use them")
        monkeypatch.setattr(kernels, "_kernels", None)
    model, inputs, targets = made(name)
    loss = MeanOverViews(cross_entropy, VIEWS)
    norms = reference.clipped_sum(model, loss, Flat(1.0), inputs, targets).norms
    clipping = Flat(float(norms.median()))
    expected = reference.clipped_sum(model, loss, clipping, inputs, targets)
    grad = ClippedGradient(model, loss=loss, clipping=clipping, engine=engine, physical_batch_size=3)
    found = grad(inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=2e-4, atol=1e-5)
    for key, gradient in expected.gradients.items():
        assert float((found.gradients[key] - gradient).abs().max()) <= 2e-4 * clipping.clipping_norm, key
    if engine == "auto" and name in BY_RULES:
        assert [route.engine for route in grad._routes.values()] == ["rules"]


@pytest.mark.parametrize("name", BY_RULES)
def test_one_example_moves_the_sum_by_at_most_its_sensitivity_whatever_its_views(name: str) -> None:
    model, inputs, targets = made(name)
    clipping = Flat(0.01)  # far below every norm: each example is clipped
    grad = ClippedGradient(model, loss=MeanOverViews(cross_entropy, VIEWS), clipping=clipping)
    whole = grad(inputs, targets)
    assert (whole.norms > 0.02).all()
    for left_out in range(EXAMPLES):
        rest = [i for i in range(EXAMPLES) if i != left_out]
        part = grad(inputs[rest], targets[rest])
        moved = torch.cat([(whole.gradients[key] - part.gradients[key]).flatten() for key in whole.gradients]).norm()
        assert float(moved) <= clipping.sensitivity * 1.001
        assert float(moved) >= clipping.sensitivity * 0.99  # and it is not clipped more than it must be


def test_views_that_cancel_leave_nothing_however_large_each_is() -> None:
    """Norms of views are never added: the mean of g and -g is 0."""
    model = nn.Linear(3, 1, bias=False)
    row = torch.randn(1, 1, 3) * 100
    loss = MeanOverViews(lambda outputs, targets: outputs[:, 0], 2)
    found = ClippedGradient(model, loss=loss, clipping=Flat(1.0))(torch.cat([row, -row], dim=1), torch.zeros(1))
    assert float(found.norms) < 0.01 * float(row.norm())  # a ghost norm allows for rounding
    assert not found.gradients["weight"].any()
    alike = ClippedGradient(model, loss=loss, clipping=Flat(1e9))(torch.cat([row, row], dim=1), torch.zeros(1))
    torch.testing.assert_close(alike.norms[0, 0], row.norm())


@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", ["conv", "group norm", "linear"])
def test_one_view_that_is_not_finite_takes_its_whole_example_out(name: str, engine: str) -> None:
    model, inputs, targets = made(name)
    grad = ClippedGradient(model, loss=MeanOverViews(cross_entropy, VIEWS), clipping=Flat(1.0), engine=engine)
    grad(inputs, targets)
    broken = inputs.clone()
    broken[2, 1] = float("nan")
    found, rest = grad(broken, targets), grad(inputs[[0, 1, 3, 4]], targets[[0, 1, 3, 4]])
    assert found.not_finite == 1
    for key, gradient in rest.gradients.items():
        torch.testing.assert_close(found.gradients[key], gradient, rtol=1e-4, atol=1e-5)


def test_groups_are_clipped_by_the_norm_of_the_mean_view() -> None:
    model, inputs, targets = made("residual")
    clipping = Grouped.by_name([name for name, _ in model.named_parameters()], clipping_norm=0.1)
    loss = MeanOverViews(cross_entropy, VIEWS)
    expected = reference.clipped_sum(model, loss, clipping, inputs, targets)
    found = ClippedGradient(model, loss=loss, clipping=clipping)(inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-3, atol=1e-5)
    assert (expected.norms > torch.tensor(clipping.clipping_norms)).any()
    for key, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[key], gradient, rtol=1e-3, atol=1e-5)


def test_a_loss_that_wants_hidden_layers_sees_all_views() -> None:
    model, inputs, targets = made("conv")
    loss = MeanOverViews(TailoredLoss(threshold_epoch=2, beta=1.0, gamma=2.0), VIEWS)
    loss.begin_epoch(1)
    expected = reference.clipped_sum(model, loss, Flat(0.5), inputs, targets)
    found = ClippedGradient(model, loss=loss, clipping=Flat(0.5))(inputs, targets)
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-4, atol=1e-5)
    # by hand: the mean of what the loss is of each view by itself
    single = [reference.clipped_sum(model, loss.loss, Flat(1e30), inputs[:1, k], targets[:1]) for k in range(VIEWS)]
    for key in single[0].gradients:
        mean = torch.stack([part.gradients[key] for part in single]).mean(dim=0)
        alone = ClippedGradient(model, loss=loss, clipping=Flat(1e30))(inputs[:1], targets[:1])
        torch.testing.assert_close(alone.gradients[key], mean, rtol=1e-4, atol=1e-5)


def test_an_empty_batch_of_views_is_a_step_like_any_other() -> None:
    model, inputs, targets = made("conv")
    found = ClippedGradient(model, loss=MeanOverViews(cross_entropy, VIEWS), clipping=Flat(0.5))(
        inputs[:0], targets[:0]
    )
    assert all(not gradient.any() for gradient in found.gradients.values())


def test_a_wrong_number_of_views_is_told() -> None:
    model, inputs, targets = made("conv")
    grad = ClippedGradient(model, loss=MeanOverViews(cross_entropy, 4), clipping=Flat(0.5))
    with pytest.raises(
        UserError, match=r"inputs of 4 views an example must be \[batch, 4, ...\], not \[2, 3, 3, 6, 6\]"
    ):
        grad(inputs, targets)


class ViewsFirst(nn.Module):
    """Rows in another order than the rules know: the first view of all examples, then the second."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(7, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.hidden(x.transpose(0, 1).flatten(0, 1))
        return rows.unflatten(0, (x.shape[1], x.shape[0])).mean(dim=0)


class ExampleFirst(ViewsFirst):
    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(dim=1)


@pytest.mark.parametrize("kind", [ViewsFirst, ExampleFirst])
def test_rows_that_the_model_makes_are_never_taken_for_views(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs, targets = kind(), images(7), torch.arange(EXAMPLES)
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(0.1))
    found, expected = grad(inputs, targets), reference.clipped_sum(model, cross_entropy, Flat(0.1), inputs, targets)
    assert [route.engine for route in grad._routes.values()] == ["vmap"]
    torch.testing.assert_close(found.gradients["hidden.weight"], expected.gradients["hidden.weight"])


class Ragged(nn.Module):
    """Only tokens that are there go through the layer; how many rows an example has differs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 10)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        found = x.new_zeros(*there.shape, 10).masked_scatter(there.unsqueeze(2), self.fc(x[there]))
        return found.sum(dim=1)


def test_examples_with_different_numbers_of_rows_are_not_mistaken_for_each_other() -> None:
    """As many rows in all as the probe's examples would have, shared out otherwise."""
    torch.manual_seed(0)
    model, targets = Ragged(), torch.arange(8) % 10
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(0.1))

    def batch(lengths: list[int]) -> tuple[Tensor, Tensor]:
        return torch.randn(len(lengths), 8, 3), torch.arange(8).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)

    for lengths in ([4] * 8, [1, 7, 2, 6, 4, 3, 5, 4]):
        inputs = batch(lengths)
        found, expected = grad(inputs, targets), reference.clipped_sum(model, cross_entropy, Flat(0.1), inputs, targets)
        torch.testing.assert_close(found.gradients["fc.weight"], expected.gradients["fc.weight"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ["vmap", "loop"])
def test_losses_are_of_each_example_by_itself_where_gradients_are(engine: str) -> None:
    class MixesCrowds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + (100 * x.sum() if len(x) > 3 else 0) * torch.arange(10)

    model, inputs, targets = MixesCrowds(), torch.randn(6, 3), torch.arange(6)
    grad = ClippedGradient(model, loss=cross_entropy, clipping=Flat(0.1), engine=engine, with_losses=True)
    alone = torch.cat([cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]) for i in range(6)]).detach()
    torch.testing.assert_close(grad(inputs, targets).losses, alone)


class MixesViews(nn.Module):
    """Takes the mean of the rows beside one another, across examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0, keepdim=True)


def test_a_layer_that_mixes_rows_of_different_examples_is_refused() -> None:
    model = nn.Sequential(nn.Linear(7, 10), MixesViews())
    with pytest.raises(UserError, match="mixes examples"):
        ClippedGradient(model, loss=MeanOverViews(cross_entropy, VIEWS), clipping=Flat(0.1))(
            images(7), torch.arange(EXAMPLES)
        )


@pytest.mark.skipif(kernels._kernels is None, reason="the kernels were not built on this machine")
@settings(max_examples=30, deadline=None)
@given(
    views=st.integers(1, 4),
    channels=st.sampled_from([1, 3, 8, 16]),
    outputs=st.sampled_from([1, 5, 16, 32]),
    size=st.integers(3, 20),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    standardized=st.booleans(),
)
def test_the_kernel_adds_up_the_views_of_an_example_and_no_others(
    views: int, channels: int, outputs: int, size: int, stride: int, padding: int, standardized: bool
) -> None:
    torch.manual_seed(size)
    geometry = kernels.Geometry((3, 3), (stride, stride), (padding, padding))
    layer = nn.Conv2d(channels, outputs, 3, stride, padding, bias=False)
    x = torch.randn(2 * views, channels, size, size)
    g = torch.randn_like(layer(x)).detach()
    weight = kernels.Standardized.of(layer.weight.detach(), 1e-5) if standardized else None
    found = kernels.conv_gradients(x, g, geometry, weight, views)
    single = kernels.conv_gradients(x, g, geometry).gradients.double().unflatten(0, (2, views)).sum(dim=1)
    scale = float(single.abs().max()) + 1
    assert float((found.gradients - single).abs().max()) <= 1e-5 * scale
    assert float((found.bias - g.sum(dim=(2, 3)).unflatten(0, (2, views)).sum(dim=1)).abs().max()) <= 1e-4 * scale
    added = found.weighted_sum(torch.tensor([1.0, 0.0])).double()
    assert float(added.square().sum()) <= float(found.norms[0]) * 1.000001 + 1e-30
