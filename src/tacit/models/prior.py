"""What features are like before anybody has looked at data: their means and deviations over random images, which cost nothing.

The power of natural images falls with the square of the frequency (Field, "Relations between the statistics of natural images and
the response properties of cortical cells", 1987). Gaussian images with that spectrum are not natural, but the channels of
a scattering transform, whose sizes differ a hundredfold, have about the right sizes on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_IMAGES = 200
_WIDER = 4  # times the size of the images, so that they do not wrap around


class PriorScale(nn.Module):
    """(x - mean) / deviation by channel of [batch, channels, ...], with the numbers that features of random images have.

    It is stored with the model, so that another generator of random numbers does not change a model that was trained.

    *Guarantee.* No data are looked at: it costs no privacy.

    >>> layer = PriorScale.of(nn.Identity(), (2, 8, 8))
    >>> layer(torch.zeros(1, 2, 8, 8)).abs().max() < 0.5
    tensor(True)
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    @classmethod
    @torch.no_grad()
    def of(cls, features: nn.Module, input_shape: Sequence[int]) -> PriorScale:
        """The layer that comes after `features` of images of this shape, [channels, height, width]."""
        rows = features(random_images(_IMAGES, input_shape)).flatten(2)
        return cls(rows.mean(dim=(0, 2)), rows.std(dim=(0, 2)).clamp(min=1e-6))

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        return (inputs - self.mean.view(shape)) / self.deviation.view(shape)

    def extra_repr(self) -> str:
        return str(len(self.mean))


def random_images(count: int, shape: Sequence[int], *, seed: int = 0) -> Tensor:
    """Gaussian images, [count, *shape], of mean 0 and deviation 1, whose power falls with the square of the frequency.

    >>> images = random_images(50, (1, 16, 16))
    >>> images.shape, bool((images[..., 1:] - images[..., :-1]).std() < 1)  # neighbours are alike
    (torch.Size([50, 1, 16, 16]), True)
    """
    channels, height, width = shape
    rows, columns = _WIDER * height, _WIDER * width
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.fft.rfft2(torch.randn(count, channels, rows, columns, generator=generator))
    frequency = torch.hypot(torch.fft.fftfreq(rows).unsqueeze(1), torch.fft.rfftfreq(columns))
    frequency[0, 0] = torch.inf  # no power at frequency 0: the mean is 0
    images: Tensor = torch.fft.irfft2(spectrum / frequency, s=(rows, columns))[..., :height, :width]
    return images / images.std()
