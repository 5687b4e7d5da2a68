"""AugMix is what the paper describes, drawn as it says, and the same for a batch as for its images one by one."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from scipy import stats

from tacit.learning import AugMix
from tacit.learning.augmix import OPERATIONS, apply_in_place
from tacit.privacy import UserError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def smooth_images(count, size=40):
    """[count, 3, size, size] of bytes: a wave of its own each."""
    y, x = torch.meshgrid(torch.arange(size) / 6.0, torch.arange(size) / 6.0, indexing="ij")
    phases = 2 * torch.rand(count, 3, 3, 1, 1, generator=generator(9))
    waves = torch.sin(phases[:, :, 0] * x + phases[:, :, 1] * y + 3 * phases[:, :, 2])
    return (127.5 + 110 * waves).round().to(torch.uint8)


def normalised(images):
    mean, std = (torch.tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
    return (images / 255 - mean) / std


def in_pillow(picture, operation, level, sign):
    """The reference's magnitudes, in Python's own numbers."""
    size = picture.size[0]

    def moved(*matrix):
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)

    return {
        "autocontrast": lambda: ImageOps.autocontrast(picture),
        "equalize": lambda: ImageOps.equalize(picture),
        "posterize": lambda: ImageOps.posterize(picture, 4 - int(level * 4 / 10)),
        "solarize": lambda: ImageOps.solarize(picture, 256 - int(level * 256 / 10)),
        "rotate": lambda: picture.rotate(sign * int(level * 30 / 10), Image.Resampling.BILINEAR),
        "shear-x": lambda: moved(1, sign * level * 0.3 / 10, 0, 0, 1, 0),
        "shear-y": lambda: moved(1, 0, 0, sign * level * 0.3 / 10, 1, 0),
        "translate-x": lambda: moved(1, 0, sign * int(level * size / 3 / 10), 0, 1, 0),
        "translate-y": lambda: moved(1, 0, 0, 0, 1, sign * int(level * size / 3 / 10)),
    }[operation]()


def test_chains_of_one_operation_are_those_of_pillow():
    images, augmentation = smooth_images(60), AugMix(severity=4, width=2, depth=1, mean=MEAN, std=STD)
    found = augmentation(normalised(images), generator(1))
    draw = augmentation.draw(60, generator(1))
    assert set(draw.operations.flatten().tolist()) == set(range(len(OPERATIONS)))
    for place, image in enumerate(images):
        picture = Image.fromarray(image.movedim(0, 2).numpy())
        mixture = np.zeros((40, 40, 3))
        for chain in range(2):
            operation = OPERATIONS[draw.operations[0, place, chain]]
            level, sign = float(draw.levels[0, place, chain]), int(draw.signs[0, place, chain])
            distorted = np.asarray(in_pillow(picture, operation, level, sign))
            mixture += float(draw.weights[place, chain]) * distorted
        share = float(draw.shares[place])
        expected = (1 - share) * image.double() + share * torch.from_numpy(mixture).movedim(2, 0)
        got = found[place] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
        # inside of the frame into which black may come
        apart = (255 * got - expected)[:, 10:-10, 10:-10].abs().max()
        assert apart <= 1.01, "Pillow cuts levels that are rounded here"


@pytest.mark.parametrize(("width", "depth"), [(3, -1), (1, 3), (4, 2)])
def test_a_batch_is_mixed_as_its_images_one_operation_after_the_other(width, depth):
    images, augmentation = smooth_images(20, size=12), AugMix(8, width, depth, 0.5, MEAN, STD)
    found = augmentation(normalised(images), generator(2))
    draw = augmentation.draw(20, generator(2))
    expected = []
    for place in range(20):
        mixture = torch.zeros(3, 12, 12)
        for chain in range(width):
            image = images[place : place + 1].clone()
            for step in range(len(draw.operations)):
                own = (draw.operations, draw.levels, draw.signs)
                apply_in_place(image, *(numbers[step, place, chain : chain + 1] for numbers in own))
            mixture += draw.weights[place, chain] * image[0]
        expected.append(torch.lerp(images[place].float(), mixture, float(draw.shares[place])))
    torch.testing.assert_close(found, normalised(torch.stack(expected)), rtol=0, atol=1e-4)


def test_what_is_drawn_has_the_laws_of_the_paper():
    """Each test is wrong with probability 1e-4 at most, were the seed not fixed."""
    draw = AugMix(severity=3, width=3, depth=-1, alpha=0.7).draw(4000, generator(3))
    there = draw.operations >= 0
    depths = there.sum(dim=0).flatten()
    assert torch.equal(there, torch.arange(3).view(3, 1, 1) < there.sum(dim=0)), "a chain that ended has ended"
    assert stats.chisquare(depths.bincount()[1:]).pvalue > 1e-4
    assert depths.min() == 1
    assert stats.chisquare(draw.operations[there].bincount(minlength=9)).pvalue > 1e-4
    assert stats.kstest(draw.levels.flatten(), stats.uniform(0.1, 2.9).cdf).pvalue > 1e-4
    assert stats.binomtest(int((draw.signs > 0).sum()), draw.signs.numel()).pvalue > 1e-4
    assert set(draw.signs.unique().tolist()) == {-1, 1}
    assert stats.kstest(draw.shares, stats.beta(0.7, 0.7).cdf).pvalue > 1e-4
    for chain in range(3):
        assert stats.kstest(draw.weights[:, chain], stats.beta(0.7, 1.4).cdf).pvalue > 1e-4
    torch.testing.assert_close(draw.weights.sum(dim=1), torch.ones(4000, dtype=torch.float64))


def test_a_fixed_depth_is_the_depth_of_every_chain():
    draw = AugMix(depth=5).draw(50, generator())
    assert len(draw.operations) == 5
    assert draw.operations.min() == 0


def test_mixtures_stay_between_black_and_white_and_differ_more_at_higher_severity():
    images = smooth_images(200, size=32)
    apart = []
    for severity in (1, 3, 10):
        found = AugMix(severity, mean=MEAN, std=STD)(normalised(images), generator(4))
        levels = found * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)
        assert levels.min() > -1e-5
        assert levels.max() < 1 + 1e-5
        apart.append(float((levels - images / 255).abs().mean()))
    assert apart == sorted(apart)
    assert 0.01 < apart[0] < apart[2] < 0.5


def test_one_number_stands_for_all_channels():
    images = normalised(smooth_images(5))
    one = AugMix(mean=0.5, std=0.25)(images, generator())
    each = AugMix(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))(images, generator())
    assert torch.equal(one, each)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"severity": 11}, "severity must lie between 0.1 and 10"),
        ({"severity": 0.01}, "severity must lie between 0.1 and 10"),
        ({"width": 0}, "width must be a whole number"),
        ({"depth": 0}, "at least 1, not 0, or -1 for one drawn from 1 to 3"),
        ({"depth": 1.5}, "or -1"),
        ({"alpha": 0.0}, "alpha must be a finite number above 0"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be above 0"),
        ({"mean": float("nan")}, "mean must be finite"),
    ],
)
def test_wrong_options_are_refused_in_words(options, words):
    with pytest.raises(UserError, match=words):
        AugMix(**options)


def test_constants_of_other_channels_are_refused():
    with pytest.raises(UserError, match=r"mean must be one number or one a channel \(1\)"):
        AugMix(mean=MEAN, std=STD)(torch.zeros(2, 1, 8, 8), generator())
