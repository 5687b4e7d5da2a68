"""What a trained model says of new examples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
    predictions = []
    for file in files:
        names, examples = _examples(Path(file), facts)
        best = probabilities(model, examples).max(dim=1)
        predictions += [
            Prediction(name, facts["classes"][int(label)], round(float(probability), 6))
            for name, label, probability in zip(names, best.indices, best.values, strict=True)
        ]
    return predictions


@torch.no_grad()
def probabilities(model: nn.Module, examples: Dataset) -> Tensor:
    """The probability that a model gives each class of each example, [examples, classes].

    >>> examples = Dataset("toy", np.zeros((3, 5), np.float32), np.array([0, 1, 0]), ("a", "b"), (0,), (1,))
    >>> probabilities(nn.Linear(5, 2), examples).sum(dim=1).round(decimals=4)
    tensor([1., 1., 1.])
    """
    where = next(model.parameters()).device
    found = [torch.zeros(0, len(examples.classes))]
    for start in range(0, len(examples), _BATCH):
        inputs, _ = examples.batch(slice(start, start + _BATCH), where)
        found.append(model(inputs).softmax(dim=1).cpu())
    return torch.cat(found)


def as_trained_on(images: np.ndarray, facts: dict[str, Any], name: str) -> Dataset:
    """Examples as they are stored, with the constants by which a model's own were normalised; others are refused.

    >>> facts = {"input_shape": [5], "classes": ["a", "b"], "mean": [0.5], "std": [2.0], "scaled_bytes": False}
    >>> as_trained_on(np.zeros((3, 5), np.float32), facts, "toy").batch()[0][0, 0]
    tensor(-0.2500)
    """
    shape = list(facts["input_shape"])
    if list(images.shape[1:]) != shape:
        raise UserError(f"{name} holds examples of shape {list(images.shape[1:])}; the model takes {shape}")
    if (images.dtype == np.uint8) != facts["scaled_bytes"]:
        kind = "bytes 0..255 (uint8)" if facts["scaled_bytes"] else "floating-point numbers"
        raise UserError(f"{name} holds {images.dtype}; the model was trained on {kind}")
    labels = np.zeros(len(images), dtype=np.int64)
    return Dataset(name, images, labels, tuple(facts["classes"]), tuple(facts["mean"]), tuple(facts["std"]))


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
    return names, as_trained_on(images, facts, str(path))


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    """Grey to colour by repetition, colour to grey by the usual weights (ITU-R 601)."""
    if image.shape[0] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=0)
    weights = np.array([0.299, 0.587, 0.114])
    return np.tensordot(weights, image, axes=1).round().astype(np.uint8)[None]
