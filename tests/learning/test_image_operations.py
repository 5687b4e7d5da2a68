"""Operations on images of bytes are Pillow's: exactly where they change levels, inside the image where they move pixels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tacit.learning.image_operations import (
    autocontrast,
    equalize,
    look_up,
    posterize,
    rotation,
    shear,
    solarize,
    translation,
    warp,
)


@st.composite
def batches(draw):
    """Noise of all contrasts, with few levels or many, and images of one grey."""
    shape = [draw(st.integers(1, 3)), draw(st.sampled_from([1, 3])), draw(st.integers(1, 48)), draw(st.integers(1, 48))]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lowest, highest = sorted((draw(st.integers(0, 255)), draw(st.integers(0, 255))))
    images = random.integers(lowest, highest, shape, endpoint=True, dtype=np.uint8)
    coarseness = draw(st.sampled_from([1, 1, 16, 100]))
    return torch.from_numpy(images // coarseness * coarseness)


def as_pillow(image):
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.movedim(0, 2).numpy())


def as_tensor(picture):
    pixels = torch.from_numpy(np.array(picture))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.movedim(2, 0)


@settings(deadline=None, max_examples=150)
@given(images=batches(), data=st.data())
def test_operations_on_levels_are_those_of_pillow(images, data):
    bits = data.draw(st.lists(st.integers(1, 8), min_size=len(images), max_size=len(images)))
    thresholds = data.draw(st.lists(st.integers(0, 256), min_size=len(images), max_size=len(images)))
    found = {
        "autocontrast": autocontrast(images),
        "equalize": equalize(images),
        "posterize": posterize(images, torch.tensor(bits)),
        "solarize": solarize(images, torch.tensor(thresholds)),
    }
    for place, image in enumerate(images):
        picture = as_pillow(image)
        expected = {
            "autocontrast": ImageOps.autocontrast(picture),
            "equalize": ImageOps.equalize(picture),
            "posterize": ImageOps.posterize(picture, bits[place]),
            "solarize": ImageOps.solarize(picture, thresholds[place]),
        }
        for name, tables in found.items():
            assert torch.equal(look_up(images, tables)[place], as_tensor(expected[name])), name


def test_an_equalized_photograph_sized_image_is_that_of_pillow():
    waves = torch.linspace(0, 9, 300).sin().outer(torch.linspace(1, 5, 200).cos())
    images = (waves * 90 + 120).to(torch.uint8).expand(1, 3, -1, -1).contiguous()
    found = look_up(images, equalize(images))
    assert torch.equal(found[0], as_tensor(ImageOps.equalize(as_pillow(images[0]))))
    assert not torch.equal(found, images)


def smooth(height, width):
    """Three channels of waves: linear between the pixels, nearly."""
    y, x = torch.meshgrid(torch.arange(height) / 5.0, torch.arange(width) / 7.0, indexing="ij")
    waves = torch.stack([torch.sin(x + y), torch.cos(1.3 * x - y), torch.sin(x) * torch.cos(y)])
    return (127.5 + 100 * waves).to(torch.uint8)


MOVES = {
    "a turn": lambda size: (rotation(torch.tensor([17.0]), *size), 17.0),
    "a turn the other way": lambda size: (rotation(torch.tensor([-8.0]), *size), -8.0),
    "shear along x": lambda size: (shear(torch.tensor([0.25]), torch.tensor([0.0])), (1, 0.25, 0, 0, 1, 0)),
    "shear along y": lambda size: (shear(torch.tensor([0.0]), torch.tensor([-0.3])), (1, 0, 0, -0.3, 1, 0)),
    "translation along x": lambda size: (translation(torch.tensor([5.0]), torch.tensor([0.0])), (1, 0, 5, 0, 1, 0)),
    "translation along y": lambda size: (translation(torch.tensor([0.0]), torch.tensor([-3.4])), (1, 0, 0, 0, 1, -3.4)),
}


@pytest.mark.parametrize("size", [(32, 32), (28, 40)], ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_operations_on_places_are_those_of_pillow_inside_and_black_outside(move, size):
    height, width = size
    image = smooth(height, width)
    matrices, given_to_pillow = MOVES[move](size)
    picture = as_pillow(image)
    if isinstance(given_to_pillow, tuple):
        expected = picture.transform(
            (width, height), Image.Transform.AFFINE, given_to_pillow, Image.Resampling.BILINEAR
        )
    else:
        expected = picture.rotate(given_to_pillow, Image.Resampling.BILINEAR)
    found = warp(image.unsqueeze(0), matrices)[0]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    from_x, from_y = matrices[0] @ torch.stack([x, y, torch.ones_like(x)]).view(3, -1)
    inside = ((from_x > 1) & (from_x < width - 1) & (from_y > 1) & (from_y < height - 1)).view(size)
    outside = ((from_x < -1) | (from_x > width + 1) | (from_y < -1) | (from_y > height + 1)).view(size)
    assert inside.float().mean() > 0.5
    assert outside.any()
    apart = (found.int() - as_tensor(expected).int()).abs()
    assert apart[:, inside].max() <= 1, "Pillow cuts what is rounded here"
    assert (found[:, inside] != image[:, inside]).float().mean() > 0.5, "it did move"
    assert not found[:, outside].any()


def test_each_image_moves_by_its_own_matrix_and_whole_pixels_stay_sharp():
    images = torch.randint(256, (3, 2, 6, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = warp(images, translation(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.0, 1.0, 0.0])))
    assert torch.equal(found[0], images[0])
    assert torch.equal(found[1, :, :5, :7], images[1, :, 1:, 2:])
    assert torch.equal(found[2, :, :, 1:], images[2, :, :, :-1])
    assert not found[1, :, 5].any()
    assert not found[2, :, :, 0].any()


def test_turning_there_and_back_is_the_same_place():
    there, back = (rotation(torch.tensor([sign * 30.0], dtype=torch.float64), 28, 40)[0] for sign in (1, -1))
    corner = torch.tensor([3.0, 5.0, 1.0], dtype=torch.float64)
    between = torch.cat([there @ corner, corner[2:]])
    torch.testing.assert_close(back @ between, corner[:2])
    assert math.dist(between[:2].tolist(), (20, 14)) == pytest.approx(math.dist((3, 5), (20, 14)))
