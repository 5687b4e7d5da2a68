"""Random images have the spectrum they should, and features scaled by them are of the order of 1, without data."""

import numpy as np
import torch
from torch import nn

from tacit.data import Dataset
from tacit.models import PriorScale, Scattering
from tacit.models.prior import random_images
from tacit.training.features import _place


def test_random_images_have_the_spectrum_of_natural_ones():
    """Twice the frequency, a quarter of the power; a window over the middle, since the images are cut from larger ones."""
    images = torch.cat([random_images(20, (1, 128, 128), seed=seed) for seed in range(10)])
    assert abs(float(images.std()) - 1) < 0.05
    window = torch.hann_window(128).unsqueeze(1) * torch.hann_window(128)
    power = torch.fft.fft2(images * window).abs().square().mean(dim=(0, 1))
    # the mean over a few neighbouring frequencies of f^2 times the power, at 8 and at 32, is the same
    scaled = [sum(f**2 * float(power[f, 0] + power[0, f]) for f in range(at - 2, at + 3)) for at in (8, 32)]
    assert abs(scaled[0] / scaled[1] - 1) < 0.15


def test_random_images_are_the_same_each_time_and_no_global_state_is_touched():
    torch.manual_seed(5)
    first = random_images(3, (2, 8, 8))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(random_images(3, (2, 8, 8)), first)
    assert not torch.equal(random_images(3, (2, 8, 8), seed=1), first)


def test_features_whose_sizes_differ_a_hundredfold_come_to_one_order():
    """On images that are not Gaussian at all: rectangles upon rectangles."""
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(300, 1, 32, 32)
    for image in images:
        for _ in range(30):
            (top, left), (height, width) = (
                torch.randint(-8, 32, (2,), generator=generator),
                torch.randint(2, 16, (2,), generator=generator),
            )
            image[0, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = torch.randn(
                1, generator=generator
            )
    images = (images - images.mean()) / images.std()
    scattering = Scattering((32, 32))
    raw = scattering(images)
    scaled = PriorScale.of(scattering, (1, 32, 32))(raw)
    deviations, before = scaled.std(dim=(0, 2, 3)), raw.std(dim=(0, 2, 3))
    assert before.max() / before.min() > 50
    assert deviations.min() > 0.3
    assert deviations.max() < 5


def test_a_stored_scale_is_the_one_that_is_used():
    features = nn.Identity()
    layer = PriorScale.of(features, (2, 8, 8))
    other = PriorScale(torch.zeros(2), torch.ones(2))
    other.load_state_dict(layer.state_dict())
    inputs = torch.randn(4, 2, 8, 8)
    assert torch.equal(other(inputs), layer(inputs))


def test_a_scale_of_other_numbers_has_a_place_of_its_own_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    images = np.zeros((4, 1, 8, 8), dtype=np.uint8)
    data = Dataset("toy", images, np.arange(4) % 2, ("a", "b"), (0.5,), (0.5,))
    places = {_place(data, PriorScale(torch.full((1,), mean), torch.ones(1)), "content") for mean in (0.0, 0.0, 1.0)}
    assert len(places) == 2


def test_large_images_are_few():
    """What a small scale of a large image costs: not hundreds of images that are sixteen times as large."""
    seen = []

    def features(images):
        seen.append(images.numel())
        return images

    PriorScale.of(features, (3, 224, 224))
    assert sum(seen) <= 8 * 3 * 224 * 224
    assert max(seen) <= 8 * 3 * 224 * 224
