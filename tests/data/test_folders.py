from __future__ import annotations

import io
import os
import warnings

import numpy as np
import pytest
from PIL import Image

from tacit.data import load
from tacit.data.folders import load_folder
from tacit.data.images import check_resize, decode_image, read_image, resize_images
from tacit.privacy.validation import UserError


def save(path, mode="L", size=(6, 5), seed=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = {"L": (), "RGB": (3,), "RGBA": (4,), "LA": (2,)}[mode]
    rng = np.random.default_rng(seed if seed is not None else abs(hash(path.name)) % 2**32)
    pixels = rng.integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def pets(tmp_path):
    """Twenty grey images of 5 x 6 in each of two classes."""
    for number, label in enumerate(("cat", "dog")):
        for image in range(20):
            save(tmp_path / "pets" / label / f"{image:02}.png", seed=100 * number + image)
    return tmp_path / "pets"


def contents(data):
    return {image.tobytes() for image in data.images}


def test_classes_are_the_sub_folders_in_the_order_of_their_names(pets):
    split = load(pets)
    assert split.train.name == "pets"
    assert split.train.classes == ("cat", "dog")
    assert split.train.input_shape == (1, 5, 6)
    assert split.train.mean == split.train.std == (0.5,)
    assert len(split.train) + len(split.test) == 40
    assert not contents(split.train) & contents(split.test)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_adding_one_image_never_moves_another_between_train_and_test(pets, mode):
    before = load_folder(pets, held_out=0.4)
    # A colour image turns all of them into colour, and still moves none.
    added = save(pets / "cat" / "05-more.png", mode, seed=999).reshape(5, 6, -1)[..., 0].tobytes()
    after = load_folder(pets, held_out=0.4)
    for part in ("train", "test"):
        small, large = ([image[0].tobytes() for image in getattr(s, part).images] for s in (before, after))
        assert [image for image in large if image != added] == small
    assert len(after.train) + len(after.test) == 41


def test_resizing_has_no_say_in_where_an_image_goes(pets):
    plain, small = load_folder(pets, held_out=0.4), load_folder(pets, held_out=0.4, resize=(3, 3))
    assert len(plain.test) == len(small.test)
    np.testing.assert_array_equal(resize_images(plain.test.images, (3, 3)), small.test.images)


def test_neither_the_name_nor_the_number_of_other_files_decides_where_an_image_goes(pets):
    before = load_folder(pets, held_out=0.4)
    for path in sorted(pets.rglob("*.png"))[::3]:
        path.rename(path.with_name(f"renamed-{path.name}"))
    removed = pets / "dog" / "02.png"
    pixels = np.asarray(Image.open(removed)).tobytes()
    removed.unlink()
    after = load_folder(pets, held_out=0.4)
    assert contents(after.train) == contents(before.train) - {pixels}
    assert contents(after.test) == contents(before.test) - {pixels}


@pytest.mark.parametrize("second", ["test", "val"])
def test_folders_train_and_test_are_the_split(tmp_path, second):
    for part, count in (("train", 4), (second, 2)):
        for label in ("cat", "dog"):
            for image in range(count):
                save(tmp_path / part / label / f"{image}.png", seed=image)
    split = load(tmp_path)
    assert (len(split.train), len(split.test)) == (8, 4)
    assert split.train.classes == ("cat", "dog")


def test_a_class_that_only_the_test_folder_has_is_refused(tmp_path):
    for folder in ("train/cat", "train/dog", "test/cat", "test/eel"):
        save(tmp_path / folder / "0.png")
    with pytest.raises(UserError, match="eel has no counterpart"):
        load(tmp_path)


def test_classes_may_be_called_train_and_test(tmp_path):
    for label in ("train", "test"):
        for image in range(12):
            save(tmp_path / label / f"{image}.png", seed=image)
    assert load(tmp_path, held_out=0.5).train.classes == ("test", "train")


def test_a_class_folder_without_images_remains_a_class(pets):
    (pets / "eel").mkdir()
    assert load(pets).train.classes == ("cat", "dog", "eel")


def test_grey_images_among_colour_ones_become_colour(pets):
    pixels = save(pets / "dog" / "99.png", "RGB", seed=7)
    split = load(pets)
    assert split.train.input_shape == (3, 5, 6)
    images = np.concatenate([split.train.images, split.test.images])
    grey = (images == images[:, :1]).all(axis=(1, 2, 3))
    assert np.count_nonzero(~grey) == 1
    np.testing.assert_array_equal(images[~grey][0], pixels.transpose(2, 0, 1))


def test_images_of_two_shapes_are_refused_and_resize_is_advised(pets):
    save(pets / "dog" / "odd.png", size=(7, 9))
    with pytest.raises(UserError) as caught:
        load(pets)
    for part in ("00.png is 5 x 6", "odd.png is 9 x 7", "--set data.resize="):
        assert part in str(caught.value)
    assert load(pets, resize=8).train.input_shape == (1, 8, 8)
    assert load(pets, resize=(8, 4)).train.input_shape == (1, 8, 4)


def test_hidden_files_are_ignored_and_others_with_a_warning(pets):
    (pets / ".DS_Store").write_bytes(b"x")
    (pets / "cat" / ".hidden.png").write_bytes(b"x")
    (pets / ".cache").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(pets).train.classes == ("cat", "dog")
    (pets / "cat" / "notes.txt").write_text("x")
    with pytest.warns(UserWarning, match=r"notes\.txt ignored"):
        load(pets)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_symbolic_link_out_of_the_folder_is_refused(pets, tmp_path, kind):
    save(tmp_path / "outside" / "secret.png")
    target = tmp_path / "outside" / ("secret.png" if kind == "file" else "")
    os.symlink(target, pets / ("cat/link.png" if kind == "file" else "link"))
    with pytest.raises(UserError, match="symbolic link that leads out"):
        load(pets)


def test_a_symbolic_link_within_the_folder_is_followed(pets):
    os.symlink(pets / "cat", pets / "kitten")
    assert load(pets).train.classes == ("cat", "dog", "kitten")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"GIF89a" + b])
def test_a_damaged_image_is_named(pets, damage):
    path = pets / "cat" / "03.png"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"03\.png cannot be read as a PNG or JPEG image"):
        load(pets)


@pytest.mark.parametrize("limit", [45, 35])
def test_a_decompression_bomb_is_named(pets, monkeypatch, limit):
    # Pillow warns above its limit and raises above twice that.
    save(pets / "dog" / "bomb.png", size=(9, 9))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(UserError, match=r"bomb\.png has more than"):
        load(pets)


def test_an_image_of_more_pixels_than_any_camera_gives_is_refused_before_it_is_decoded(pets, monkeypatch):
    save(pets / "dog" / "bomb.png", size=(9, 9))
    monkeypatch.setattr("tacit.data.images.MOST_PIXELS", 80)
    monkeypatch.setattr(
        "tacit.data.images._grey_or_rgb", lambda image: pytest.fail("decoded") if image.width == 9 else image
    )
    with pytest.raises(UserError, match=r"bomb\.png has more than 80 pixels"):
        load(pets)


def test_more_pixels_than_memory_allows_are_refused(pets, monkeypatch):
    monkeypatch.setattr("tacit.data.folders.LARGEST_ARRAY", 1000)
    with pytest.raises(UserError, match=r"data\.resize"):
        load(pets)


@pytest.mark.parametrize("folders", [(), ("cat",)])
def test_fewer_than_two_class_folders_are_refused(tmp_path, folders):
    for folder in folders:
        save(tmp_path / folder / "0.png")
    with pytest.raises(UserError, match="at least two class folders"):
        load(tmp_path)


def test_folders_without_images_are_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match="no PNG or JPEG images"):
        load(tmp_path)
    save(tmp_path / "dog" / "0.png")
    with pytest.raises(UserError, match="one class only"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3), ("I;16", 1)]
)
def test_every_mode_of_a_png_becomes_grey_or_rgb(tmp_path, mode, channels):
    if mode == "I;16":
        image = Image.fromarray(np.full((5, 6), 0x1234, np.uint16))
    else:
        image = Image.new("RGBA", (6, 5), (18, 18, 18, 40)).convert(mode)
    image.save(tmp_path / "image.png")
    pixels = read_image(tmp_path / "image.png")
    assert pixels.shape == (channels, 5, 6)
    assert pixels.dtype == np.uint8
    assert mode == "1" or set(np.unique(pixels)) <= {17, 18}


def test_a_photograph_is_turned_upright(tmp_path):
    image = Image.new("RGB", (6, 4))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "photo.JPG", "JPEG", exif=exif)
    assert read_image(tmp_path / "photo.JPG").shape == (3, 6, 4)


def test_resizing_arrays_and_files_gives_the_same_pixels(tmp_path):
    pixels = save(tmp_path / "image.png", "RGB", size=(9, 7))
    from_file = read_image(tmp_path / "image.png", resize=(4, 5))
    np.testing.assert_array_equal(resize_images(pixels.transpose(2, 0, 1)[None], (4, 5))[0], from_file)


@pytest.mark.parametrize("resize", [0, -3, 2.5, "32", (1, 2, 3), True, 10_000])
def test_a_size_that_is_none_is_refused(resize):
    with pytest.raises(UserError, match="resize"):
        check_resize(resize)


def test_other_formats_are_not_even_tried():
    bitmap = io.BytesIO()
    Image.new("L", (4, 4)).save(bitmap, "BMP")
    with pytest.raises(UserError, match="cannot be read"):
        decode_image(bitmap.getvalue(), "drawing.png")
