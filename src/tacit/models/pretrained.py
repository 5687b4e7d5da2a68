"""Pre-trained weights: what was learned from public data costs no privacy.

Files are safetensors, which hold numbers and nothing else. Every tensor of a file is used, or the report says why not; every
tensor of the model comes from the file, or the report calls it fresh.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tacit.models.folding import COUNTER, MEAN, VARIANCE, convolutions_of_norms, fold_norms, folded
from tacit.models.published import PUBLISHED
from tacit.privacy.files import expanded, read_whole
from tacit.privacy.validation import UserError, check_choice, check_not_negative

LARGEST_WEIGHTS = 2**34
"""Bytes of a file of weights, which is read whole: 16 GiB."""
BATCH_NORMS = ("replace", "fold")
_HUB = "hf://"
_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")
_PICKLED = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))  # how such a file begins
_OURS = "tacit"
_FEW = 4  # names that are listed in a sentence


@dataclass(frozen=True)
class Pretrained:
    """What a checkpoint gave a model, tensor by tensor.

    `loaded` and `fresh` are tensors of the model, together all it has; `unused` are tensors of the checkpoint, each with the
    reason. `naming` says whose names the checkpoint has, `sha256` which file it was.

    >>> print(Pretrained("a.safetensors", "0" * 64, "tacit", ("0.weight",), ("1.weight",), {"2.weight": "no such tensor"}))
    pre-trained weights of a.safetensors: 1 tensor of 2; fresh: 1.weight; not used (no such tensor): 2.weight
    """

    source: str
    sha256: str
    naming: str
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    unused: Mapping[str, str]

    def __str__(self) -> str:
        whose = "" if self.naming == _OURS else f", which has the names of {self.naming}"
        total = len(self.loaded) + len(self.fresh)
        noun = "tensor" if len(self.loaded) == 1 else "tensors"
        parts = [f"pre-trained weights of {self.source}{whose}: {len(self.loaded)} {noun} of {total}"]
        if self.fresh:
            parts.append(f"fresh: {_listed(self.fresh)}")
        for reason in dict.fromkeys(self.unused.values()):
            names = [name for name, given in self.unused.items() if given == reason]
            parts.append(f"not used ({reason}): {_listed(names)}")
        return "; ".join(parts)


def load_pretrained(
    model: nn.Module, source: str | os.PathLike[str], *, batch_norm: str = "replace", eps: float = 1e-5
) -> Pretrained:
    """Give a model the weights of a `.safetensors` file, or of `hf://owner/name/file.safetensors`, and say what became of each.

    Names are the model's own (as in the `model.safetensors` of a run); an EfficientNet-B0 also takes the files of torchvision
    and timm, whole. If the last layer is of another shape, because there are other classes, it stays as fresh as it was; any
    other difference in shape is an error. Until everything has been checked, the model is left as it is.

    What a BatchNorm of the checkpoint becomes is for `batch_norm` to say. "replace": its scale and shift go to the GroupNorm in
    its place, its statistics are not used; training must get over the difference. "fold": it goes into the convolution
    before it, `eps` included (which no file holds: 1e-5 unless its makers say otherwise), and the model, which then has no
    normalisation, computes what the original computed; make the optimizer afterwards, since there are new parameters.

    >>> import tempfile
    >>> old, new = (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, classes)) for classes in (2, 5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     safetensors.torch.save_file(old.state_dict(), f"{folder}/old.safetensors")
    ...     report = load_pretrained(new, f"{folder}/old.safetensors")
    >>> torch.equal(new[0].weight, old[0].weight), report.loaded, report.fresh
    (True, ('0.weight', '0.bias'), ('2.weight', '2.bias'))
    """
    check_choice("batch_norm", batch_norm, BATCH_NORMS)
    check_not_negative("eps", eps)
    content = _content(source)
    checkpoint = _Checkpoint.of(str(source), content, model)
    if batch_norm == "fold":
        target = copy.deepcopy(model)
        fold_norms(target)
        places = checkpoint.shapes_checked(target)
        checkpoint.fold(convolutions_of_norms(target), eps)
    else:
        places = checkpoint.shapes_checked(model)
        checkpoint.replace(places)
    checkpoint.conclude(places, _head(model))
    if batch_norm == "fold":
        fold_norms(model)
    model.load_state_dict({**model.state_dict(), **checkpoint.tensors})
    return Pretrained(
        str(source),
        hashlib.sha256(content).hexdigest(),
        checkpoint.naming,
        tuple(name for name in places if name in checkpoint.tensors),
        tuple(name for name in places if name not in checkpoint.tensors),
        checkpoint.unused,
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Parameters whose names fit a pattern (`*` and `?` as in file names) stay as they are from now on; returns their names.

    They get no gradient, are not clipped and get no noise: they cost no privacy, and no work where no other comes before them.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    >>> freeze(model, ["0.*"])
    ('0.weight', '0.bias')
    >>> freeze(model, ["frist.*"])
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: frozen: no parameter has a name like 'frist.*' (there are: 0.weight ... 2.bias)
    """
    if isinstance(patterns, str):
        raise UserError(f"frozen must be a list of name patterns, such as [{patterns!r}]")
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"frozen: no parameter has a name like {pattern!r} (there are: {names[0]} ... {names[-1]})")
    chosen = tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    if len(chosen) == len(names):
        raise UserError(f"frozen: {list(patterns)} leave nothing to train; take out what fits the last layer")
    for name in chosen:
        model.get_parameter(name).requires_grad_(False)
    return chosen


@dataclass
class _Checkpoint:
    """A checkpoint under our names. What has no use is taken out of `tensors`, and noted in `unused` as the file calls it."""

    source: str
    naming: str
    tensors: dict[str, Tensor]
    original: dict[str, str]
    unused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, content: bytes, model: nn.Module) -> _Checkpoint:
        """Under the names that fit most tensors of the model."""
        tensors = _tensors(source, content)
        own = set(model.state_dict())
        modules = {name for name, _ in model.named_modules()}
        namings = {_OURS: {name: name for name in tensors}}
        for naming, names in PUBLISHED.items():
            table = names()
            if modules >= set(table):
                ours = {theirs: name for name, theirs in table.items()}
                parts = {name: name.rpartition(".") for name in tensors}
                namings[naming] = {
                    f"{ours[module]}.{last}": name for name, (module, _, last) in parts.items() if module in ours
                }
        naming = max(namings, key=lambda key: len(own & set(namings[key])))
        original = namings[naming]
        for stranger in sorted(set(tensors) - set(original.values())):
            raise UserError(
                f"{source} has the names of {naming} and holds {stranger!r}, for which the model has no place; "
                "it is of another network"
            )
        return cls(source, naming, {name: tensors[there] for name, there in original.items()}, original)

    def leave(self, name: str, reason: str) -> None:
        """Do not use a tensor."""
        del self.tensors[name]
        self.unused[self.original[name]] = reason

    def shapes_checked(self, model: nn.Module) -> dict[str, torch.Size]:
        """The shapes of the model's tensors. Only the last layer may be of another shape, and then is not used at all."""
        places = {name: tensor.shape for name, tensor in model.state_dict().items()}
        expected = dict(places)
        for norm, conv in convolutions_of_norms(model).items():
            if f"{norm}.weight" not in places and f"{conv}.bias" in places:  # it is to be folded
                expected |= dict.fromkeys(_vectors(norm), places[f"{conv}.bias"])
        head, others = _head(model), list[str]()
        for name, tensor in self.tensors.items():
            if name not in expected:
                continue
            if not (tensor.is_floating_point() and bool(tensor.isfinite().all())):
                raise UserError(
                    f"{self.source}: {self.original[name]!r} holds something else than finite real numbers; take another file"
                )
            if tensor.shape == expected[name]:
                continue
            if _module(name) != head:
                raise UserError(
                    f"{self.source}: {self.original[name]!r} is {list(tensor.shape)} there and {list(expected[name])} here, and "
                    "only the last layer may differ; choose the network, and as many channels, as it was trained with"
                )
            others.append(f"{list(tensor.shape)} there and {list(expected[name])} here")
        if others:
            widest = max(others, key=len)  # the weight's, which tells more than the bias's
            for name in [name for name in self.tensors if _module(name) == head]:
                self.leave(name, f"the last layer is {widest}")
        return places

    def replace(self, places: Mapping[str, torch.Size]) -> None:
        """Scale and shift of every BatchNorm are for the GroupNorm in its place; its statistics are left."""
        for norm in self._batch_norms(places):
            if f"{norm}.weight" in self.tensors and f"{norm}.weight" not in places:
                raise UserError(
                    f"{self.source} has a BatchNorm at {_module(self.original[f'{norm}.{MEAN}'])!r}, where the model has no "
                    'normalisation with a scale; use batch_norm = "fold"'
                )
            for statistic in (MEAN, VARIANCE, COUNTER):
                if f"{norm}.{statistic}" in self.tensors:
                    self.leave(f"{norm}.{statistic}", "statistics of BatchNorm, which GroupNorm replaces")

    def fold(self, norms: Mapping[str, str], eps: float) -> None:
        """Every BatchNorm goes into the convolution before it."""
        for norm, conv in norms.items():
            if not any(name in self.tensors for name in _vectors(norm)):
                continue  # it is folded already
            for name in (f"{norm}.{MEAN}", f"{norm}.{VARIANCE}", f"{conv}.weight"):
                if name not in self.tensors:
                    raise UserError(
                        f"{self.source} has no {name!r}, so that the normalisation there cannot be folded; "
                        'use batch_norm = "replace"'
                    )
            if bool((self.tensors[f"{norm}.{VARIANCE}"] + eps <= 0).any()):
                there = self.original[f"{norm}.{VARIANCE}"]
                raise UserError(f"{self.source}: {there!r} holds variances that are not positive; take another file")
            self.tensors |= folded(self.tensors, norm, conv, eps)
            for name in _vectors(norm):
                self.tensors.pop(name, None)
            if f"{norm}.{COUNTER}" in self.tensors:
                self.leave(f"{norm}.{COUNTER}", "a counter of BatchNorm")

    def conclude(self, places: Mapping[str, torch.Size], head: str) -> None:
        """Leave what has no place, and refuse a checkpoint that has too little."""
        for name in [name for name in self.tensors if name not in places]:
            self.leave(name, "the model has no such tensor")
        body = [name for name in places if _module(name) != head]
        if not self.tensors or (body and not any(name in self.tensors for name in body)):
            raise UserError(
                f"{self.source} has nothing for this model: it holds {_listed(list(self.original.values()))}; "
                f"the model has {_listed(list(places))}"
            )
        missing = next((name for name in body if name not in self.tensors), None)
        if self.naming != _OURS and missing is not None:
            raise UserError(
                f"{self.source} has the names of {self.naming} and nothing for {missing!r}; of published networks only the last "
                "layer may be missing"
            )

    def _batch_norms(self, places: Mapping[str, torch.Size]) -> list[str]:
        """The modules of which the checkpoint has running statistics and the model has none."""
        return [_module(name) for name in self.tensors if name.endswith(f".{MEAN}") and name not in places]


def _content(source: str | os.PathLike[str]) -> bytes:
    """The bytes of a file, fetched first if it is on the hub: what is hashed is what is loaded."""
    text = str(source)
    if text.lower().endswith(_PICKLES):
        raise _refused_pickle(text)
    path = _fetched(text) if text.startswith(_HUB) else expanded(source)
    try:
        return read_whole(path, largest=LARGEST_WEIGHTS)
    except FileNotFoundError:
        raise UserError(f"there is no file {path} with pre-trained weights") from None
    except OSError as error:
        raise UserError(f"the pre-trained weights {path} cannot be read: {error.strerror}") from None


def _tensors(source: str, content: bytes) -> dict[str, Tensor]:
    """All tensors of a file, in the order of their names."""
    try:
        return dict(sorted(safetensors.torch.load(content).items()))
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        if content.startswith(_PICKLED) and content[8:9] != b"{":  # with which a safetensors header begins
            raise _refused_pickle(source) from None
        raise UserError(f"{source} is not a safetensors file, or is damaged: {str(error)[:200]}") from None


def _fetched(source: str) -> Path:
    """Where the hub's own package has put a file of `hf://owner/name/file.safetensors`."""
    owner, _, rest = source.removeprefix(_HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise UserError(f"a file on the hub is written hf://owner/name/file.safetensors, not {source!r}")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"{source} needs the package huggingface_hub; install it, or download the file and give its path"
        ) from None
    try:
        return Path(hub.hf_hub_download(repo_id=f"{owner}/{name}", filename=file))
    except Exception as error:  # of classes that differ from version to version, some of them of its network library
        raise UserError(
            f"{source} cannot be fetched ({type(error).__name__}); check the name and the network, or download the file and give "
            "its path"
        ) from None


def _refused_pickle(source: str) -> UserError:
    return UserError(
        f"{source} is a pickle, and reading a pickle can run any code; convert it where you trust it: "
        f"safetensors.torch.save_file(torch.load({Path(source).name!r}, weights_only=True), 'weights.safetensors')"
    )


def _head(model: nn.Module) -> str:
    """The last module that has parameters."""
    return _module([name for name, _ in model.named_parameters()][-1])


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _vectors(norm: str) -> list[str]:
    return [f"{norm}.{name}" for name in ("weight", "bias", MEAN, VARIANCE)]


def _listed(names: Sequence[str]) -> str:
    """All names if they are few, else the first ones and how many there are."""
    if len(names) <= _FEW:
        return ", ".join(names)
    return f"{', '.join(names[: _FEW - 1])} and {len(names) - _FEW + 1} more"
