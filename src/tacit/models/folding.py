"""A BatchNorm whose statistics do not change any more is a part of the convolution before it: s (W x + b - mean) + shift.

With s = scale / sqrt(variance + eps), the convolution W' = s W with the bias s (b - mean) + shift computes the same.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from tacit.privacy.validation import UserError

MEAN, VARIANCE, COUNTER = "running_mean", "running_var", "num_batches_tracked"


def convolutions_of_norms(model: nn.Module) -> dict[str, str]:
    """The normalisations, by name, that come straight after a convolution in an `nn.Sequential`, each with its convolution.

    An `nn.Identity` in such a place counts: it is where a normalisation was that has been folded already.

    >>> convolutions_of_norms(nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8), nn.ReLU()))
    {'1': '0'}
    """
    found = {}
    for prefix, parent in model.named_modules():
        if not isinstance(parent, nn.Sequential):
            continue
        children = list(parent.named_children())
        for (before, conv), (name, norm) in pairwise(children):
            # of no other kind: what standardises its weight undoes the scale
            if type(conv) is nn.Conv2d and isinstance(norm, nn.GroupNorm | nn.Identity):
                found[_joined(prefix, name)] = _joined(prefix, before)
    return found


def check_foldable(model: nn.Module) -> None:
    """Refuse a model with a normalisation that no convolution can take over.

    >>> check_foldable(nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 8, 1)))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: the normalisation '0' does not come straight after an ordinary convolution, so nothing
    can be folded there; use batch_norm = "replace"
    """
    pairs = convolutions_of_norms(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.GroupNorm) and name not in pairs:
            raise UserError(
                f"the normalisation {name!r} does not come straight after an ordinary convolution, so nothing can be folded "
                'there; use batch_norm = "replace"'
            )


def fold_norms(model: nn.Module) -> None:
    """Take every normalisation out of a model, in place, and give the convolution before it a bias (zeros, if it had none).

    Parameters are new: make the optimizer afterwards. A second time changes nothing.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.GroupNorm(2, 8))
    >>> fold_norms(model)
    >>> model[1], model[0].bias.shape
    (Identity(), torch.Size([8]))
    """
    check_foldable(model)
    for norm, conv in convolutions_of_norms(model).items():
        module = model.get_submodule(norm)
        if not isinstance(module, nn.GroupNorm):
            continue
        layer = model.get_submodule(conv)
        assert isinstance(layer, nn.Conv2d)
        if layer.bias is None:
            layer.bias = nn.Parameter(layer.weight.new_zeros(layer.out_channels))
        parent, _, name = norm.rpartition(".")
        setattr(model.get_submodule(parent), name, nn.Identity())


def folded(tensors: dict[str, Tensor], norm: str, conv: str, eps: float) -> dict[str, Tensor]:
    """Weight and bias, by name and in double precision, of a convolution that has taken over the BatchNorm after it.

    >>> ones = {"conv.weight": torch.ones(1, 1, 1, 1), "norm.running_mean": torch.ones(1), "norm.running_var": torch.ones(1)}
    >>> found = folded({**ones, "norm.weight": 2 * torch.ones(1), "norm.bias": torch.ones(1)}, "norm", "conv", eps=0.0)
    >>> found["conv.weight"].item(), found["conv.bias"].item()  # 2 (x - 1) + 1
    (2.0, -1.0)
    """
    weight = tensors[f"{conv}.weight"]

    def of(name: str, otherwise: float) -> Tensor:
        return tensors[name].double() if name in tensors else torch.full((len(weight),), otherwise, dtype=torch.float64)

    scale = of(f"{norm}.weight", 1.0) / (of(f"{norm}.{VARIANCE}", 1.0) + eps).sqrt()
    bias = scale * (of(f"{conv}.bias", 0.0) - of(f"{norm}.{MEAN}", 0.0)) + of(f"{norm}.bias", 0.0)
    scaled = scale.view(-1, *(1,) * (weight.dim() - 1)) * weight.double()
    return {f"{conv}.weight": scaled, f"{conv}.bias": bias}


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
