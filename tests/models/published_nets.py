"""EfficientNet-B0 with BatchNorm, built as torchvision and as timm nest their modules, so that their tensors have their names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# expansion, channels, blocks, stride, kernel; strides for 32 x 32 pixels
STAGES = [
    (1, 16, 1, 1, 3),
    (6, 24, 2, 1, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
]


def conv(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False)


class TorchvisionSqueeze(nn.Module):
    def __init__(self, wide: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(wide, squeezed, 1), nn.Conv2d(squeezed, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(self.avgpool(x)))))


class TorchvisionBlock(nn.Module):
    def __init__(self, channels: int, width: int, expansion: int, stride: int, kernel: int, eps: float) -> None:
        super().__init__()
        wide = channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(nn.Sequential(conv(channels, wide, 1), nn.BatchNorm2d(wide, eps), nn.SiLU()))
        depthwise = conv(wide, wide, kernel, stride, groups=wide)
        layers.append(nn.Sequential(depthwise, nn.BatchNorm2d(wide, eps), nn.SiLU()))
        layers.append(TorchvisionSqueeze(wide, channels // 4))
        layers.append(nn.Sequential(conv(wide, width, 1), nn.BatchNorm2d(width, eps)))
        self.block = nn.Sequential(*layers)
        self.residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x if self.residual else self.block(x)


class Torchvision(nn.Module):
    def __init__(self, classes: int, eps: float = 1e-5) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(conv(3, 32, 3), nn.BatchNorm2d(32, eps), nn.SiLU())]
        channels = 32
        for expansion, width, blocks, stride, kernel in STAGES:
            stage = []
            for block in range(blocks):
                stage.append(TorchvisionBlock(channels, width, expansion, 1 if block else stride, kernel, eps))
                channels = width
            layers.append(nn.Sequential(*stage))
        layers.append(nn.Sequential(conv(channels, 1280, 1), nn.BatchNorm2d(1280, eps), nn.SiLU()))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class TimmSqueeze(nn.Module):
    def __init__(self, wide: int, squeezed: int) -> None:
        super().__init__()
        self.conv_reduce, self.conv_expand = nn.Conv2d(wide, squeezed, 1), nn.Conv2d(squeezed, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv_expand(F.silu(self.conv_reduce(x.mean((2, 3), keepdim=True)))))


class TimmFirst(nn.Module):
    def __init__(self, channels: int, width: int, kernel: int, eps: float) -> None:
        super().__init__()
        self.conv_dw, self.bn1 = conv(channels, channels, kernel, groups=channels), nn.BatchNorm2d(channels, eps)
        self.se = TimmSqueeze(channels, channels // 4)
        self.conv_pw, self.bn2 = conv(channels, width, 1), nn.BatchNorm2d(width, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(self.se(F.silu(self.bn1(self.conv_dw(x))))))


class TimmBlock(nn.Module):
    def __init__(self, channels: int, width: int, expansion: int, stride: int, kernel: int, eps: float) -> None:
        super().__init__()
        wide = channels * expansion
        self.conv_pw, self.bn1 = conv(channels, wide, 1), nn.BatchNorm2d(wide, eps)
        self.conv_dw, self.bn2 = conv(wide, wide, kernel, stride, groups=wide), nn.BatchNorm2d(wide, eps)
        self.se = TimmSqueeze(wide, channels // 4)
        self.conv_pwl, self.bn3 = conv(wide, width, 1), nn.BatchNorm2d(width, eps)
        self.residual = stride == 1 and channels == width

    def forward(self, x: Tensor) -> Tensor:
        inner = self.se(F.silu(self.bn2(self.conv_dw(F.silu(self.bn1(self.conv_pw(x)))))))
        inner = self.bn3(self.conv_pwl(inner))
        return inner + x if self.residual else inner


class Timm(nn.Module):
    def __init__(self, classes: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = conv(3, 32, 3), nn.BatchNorm2d(32, eps)
        channels, stages = 32, []
        for expansion, width, blocks, stride, kernel in STAGES:
            stage: list[nn.Module] = []
            for block in range(blocks):
                if expansion == 1:
                    stage.append(TimmFirst(channels, width, kernel, eps))
                else:
                    stage.append(TimmBlock(channels, width, expansion, 1 if block else stride, kernel, eps))
                channels = width
            stages.append(nn.Sequential(*stage))
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = conv(channels, 1280, 1), nn.BatchNorm2d(1280, eps)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.silu(self.bn1(self.conv_stem(x))))
        return self.classifier(F.silu(self.bn2(self.conv_head(x))).mean(dim=(2, 3)))


NETS = {"torchvision": Torchvision, "timm": Timm}


def published(naming: str, classes: int = 10, eps: float = 1e-5) -> nn.Module:
    """A network of this naming whose BatchNorms have seen something, in double precision, for evaluation."""
    torch.manual_seed(1)
    model = NETS[naming](classes, eps).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.3, 1.5)
    return model
