"""tacit: accurate classifiers under differential privacy, with a guarantee you can show."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.gradients import ClippedGradient
    from tacit.privacy import Constant, Flat, Grouped, Linear, PrivacyPlan, UserError, verify
    from tacit.training import Interrupted, PrivateTrainer, Recipe, load_model, train

__version__ = "0.1.0"

# Imported only when used, so that what needs no torch starts at once.
_HOMES = {
    "ClippedGradient": "gradients",
    "Constant": "privacy",
    "Flat": "privacy",
    "Grouped": "privacy",
    "Interrupted": "training",
    "Linear": "privacy",
    "PrivacyPlan": "privacy",
    "PrivateTrainer": "training",
    "Recipe": "training",
    "UserError": "privacy",
    "load_model": "training",
    "train": "training",
    "verify": "privacy",
}

__all__ = [
    "ClippedGradient",
    "Constant",
    "Flat",
    "Grouped",
    "Interrupted",
    "Linear",
    "PrivacyPlan",
    "PrivateTrainer",
    "Recipe",
    "UserError",
    "load_model",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tacit.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
