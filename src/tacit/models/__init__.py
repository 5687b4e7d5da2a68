"""The papers' networks, a small one for digits, and what makes a model of your own fit for private training."""

from tacit.models.networks import MODELS, build, cifar_cnn, linear, mnist_cnn, small_cnn
from tacit.models.replacement import without_batch_norm

__all__ = ["MODELS", "build", "cifar_cnn", "linear", "mnist_cnn", "small_cnn", "without_batch_norm"]
