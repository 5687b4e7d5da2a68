"""A small transformer that classifies token sequences, made of layers whose per-example gradients have a rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.models.networks import Activation
from tacit.privacy.validation import UserError, check_count


def transformer(
    vocabulary: int,
    length: int,
    classes: int,
    activation: Activation = nn.GELU,
    *,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
) -> nn.Sequential:
    """Takes tokens [batch, up to `length`], gives logits [batch, classes]: learned positions, normalisation before each part,
    the mean over positions at the end.

    >>> transformer(1000, 32, 2)(torch.zeros(4, 32, dtype=torch.long)).shape
    torch.Size([4, 2])
    """
    check_count("layers", layers)
    if check_count("width", width) % check_count("heads", heads):
        raise UserError(f"width must be a multiple of heads ({heads}), not {width}")
    parts: list[nn.Module] = []
    for _ in range(layers):
        forward = nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))
        parts += [_Residual(width, _Attention(width, heads)), _Residual(width, forward)]
    return nn.Sequential(
        _Embedded(vocabulary, length, width), *parts, nn.LayerNorm(width), _Mean(), nn.Linear(width, classes)
    )


class _Embedded(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        # one row of positions an example, so that their gradients are an example's own
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        found: Tensor = self.tokens(tokens) + self.positions(positions)
        return found


class _Residual(nn.Module):
    def __init__(self, width: int, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(self.norm(x))
        return found


class _Attention(nn.Module):
    """Multi-head self-attention of plain linear layers, where `nn.MultiheadAttention` would hide its parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.join(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return found


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)
