"""Canaries in a whole training: extra records among the real ones, each with an input feature that nobody else uses.

The recipe's network, loss, optimizer and plan train on the recipe's data, and on the canaries for which a fair coin showed heads.
A canary is a blank example with a label drawn by lot and a large value in a feature of its own, read by a layer beside the
network that is not learned. Its gradient, clipped, lies in that feature's weights, where nobody else's is. So the attacker, who
knows the model of each step, knows its direction, and sums up what is released there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tacit.audit.listening import Listener, check_audible, strengths_at
from tacit.audit.mechanism import seed_of
from tacit.audit.scores import Scores
from tacit.audit.subject import Subject
from tacit.data import Dataset
from tacit.learning import make_loss
from tacit.privacy.clipping import Automatic, Grouped
from tacit.privacy.validation import UserError, check_count
from tacit.training.building import build_learning_rate_schedule, build_model, build_optimizer, prepare_network
from tacit.training.features import with_features
from tacit.training.run import load_data
from tacit.training.trainer import PrivateTrainer

_LOUD = 1e5  # times the clipping norm: the value in a canary's own feature
NOBODY = -1
LEFT_OUT = "augmentation, averages, curriculum and weight decay of the recipe are left out"


class WithCanaryFeatures(nn.Module):
    """A network, and beside it a layer that reads the canaries' features. Its weights are 0, and stay so: it only has gradients.

    >>> model = WithCanaryFeatures(nn.Linear(5, 2), canaries=3, classes=2)
    >>> model(torch.zeros(4, 5), torch.zeros(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, network: nn.Module, canaries: int, classes: int) -> None:
        super().__init__()
        self.network = network
        self.own = nn.Linear(canaries, classes, bias=False)
        nn.init.zeros_(self.own.weight)

    def forward(self, inputs: Tensor, features: Tensor) -> Tensor:
        logits: Tensor = self.network(inputs) + self.own(features)
        return logits


@dataclasses.dataclass(frozen=True, eq=False)
class WithCanaries:
    """Real examples and the canaries that take part, in an order drawn by lot; `identities` says who is in which place.

    A place holds `NOBODY` for the next of the real examples, or the number of a canary.

    >>> data = Dataset("toy", np.ones((2, 5), np.float32), np.array([0, 1]), ("a", "b"), (0,), (1,))
    >>> examples = WithCanaries.drawn(data, np.array([1, 0, 1]), np.array([True, False, True]), 9.0, np.random.default_rng(0))
    >>> len(examples), sorted(examples.identities.tolist())
    (4, [-1, -1, 0, 2])
    >>> (inputs, features), targets = examples.batch()
    >>> features.sum(dim=0).tolist()
    [9.0, 0.0, 9.0]
    """

    data: Dataset
    labels: NDArray[np.int64]  # of the canaries, by their numbers
    identities: NDArray[np.int64]
    places: NDArray[np.int64]  # of the real examples in their data set
    loud: float

    @classmethod
    def drawn(
        cls,
        data: Dataset,
        labels: NDArray[np.int64],
        took_part: NDArray[np.bool_],
        loud: float,
        generator: np.random.Generator,
    ) -> WithCanaries:
        """With these canaries taking part."""
        identities = np.concatenate([np.full(len(data), NOBODY), np.flatnonzero(took_part)])
        generator.shuffle(identities)
        places = np.cumsum(identities == NOBODY) - 1
        return cls(data, labels, identities, places, loud)

    def __len__(self) -> int:
        return len(self.identities)

    def batch(self, indices: Any = None, device: Any = "cpu") -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Inputs, features and targets of these places."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        who = self.identities[chosen]
        inputs, targets = self.data.batch(self.places[chosen], device)
        features = torch.zeros(len(chosen), len(self.labels), device=device)
        canary = np.flatnonzero(who != NOBODY)
        inputs[canary] = 0.0
        targets[canary] = torch.from_numpy(self.labels[who[canary]]).to(targets.device)
        features[canary, who[canary]] = self.loud
        return (inputs, features), targets


def attack_canaries(
    subject: Subject,
    *,
    canaries: int = 1000,
    trainings: int = 1,
    seed: int | None = None,
    advance: Callable[[float], Any] = lambda trainings: None,
) -> Scores:
    """The scores of a white-box attack on whole trainings by the subject's recipe, by canary.

    Several trainings have canaries of their own each, so that together they are like one training with all of them.

    >>> subject = Subject.of_recipe("digits", ["model.name=linear", "privacy.epochs=2"])
    >>> len(attack_canaries(subject, canaries=20, seed=0))
    20
    """
    check_count("canaries", canaries, at_least=2)
    clipping = subject.plan.clipping
    if isinstance(clipping.of if isinstance(clipping, Automatic) else clipping, Grouped) or subject.plan.whole_releases:
        raise UserError(
            "canaries in a training are for one clipping norm, and no statistics of the data; choose --attack mechanism"
        )
    check_audible(subject.plan)
    split = load_data(subject.recipe)
    parts = []
    for training in range(check_count("trainings", trainings)):
        own = seed_of(seed, training)
        parts.append(_one_training(subject, split, canaries, own, advance))
    return Scores.together(parts)


def _one_training(
    subject: Subject, split: Any, canaries: int, seed: int | None, advance: Callable[[float], Any]
) -> Scores:
    recipe, plan, train = subject.recipe, subject.plan, split.train
    generator = np.random.default_rng(seed)
    classes = len(train.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator.integers(2**62)))
        network: nn.Module = build_model(recipe.model, train.input_shape, classes)
    prepare_network(recipe.model, network)
    if recipe.model.features is not None:
        assert isinstance(network, nn.Sequential)
        train, network = with_features(split, network[0]).train, network[1]
    loss = make_loss(recipe.loss.name, **(recipe.loss.model_extra or {}))
    if getattr(loss, "wants_hidden", False):
        raise UserError("this loss looks into the network, where canaries would show; choose --attack mechanism")
    took_part = generator.random(canaries) < 0.5
    labels = generator.integers(classes, size=canaries)
    examples = WithCanaries.drawn(train, labels, took_part, _LOUD * plan.clipping.sensitivity, generator)
    model = WithCanaryFeatures(network, canaries, classes)
    optimizer = build_optimizer(recipe.optimizer, network)  # of the network alone
    listener = Listener(canaries, plan.sample_rate)
    targets = torch.arange(classes)
    blank = torch.zeros(1, *train.input_shape)
    step = 0

    def listen(*_: object) -> None:
        nonlocal step
        (strength,), (std,) = strengths_at(plan, step)
        assert plan.expected_batch_size is not None
        assert model.own.weight.grad is not None
        # The gradient of each label at the present model, in the classes' weights of a canary's feature.
        with torch.no_grad():
            logits = network(blank).repeat(classes, 1)
        logits.requires_grad_()
        (directions,) = torch.autograd.grad(loss(logits, targets).sum(), logits)
        directions = torch.nn.functional.normalize(directions, dim=1)[torch.from_numpy(labels)]
        along = (model.own.weight.grad.T.double() * directions.double()).sum(dim=1).numpy()
        listener.hear([along * (plan.expected_batch_size / std)], [strength])
        step += 1
        advance(1 / plan.steps)

    optimizer.register_step_pre_hook(listen)
    trainer = PrivateTrainer(
        model,
        optimizer=optimizer,
        loss=loss,
        plan=plan,
        delta=subject.delta,
        learning_rate_schedule=build_learning_rate_schedule(recipe.learning_rate_schedule, optimizer, plan),
        seed=seed,
    )
    trainer.fit(examples)
    found = listener.scores(took_part)["likelihood ratio"]
    by_identity: dict[Hashable, float] = dict(enumerate(found.values.tolist()))
    trained_on: set[Hashable] = {int(identity) for identity in examples.identities if identity != NOBODY}
    return Scores.joined(by_identity, trained_on)
