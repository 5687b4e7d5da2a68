"""What makes private models accurate: activations and losses (more to come: curricula, averaging, augmentation)."""

from tacit.learning.activations import ACTIVATIONS
from tacit.learning.losses import LOSSES

__all__ = ["ACTIVATIONS", "LOSSES"]
