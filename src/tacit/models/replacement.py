"""BatchNorm computes with other examples, so it cannot be trained privately; GroupNorm takes its place."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tacit.privacy.validation import check_count


def without_batch_norm(model: nn.Module, *, groups: int = 32) -> nn.Module:
    """A copy of the model with a GroupNorm in place of every BatchNorm, with the same affine parameters.

    Each has as many groups as divide its channels, at most `groups`. The original is left as it is.

    *Guarantee.* No layer of the copy is a BatchNorm; every example is normalised by itself.

    >>> model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
    >>> without_batch_norm(model)[1]
    GroupNorm(16, 48, ...)
    """
    check_count("groups", groups)
    if isinstance(model, _BatchNorm):
        return _group_norm(model, groups)
    replaced = copy.deepcopy(model)
    for parent in list(replaced.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _group_norm(child, groups))
    return replaced


def _group_norm(norm: _BatchNorm, groups: int) -> nn.GroupNorm:
    divisor = math.gcd(norm.num_features, groups)
    replacement = nn.GroupNorm(divisor, norm.num_features, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        with torch.no_grad():
            replacement.weight.copy_(norm.weight)
            replacement.bias.copy_(norm.bias)
        replacement.to(device=norm.weight.device, dtype=norm.weight.dtype)
    return replacement.train(norm.training)
