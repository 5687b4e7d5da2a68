"""Every augmentation keeps one contract: shape, layout, numbers of its own an image, and no look at another image."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tacit.learning import AUGMENTATIONS, AugMix, Compose, Crop, Flip, Views, make_augmentation
from tacit.privacy import UserError

EVERY = {
    "flip": Flip(),
    "crop": Crop(),
    "augmix": AugMix(severity=6, mean=0.5, std=0.25),
    "all": make_augmentation(["flip", "crop", "augmix"], mean=0.5, std=(0.25, 0.2, 0.3), padding=2, severity=5),
    "views": Views(3, Compose([Flip(), Crop(), AugMix(mean=0.5, std=0.25)])),
}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
every_augmentation = pytest.mark.parametrize("name", EVERY)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(batch=12, channels=3, height=16, width=20, layout="channels first"):
    images = torch.rand(batch, channels, height, width, generator=generator(1)).sub(0.5).div(0.25)
    return images.contiguous(memory_format=LAYOUTS[layout])


def test_every_named_augmentation_is_tested_here():
    assert set(AUGMENTATIONS) <= set(EVERY)


@every_layout
@every_augmentation
def test_shape_kind_and_layout_stay_and_the_images_are_not_written_to(name, layout):
    images = random_images(layout=layout)
    before = images.clone()
    found = EVERY[name](images, generator())
    assert torch.equal(images, before)
    flat = found.flatten(0, 1) if name == "views" else found
    assert flat.shape[1:] == images.shape[1:]
    assert flat.stride() == images.stride()
    assert flat.dtype == torch.float32
    assert not torch.equal(flat[: len(images)], images)


@every_augmentation
def test_both_layouts_become_the_same(name):
    first, last = (EVERY[name](random_images(layout=layout), generator(5)) for layout in LAYOUTS)
    torch.testing.assert_close(first, last, rtol=0, atol=1e-5)


@every_layout
@every_augmentation
def test_what_an_image_becomes_depends_on_no_other_image(name, layout):
    images = random_images(layout=layout)
    expected = EVERY[name](images, generator(2))
    for place in (0, 5, 11):
        others = torch.arange(len(images)) != place
        for pixels in (0.0, 1e6, -math.inf, math.nan):
            changed = images.clone()
            changed[others] = pixels
            assert torch.equal(EVERY[name](changed, generator(2))[place], expected[place])
        changed = images.clone()
        changed[others] = images[others].flip(0).roll(3, dims=2)
        assert torch.equal(EVERY[name](changed, generator(2))[place], expected[place])


@every_augmentation
def test_equal_images_become_different_ones(name):
    images = random_images(batch=1).expand(40, -1, -1, -1)
    different = len(EVERY[name](images, generator(3)).flatten(1).unique(dim=0))
    assert different == 2 if name == "flip" else different > 25


@every_augmentation
def test_the_generator_decides_and_the_global_ones_are_left_alone(name):
    images = random_images()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (EVERY[name](images, generator(seed)) for seed in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    going_on = generator(4)
    EVERY[name](images, going_on)
    assert not torch.equal(EVERY[name](images, going_on), first)


@every_layout
@every_augmentation
def test_empty_batches_and_other_sizes_pass(name, layout):
    for shape in ((0, 3, 16, 20), (1, 3, 7, 5), (2, 3, 1, 1)):
        found = EVERY[name](random_images(*shape, layout=layout), generator())
        assert found.shape == ((shape[0], 3, *shape[1:]) if name == "views" else shape)
        assert found.isfinite().all()


@every_augmentation
def test_what_is_no_image_is_refused_in_words(name):
    for inputs, words in (
        (torch.zeros(4, 64), r"for images, .* not for inputs of shape \[4, 64\]"),
        (torch.zeros(4, 2, 3, 8, 8), "not for inputs of shape"),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "not of torch.uint8"),
        ((torch.zeros(4, 3, 8, 8),), "not for tuple"),
    ):
        with pytest.raises(UserError, match=words):
            EVERY[name](inputs, generator())


def test_a_flip_exchanges_left_and_right_as_often_as_it_says():
    images = random_images(batch=2000, height=3, width=4)
    for probability in (0.5, 0.1):
        found = Flip(probability)(images, generator(6))
        flipped = (found != images).flatten(1).any(dim=1)
        assert torch.equal(found[flipped], images[flipped].flip(3))
        assert stats.binomtest(int(flipped.sum()), 2000, probability).pvalue > 1e-4


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    padding=st.integers(0, 5),
    layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 2**32),
)
def test_a_crop_is_a_window_of_the_padded_image(shape, padding, layout, seed):
    batch, channels, height, width = shape
    images = 1 + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    found = Crop(padding)(images.contiguous(memory_format=LAYOUTS[layout]), generator(seed))
    corners = torch.randint(2 * padding + 1, (2, batch), generator=generator(seed))
    for place, (top, left) in enumerate(corners.T.tolist()):
        expected = torch.zeros(channels, height, width)
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + top - padding, x + left - padding
                if 0 <= from_y < height and 0 <= from_x < width:
                    expected[:, y, x] = images[place, :, from_y, from_x]
        assert torch.equal(found[place], expected)


def test_every_window_is_as_likely():
    image = torch.zeros(1, 1, 5, 5)
    image[0, 0, 2, 2] = 1
    found = Crop(2)(image.expand(5000, -1, -1, -1), generator(7))
    assert (found.sum(dim=(1, 2, 3)) == 1).all(), "the middle is in every window"
    assert stats.chisquare(found.sum(dim=0).flatten()).pvalue > 1e-4


def test_composed_augmentations_follow_one_another():
    images, together, apart = random_images(), generator(8), generator(8)
    found = Compose([Crop(3), Flip()])(images, together)
    assert torch.equal(found, Flip()(Crop(3)(images, apart), apart))


@every_layout
def test_views_are_independent_draws_that_flatten_without_a_copy(layout):
    images = random_images(layout=layout)
    drawing = generator(9)
    views = Views(4, Crop(3))(images, generator(9))
    assert views.shape == (12, 4, 3, 16, 20)
    for view in range(4):
        assert torch.equal(views[:, view], Crop(3)(images, drawing)), "one draw after the other"
    assert not torch.equal(views[:, 0], views[:, 1])
    flat = views.flatten(0, 1)
    assert flat.data_ptr() == views.data_ptr()
    assert flat.is_contiguous(memory_format=LAYOUTS[layout])
    assert flat.stride() == torch.empty(48, 3, 16, 20).contiguous(memory_format=LAYOUTS[layout]).stride()


def test_a_single_view_has_no_axis_of_views():
    images = random_images()
    assert torch.equal(Views(1, Crop(3))(images, generator()), Crop(3)(images, generator()))


def test_names_and_options_make_an_augmentation():
    made = make_augmentation(
        ["flip", "crop", "augmix"], (0.4, 0.5, 0.6), (0.2, 0.2, 0.2), views=2, padding=3, severity=2, width=1, alpha=0.5
    )
    mix = AugMix(severity=2, width=1, alpha=0.5, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2))
    assert made == Views(2, Compose((Flip(), Crop(3), mix)))
    assert make_augmentation(["crop"], 0.5, 0.25) == Crop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": ["flp"]}, "did you mean 'flip'"),
        ({"names": "flip"}, r"must be a list such as \['flip', 'crop'\], not 'flip'"),
        ({"names": []}, "must be a list such as"),
        (
            {"names": ["crop"], "pading": 3},
            r"no augmentation.pading; did you mean 'padding'\? \(of crop there are: padding\)",
        ),
        ({"names": ["flip", "crop"], "severity": 3}, "augmentation.severity is of 'augmix', which"),
        ({"names": ["crop"], "padding": "four"}, "augmentation.padding must be a number"),
        ({"names": ["crop"], "padding": -1}, "augmentation.padding must be a whole number of at least 0"),
        ({"names": ["crop"], "padding": 2.5}, "augmentation.padding must be a whole number"),
        ({"names": ["flip"], "probability": 1.5}, "augmentation.probability must be above 0 and at most 1"),
        ({"names": ["flip"], "views": 0}, "augmentation.views must be a whole number of at least 1"),
        ({"names": ["augmix"], "severity": 40}, "severity must lie between"),
        ({"names": ["augmix"], "std": 0.0}, "std must be above 0"),
    ],
)
def test_wrong_augmentations_are_refused_in_words(options, words):
    with pytest.raises(UserError, match=words):
        make_augmentation(**{"mean": 0.5, "std": 0.25, **options})
