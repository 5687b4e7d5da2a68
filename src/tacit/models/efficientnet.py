"""EfficientNet-B0 (Tan & Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019) without BatchNorm.

GroupNorm takes its place: it looks at one example at a time, and has as many parameters, so that published weights fit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.models.networks import Activation
from tacit.privacy.validation import UserError, check_count


@dataclass(frozen=True)
class Stage:
    """Blocks of the same width; the first of them has the stride, and the network's own strides are for 224 x 224 pixels.

    >>> sum(stage.blocks for stage in STAGES)
    16
    """

    expansion: int
    channels: int
    blocks: int
    stride: int
    kernel: int


STEM, HEAD = 32, 1280
STAGES = (
    Stage(1, 16, 1, 1, 3),
    Stage(6, 24, 2, 2, 3),
    Stage(6, 40, 2, 2, 5),
    Stage(6, 80, 3, 2, 3),
    Stage(6, 112, 3, 1, 5),
    Stage(6, 192, 4, 2, 5),
    Stage(6, 320, 1, 1, 3),
)
STRIDES = (2, *(stage.stride for stage in STAGES))  # of the stem and of each stage
SMALL_STRIDES = (1, 1, 1, *STRIDES[3:])  # an eighth of the size in the end, in place of a thirty-second
_SMALL = 64  # pixels: an image with a shorter side is small
_SQUEEZE = 4  # times fewer channels than enter the block


def efficientnet_b0(
    input_shape: Sequence[int],
    classes: int,
    activation: Activation = nn.SiLU,
    *,
    groups: int | None = 8,
    dropout: float = 0.0,
    strides: Sequence[int] | None = None,
) -> nn.Sequential:
    """EfficientNet-B0 with GroupNorm: 5.3 million parameters at 1000 classes, made for few multiplications.

    `groups` of GroupNorm: as many of them as divide the channels; 8 divide them everywhere and leave no group with a single
    channel, of which nothing would be left on a map of one pixel. With None there is no normalisation, and every convolution has
    a bias: what a network with BatchNorm becomes when that is folded into its convolutions. `dropout` is the rate before the
    last layer; the paper has 0.2, for far more examples and no noise.

    `strides` are those of the stem and of the seven stages, eight numbers. The paper's, (2, 1, 2, 2, 2, 1, 2, 1), make one pixel
    of 32 x 32; so for images with a side below 64 pixels the default is (1, 1, 1, 2, 2, 1, 2, 1), which leave 4 x 4. Strides have
    no weights: those that were learned with other strides fit all the same.

    >>> sum(p.numel() for p in efficientnet_b0((3, 224, 224), 1000).parameters())
    5288548
    >>> small, large = torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 64, 64)
    >>> efficientnet_b0((3, 32, 32), 10)[:3](small).shape, efficientnet_b0((3, 64, 64), 10)[:3](large).shape
    (torch.Size([1, 1280, 4, 4]), torch.Size([1, 1280, 2, 2]))
    """
    if strides is None:
        strides = SMALL_STRIDES if min(input_shape[1:]) < _SMALL else STRIDES
    if len(strides) != len(STRIDES):
        raise UserError(
            f"strides are {len(STRIDES)} numbers, of the stem and of the {len(STAGES)} stages, not {list(strides)}"
        )
    if not 0 <= dropout < 1:
        raise UserError(f"dropout must be at least 0 and below 1, not {dropout!r}")
    first, *later = (check_count("each of strides", stride) for stride in strides)
    style = _Style(activation, groups)
    stem = style.convolution(input_shape[0], STEM, 3, first)
    channels, stages = STEM, []
    for stage, stride in zip(STAGES, later, strict=True):
        blocks = []
        for block in range(stage.blocks):
            blocks.append(_Block(channels, stage, 1 if block else stride, style))
            channels = stage.channels
        stages.append(nn.Sequential(*blocks))
    layers: list[tuple[str, nn.Module]] = [
        ("stem", stem),
        ("stages", nn.Sequential(*stages)),
        ("head", style.convolution(channels, HEAD, 1)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("classifier", nn.Linear(HEAD, classes)),
    ]
    if dropout:
        layers.insert(-1, ("dropout", nn.Dropout(dropout)))
    return nn.Sequential(OrderedDict(layers))


@dataclass(frozen=True)
class _Style:
    """What all blocks of the network have in common."""

    activation: Activation
    groups: int | None

    def __post_init__(self) -> None:
        if self.groups is not None:
            check_count("groups", self.groups)

    def convolution(
        self, channels: int, width: int, kernel: int, stride: int = 1, *, depthwise: bool = False, active: bool = True
    ) -> nn.Sequential:
        """A convolution, its normalisation and, if it is to be `active`, an activation; `depthwise`: each channel by itself."""
        conv = nn.Conv2d(
            channels,
            width,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=channels if depthwise else 1,
            bias=self.groups is None,
        )
        norm = nn.Identity() if self.groups is None else nn.GroupNorm(math.gcd(width, self.groups), width)
        layers: list[tuple[str, nn.Module]] = [("conv", conv), ("norm", norm)]
        if active:
            layers.append(("activation", self.activation()))
        return nn.Sequential(OrderedDict(layers))


class _Block(nn.Module):
    """The inverted bottleneck: more channels, a depthwise convolution, their excitation, few channels; and a way around."""

    def __init__(self, channels: int, stage: Stage, stride: int, style: _Style) -> None:
        super().__init__()
        wide = channels * stage.expansion
        self.expand = style.convolution(channels, wide, 1) if wide != channels else nn.Identity()
        self.depthwise = style.convolution(wide, wide, stage.kernel, stride, depthwise=True)
        self.excite = _Excitation(wide, max(1, channels // _SQUEEZE), style.activation())
        self.project = style.convolution(wide, stage.channels, 1, active=False)
        self.around = stride == 1 and channels == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.project(self.excite(self.depthwise(self.expand(x))))
        return found + x if self.around else found


class _Excitation(nn.Module):
    """Each channel times a number in (0, 1), which the means of all channels of the same example decide."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        self.reduce, self.activation = nn.Conv2d(channels, squeezed, 1), activation
        self.restore = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean(dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.restore(self.activation(self.reduce(means))))
