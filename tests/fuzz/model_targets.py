"""Targets that hold tensors: models, checkpoints, pre-trained weights, and features in the cache."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tacit.data import load
from tacit.models import load_pretrained
from tacit.privacy import PrivacyPlan
from tacit.training.building import build_model
from tacit.training.features import cached_features
from tacit.training.recipe import ModelSection
from tacit.training.run import load_model, save_model
from tacit.training.trainer import PrivateTrainer

from .target import Target, workshop, written

KINDS = ("F32", "F8_E4M3", "F4", "BF16", "C64", "BOOL", "I64")
WORDS = (
    *(b'"dtype":"%s"' % kind.encode() for kind in KINDS),
    *(
        b'"shape":[',
        b'"data_offsets":[0,0]',
        b'"__metadata__":',
        b"9" * 30,
        b"\\u0000",
        b"[" * 2000,
        b"null",
        b"tensor:",
    ),
    *(b'\\"input_shape\\": [1, 20000, 20000]', b'\\"classes\\": []', b'\\"model\\": {', b'\\"name\\": \\"resnet-20\\"'),
    *(b'\\"name\\": \\"linear\\"', b'\\"features\\": \\"scattering\\"'),
)


def relengthened(content: bytes) -> bytes:
    """With the length of the header that the file has, if its first brace closes anywhere."""
    end = content.rfind(b"}") + 1
    return (end - 8).to_bytes(8, "little") + content[8:end] + content[end:] if end > 8 else content


def model(content: bytes) -> None:
    (workshop() / "model").mkdir(exist_ok=True)
    written("model/model.safetensors", content)
    load_model(workshop() / "model")


@cache
def model_seeds() -> list[bytes]:
    data, path, seeds = load("digits").train, workshop() / "weights.safetensors", []
    for section in (
        ModelSection(name="linear"),
        ModelSection(name="small-cnn", activation="tempered:1.97:2.27:1.15"),
        ModelSection(name="linear", features="scattering"),
    ):
        save_model(path, build_model(section, (1, 8, 8), 10), section, data)
        seeds.append(path.read_bytes())
    return seeds


@cache
def _trainer() -> PrivateTrainer:
    """A run of a few steps, whose checkpoint is exchanged for others."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    trainer = PrivateTrainer(
        network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(reduction="none"),
        plan=PrivacyPlan(sample_rate=0.01, steps=2, expected_batch_size=15),
        run_directory=workshop() / "training",
    )
    trainer.fit(load("digits").train)
    return trainer


def checkpoint(content: bytes) -> None:
    path = _path_of_checkpoint()
    path.write_bytes(content)
    _trainer()._load()


def _path_of_checkpoint() -> Path:
    directory = _trainer().directory
    assert directory is not None
    return directory.checkpoint


@cache
def checkpoint_seeds() -> list[bytes]:
    return [_path_of_checkpoint().read_bytes()]


def pretrained(content: bytes) -> None:
    load_pretrained(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), written("weights.safetensors", content))


@cache
def pretrained_seeds() -> list[bytes]:
    from safetensors.torch import save

    tensors = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).state_dict()
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
    return [save({name: tensor.to(kind) for name, tensor in tensors.items()}) for kind in kinds]


def features(content: bytes) -> None:
    cached_features(written("cached.npy", content), 3)


def feature_seeds() -> list[bytes]:
    seeds = []
    for array in (np.zeros((3, 2, 2, 2), np.float32), np.zeros((3, 4)), np.array([{}], dtype=object)):
        stream = io.BytesIO()
        np.lib.format.write_array(stream, array, allow_pickle=True)
        seeds.append(stream.getvalue())
    return seeds


TARGETS = [
    Target("model", model, model_seeds, WORDS, relengthened),
    Target("checkpoint", checkpoint, checkpoint_seeds, WORDS, relengthened),
    Target("pretrained", pretrained, pretrained_seeds, WORDS, relengthened),
    Target("features", features, feature_seeds, (b"'<f4'", b"'|O'", b"'shape': (", b"\x93NUMPY\x02\0", b"True")),
]
