"""Augmentation: each example in another guise at every step, so that a network learns what the guises have in common.

What an image becomes depends on that image and on random numbers, never on another image of the batch, so that it costs no
privacy. Nor do several views of an image, whose losses are averaged before the gradient is clipped: their mean is a function of
one example, and to clip it once costs the same privacy as one view (De et al., "Unlocking High-Accuracy Differentially Private
Image Classification through Scale", 2022: augmentation multiplicity).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tacit.gradients.batches import LayerOutput
from tacit.learning.augmix import AugMix
from tacit.learning.image_operations import check_images, layout_of
from tacit.learning.losses import PerExampleLoss
from tacit.learning.named import make_named
from tacit.privacy.validation import UserError, check_choice, check_count, check_probability, nearest


class Augmentation(Protocol):
    """From normalised images, [batch, channels, height, width], to their guises, in the same layout of memory."""

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor: ...


@dataclass(frozen=True)
class Flip:
    """Left and right exchanged, with this probability.

    >>> Flip(probability=1.0)(torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.Generator())
    tensor([[[[3., 2., 1.]]]])
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        check_probability("augmentation.probability", self.probability)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        images = check_images(images)
        uniform = torch.rand(len(images), generator=generator, device=generator.device)
        chosen = (uniform < self.probability).to(images.device)
        flipped = images.clone()
        flipped[chosen] = images[chosen].flip(3)
        return flipped


@dataclass(frozen=True)
class Crop:
    """A window of the image's own size, from anywhere in the image with `padding` zeros around it.

    The zeros are those of normalised images: the mean that was subtracted.

    >>> image = torch.arange(1.0, 10.0).view(1, 1, 3, 3)
    >>> Crop(padding=1)(image, torch.Generator().manual_seed(0))
    tensor([[[[0., 4., 5.],
              [0., 7., 8.],
              [0., 0., 0.]]]])
    """

    padding: int = 4

    def __post_init__(self) -> None:
        check_count("augmentation.padding", self.padding, at_least=0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        images = check_images(images)
        batch, channels, height, width = images.shape
        places = 2 * self.padding + 1
        corners = torch.randint(places, (2, batch), generator=generator, device=generator.device)
        top, left = corners.to(images.device)
        padded = functional.pad(images, (self.padding,) * 4)
        # every window of every image as a view, of which one an image is copied
        along_batch, along_channels, along_height, along_width = padded.stride()
        windows = padded.as_strided(
            (batch, places, places, channels, height, width),
            (along_batch, along_height, along_width, along_channels, along_height, along_width),
        )
        chosen = windows[torch.arange(batch, device=images.device), top, left]
        return chosen.contiguous(memory_format=layout_of(images))


@dataclass(frozen=True)
class Compose:
    """Several augmentations, one after the other.

    >>> Compose([Flip(1.0), Flip(1.0)])(torch.tensor([[[[1.0, 2.0]]]]), torch.Generator())
    tensor([[[[1., 2.]]]])
    """

    augmentations: Sequence[Augmentation]

    def __post_init__(self) -> None:
        object.__setattr__(self, "augmentations", tuple(self.augmentations))

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for augmentation in self.augmentations:
            images = augmentation(images, generator)
        return images


@dataclass(frozen=True)
class Views:
    """`count` guises of each image, drawn independently: [batch, count, channels, height, width]; without that axis if it is 1.

    Flattened to [batch * count, ...], they have the layout of memory that the images came in, and nothing is copied.

    >>> views = Views(4, Crop(padding=2))(torch.rand(8, 3, 32, 32), torch.Generator().manual_seed(0))
    >>> views.shape, views.flatten(0, 1).shape
    (torch.Size([8, 4, 3, 32, 32]), torch.Size([32, 3, 32, 32]))
    """

    count: int
    augmentation: Augmentation

    def __post_init__(self) -> None:
        check_count("augmentation.views", self.count)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        images = check_images(images)
        if self.count == 1:
            return self.augmentation(images, generator)
        batch, *shape = images.shape
        options: Any = {"dtype": images.dtype, "device": images.device, "memory_format": layout_of(images)}
        views = torch.empty((batch * self.count, *shape), **options).view(batch, self.count, *shape)
        for view in views.unbind(dim=1):
            view.copy_(self.augmentation(images, generator))
        return views


class MeanOverViews:
    """The mean of a loss over K views of each example: what the model gives is [batch, K, ...], targets are one an example.

    The gradient engine sees `views` and lays the inputs, [batch, K, ...], out for the model; `wants_hidden` is the loss's own.

    >>> from torch import nn
    >>> loss = MeanOverViews(nn.CrossEntropyLoss(reduction="none"), views=2)
    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 50.0]]])  # one example: a view that tells nothing, and one that tells all
    >>> loss(logits, torch.tensor([1]))
    tensor([0.3466])
    """

    def __init__(self, loss: PerExampleLoss, views: int) -> None:
        self.loss, self.views = loss, check_count("views", views)

    @property
    def wants_hidden(self) -> bool:
        """Whether the loss wants to see the hidden layers."""
        return bool(getattr(self.loss, "wants_hidden", False))

    def begin_epoch(self, epoch: int) -> None:
        """For a loss that changes with time."""
        begin_epoch = getattr(self.loss, "begin_epoch", None)
        if begin_epoch is not None:
            begin_epoch(epoch)

    def __call__(self, outputs: Tensor, targets: Tensor, layers: list[LayerOutput] | None = None) -> Tensor:
        if not isinstance(outputs, Tensor):
            raise UserError(f"the mean over views is of one output, a tensor, not of a {type(outputs).__name__}")
        rows, repeated = outputs.flatten(0, 1), torch.repeat_interleave(targets, self.views, dim=0)
        if layers is None:
            losses = self.loss(rows, repeated)
        else:
            hidden = [LayerOutput(layer.output.flatten(0, 1), layer.weight) for layer in layers]
            losses = self.loss(rows, repeated, hidden)
        return losses.view(len(targets), self.views).mean(dim=1)


AUGMENTATIONS: Mapping[str, Callable[..., Augmentation]] = {"flip": Flip, "crop": Crop, "augmix": AugMix}


def make_augmentation(
    names: Sequence[str],
    mean: float | Sequence[float],
    std: float | Sequence[float],
    *,
    views: int = 1,
    **options: Any,
) -> Augmentation:
    """The augmentations of these names, in this order, and so many views of each image; each takes the options that it has.

    `mean` and `std` are the public constants that normalised the images.

    >>> make_augmentation(["flip", "crop"], mean=0.5, std=0.25, padding=2)
    Compose(augmentations=(Flip(probability=0.5), Crop(padding=2)))
    >>> make_augmentation(["flip"], mean=0.5, std=0.25, views=4)
    Views(count=4, augmentation=Flip(probability=0.5))
    """
    check_options(names, options)
    made = []
    for name in names:
        own = {option: value for option, value in options.items() if option in _options(name)}
        augmentation = make_named("augmentation", AUGMENTATIONS, name, own)
        if isinstance(augmentation, AugMix):
            augmentation = replace(augmentation, mean=mean, std=std)
        made.append(augmentation)
    whole = made[0] if len(made) == 1 else Compose(made)
    return whole if check_count("augmentation.views", views) == 1 else Views(views, whole)


def check_options(names: Sequence[str], options: Iterable[str]) -> None:
    """Raise a UserError if one of these names is no augmentation's, or one of these options is of none of them.

    `mean` and `std` are no options: they are those of the data.

    >>> check_options(["crop"], ["mean"])
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: there is no augmentation.mean (of crop there are: padding)
    """
    if isinstance(names, str) or not names:
        raise UserError(f"augmentation.names must be a list such as ['flip', 'crop'], not {names!r}")
    for name in names:
        check_choice("augmentation", name, AUGMENTATIONS)
    for option in options:
        _check_option(option, names)


def _options(name: str) -> list[str]:
    """What a recipe may say about the augmentation of this name."""
    return [option for option in inspect.signature(AUGMENTATIONS[name]).parameters if option not in ("mean", "std")]


def _check_option(option: str, names: Sequence[str]) -> None:
    taken = list(dict.fromkeys(known for name in names for known in _options(name)))
    if option in taken:
        return
    others = [name for name in AUGMENTATIONS if option in _options(name)]
    if others:
        raise UserError(
            f"augmentation.{option} is of {' and '.join(map(repr, others))}, which augmentation.names does not list"
        )
    raise UserError(
        f"there is no augmentation.{option}{nearest(option, taken)} (of {', '.join(names)} there are: {', '.join(taken)})"
    )
