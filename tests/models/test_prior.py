"""Random images have the spectrum they should, and features scaled by them are of the order of 1, without data."""

import torch
from torch import nn

from tacit.models import PriorScale, Scattering
from tacit.models.prior import random_images


def test_random_images_have_the_spectrum_of_natural_ones():
    """Twice the frequency, a quarter of the power: over whole images, which wrap around, to a few per cent."""
    images = random_images(400, (1, 128, 128))
    assert abs(float(images.std()) - 1) < 1e-5
    # A window over the middle, since the images are cut from larger ones.
    window = torch.hann_window(128).unsqueeze(1) * torch.hann_window(128)
    power = torch.fft.fft2(images * window).abs().square().mean(dim=(0, 1))
    for low in (8, 16):
        ratio = float((power[low, 0] + power[0, low]) / (power[2 * low, 0] + power[0, 2 * low]))
        assert 3.4 < ratio < 4.6


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
