"""One image at a time: reading a PNG or JPEG file, and resizing."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tacit.privacy.files import read_whole
from tacit.privacy.validation import UserError, check_count

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg")
LARGEST_FILE = 2**28
MOST_PIXELS = 62_000_000
"""Of one image, at up to eight bytes a pixel while it is decoded. As many as cameras give: however few bytes a file has, it may
say that it has so many."""
_STRIP = 2**20  # pixels that are taken out of an image at a time
MOST_SCANS = 100
"""Of a progressive JPEG, which has ten as a rule: each goes over all pixels anew, however few bytes it has."""


def read_image(path: str | os.PathLike[str], *, resize: tuple[int, int] | None = None) -> np.ndarray:
    """The pixels of a PNG or JPEG file: uint8, `[1, height, width]` if greyscale, else `[3, height, width]`.

    Transparency is dropped, a photograph is turned upright as its EXIF entry says, 16-bit greys keep their
    upper byte.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "red.png")
    ...     Image.new("RGB", (3, 2), "red").save(path)
    ...     pixels = read_image(path)
    >>> pixels.shape, pixels[:, 0, 0].tolist()
    ((3, 2, 3), [255, 0, 0])
    """
    return decode_image(read_file(path), str(path), resize=resize)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image file, unless it is too long to be one.

    >>> read_file("no-such-file.png")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: no-such-file.png cannot be read (No such file or directory); ...
    """
    try:
        return read_whole(path, largest=LARGEST_FILE)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its name and permissions") from error


def decode_image(content: bytes, name: str, *, resize: tuple[int, int] | None = None) -> np.ndarray:
    """What `read_image` does, for bytes already read; `name` is for the error.

    >>> decode_image(b"not an image", "cat.png")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: cat.png cannot be read as a PNG or JPEG image (...); ...
    """
    from PIL import Image, ImageOps

    if content.startswith(b"\xff\xd8") and content.count(b"\xff\xda") > MOST_SCANS:
        raise UserError(f"{name} has more than {MOST_SCANS} scans; remove it or save it anew")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise Image.DecompressionBombError
                # no copy is held beside the image that it is of
                ImageOps.exif_transpose(opened, in_place=True)
                image = _grey_or_rgb(opened)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        most = min(MOST_PIXELS, Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
        raise UserError(f"{name} has more than {most} pixels; remove it or save it smaller") from error
    except Exception as error:  # A damaged file makes Pillow's decoders raise errors of many kinds.
        reason = str(error).replace("\n", " ").rstrip(".")[:200] or type(error).__name__
        if "cannot identify" in reason:
            reason = "it is of another kind or damaged"
        raise UserError(f"{name} cannot be read as a PNG or JPEG image ({reason}); repair or remove it") from error
    if resize is not None:
        image = image.resize((resize[1], resize[0]), Image.Resampling.BILINEAR)
    return _pixels(image)


def _pixels(image: Image.Image) -> np.ndarray:
    """[channels, height, width], some rows at a time: all of them at once would be held three times."""
    rows = max(1, _STRIP // image.width)
    pixels = np.empty((len(image.getbands()), image.height, image.width), dtype=np.uint8)
    for top in range(0, image.height, rows):
        strip = np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))
        pixels[:, top : top + rows] = strip if strip.ndim == 2 else strip.transpose(2, 0, 1)
    return pixels


def resize_images(images: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Each image (uint8, `[n, channels, height, width]`) resized by itself, bilinearly, to (height, width).

    >>> resize_images(np.full((2, 1, 8, 8), 7, dtype=np.uint8), (4, 5)).shape
    (2, 1, 4, 5)
    """
    from PIL import Image

    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"resize is for images of bytes (uint8), not for {images.dtype} of shape {list(images.shape)}; "
            "leave data.resize out"
        )
    if images.shape[2:] == size:
        return images
    resized = np.empty((*images.shape[:2], *size), dtype=np.uint8)
    for image, out in zip(images, resized):
        for channel in range(len(image)):
            plane = Image.fromarray(image[channel])
            out[channel] = plane.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return resized


def check_resize(value: int | Sequence[int] | None) -> tuple[int, int] | None:
    """A side, or (height, width), as (height, width).

    >>> check_resize(32), check_resize((28, 32)), check_resize(None)
    ((32, 32), (28, 32), None)
    """
    if value is None:
        return None
    sides = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    if len(sides) != 2:
        raise UserError(f"resize must be one side or (height, width), not {value!r}")
    height, width = (check_count("resize", side) for side in sides)
    if max(height, width) > 4096:
        raise UserError(f"resize must be at most 4096, not {value!r}")
    return height, width


def _grey_or_rgb(image: Image.Image) -> Image.Image:
    """The image, or one made from it, which is then closed."""
    from PIL import Image

    image.load()
    if image.mode.startswith("I"):
        # Pillow clips 16-bit greys when it converts them; shift them instead.
        greys = np.array(image)
        image.close()
        np.clip(np.right_shift(greys, 8, out=greys), 0, 255, out=greys)
        return Image.fromarray(greys.astype(np.uint8))
    if image.mode == "P":
        image = _converted(image, "RGBA")  # Pillow warns about a palette with transparency that goes straight to RGB.
    mode = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    return image if image.mode == mode else _converted(image, mode)


def _converted(image: Image.Image, mode: str) -> Image.Image:
    converted = image.convert(mode)
    image.close()
    return converted
