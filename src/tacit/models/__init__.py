"""The papers' networks, a small one for digits, and what makes a model of your own fit for private training."""

from tacit.gradients.standardized import WeightStandardizedConv2d
from tacit.models.efficientnet import efficientnet_b0
from tacit.models.networks import all_conv, cifar_cnn, linear, mnist_cnn, scatter_cnn, shallow_scatter_cnn, small_cnn
from tacit.models.pretrained import Pretrained, freeze, load_pretrained
from tacit.models.prior import PriorScale
from tacit.models.registry import MODELS, build
from tacit.models.replacement import without_batch_norm
from tacit.models.residual import resnet, wide_resnet
from tacit.models.scattering import Scattering
from tacit.models.standardize import Standardize
from tacit.models.transformer import transformer

__all__ = [
    "MODELS",
    "Pretrained",
    "PriorScale",
    "Scattering",
    "Standardize",
    "WeightStandardizedConv2d",
    "all_conv",
    "build",
    "cifar_cnn",
    "efficientnet_b0",
    "freeze",
    "linear",
    "load_pretrained",
    "mnist_cnn",
    "resnet",
    "scatter_cnn",
    "shallow_scatter_cnn",
    "small_cnn",
    "transformer",
    "wide_resnet",
    "without_batch_norm",
]
