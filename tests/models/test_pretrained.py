"""Pre-trained weights: nothing is lost, nothing is loaded wrongly, and what is frozen costs nothing."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published_nets import NETS, published
from safetensors.torch import save_file
from torch import Tensor, nn

from tacit.gradients import ClippedGradient, reference
from tacit.models import build, efficientnet_b0, freeze, load_pretrained, resnet, small_cnn
from tacit.models.folding import fold_norms
from tacit.models.published import PUBLISHED
from tacit.privacy import Flat, UserError

LOSS = nn.CrossEntropyLoss(reduction="none")
PLAIN = {"depth": 8, "standardized": False}


def stored(folder: Path, tensors: dict[str, Tensor], name: str = "weights.safetensors") -> Path:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
    return folder / name


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("naming", NETS)
def test_the_names_of_others_are_as_many_as_their_tensors_and_ours(naming: str) -> None:
    table = PUBLISHED[naming]()
    theirs, ours = NETS[naming](10), efficientnet_b0((3, 32, 32), 10)
    owners = {name.rpartition(".")[0] for name, _ in theirs.named_parameters()}
    assert set(table.values()) == owners
    assert len(table) == len(owners)
    assert set(table) == {name.rpartition(".")[0] for name, _ in ours.named_parameters()}
    for here, there in table.items():
        own = {name: p.shape for name, p in ours.get_submodule(here).named_parameters()}
        assert own == {name: p.shape for name, p in theirs.get_submodule(there).named_parameters()}


@pytest.mark.parametrize("eps", [1e-5, 1e-3])
@pytest.mark.parametrize("naming", NETS)
def test_a_folded_network_computes_what_the_published_one_computes(naming: str, eps: float, tmp_path: Path) -> None:
    original = published(naming, eps=eps)
    model = efficientnet_b0((3, 32, 32), 10).double()
    report = load_pretrained(model, stored(tmp_path, original.state_dict()), batch_norm="fold", eps=eps)
    assert not any(isinstance(module, nn.GroupNorm) for module in model.modules())
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), original(x), rtol=1e-9, atol=1e-9)
    assert report.naming == naming
    assert report.fresh == ()
    assert set(report.unused) == {name for name in original.state_dict() if name.endswith("num_batches_tracked")}
    others = efficientnet_b0((3, 32, 32), 10, groups=None)
    assert set(others.state_dict()) == set(model.state_dict()), "as if it had been built without normalisation"


@pytest.mark.parametrize("naming", NETS)
def test_replaced_batch_norms_give_scale_and_shift_and_their_statistics_are_listed(naming: str, tmp_path: Path) -> None:
    original = published(naming)
    theirs = original.state_dict()
    model = efficientnet_b0((3, 32, 32), 10).double()
    path = stored(tmp_path, theirs)
    report = load_pretrained(model, path)
    assert (report.fresh, len(report.loaded)) == ((), 213)
    assert report.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    statistics = {name for name in theirs if "running_" in name or "num_batches" in name}
    assert set(report.unused) == statistics
    assert len(statistics) == 3 * 49
    for here, there in PUBLISHED[naming]().items():
        for name, parameter in model.get_submodule(here).named_parameters():
            assert torch.equal(parameter, theirs[f"{there}.{name}"])
    assert f"which has the names of {naming}: 213 tensors of 213" in str(report)
    assert "statistics of BatchNorm" in str(report)


@pytest.mark.parametrize("naming", NETS)
@pytest.mark.parametrize("batch_norm", ["replace", "fold"])
def test_the_last_layer_is_fresh_when_there_are_other_classes(naming: str, batch_norm: str, tmp_path: Path) -> None:
    theirs = published(naming, classes=13).state_dict()
    model = efficientnet_b0((3, 32, 32), 10)
    before = copied(model)
    report = load_pretrained(model, stored(tmp_path, theirs), batch_norm=batch_norm)
    assert report.fresh == ("classifier.weight", "classifier.bias")
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in report.fresh)
    head = PUBLISHED[naming]()["classifier"]
    assert {f"{head}.weight", f"{head}.bias"} <= set(report.unused)
    assert report.unused[f"{head}.bias"] == "the last layer is [13, 1280] there and [10, 1280] here"
    assert "fresh: classifier.weight, classifier.bias" in str(report)


def test_a_published_network_without_its_last_layer_is_taken(tmp_path: Path) -> None:
    theirs = {name: t for name, t in published("timm").state_dict().items() if not name.startswith("classifier")}
    report = load_pretrained(efficientnet_b0((3, 32, 32), 10), stored(tmp_path, theirs))
    assert report.naming == "timm"
    assert report.fresh == ("classifier.weight", "classifier.bias")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_tensor_of_file_and_model_is_accounted_for(data: st.DataObject) -> None:
    source, model = (resnet((3, 8, 8), 4, depth=8, groups=4) for _ in range(2))
    names = list(source.state_dict())
    kept = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    extra = data.draw(st.lists(st.sampled_from(["other.weight", "9.bias", "1.running_mean", "7"]), unique=True))
    before = copied(model)
    tensors = {**{name: source.state_dict()[name] for name in kept}, **{name: torch.ones(3) for name in extra}}
    with tempfile.TemporaryDirectory() as folder:
        path = stored(Path(folder), tensors)
        if all(name.startswith("8.") for name in kept):
            with pytest.raises(UserError, match="nothing for this model"):
                load_pretrained(model, path)
            assert_unchanged(model, before)
            return
        report = load_pretrained(model, path)
    assert set(report.loaded) == set(kept)
    assert set(report.fresh) == set(names) - set(kept)
    assert set(report.unused) == set(extra)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name] if name in kept else before[name])


@pytest.mark.parametrize("name", ["linear", "small-cnn", "mnist-cnn", "all-conv", "wrn-16-4"])
def test_every_network_takes_its_own_weights_and_renews_its_own_last_layer(name: str, tmp_path: Path) -> None:
    shape = (1, 28, 28) if name == "mnist-cnn" else (3, 16, 16)
    source, same, other = (build(name, shape, classes) for classes in (4, 4, 7))
    path = stored(tmp_path, source.state_dict())
    report = load_pretrained(same, path)
    assert (report.naming, report.fresh, dict(report.unused)) == ("tacit", (), {})
    assert_unchanged(same, copied(source))
    if name == "linear":  # nothing but a last layer
        with pytest.raises(UserError, match="nothing for this model"):
            load_pretrained(other, path)
    else:
        last = list(source.state_dict())[-2:]
        assert list(load_pretrained(other, path).fresh) == last


def test_half_precision_is_widened_and_the_layout_of_the_model_kept(tmp_path: Path) -> None:
    source = {name: tensor.half() for name, tensor in small_cnn((1, 8, 8), 3).state_dict().items()}
    model = small_cnn((1, 8, 8), 3).to(memory_format=torch.channels_last)
    load_pretrained(model, stored(tmp_path, source))
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, source["0.weight"].float())


def test_own_names_with_batch_norm_are_replaced_or_folded_in_any_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = resnet((3, 8, 8), 4, **PLAIN).double().eval()
    original = resnet((3, 8, 8), 4, **PLAIN).double().eval()
    for parent in list(original.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.GroupNorm):
                norm = nn.BatchNorm2d(child.num_channels).double().eval()
                norm.running_mean.normal_(std=0.3)
                norm.running_var.uniform_(0.5, 2.0)
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                setattr(parent, name, norm)
    path = stored(tmp_path, original.state_dict())
    report = load_pretrained(net, path)
    assert torch.equal(net[1].weight, original[1].weight)
    assert report.fresh == ()
    folded = resnet((3, 8, 8), 4, **PLAIN).double().eval()
    load_pretrained(folded, path, batch_norm="fold")
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(folded(x), original(x))
    again = resnet((3, 8, 8), 4, **PLAIN).double().eval()
    report = load_pretrained(again, stored(tmp_path, folded.state_dict(), "folded.safetensors"), batch_norm="fold")
    assert report.fresh == ()
    assert torch.equal(again(x), folded(x))


def test_folding_twice_changes_nothing_and_keeps_a_bias_that_was_there() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1, bias=False), nn.GroupNorm(2, 4))
    bias = model[0].bias
    fold_norms(model)
    parameters = list(model.parameters())
    fold_norms(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model[0].bias is bias
    assert torch.equal(model[2].bias, torch.zeros(4))


def bad(change: Callable[[dict[str, Tensor]], object], naming: str = "timm") -> dict[str, Tensor]:
    tensors = published(naming).state_dict()
    change(tensors)
    return dict(tensors)


B0 = {"input_shape": (3, 32, 32), "classes": 10}


@pytest.mark.parametrize("batch_norm", ["replace", "fold"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"blocks.1.2.conv_pw.weight": torch.ones(2)}),
            "'blocks.1.2.conv_pw.weight', for which .* no place",
        ),
        (lambda t: t.pop("blocks.3.1.conv_dw.weight"), "stages.3.1.depthwise.conv.weight"),
        (lambda t: t.pop("blocks.3.1.se.conv_reduce.bias"), "nothing for 'stages.3.1.excite.reduce.bias'"),
        (
            lambda t: t.update({"conv_stem.weight": torch.ones(32, 1, 3, 3)}),
            r"is \[32, 1, 3, 3\] there and \[32, 3, 3, 3\]",
        ),
        (
            lambda t: t.update({"blocks.2.0.bn1.bias": torch.ones(7)}),
            r"'blocks.2.0.bn1.bias' is \[7\] there and \[144\] here",
        ),
        (lambda t: t["bn1.bias"].fill_(float("nan")), "'bn1.bias' holds something else than finite"),
        (
            lambda t: t.update({"bn1.bias": torch.ones(32, dtype=torch.int64)}),
            "'bn1.bias' holds something else than finite",
        ),
    ],
)
def test_what_is_not_this_network_is_refused_and_the_model_left_as_it_was(
    batch_norm: str, change: Callable, message: str, tmp_path: Path
) -> None:
    model = efficientnet_b0(**B0)
    before = copied(model)
    with pytest.raises(UserError, match=message):
        load_pretrained(model, stored(tmp_path, bad(change)), batch_norm=batch_norm)
    assert_unchanged(model, before)
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 49


def test_statistics_are_needed_for_folding(tmp_path: Path) -> None:
    path = stored(tmp_path, bad(lambda t: t.pop("bn1.running_var")))
    with pytest.raises(UserError, match=r"no 'stem.norm.running_var', .* use batch_norm = \"replace\""):
        load_pretrained(efficientnet_b0(**B0), path, batch_norm="fold")
    path = stored(tmp_path, efficientnet_b0(**B0).state_dict())
    with pytest.raises(UserError, match="cannot be folded"):
        load_pretrained(efficientnet_b0(**B0), path, batch_norm="fold")


def test_variances_must_be_positive_to_be_folded(tmp_path: Path) -> None:
    path = stored(tmp_path, bad(lambda t: t["blocks.1.0.bn2.running_var"][3].fill_(-1.0)))
    with pytest.raises(UserError, match=r"'blocks.1.0.bn2.running_var' holds variances that are not positive"):
        load_pretrained(efficientnet_b0(**B0), path, batch_norm="fold")


def test_a_batch_norm_without_a_place_is_not_dropped_in_silence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has a BatchNorm at 'blocks.0.0.bn1', where the model has no normalisation"):
        load_pretrained(efficientnet_b0(**B0, groups=None), stored(tmp_path, published("timm").state_dict()))


@pytest.mark.parametrize("options", [{"depth": 8}, {**PLAIN, "pre_activation": True}])
def test_normalisations_that_no_convolution_can_take_are_not_folded(options: dict, tmp_path: Path) -> None:
    model = resnet((3, 8, 8), 4, **options)
    path = stored(tmp_path, model.state_dict())
    with pytest.raises(
        UserError, match=r'does not come straight after an ordinary convolution.*use batch_norm = "replace"'
    ):
        load_pretrained(model, path, batch_norm="fold")


def test_another_network_of_the_same_shapes_but_its_head_is_refused(tmp_path: Path) -> None:
    model = efficientnet_b0(**B0)
    path = stored(tmp_path, {"classifier.weight": torch.ones(10, 1280), "layer.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"for which the model has no place|nothing for this model"):
        load_pretrained(model, path)
    path = stored(tmp_path, {"layer.weight": torch.ones(2)})
    with pytest.raises(UserError, match=r"it holds layer.weight; the model has stem.conv.weight, .* and 210 more"):
        load_pretrained(model, path)


class Mischief:
    """What a pickle can do: run code when it is read."""

    def __reduce__(self) -> tuple:
        return exec, ("raise SystemError('a pickle was read')",)


@pytest.mark.parametrize("name", ["weights.pth", "weights.pt", "weights.BIN", "weights.ckpt", "weights.safetensors"])
@pytest.mark.parametrize("new", [True, False])
def test_pickles_are_never_read(name: str, new: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save(Mischief(), path, _use_new_zipfile_serialization=new)
    with pytest.raises(UserError, match=r"is a pickle.*run any code.*safetensors\.torch\.save_file\(torch\.load"):
        load_pretrained(small_cnn((1, 8, 8), 2), path)


def test_what_is_no_file_of_weights_is_told_in_words(tmp_path: Path) -> None:
    model = small_cnn((1, 8, 8), 2)
    with pytest.raises(UserError, match=r"there is no file .*nowhere.safetensors"):
        load_pretrained(model, tmp_path / "nowhere.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        load_pretrained(model, tmp_path)
    path = stored(tmp_path, model.state_dict())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="not a safetensors file, or is damaged"):
        load_pretrained(model, path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_pretrained(model, path)
    with pytest.raises(UserError, match="unknown batch_norm 'folded'; did you mean 'fold'"):
        load_pretrained(model, path, batch_norm="folded")
    with pytest.raises(UserError, match="eps must be a finite number"):
        load_pretrained(model, path, eps=-1.0)


def test_the_hub_needs_its_package_and_a_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_cnn((1, 8, 8), 2)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(UserError, match="needs the package huggingface_hub; install it, or download the file"):
        load_pretrained(model, "hf://owner/name/weights.safetensors")
    with pytest.raises(UserError, match="is a pickle"):
        load_pretrained(model, "hf://owner/name/pytorch_model.bin")
    for wrong in ("hf://owner/weights.safetensors", "hf:///name/weights.safetensors"):
        with pytest.raises(UserError, match=r"is written hf://owner/name/file.safetensors"):
            load_pretrained(model, wrong)


def test_frozen_parameters_get_no_gradient_and_the_rest_that_of_the_reference():
    torch.manual_seed(0)
    model = efficientnet_b0((3, 16, 16), 4).double()
    frozen = freeze(model, ["stem.*", "stages.[0-4].*", "stages.5.[01].*", "*.norm.*"])
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not set(frozen) & set(trained)
    assert trained[0] == "stages.5.2.expand.conv.weight"
    assert len(frozen) + len(trained) == 213
    inputs, targets = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 3])
    differentiated = []
    handle = model.stages[5][1].register_forward_hook(lambda _, __, output: differentiated.append(output.requires_grad))
    norms = reference.clipped_sum(model, LOSS, Flat(1.0), inputs, targets).norms
    clipping = Flat(float(norms.median()))
    grad = ClippedGradient(model, loss=LOSS, clipping=clipping, engine="rules")
    found, expected = grad(inputs, targets), reference.clipped_sum(model, LOSS, clipping, inputs, targets)
    handle.remove()
    assert list(found.gradients) == list(expected.gradients) == trained
    torch.testing.assert_close(found.norms, expected.norms, rtol=1e-8, atol=0)
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients), rtol=1e-7, atol=1e-9)
    assert differentiated
    assert not any(differentiated), "no graph is made of what comes before the first trained layer"


def test_freezing_needs_names_that_are_there_and_leaves_something_to_train():
    model = small_cnn((1, 8, 8), 2)
    with pytest.raises(UserError, match=r"no parameter has a name like 'conv\*'"):
        freeze(model, ["0.*", "conv*"])
    with pytest.raises(UserError, match="leave nothing to train"):
        freeze(model, ["*"])
    with pytest.raises(UserError, match=r"must be a list of name patterns, such as \['0.\*'\]"):
        freeze(model, "0.*")
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert freeze(model, ["?.weight"]) == ("0.weight", "4.weight")
    assert freeze(model, []) == ()
