"""Several views of an example, by augmentation: their losses are averaged before the gradient is clipped.

The mean over views is a function of one example, so clipping it once costs the same privacy as one view, whatever their number
(De et al., "Unlocking High-Accuracy Differentially Private Image Classification through Scale", 2022: augmentation multiplicity).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.gradients.batches import LayerOutput
from tacit.learning.losses import PerExampleLoss
from tacit.privacy.validation import UserError, check_count


class MeanOverViews:
    """The mean of a loss over K views of each example: what the model gives is [batch, K, ...], targets are one an example.

    The gradient engine sees `views` and lays the inputs, [batch, K, ...], out for the model; `wants_hidden` is the loss's own.

    >>> from torch import nn
    >>> loss = MeanOverViews(nn.CrossEntropyLoss(reduction="none"), views=2)
    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 50.0]]])  # one example: a view that tells nothing, and one that tells all
    >>> loss(logits, torch.tensor([1]))
    tensor([0.3466])
    """

    def __init__(self, loss: PerExampleLoss, views: int) -> None:
        self.loss, self.views = loss, check_count("views", views)

    @property
    def wants_hidden(self) -> bool:
        """Whether the loss wants to see the hidden layers."""
        return bool(getattr(self.loss, "wants_hidden", False))

    def begin_epoch(self, epoch: int) -> None:
        """For a loss that changes with time."""
        begin_epoch = getattr(self.loss, "begin_epoch", None)
        if begin_epoch is not None:
            begin_epoch(epoch)

    def __call__(self, outputs: Tensor, targets: Tensor, layers: list[LayerOutput] | None = None) -> Tensor:
        if not isinstance(outputs, Tensor):
            raise UserError(f"the mean over views is of one output, a tensor, not of a {type(outputs).__name__}")
        rows, repeated = outputs.flatten(0, 1), torch.repeat_interleave(targets, self.views, dim=0)
        if layers is None:
            losses = self.loss(rows, repeated)
        else:
            hidden = [LayerOutput(layer.output.flatten(0, 1), layer.weight) for layer in layers]
            losses = self.loss(rows, repeated, hidden)
        return losses.view(len(targets), self.views).mean(dim=1)
