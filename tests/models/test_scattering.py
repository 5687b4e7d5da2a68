"""The scattering transform: Kymatio's numbers, the properties the theory promises, and the same features in any batch."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tacit.gradients import ClippedGradient
from tacit.models.scattering import Scattering, _averages, _wavelet
from tacit.privacy import Flat, UserError


def textures(count, size=32, seed=0):
    torch.manual_seed(seed)
    return functional.interpolate(torch.randn(count, 1, size // 2, size // 2), size=(size, size), mode="bicubic")


def formula_image():
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    return torch.sin(0.7 * x + 0.3 * y) + 0.5 * torch.cos(0.05 * x * y) + (x > 8)


def test_the_features_are_kymatios():
    """Kymatio takes 3.1415 for pi where it normalises a filter; a feature of order m has passed m + 1 filters."""
    expected = torch.tensor(json.loads((Path(__file__).parent / "kymatio.json").read_text())["features"])
    found = Scattering((16, 16), scales=2, angles=4)(formula_image()[None, None])[0]
    orders = torch.tensor([0] + [1] * 8 + [2] * 16)
    rounded = expected * (3.1415 / math.pi) ** (orders + 1).view(-1, 1, 1)
    assert (found - rounded).abs().max() < 3e-6
    assert (found - expected).abs().max() > 1e-5, "the correction is not for nothing"


@pytest.mark.parametrize(
    ("size", "scales", "angles", "order"), [((28, 28), 2, 8, 2), ((32, 20), 3, 4, 2), ((16, 16), 1, 6, 1)]
)
def test_shapes(size, scales, angles, order):
    scattering = Scattering(size, scales, angles, order)
    first, second = scales * angles, angles**2 * scales * (scales - 1) // 2
    paths = 1 + first + (second if order == 2 else 0)
    found = scattering(torch.randn(3, 2, *size))
    assert found.shape == (3, 2 * paths, size[0] // 2**scales, size[1] // 2**scales)
    assert found.shape[1:] == scattering.output_shape(2)
    assert not list(scattering.parameters())
    assert not scattering.state_dict(), "filters are computed, not stored"


def test_wavelets_have_mean_zero_and_averages_have_mean_one():
    for octave in (0, 1):
        assert abs(float(_wavelet((36, 36), octave, 3, 8)[0, 0])) < 1e-12
    for level in (0, 1):
        assert (_averages(36, 2, level).sum(dim=1) - 1).abs().max() < 1e-6


def test_images_of_any_type_are_taken():
    images = torch.randint(0, 256, (2, 1, 16, 16), dtype=torch.uint8)
    scattering = Scattering((16, 16))
    for other in (images, images.double()):
        assert torch.equal(scattering(other), scattering(images.float()))
    assert (scattering.double()(images) - Scattering((16, 16))(images)).abs().max() < 1e-3


def test_energy_goes_down_the_orders_and_never_up():
    """The transform does not expand distances, up to the few per cent by which the filters are no exact frame."""
    scattering = Scattering((32, 32))
    first, second = textures(20, seed=1), textures(20, seed=2)
    features = scattering(first) - scattering(second)
    distance = 16 * features.square().sum(dim=(1, 2, 3))  # one feature stands for 4 x 4 pixels
    assert (distance <= 1.1 * (first - second).square().sum(dim=(1, 2, 3))).all()
    energies = [scattering(first)[:, part].square().sum() for part in (slice(1, 17), slice(17, 81))]
    assert energies[0] > 2 * energies[1] > 0


def test_a_shift_moves_features_less_than_pixels():
    images = textures(20, 40)
    here, there = images[..., 4:36, 4:36], images[..., 4:36, 5:37]
    scattering = Scattering((32, 32))

    def change(before, after):
        return float(((after - before).square().sum() / before.square().sum()).sqrt())

    assert change(scattering(here), scattering(there)) < 0.5 * change(here, there)


def test_a_small_deformation_moves_features_less_than_pixels():
    images = textures(20)
    grid = functional.affine_grid(torch.eye(2, 3).expand(20, 2, 3), (20, 1, 32, 32), align_corners=False)
    moved = grid + 0.06 * torch.sin(3 * grid.flip(-1))
    deformed = functional.grid_sample(images, moved, padding_mode="reflection", align_corners=False)
    scattering = Scattering((32, 32))
    pixels = (deformed - images).norm() / images.norm()
    features = (scattering(deformed) - scattering(images)).norm() / scattering(images).norm()
    assert features < 0.5 * pixels


def test_a_constant_image_has_no_waves():
    found = Scattering((28, 28))(torch.full((1, 1, 28, 28), 3.0))
    assert (found[:, 0] - 3).abs().max() < 1e-4
    assert found[:, 1:].abs().max() < 1e-4


def test_features_do_not_depend_on_the_batch_or_the_threads():
    images = torch.randn(37, 3, 32, 32)
    scattering = Scattering((32, 32))
    together = scattering(images)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (1, 5, 37):
                apart = torch.cat([scattering(part) for part in images.split(size)])
                assert (apart - together).abs().max() < 1e-5
    finally:
        torch.set_num_threads(threads)


def test_colours_are_transformed_one_by_one():
    images = torch.randn(4, 3, 16, 16)
    scattering = Scattering((16, 16))
    found = scattering(images)
    for channel in range(3):
        alone = scattering(images[:, channel : channel + 1])
        assert (found[:, 81 * channel : 81 * (channel + 1)] - alone).abs().max() < 1e-6


def test_it_can_stand_in_a_model_that_is_trained_privately():
    model = torch.nn.Sequential(Scattering((16, 16)), torch.nn.Flatten(), torch.nn.Linear(81 * 16, 3))
    summed = ClippedGradient(model, loss=torch.nn.CrossEntropyLoss(reduction="none"), clipping=Flat(1.0))(
        torch.randn(5, 1, 16, 16), torch.tensor([0, 1, 2, 0, 1])
    )
    assert summed.gradients["2.weight"].isfinite().all()


def test_wrong_sizes_are_refused_in_words():
    with pytest.raises(UserError, match="too small"):
        Scattering((7, 28))
    with pytest.raises(UserError, match=r"takes images \[batch, channels, 16, 16\]"):
        Scattering((16, 16))(torch.zeros(1, 1, 28, 28))
    with pytest.raises(UserError, match="order"):
        Scattering((16, 16), order=3)
