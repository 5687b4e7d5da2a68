"""What a trained model says of new examples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tacit.data import Dataset, read_image, read_inputs
from tacit.privacy.validation import UserError
from tacit.training.run import load_model

_BATCH = 512


@dataclass(frozen=True)
class Prediction:
    """The class a model gives one example, and how sure it is."""

    example: str
    label: str
    probability: float


def predict(
    run_directory: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]], *, device: str = "cpu"
) -> list[Prediction]:
    """The most probable class of every image, and of every row of every `.npz` file."""
    model, facts = load_model(run_directory, device)
    where = next(model.parameters()).device
    predictions = []
    for file in files:
        names, examples = _examples(Path(file), facts)
        for start in range(0, len(examples), _BATCH):
            chosen = range(start, min(start + _BATCH, len(examples)))
            with torch.no_grad():
                inputs, _ = examples.batch(list(chosen), where)
                best = model(inputs).softmax(dim=1).max(dim=1)
            predictions += [
                Prediction(names[row], facts["classes"][int(label)], round(float(probability), 6))
                for row, label, probability in zip(chosen, best.indices, best.values, strict=True)
            ]
    return predictions


def _examples(path: Path, facts: dict[str, Any]) -> tuple[list[str], Dataset]:
    """The examples of one file in the form the model was trained on, and a name for each."""
    shape = tuple(facts["input_shape"])
    if path.suffix == ".npz":
        images = read_inputs(path)
        names = [f"{path}[{row}]" for row in range(len(images))]
    else:
        if len(shape) != 3:
            raise UserError(f"this model takes vectors of {shape[0]} features, not images; give an .npz file with x")
        images = _with_channels(read_image(path, resize=shape[1:]), shape[0])[None]
        names = [str(path)]
    if images.shape[1:] != shape:
        raise UserError(f"{path} holds examples of shape {list(images.shape[1:])}; the model takes {list(shape)}")
    if (images.dtype == np.uint8) != facts["scaled_bytes"]:
        kind = "bytes 0..255 (uint8)" if facts["scaled_bytes"] else "floating-point numbers"
        raise UserError(f"{path} holds {images.dtype}; the model was trained on {kind}")
    labels = np.zeros(len(images), dtype=np.int64)
    return names, Dataset(path.name, images, labels, tuple(facts["classes"]), tuple(facts["mean"]), tuple(facts["std"]))


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Grey to colour by repetition, colour to grey by the usual weights (ITU-R 601)."""
    if image.shape[0] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=0)
    weights = np.array([0.299, 0.587, 0.114])
    return np.tensordot(weights, image, axes=1).round().astype(np.uint8)[None]
