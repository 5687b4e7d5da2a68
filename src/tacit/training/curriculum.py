"""Who takes part in a step, by a sample curriculum: difficulties under a released model, and the logistic regression that the
first steps of a plan can be given for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tacit.gradients import ClippedGradient
from tacit.gradients.batches import Batch, losses_of
from tacit.gradients.sandbox import unchanged
from tacit.learning.curricula import SampleCurriculum
from tacit.learning.losses import cross_entropy
from tacit.privacy.beside import LOSS
from tacit.privacy.clipping import Automatic, Grouped
from tacit.privacy.mechanism import PrivateGradient
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError
from tacit.training.evaluation import evaluating
from tacit.training.examples import channels_last

_MARGIN = 1e-3  # around a threshold: far more than the last digits, in which the examples of one batch show
_TRIED = 16  # examples whose difficulty is computed by itself as well, when a run begins


class Participation:
    """What a curriculum makes of each batch that was drawn; without one, nothing.

    *Guarantee.* Whether an example is kept depends on that example, on public constants and on a model that was released: its
    difficulty is the one *computed for it alone*, in evaluation mode and not augmented. (Difficulties are computed together where
    they are clear. Their last digits depend on who else is in the batch, so whoever comes near the threshold is judged again
    alone; and where alone and together do not agree, everybody is.) Those who are left out add nothing to the sum: nobody takes
    part with a probability above the plan's, the sensitivity is the plan's, and so are the releases. How many were kept is
    private, and is stored nowhere.

    >>> plan = PrivacyPlan(sample_rate=0.1, steps=100)
    >>> participation = Participation(SampleCurriculum("step", first=0.7, epochs=2), plan)
    >>> model, inputs, targets = nn.Linear(1, 2, bias=False), torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1])
    >>> _ = model.weight.data.copy_(torch.tensor([[2.0], [0.0]]))
    >>> for step in (0, 20):
    ...     participation.begin_step(step)
    ...     participation.of(model, inputs, targets)[1]
    tensor([0])
    tensor([0, 1])
    """

    def __init__(
        self, curriculum: SampleCurriculum | None, plan: PrivacyPlan, *, physical_batch_size: int | None = None
    ) -> None:
        self.curriculum = curriculum
        self.threshold = math.inf
        self.warm_up = 0 if curriculum is None else curriculum.logistic_steps(plan.sample_rate)
        self._sample_rate, self._step = plan.sample_rate, self.warm_up
        self._tried = self._alone = False
        self._logistic: LogisticRegression | None = None
        if self.warm_up:
            assert curriculum is not None
            assert curriculum.logistic_learning_rate is not None
            if self.warm_up >= plan.steps:
                raise UserError(
                    f"the logistic regression takes {self.warm_up} of the plan's {plan.steps} steps and leaves none for the "
                    "network; give a smaller curriculum.logistic_epochs"
                )
            self._logistic = LogisticRegression(plan, curriculum.logistic_learning_rate, physical_batch_size)

    @property
    def sorted(self) -> bool:
        """Whether batches come from a sorted pass, which has no privacy."""
        return self.curriculum is not None and self.curriculum.sorted

    @property
    def warming_up(self) -> bool:
        """Whether this step is the logistic regression's."""
        return self._step < self.warm_up

    @property
    def gradient(self) -> ClippedGradient:
        """Of the logistic regression."""
        assert self._logistic is not None
        return self._logistic.gradient

    def prepare(self, model: nn.Module, inputs: Any) -> None:
        """Make the logistic regression for examples of this shape, which is all that is looked at."""
        if self._logistic is not None:
            self._logistic.prepare(model, inputs)

    def begin_step(self, step: int) -> None:
        """A step of the plan begins, and with it another threshold."""
        self._step = step
        if self.curriculum is not None:
            self.threshold = self.curriculum.threshold((step - self.warm_up) * self._sample_rate)

    def of(self, model: nn.Module, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Those of a batch that take part; in the steps of the logistic regression all of them, as it takes them."""
        if self.warming_up:
            return flat(inputs), targets
        if self.curriculum is None or math.isinf(self.threshold) or not len(targets):
            return inputs, targets
        if self._logistic is not None:
            kept = self.admitted(self._logistic.model, flat(inputs), targets)
        else:
            kept = self.admitted(model, inputs, targets)
        rows, labels = Batch.of(inputs, targets).rows(kept.nonzero()[:, 0]).tree()
        return channels_last(rows), labels

    def admitted(self, model: nn.Module, inputs: Any, targets: Tensor) -> Tensor:
        """Which of these examples the curriculum admits at the threshold of this step, [examples]: private data."""
        assert self.curriculum is not None
        batch = Batch.of(inputs, targets)
        if not self._alone:
            found, margin = difficulties(model, batch), _MARGIN * max(1.0, abs(self.threshold))
            near = ~((found - self.threshold).abs() > margin)  # also what is not a number
            near[: 0 if self._tried else _TRIED] = True
            places, self._tried = near.nonzero()[:, 0], True
            again = torch.cat([found[:0], *_one_by_one(model, batch.rows(places))])
            self._alone = not torch.allclose(again, found[places], rtol=1e-4, atol=margin / 2, equal_nan=True)
            found[places] = again
        if self._alone:
            found = torch.cat(_one_by_one(model, batch))
        return self.curriculum.admits(found, self.threshold)

    def update(self, private: PrivateGradient) -> None:
        """A step of the logistic regression."""
        assert self._logistic is not None
        self._logistic.update(private)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold: the weights of the logistic regression, which were released."""
        return {} if self._logistic is None else self._logistic.tensors

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from a checkpoint's tensors."""
        if self._logistic is not None and tensors:
            self._logistic.restore(tensors, device)


class LogisticRegression:
    """A linear model of the flattened inputs, which private gradients train by the plan's own clipping.

    Its learning rate is for gradients measured in clipping norms, so that it does not depend on the norm.

    *Guarantee.* It sees the training examples through releases of the plan's mechanism alone; before the first, it is 0.

    >>> regression = LogisticRegression(PrivacyPlan(sample_rate=0.1, steps=100), learning_rate=0.5)
    >>> regression.prepare(nn.Linear(4, 3), torch.zeros(1, 4))
    >>> regression.model
    Linear(in_features=4, out_features=3, bias=True)
    """

    def __init__(self, plan: PrivacyPlan, learning_rate: float, physical_batch_size: int | None = None) -> None:
        clipping = plan.clipping.of if isinstance(plan.clipping, Automatic) else plan.clipping
        if isinstance(clipping, Grouped):
            raise UserError(
                'difficulty "logistic" trains another model by the same plan, and this plan clips groups of the network\'s '
                'parameters; leave privacy.groups out, or take difficulty "network"'
            )
        self._plan, self._learning_rate, self._physical_batch_size = plan, learning_rate, physical_batch_size
        self._gradient: ClippedGradient | None = None

    @property
    def gradient(self) -> ClippedGradient:
        """The engine of its clipped sums."""
        assert self._gradient is not None, "prepare comes first"
        return self._gradient

    @property
    def model(self) -> nn.Module:
        return self.gradient.model

    @torch.no_grad()
    def prepare(self, network: nn.Module, inputs: Any) -> None:
        """For inputs of this shape, and for as many classes as the network has."""
        if self._gradient is not None:
            return
        width = flat(inputs).shape[1]
        with evaluating(network):
            outputs = network(torch.zeros(1, *inputs.shape[1:], dtype=inputs.dtype, device=inputs.device))
        self._make(torch.zeros(outputs.shape[1], width), torch.zeros(outputs.shape[1]), inputs.device)

    def _make(self, weight: Tensor, bias: Tensor, device: torch.device) -> None:
        model = nn.Linear(weight.shape[1], weight.shape[0])
        model.load_state_dict({"weight": weight, "bias": bias})
        self._gradient = ClippedGradient(
            model.to(device),
            loss=cross_entropy,
            clipping=self._plan.clipping,
            physical_batch_size=self._physical_batch_size,
            with_losses=any(number.name == LOSS for number in self._plan.beside),
        )

    @torch.no_grad()
    def update(self, private: PrivateGradient) -> None:
        """One plain step of gradient descent."""
        rate = self._learning_rate / self.gradient.clipping.clipping_norms[0]
        for name, parameter in self.model.named_parameters():
            parameter.sub_(rate * private.gradients[name])

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {} if self._gradient is None else dict(self.model.state_dict())

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on with these weights."""
        self._make(tensors["weight"], tensors["bias"], device)


@torch.no_grad()
def difficulties(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of each example in nats, whatever the training loss is; the model is in evaluation mode meanwhile.

    >>> difficulties(nn.Linear(2, 4), Batch.of(torch.zeros(3, 2), torch.tensor([0, 1, 2]))).shape
    torch.Size([3])
    """
    with evaluating(model), unchanged(model, _difficulty):
        return losses_of(model, _difficulty, batch)


def _difficulty(outputs: Any, targets: Any) -> Tensor:
    labels = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    if not labels or not isinstance(outputs, Tensor) or outputs.dim() != 2:
        raise UserError(
            "a curriculum goes by the cross-entropy of each example, and needs a model that gives one number a class, and labels "
            "that are whole numbers; leave the curriculum out"
        )
    return functional.cross_entropy(outputs.float(), targets.long(), reduction="none")


def _one_by_one(model: nn.Module, batch: Batch) -> list[Tensor]:
    """Difficulties that do not depend on who else is in the batch, not even in their last digits."""
    # a row of its own, not a view: its place in memory must not show either
    rows = (batch.rows(torch.tensor([place])) for place in range(batch.size))
    return [difficulties(model, Batch.of(*channels_last(row.tree()))) for row in rows]


def flat(inputs: Any) -> Tensor:
    """Inputs as a logistic regression takes them, [batch, numbers].

    >>> flat(torch.zeros(2, 3, 4, 4)).shape
    torch.Size([2, 48])
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise UserError(
            'difficulty "logistic" needs one tensor of floating-point numbers an example; take difficulty "network"'
        )
    return inputs.flatten(1).float()
