"""What the modules of our networks are called in checkpoints that others have published.

Those of torchvision's and timm's EfficientNet-B0, whose tensors have the shapes of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tacit.models.efficientnet import STAGES, Stage


def torchvision_names() -> dict[str, str]:
    """Our EfficientNet-B0's modules that have parameters, and the names of the same in torchvision's `efficientnet_b0`.

    >>> names = torchvision_names()
    >>> names["stem.conv"], names["stages.0.0.depthwise.conv"], names["stages.1.0.project.norm"], names["classifier"]
    ('features.0.0', 'features.1.0.block.0.0', 'features.2.0.block.3.1', 'classifier.1')
    """
    names = {**_pair("stem", "features.0.0", "features.0.1"), "classifier": "classifier.1"}
    for stage, ours, index, block in _blocks():
        theirs = f"features.{index + 1}.{block}.block"
        parts = [*([] if stage.expansion == 1 else ["expand"]), "depthwise", "excite", "project"]
        for part, there in ((part, f"{theirs}.{place}") for place, part in enumerate(parts)):
            if part == "excite":
                names |= {f"{ours}.excite.reduce": f"{there}.fc1", f"{ours}.excite.restore": f"{there}.fc2"}
            else:
                names |= _pair(f"{ours}.{part}", f"{there}.0", f"{there}.1")
    last = len(STAGES) + 1
    return {**names, **_pair("head", f"features.{last}.0", f"features.{last}.1")}


def timm_names() -> dict[str, str]:
    """Our EfficientNet-B0's modules that have parameters, and the names of the same in timm's `efficientnet_b0`.

    >>> names = timm_names()
    >>> names["stem.conv"], names["stages.0.0.depthwise.conv"], names["stages.1.0.project.norm"], names["classifier"]
    ('conv_stem', 'blocks.0.0.conv_dw', 'blocks.1.0.bn3', 'classifier')
    """
    names = {**_pair("stem", "conv_stem", "bn1"), "classifier": "classifier"}
    for stage, ours, index, block in _blocks():
        theirs = f"blocks.{index}.{block}"
        # the 1x1 convolution at the end is "linear" where there is another one at the beginning
        if stage.expansion == 1:
            convolutions = {"depthwise": "conv_dw", "project": "conv_pw"}
        else:
            convolutions = {"expand": "conv_pw", "depthwise": "conv_dw", "project": "conv_pwl"}
        for number, (part, conv) in enumerate(convolutions.items(), start=1):
            names |= _pair(f"{ours}.{part}", f"{theirs}.{conv}", f"{theirs}.bn{number}")
        names |= {
            f"{ours}.excite.reduce": f"{theirs}.se.conv_reduce",
            f"{ours}.excite.restore": f"{theirs}.se.conv_expand",
        }
    return {**names, **_pair("head", "conv_head", "bn2")}


PUBLISHED: Mapping[str, Callable[[], dict[str, str]]] = {"torchvision": torchvision_names, "timm": timm_names}


def _pair(ours: str, conv: str, norm: str) -> dict[str, str]:
    return {f"{ours}.conv": conv, f"{ours}.norm": norm}


def _blocks() -> Iterator[tuple[Stage, str, int, int]]:
    """Every block: its stage, its name, the number of the stage and its own in it."""
    for index, stage in enumerate(STAGES):
        for block in range(stage.blocks):
            yield stage, f"stages.{index}.{block}", index, block
