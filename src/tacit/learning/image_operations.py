"""What can be done to a batch of images, to each as numbers of its own say.

Grey levels are bytes here, as in Pillow, whose `ImageOps` and `Image.transform` these functions follow. Those that change each
grey level alone give *tables*, [batch, channels, 256], which `look_up` applies; those that move pixels give *matrices*,
[batch, 2, 3], from the place a pixel goes to, to the place it comes from, which `warp` applies. Nothing looks at two images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tacit.privacy.validation import UserError


def check_images(inputs: Any) -> Tensor:
    """The inputs, if they are float images, [batch, channels, height, width], with their channels first or last in memory.

    >>> check_images(torch.zeros(2, 64))
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: augmentation is for images, [batch, channels, height, width], not for inputs of shape
    [2, 64]; leave it out of the recipe
    """
    if not isinstance(inputs, Tensor):
        raise UserError(
            f"augmentation is for one tensor of images an example, not for {type(inputs).__name__}; leave it out of the recipe"
        )
    if inputs.dim() != 4:
        raise UserError(
            "augmentation is for images, [batch, channels, height, width], not for inputs of shape "
            f"{list(inputs.shape)}; leave it out of the recipe"
        )
    if not inputs.is_floating_point():
        raise UserError(
            f"augmentation is for images of floats, not of {inputs.dtype}; convert and normalise them first"
        )
    return inputs.contiguous(memory_format=layout_of(inputs))


def layout_of(images: Tensor) -> torch.memory_format:
    """Whether the channels come last in memory.

    >>> layout_of(torch.zeros(2, 3, 4, 4)), layout_of(torch.zeros(2, 4, 4, 3).movedim(3, 1))
    (torch.contiguous_format, torch.channels_last)
    """
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def autocontrast(images: Tensor) -> Tensor:
    """Tables that stretch each channel, so that its darkest level becomes 0 and its lightest 255; one grey stays as it is.

    (Or 254: as in Pillow, what rounding leaves just below a whole number is cut to the one before.)

    >>> images = torch.tensor([[[[50, 60, 101]]]], dtype=torch.uint8)
    >>> look_up(images, autocontrast(images)).tolist()
    [[[[0, 50, 255]]]]
    """
    darkest = images.amin(dim=(2, 3)).double().unsqueeze(2)
    lightest = images.amax(dim=(2, 3)).double().unsqueeze(2)
    # rounded where Pillow's arithmetic rounds, as results are cut to whole numbers (a number / tensor would be its reciprocal's)
    scale = torch.full_like(darkest, 255.0) / (lightest - darkest).clamp(min=1)
    stretched = (_levels(images) * scale + -darkest * scale).clamp(0, 255)
    return torch.where(lightest > darkest, stretched, _levels(images)).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """Tables after which the grey levels of each channel are about equally frequent.

    Level v becomes (step // 2 + how many pixels are darker than v) // step, with step a 255th of all pixels but the lightest.

    >>> images = torch.arange(0, 128).repeat(4).view(1, 1, 16, 32).to(torch.uint8)
    >>> look_up(images, equalize(images)).flatten()[:128:31].tolist()
    [0, 124, 248, 255, 255]
    """
    batch, channels, height, width = images.shape
    planes = images.flatten(2).long() + 256 * torch.arange(batch * channels, device=images.device).view(
        batch, channels, 1
    )
    counts = torch.bincount(planes.flatten(), minlength=256 * batch * channels).view(batch, channels, 256)
    lightest = counts.gather(2, images.amax(dim=(2, 3)).long().unsqueeze(2))
    step = (height * width - lightest) // 255
    darker = counts.cumsum(dim=2) - counts
    spread = ((step // 2 + darker) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, spread, _levels(images).long()).to(torch.uint8)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Tables that keep so many of the upper bits of each level (1 to 8, one number an image).

    >>> images = torch.tensor([[[[7, 100, 255]]]], dtype=torch.uint8)
    >>> look_up(images, posterize(images, torch.tensor([2]))).tolist()
    [[[[0, 64, 192]]]]
    """
    coarseness = 2 ** (8 - bits.long()).view(-1, 1, 1)
    levels = _levels(images).long()
    return (levels - levels % coarseness).to(torch.uint8).expand(-1, images.shape[1], -1)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Tables that turn levels from the threshold on (one number an image) into their negative.

    >>> images = torch.tensor([[[[7, 100, 255]]]], dtype=torch.uint8)
    >>> look_up(images, solarize(images, torch.tensor([100]))).tolist()
    [[[[7, 155, 0]]]]
    """
    levels = _levels(images).long()
    turned = torch.where(levels < thresholds.view(-1, 1, 1), levels, 255 - levels)
    return turned.to(torch.uint8).expand(-1, images.shape[1], -1)


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """Each byte replaced by the entry of its channel's table.

    >>> look_up(torch.tensor([[[[0, 1]]]], dtype=torch.uint8), torch.arange(255, -1, -1, dtype=torch.uint8).view(1, 1, 256))
    tensor([[[[255, 254]]]], dtype=torch.uint8)
    """
    return tables.gather(2, images.flatten(2).long()).view(images.shape)


def rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Matrices that turn images around their middle, against the clock.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> warp(image, rotation(torch.tensor([90.0]), 2, 2)).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    x, y = width / 2, height / 2
    return _matrices(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def shear(along_x: Tensor, along_y: Tensor) -> Tensor:
    """Matrices that take a pixel at (x, y) from (x + along_x * y, y + along_y * x), counted from the upper left corner.

    >>> shear(torch.tensor([0.3]), torch.tensor([0.0]))
    tensor([[[1.0000, 0.3000, 0.0000],
             [0.0000, 1.0000, 0.0000]]])
    """
    return _matrices(torch.ones_like(along_x), along_x, 0 * along_x, along_y, torch.ones_like(along_y), 0 * along_y)


def translation(along_x: Tensor, along_y: Tensor) -> Tensor:
    """Matrices that take a pixel at (x, y) from (x + along_x, y + along_y).

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> warp(image, translation(torch.tensor([1.0]), torch.tensor([0.0]))).tolist()
    [[[[2, 0], [4, 0]]]]
    """
    one, zero = torch.ones_like(along_x), torch.zeros_like(along_x)
    return _matrices(one, zero, along_x, zero, one, along_y)


def warp(images: Tensor, matrices: Tensor) -> Tensor:
    """Images of bytes whose pixels come from where their matrix says, between pixels by linear interpolation; black outside.

    >>> image = torch.tensor([[[[10, 20]]]], dtype=torch.uint8)
    >>> warp(image, translation(torch.tensor([0.5]), torch.tensor([0.0]))).tolist()
    [[[[15, 10]]]]
    """
    height, width = images.shape[2:]
    (a, b, c), (d, e, f) = (row.unbind(dim=1) for row in matrices.double().unbind(dim=1))
    # torch counts from -1 to 1 across the image, whatever its size
    b, d = b * height / width, d * width / height
    across = _matrices(a, b, a + b - 1 + 2 * c / width, d, e, d + e - 1 + 2 * f / height).float()
    grid = functional.affine_grid(across, list(images.shape), align_corners=False)
    warped = functional.grid_sample(images.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return warped.round_().clamp_(0, 255).to(torch.uint8)


def _levels(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.float64, device=images.device).view(1, 1, 256)


def _matrices(*entries: Tensor) -> Tensor:
    """[batch, 2, 3], of six vectors, row by row."""
    return torch.stack(entries, dim=1).view(-1, 2, 3)
