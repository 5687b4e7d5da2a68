"""Recipes, the trainer, checkpoints and progress."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.training.dice import DiceTrainer
    from tacit.training.ensemble import Ensemble
    from tacit.training.evaluation import evaluate
    from tacit.training.interruption import Interrupted
    from tacit.training.recipe import Recipe
    from tacit.training.run import load_model, train
    from tacit.training.trainer import PrivateTrainer

_HOMES = {
    "DiceTrainer": "dice",
    "Ensemble": "ensemble",
    "Interrupted": "interruption",
    "PrivateTrainer": "trainer",
    "Recipe": "recipe",
    "evaluate": "evaluation",
    "load_model": "run",
    "train": "run",
}

__all__ = ["DiceTrainer", "Ensemble", "Interrupted", "PrivateTrainer", "Recipe", "evaluate", "load_model", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tacit.training.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
