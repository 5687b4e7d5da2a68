"""What features are like before anybody has looked at data: their means and deviations over random images, which cost nothing.

The power of natural images falls with the square of the frequency (Field, "Relations between the statistics of natural images and
the response properties of cortical cells", 1987). Gaussian images with that spectrum are not natural, but the channels of
a scattering transform, whose sizes differ a hundredfold, have about the right sizes on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_PIXELS = 200 * 32 * 32  # of all random images together, so that large ones are few
_FEWEST = 8
_AT_A_TIME = 8
_WIDER = 4  # times the size of the images, so that they do not wrap around


class PriorScale(nn.Module):
    """(x - mean) / deviation by channel of [batch, channels, ...], with the numbers that features of random images have.

    It is stored with the model, so that another generator of random numbers does not change a model that was trained.

    *Guarantee.* `of` looks at no data, so that it costs no privacy if the features look at none.

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
        count = max(_FEWEST, _PIXELS // (input_shape[1] * input_shape[2]))
        sums: list[Tensor] = []
        for seed, start in enumerate(range(0, count, _AT_A_TIME)):
            images = random_images(min(_AT_A_TIME, count - start), input_shape, seed=seed)
            rows = features(images).flatten(2).double()
            sums.append(torch.stack([rows.mean(dim=2), rows.square().mean(dim=2)]).sum(dim=1))
        mean, square = torch.stack(sums).sum(dim=0) / count
        deviation = (square - mean.square()).clamp(min=1e-12).sqrt()
        return cls(_rounded(mean), _rounded(deviation))

    def forward(self, inputs: Tensor) -> Tensor:
        shape = (1, -1) + (1,) * (inputs.dim() - 2)
        return (inputs - self.mean.view(shape)) / self.deviation.view(shape)

    def extra_repr(self) -> str:
        return str(len(self.mean))


def _rounded(numbers: Tensor) -> Tensor:
    """To three digits: the same numbers on another machine, whose last bits differ."""
    return torch.tensor([float(f"{number:.3g}") for number in numbers.tolist()])


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
    down = torch.fft.fftfreq(rows).unsqueeze(1)
    power = 1 / (down.square() + torch.fft.fftfreq(columns).square())
    power[0, 0] = 0.0  # none at frequency 0: the mean is 0
    amplitude = (power / power.mean()).sqrt()[:, : columns // 2 + 1]
    images: Tensor = torch.fft.irfft2(spectrum * amplitude, s=(rows, columns))
    return images[..., :height, :width].contiguous()
