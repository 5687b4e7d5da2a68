"""Residual networks without BatchNorm: ResNet (He et al., 2016) and Wide ResNet (Zagoruyko & Komodakis, 2016) for small images.

As private training wants them: GroupNorm, which looks at one example at a time, and convolutions with standardised weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from tacit.gradients.standardized import WeightStandardizedConv2d
from tacit.models.networks import Activation
from tacit.privacy.validation import UserError, check_choice, check_count

SHORTCUTS = ("convolution", "identity")


def resnet(
    input_shape: Sequence[int],
    classes: int,
    activation: Activation = nn.SiLU,
    *,
    depth: int = 20,
    width: int = 1,
    pre_activation: bool = False,
    shortcut: str = "identity",
    groups: int | None = 16,
    standardized: bool = True,
    dropout: float = 0.0,
) -> nn.Sequential:
    """ResNet of depth 6n + 2, as for CIFAR-10: n blocks at each of 16, 32 and 64 times `width` channels.

    Where the shape changes, the `shortcut` is the "identity" at every other pixel with zeros for the new channels, or a 1x1
    "convolution". `groups` of GroupNorm: as many of them as divide the channels; None for no normalisation at all. `dropout`
    is the rate between the two convolutions of a block.

    >>> sum(p.numel() for p in resnet((3, 32, 32), 10).parameters())
    269722
    >>> resnet((3, 32, 32), 10, depth=18)
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: depth must be 6n + 2 with n of at least 1 (8, 14, 20, ...), not 18
    """
    style = _Style(activation, pre_activation, shortcut, groups, standardized, dropout)
    return _network(input_shape, classes, _blocks_a_stage(depth, 2), width, style)


def wide_resnet(
    input_shape: Sequence[int],
    classes: int,
    activation: Activation = nn.SiLU,
    *,
    depth: int = 16,
    width: int = 4,
    pre_activation: bool = True,
    shortcut: str = "convolution",
    groups: int | None = 16,
    standardized: bool = True,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Wide ResNet of depth 6n + 4: `width` times the channels, normalisation and activation before each convolution.

    The arguments are those of `resnet`. The paper on private optimizers uses dropout and does not give its rate, so there is
    none by default; the one on Wide ResNets has 0.3.

    >>> sum(p.numel() for p in wide_resnet((3, 32, 32), 10).parameters())
    2748890
    """
    style = _Style(activation, pre_activation, shortcut, groups, standardized, dropout)
    return _network(input_shape, classes, _blocks_a_stage(depth, 4), width, style)


@dataclass(frozen=True)
class _Style:
    """What all blocks of a network have in common."""

    activation: Activation
    pre_activation: bool
    shortcut: str
    groups: int | None
    standardized: bool
    dropout: float

    def __post_init__(self) -> None:
        check_choice("shortcut", self.shortcut, SHORTCUTS)
        if self.groups is not None:
            check_count("groups", self.groups)
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must be at least 0 and below 1, not {self.dropout!r}")

    def conv(self, channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        kind = WeightStandardizedConv2d if self.standardized else nn.Conv2d
        return kind(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)

    def norm(self, channels: int) -> list[nn.Module]:
        return [] if self.groups is None else [nn.GroupNorm(math.gcd(channels, self.groups), channels)]

    def before_convolution(self, channels: int) -> list[nn.Module]:
        return [*self.norm(channels), self.activation()]


class _Block(nn.Module):
    """after(body(before(x)) + shortcut): two convolutions, and a way around them."""

    def __init__(self, channels: int, width: int, stride: int, style: _Style) -> None:
        super().__init__()
        pre = style.pre_activation
        first, second = style.conv(channels, width, 3, stride), style.conv(width, width, 3)
        dropout = [nn.Dropout(style.dropout)] if style.dropout else []
        between = [*style.before_convolution(width), *dropout]
        self.before = nn.Sequential(*style.before_convolution(channels)) if pre else nn.Identity()
        self.body = nn.Sequential(first, *between, second, *([] if pre else style.norm(width)))
        self.after = nn.Identity() if pre else style.activation()
        self.changes = stride != 1 or width != channels
        if not self.changes:
            self.shortcut: nn.Module = nn.Identity()
        elif style.shortcut == "identity":
            self.shortcut = _Padded(width - channels, stride)
        else:
            self.shortcut = nn.Sequential(style.conv(channels, width, 1, stride), *([] if pre else style.norm(width)))

    def forward(self, x: Tensor) -> Tensor:
        before = self.before(x)
        # as in Wide ResNet: an untouched shortcut takes what enters the block, another one what enters the convolutions
        around: Tensor = self.shortcut(before if self.changes else x)
        found: Tensor = self.after(self.body(before) + around)
        return found


class _Padded(nn.Module):
    """Every so many pixels, and zeros for the new channels: the shortcut without parameters."""

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))


def _network(input_shape: Sequence[int], classes: int, blocks: int, width: int, style: _Style) -> nn.Sequential:
    check_count("width", width)
    channels = 16
    layers: list[nn.Module] = [style.conv(input_shape[0], channels, 3)]
    if not style.pre_activation:
        layers += style.before_convolution(channels)
    for stage in range(3):
        for block in range(blocks):
            wide = 16 * width * 2**stage
            layers.append(_Block(channels, wide, 2 if stage and not block else 1, style))
            channels = wide
    if style.pre_activation:
        layers += style.before_convolution(channels)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _blocks_a_stage(depth: int, rest: int) -> int:
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 6 + rest or (depth - rest) % 6:
        allowed = ", ".join(str(6 * n + rest) for n in (1, 2, 3))
        raise UserError(f"depth must be 6n + {rest} with n of at least 1 ({allowed}, ...), not {depth!r}")
    return (depth - rest) // 6
