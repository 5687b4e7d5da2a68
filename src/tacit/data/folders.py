"""A user's own images in folders, one a class."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tacit.data.dataset import Dataset, Split, check_held_out, is_held_out, split_by_mask
from tacit.data.images import SUFFIXES, decode_image, read_file
from tacit.privacy.files import expanded
from tacit.privacy.validation import UserError, visible

LARGEST_ARRAY = 2**34
"""Bytes of pixels that are held in memory: 16 GiB."""
BAR_FROM = 2000
"""Images from which a progress bar is shown."""


class _Item(NamedTuple):
    path: Path
    label: int
    part: str | None


def load_folder(
    root: str | os.PathLike[str],
    *,
    held_out: float = 1 / 6,
    resize: tuple[int, int] | None = None,
    progress: bool = True,
) -> Split:
    """The PNG and JPEG images under `root`, one sub-folder a class, classes in the order of their names.

    If `root` holds `train/` and `test/` (or `val/`), with the class folders in them, these are the parts.
    Else `is_held_out` decides for each file by its bytes and the name of its class, so that neither `resize`
    nor another file has a say. Colour images make greyscale ones among them colour too. Hidden files are
    ignored, a symbolic link that leads out of `root` is refused. The names of the classes, the shape of the
    images and whether they have colour are taken as public.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for label in ("cat", "dog"):
    ...         os.mkdir(os.path.join(folder, label))
    ...         for shade in range(20):
    ...             Image.new("L", (8, 8), shade).save(os.path.join(folder, label, f"{shade}.png"))
    ...     split = load_folder(folder, held_out=0.25)
    >>> split.train.classes, split.train.input_shape, len(split.train) + len(split.test)
    (('cat', 'dog'), (1, 8, 8), 40)
    """
    root = expanded(root)
    held_out = check_held_out(held_out)
    classes, items = _survey(root)
    images, test = _read(root, classes, items, held_out, resize, progress)
    labels = np.array([item.label for item in items], dtype=np.int64)
    if len(np.unique(labels)) < 2:
        raise UserError(f"{root} has images of one class only; a classifier needs at least two")
    name = root.resolve().name or "folder"
    return split_by_mask(Dataset(name, images, labels, classes, (0.5,), (0.5,)), test)


def _survey(root: Path) -> tuple[tuple[str, ...], list[_Item]]:
    """The classes, and every image with its label and (if `root` is split already) its part."""
    parts = {entry.name: Path(entry) for entry in _entries(root, root) if entry.is_dir()}
    second = next((name for name in ("test", "val") if name in parts), None)
    if "train" not in parts or second is None or not _class_folders(parts["train"], root):
        folders = _class_folders(root, root)
        classes = tuple(folders)
        items = [item for label, name in enumerate(classes) for item in _images(folders[name], label, None, root)]
    else:
        train, test = (_class_folders(parts[part], root) for part in ("train", second))
        classes = tuple(train)
        unknown = sorted(set(test) - set(classes))
        if unknown:
            raise UserError(f"{parts[second] / unknown[0]} has no counterpart in {parts['train']}; add or remove it")
        items = [
            item
            for part, folders in (("train", train), ("test", test))
            for name, folder in folders.items()
            for item in _images(folder, classes.index(name), part, root)
        ]
    for name in classes:
        if visible(name) != name:
            raise UserError(f"the class folder {root / name} has a name that cannot be printed; rename it")
    if len(classes) < 2:
        raise UserError(
            f"{root} must hold at least two class folders, not {len(classes)}: put the images of each class "
            "into a sub-folder of its own (for the files of a benchmark set, pass its name and --data-dir)"
        )
    if not items:
        raise UserError(f"{root} holds no PNG or JPEG images in its class folders; put some there")
    return classes, items


def _entries(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, by name, without hidden files; a link out of `root` is refused."""
    try:
        with os.scandir(folder) as listing:
            entries = sorted((e for e in listing if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise UserError(f"{folder} cannot be listed ({error.strerror}); check its name and permissions") from error
    for entry in entries:
        # Only a link can lead outside: the walk began at `root` and goes down.
        if entry.is_symlink() and not _leads_into(entry.path, root):
            raise UserError(
                f"{entry.path} is a symbolic link that leads out of {root}, or nowhere; copy the file or remove the link"
            )
    return entries


def _leads_into(link: str, root: Path) -> bool:
    try:
        return Path(link).resolve(strict=True).is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # to nothing, or in a circle
        return False


def _class_folders(folder: Path, root: Path) -> dict[str, Path]:
    return {entry.name: Path(entry.path) for entry in _entries(folder, root) if entry.is_dir()}


def _images(folder: Path, label: int, part: str | None, root: Path) -> list[_Item]:
    entries = _entries(folder, root)
    images = [e for e in entries if e.name.lower().endswith(SUFFIXES) and e.is_file()]
    if len(images) < len(entries):
        ignored = next(entry for entry in entries if entry not in images)
        others = len(entries) - len(images) - 1
        warnings.warn(
            f"{ignored.path}{f' and {others} more there' if others else ''} ignored: not a PNG or JPEG file",
            stacklevel=2,
        )
    return [_Item(Path(entry.path), label, part) for entry in images]


def _read(
    root: Path,
    classes: tuple[str, ...],
    items: list[_Item],
    held_out: float,
    resize: tuple[int, int] | None,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """All pixels as one array, and which examples are held out."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not (progress and console.is_terminal and len(items) > BAR_FROM)
    images = np.empty((0, 0, 0, 0), dtype=np.uint8)
    test = np.zeros(len(items), dtype=bool)
    bar = track(enumerate(items), root.name, len(items), console=console, transient=True, disable=quiet)
    for row, item in bar:
        content = read_file(item.path)
        pixels = decode_image(content, str(item.path), resize=resize)
        if row == 0:
            _check_memory(root, (len(items), *pixels.shape))
            images = np.empty((len(items), *pixels.shape), dtype=np.uint8)
        elif pixels.shape[1:] != images.shape[2:]:
            raise UserError(
                f"images must all have one shape, but {items[0].path} is {_size(images[0])} and {item.path} "
                f"is {_size(pixels)} (height x width); resize each with --set data.resize={pixels.shape[1]}"
            )
        elif len(pixels) > images.shape[1]:
            _check_memory(root, (len(items), *pixels.shape))
            images = np.repeat(images, 3, axis=1)
        images[row] = pixels  # One grey channel fills three.
        if item.part is None:
            test[row] = is_held_out(content, classes[item.label], held_out)
        else:
            test[row] = item.part == "test"
    return images, test


def _check_memory(root: Path, shape: tuple[int, ...]) -> None:
    if np.prod(shape, dtype=object) > LARGEST_ARRAY:
        raise UserError(
            f"the {shape[0]} images of {root} take more than {LARGEST_ARRAY // 2**30} GiB as pixels; "
            "pass a smaller size, as in --set data.resize=32"
        )


def _size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[2]}"
