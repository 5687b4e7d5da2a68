"""AugMix: an image mixed with several of its own distortions, after "AugMix: A Simple Data Processing Method to Improve
Robustness and Uncertainty" (Hendrycks et al., ICLR 2020).

This is the data processing alone; the paper's consistency loss over several mixtures is not here. The operations are those the
paper keeps: none of them is among the corruptions that robustness is measured with (no colour, contrast, brightness, sharpness).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tacit.data.dataset import per_channel
from tacit.learning.image_operations import (
    autocontrast,
    check_images,
    equalize,
    layout_of,
    look_up,
    posterize,
    rotation,
    shear,
    solarize,
    translation,
    warp,
)
from tacit.privacy.validation import UserError, check_count, check_positive

_DEEPEST = 3  # the longest chain, where its depth is drawn
_MILDEST = 0.1  # the lowest level
_HARSHEST = 10.0  # the level at which a magnitude is whole


def _whole(levels: Tensor, largest: float) -> Tensor:
    """The magnitude at these levels, cut to a whole number."""
    return (levels * largest / _HARSHEST).trunc()


# From (images, levels) to tables.
_TABLES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda images, levels: autocontrast(images),
    "equalize": lambda images, levels: equalize(images),
    "posterize": lambda images, levels: posterize(images, (4 - _whole(levels, 4)).clamp(min=1)),
    "solarize": lambda images, levels: solarize(images, 256 - _whole(levels, 256)),
}

# From (levels with a sign, height, width) to matrices.
_MATRICES: Mapping[str, Callable[[Tensor, int, int], Tensor]] = {
    "rotate": lambda levels, height, width: rotation(_whole(levels, 30), height, width),
    "shear-x": lambda levels, height, width: shear(levels * 0.3 / _HARSHEST, 0 * levels),
    "shear-y": lambda levels, height, width: shear(0 * levels, levels * 0.3 / _HARSHEST),
    "translate-x": lambda levels, height, width: translation(_whole(levels, width / 3), 0 * levels),
    "translate-y": lambda levels, height, width: translation(0 * levels, _whole(levels, height / 3)),
}

OPERATIONS = (*_TABLES, *_MATRICES)


@dataclass(frozen=True)
class Draw:
    """What chance decided about each image of a batch, before any was looked at.

    >>> draw = AugMix(width=2, depth=1).draw(5, torch.Generator().manual_seed(0))
    >>> draw.operations.shape, draw.weights.shape, draw.shares.shape
    (torch.Size([1, 5, 2]), torch.Size([5, 2]), torch.Size([5]))
    """

    operations: Tensor  # [steps, batch, width], places in OPERATIONS; -1 where a chain has ended
    levels: Tensor  # [steps, batch, width]
    signs: Tensor  # [steps, batch, width], of what moves pixels: 1 or -1
    weights: Tensor  # [batch, width], of the chains in their mixture
    shares: Tensor  # [batch], of the mixture in the result


@dataclass(frozen=True)
class AugMix:
    """(1 - m) * image + m * sum_j w_j * chain_j(image), with m ~ Beta(alpha, alpha) and w ~ Dirichlet(alpha, ..., alpha).

    Each of the `width` chains is `depth` operations, or with -1 one to three, drawn from autocontrast, equalize, posterize,
    solarize, rotate, and shear and translate along x and y. Each has a level L ~ U(0.1, severity) of its own: whole degrees up to
    30 L/10, shear 0.3 L/10, whole pixels up to a third of the size times L/10, each to a side drawn by chance; posterize keeps
    4 - 4 L/10 bits, solarize turns levels from 256 - 256 L/10. Pixels that come from outside are black.

    `mean` and `std`, one number or one a channel, are the public constants that normalised the images, which lay in [0, 1] before
    (in the chains, what did not is cut to it).

    >>> images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> mixed = AugMix(severity=5)(images, torch.Generator().manual_seed(1))
    >>> mixed.shape, bool((mixed - images).flatten(1).any(dim=1).all())
    (torch.Size([4, 3, 8, 8]), True)
    """

    severity: float = 3.0
    width: int = 3
    depth: int = -1
    alpha: float = 1.0
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if not _MILDEST <= check_positive("augmentation.severity", self.severity) <= _HARSHEST:
            raise UserError(f"augmentation.severity must lie between {_MILDEST} and {_HARSHEST:g}, not {self.severity}")
        check_count("augmentation.width", self.width)
        if self.depth != -1:
            try:
                check_count("augmentation.depth", self.depth)
            except UserError as error:
                raise UserError(f"{error}, or -1 for one drawn from 1 to {_DEEPEST}") from None
        check_positive("augmentation.alpha", self.alpha)
        for name in ("mean", "std"):
            value = getattr(self, name)
            channels = 1 if np.ndim(value) == 0 else len(value)
            object.__setattr__(self, name, per_channel(name, value, channels))

    def draw(self, batch: int, generator: torch.Generator) -> Draw:
        """Random numbers for so many images."""
        steps = _DEEPEST if self.depth == -1 else self.depth
        shape, device = (steps, batch, self.width), generator.device
        operations = torch.randint(len(OPERATIONS), shape, generator=generator, device=device)
        if self.depth == -1:
            depths = torch.randint(1, _DEEPEST + 1, shape[1:], generator=generator, device=device)
            operations[torch.arange(steps, device=device).view(-1, 1, 1) >= depths] = -1
        uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        signs = 2 * torch.randint(2, shape, generator=generator, device=device) - 1
        # torch draws neither law with a generator of one's own
        seed = torch.randint(2**63 - 1, (), generator=generator, device=device)
        chance = np.random.default_rng(int(seed))
        return Draw(
            operations=operations,
            levels=_MILDEST + (self.severity - _MILDEST) * uniform,
            signs=signs,
            weights=torch.from_numpy(chance.dirichlet([self.alpha] * self.width, size=batch)),
            shares=torch.from_numpy(chance.beta(self.alpha, self.alpha, size=batch)),
        )

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        images = check_images(images)
        draw = self.draw(len(images), generator)
        mean, std = (self._by_channel(name, images) for name in ("mean", "std"))
        raw = (images * std + mean).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
        chains = raw.contiguous().repeat_interleave(self.width, dim=0)
        for operations, levels, signs in zip(draw.operations, draw.levels, draw.signs):
            places = (x.flatten().to(images.device) for x in (operations, levels, signs))
            apply_in_place(chains, *places)
        weights = draw.weights.to(images).view(-1, self.width, 1, 1, 1) / 255
        mixture = (chains.view(len(images), self.width, *images.shape[1:]) * weights).sum(dim=1)
        mixed = torch.lerp(images, (mixture - mean) / std, draw.shares.to(images).view(-1, 1, 1, 1))
        return mixed.contiguous(memory_format=layout_of(images))

    def _by_channel(self, name: str, images: Tensor) -> Tensor:
        numbers = per_channel(name, getattr(self, name), images.shape[1])
        return torch.tensor(numbers, dtype=images.dtype, device=images.device).view(1, -1, 1, 1)


def apply_in_place(images: Tensor, operations: Tensor, levels: Tensor, signs: Tensor) -> None:
    """One step of every chain: to each image of bytes its own operation, or none (-1), at its own level.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> apply_in_place(image, torch.tensor([OPERATIONS.index("solarize")]), torch.tensor([10.0]), torch.tensor([1]))
    >>> image.tolist()
    [[[[254, 253], [252, 251]]]]
    """
    height, width = images.shape[2:]
    for place, tables in enumerate(_TABLES.values()):
        if len(rows := (operations == place).nonzero().squeeze(1)):
            chosen = images[rows]
            images[rows] = look_up(chosen, tables(chosen, levels[rows]))
    matrices = torch.zeros(len(images), 2, 3, dtype=levels.dtype, device=images.device)
    for place, moved in enumerate(_MATRICES.values(), len(_TABLES)):
        rows = (operations == place).nonzero().squeeze(1)
        matrices[rows] = moved(levels[rows] * signs[rows], height, width)
    if len(rows := (operations >= len(_TABLES)).nonzero().squeeze(1)):
        images[rows] = warp(images[rows], matrices[rows])
