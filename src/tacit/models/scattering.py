"""The scattering transform of images: features that nobody learned, so that they cost no privacy.

An image is convolved with Morlet wavelets of `scales` octaves and `angles` directions; the modulus is taken, which forgets the
phase; that is done once (first order) or twice (second order, along paths of growing scale), and everything is averaged over
windows of 2^scales pixels (Mallat, "Group Invariant Scattering", 2012; Bruna and Mallat, "Invariant Scattering Convolution
Networks", 2013). Filters and padding are those of Kymatio (Andreux et al., 2020), so that results can be compared. It
looks at one image at a time.

Wavelets are applied in the Fourier domain, where a convolution is a product, and where an image whose high frequencies are gone
is made smaller by adding up what aliasing would bring together. The average is a Gaussian, so that two small matrices do it, one
for the rows and one for the columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.privacy.validation import UserError, check_choice, check_count

_BANDWIDTH = 0.8  # the deviation of the finest wavelet's envelope, in pixels
_FREQUENCY = 3 * math.pi / 4  # of the finest wavelet
_ELONGATION = 4.0  # the envelope's slant times the number of angles
_NEIGHBOURS = 2  # periods on each side that are added up, so that a filter is periodic
_AT_A_TIME = 24  # maps, on a processor: what comes in between then stays in its cache


class Scattering(nn.Module):
    """Scattering features, [batch, channels * paths, height / 2^scales, width / 2^scales].

    The paths are 1 of order 0, scales * angles of order 1, and angles^2 * scales * (scales - 1) / 2 of order 2, in this order.

    >>> scattering = Scattering((28, 28))
    >>> scattering(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 81, 7, 7])
    >>> Scattering((32, 32)).output_shape(3)
    (243, 8, 8)
    """

    def __init__(self, size: Sequence[int], scales: int = 2, angles: int = 8, order: int = 2) -> None:
        super().__init__()
        self.size = (int(size[0]), int(size[1]))
        self.scales, self.angles = check_count("scales", scales), check_count("angles", angles)
        self.order = int(check_choice("order", str(order), ["0", "1", "2"]))
        step = 2**scales
        if min(self.size) < 2 * step:
            raise UserError(
                f"images of {self.size[0]} x {self.size[1]} pixels are too small for a scattering over {scales} scales; "
                f"they need {2 * step} pixels on each side"
            )
        self._padded = tuple(((length + step) // step + 1) * step for length in self.size)
        for j in range(scales):
            wavelets = [_wavelet(self._padded, j, angle, angles) for angle in range(angles)]
            for level in range(j + 1):
                filters = _kept(torch.stack(wavelets), level, axes=(-2, -1)).float()
                self.register_buffer(f"wavelets_{j}_{level}", filters, persistent=False)
        for level in range(scales):
            for axis, (padded, length) in enumerate(zip(self._padded, self.size)):
                averages = _averages(padded, scales, level)[1 : 1 + length // step]  # without what the padding gives
                self.register_buffer(f"average_{level}_{axis}", averages, persistent=False)

    @property
    def paths(self) -> int:
        """How many features come from one channel."""
        first = self.scales * self.angles
        second = self.angles**2 * self.scales * (self.scales - 1) // 2
        return 1 + (first if self.order > 0 else 0) + (second if self.order > 1 else 0)

    def output_shape(self, channels: int) -> tuple[int, int, int]:
        """The shape of one image's features."""
        step = 2**self.scales
        return (channels * self.paths, self.size[0] // step, self.size[1] // step)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or tuple(images.shape[2:]) != self.size:
            raise UserError(
                f"this scattering takes images [batch, channels, {self.size[0]}, {self.size[1]}], not {list(images.shape)}"
            )
        images = images.to(self._filters("average_0_0").dtype)
        batch, channels = images.shape[:2]
        maps = images.reshape(batch * channels, 1, *self.size)
        before = [(padded - length) // 2 for padded, length in zip(self._padded, self.size)]
        after = [padded - length - first for padded, length, first in zip(self._padded, self.size, before)]
        maps = functional.pad(maps, (before[1], after[1], before[0], after[0]), mode="reflect")
        size = _AT_A_TIME if images.device.type == "cpu" else len(maps)
        found = torch.cat([self._scattered(some) for some in torch.split(maps, max(size, 1))])
        return found.reshape(batch, *self.output_shape(channels))

    def _scattered(self, maps: Tensor) -> Tensor:
        """All paths, [maps, paths, rows, columns], of padded maps, [maps, 1, ...]."""
        found, second = [self._averaged(maps, 0)], []
        spectrum = torch.fft.fft2(maps)
        for j in range(self.scales if self.order > 0 else 0):
            first = torch.fft.ifft2(
                _coarser(spectrum, self._filters(f"wavelets_{j}_0"), j)
            ).abs()  # [maps, angles, ...]
            found.append(self._averaged(first, j))
            if self.order > 1 and j + 1 < self.scales:
                again = torch.fft.fft2(first).unsqueeze(2)
                for k in range(j + 1, self.scales):  # [maps, angles, angles, ...]
                    paths = torch.fft.ifft2(_coarser(again, self._filters(f"wavelets_{k}_{j}"), k - j)).abs()
                    second.append(self._averaged(paths.flatten(1, 2), k))
        return torch.cat(found + second, dim=1)

    def _averaged(self, maps: Tensor, level: int) -> Tensor:
        """Maps that are `level` octaves coarser than the image, averaged and as coarse as the result."""
        return self._filters(f"average_{level}_0") @ maps @ self._filters(f"average_{level}_1").T

    def _filters(self, name: str) -> Tensor:
        filters: Tensor = self.get_buffer(name)
        return filters

    def extra_repr(self) -> str:
        return f"size={self.size}, scales={self.scales}, angles={self.angles}, order={self.order}"


def _coarser(spectrum: Tensor, filters: Tensor, octaves: int) -> Tensor:
    """The filtered spectrum of every 2^octaves-th pixel: the mean over the frequencies that become one."""
    step = 2**octaves
    rows, columns = (length // step for length in spectrum.shape[-2:])
    found: Tensor | None = None
    for i in range(step):
        for j in range(step):
            here = (..., slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            part = spectrum[here] * filters[here]
            found = part if found is None else found.add_(part)
    assert found is not None
    return found.div_(step**2)


def _gabor(size: Sequence[int], deviation: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A wave under an elliptic bell, made periodic: [rows, columns], complex, of integral about 1 at frequency 0."""
    cos, sin = math.cos(angle), math.sin(angle)
    spans = [torch.arange(-_NEIGHBOURS * n, (_NEIGHBOURS + 1) * n, dtype=torch.float64) for n in size]
    x, y = torch.meshgrid(*spans, indexing="ij")
    along, across = cos * x + sin * y, cos * y - sin * x
    bell = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
    wave = torch.polar(bell, frequency * along)
    periods = 2 * _NEIGHBOURS + 1
    folded = wave.reshape(periods, size[0], periods, size[1]).sum(dim=(0, 2))
    return folded * slant / (2 * math.pi * deviation**2)


def _wavelet(size: Sequence[int], octave: int, angle: int, angles: int) -> Tensor:
    """The Fourier transform, which is real, of a Morlet wavelet: a Gabor function less so much of its bell that it has mean 0."""
    turn = (int(angles - angles / 2 - 1) - angle) * math.pi / angles
    shape = (_BANDWIDTH * 2**octave, turn)
    wave = _gabor(size, *shape, _FREQUENCY / 2**octave, _ELONGATION / angles)
    bell = _gabor(size, *shape, 0.0, _ELONGATION / angles)
    found: Tensor = torch.fft.fft2(wave - wave.sum() / bell.sum() * bell).real
    return found


def _averages(length: int, scales: int, level: int) -> Tensor:
    """The matrix, [length / 2^scales, length / 2^level], averaging a row of pixels that is already `level` octaves coarser."""
    deviation = _BANDWIDTH * 2 ** (scales - 1)
    span = torch.arange(-_NEIGHBOURS * length, (_NEIGHBOURS + 1) * length, dtype=torch.float64)
    bell = torch.exp(-(span**2) / (2 * deviation**2)) / (math.sqrt(2 * math.pi) * deviation)
    spectrum = torch.fft.fft(bell.reshape(-1, length).sum(dim=0)).real
    impulses = torch.fft.fft(torch.eye(length >> level, dtype=torch.float64)) * _kept(spectrum, level, axes=(-1,))
    coarser = impulses.reshape(len(impulses), 2 ** (scales - level), -1).mean(dim=1)
    found: Tensor = torch.fft.ifft(coarser).real
    return found.T.float().contiguous()


def _kept(spectrum: Tensor, level: int, axes: Sequence[int]) -> Tensor:
    """A filter's spectrum for images that are `level` octaves coarser: the frequencies they still have."""
    for axis in axes:
        length = spectrum.shape[axis]
        kept = spectrum.clone()
        kept.narrow(axis, int(length * 2.0 ** (-level - 1)), int(length * (1 - 2.0**-level))).zero_()
        spectrum = torch.unflatten(kept, axis, (2**level, -1)).sum(dim=axis - 1)
    return spectrum
