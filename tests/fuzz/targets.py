"""Every target, by name; only the module of the one that is asked for is loaded, since some need torch."""

from __future__ import annotations

from importlib import import_module

from .target import Target

NAMES = {
    "data_targets": ["idx", "cifar", "benchmark-file", "archive", "npz", "npy", "image", "image-file", "folder"],
    "text_targets": ["recipe", "recipe-file", "changes", "schedule", "options", "account"],
    "run_targets": ["ledger", "run", "certificate", "signature", "key", "metrics"],
    "model_targets": ["model", "checkpoint", "pretrained", "features"],
}
TARGETS = [name for names in NAMES.values() for name in names]


def target_of(name: str) -> Target:
    """The target of this name."""
    module = next(module for module, names in NAMES.items() if name in names)
    targets: list[Target] = import_module(f".{module}", __package__).TARGETS
    return next(target for target in targets if target.name == name)
