"""The private trainer: sample, clip, record, add noise, update; measure on held-out data; survive whatever happens."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tacit.gradients import ClippedGradient, kernels
from tacit.learning.augmentation import Augmentation, MeanOverViews, Views
from tacit.learning.averaging import AveragedWeights, Averaging
from tacit.learning.curricula import SampleCurriculum
from tacit.learning.losses import PerExampleLoss
from tacit.learning.optimizers import LearnsNoise
from tacit.learning.weight_decay import WeightDecay
from tacit.models.standardize import Standardize
from tacit.privacy.beside import LOSS
from tacit.privacy.certificate import certificate_of, sha256_of
from tacit.privacy.ledger import SORTED, Ledger, released_levels, unsampled, whole_levels
from tacit.privacy.mechanism import GaussianMechanism, PrivateGradient
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.randomness import Randomness
from tacit.privacy.sampling import PoissonSampler
from tacit.privacy.validation import UserError, check_count, check_delta
from tacit.training.checkpoint import load_tensors, load_weights, pack, save_tensors, unpack
from tacit.training.chores import Chore
from tacit.training.curriculum import Participation
from tacit.training.diagnostics import diagnosed
from tacit.training.directory import RunDirectory
from tacit.training.evaluation import evaluate, evaluations_apart, mean_loss
from tacit.training.examples import Examples, Indices, as_examples, channels_last, shares_memory
from tacit.training.interruption import Interrupted, StopRequest
from tacit.training.progress import Reporter, progress_of
from tacit.training.sorted_passes import SortedPasses
from tacit.training.statistics import give_statistics, unpaid_statistics

_CHECKPOINT_SECONDS = 60.0  # between checkpoints within an epoch
_SAVING, _ACCOUNTING = 0.01, 0.01  # the most of a run's time that checkpoints, and epsilon along the way, may take
_PROBED = 32  # examples on which the engine tries whether any layer mixes them


class PrivateTrainer:
    """Trains a model on private gradients alone, by a plan, and certifies what that guarantees.

    The optimizer is any of torch.optim over the model's parameters, and is told the noise of each gradient if it asks
    (`tacit.learning.LearnsNoise`); the loss gives one value an example. With a `run_directory`,
    the ledger, checkpoints, metrics and the certificate are kept there, and `resume=True` continues it. `seed` makes a run
    reproducible, for research: it voids the certificate for release. With an `averaging` of `tacit.learning`, what is measured
    and stored, and what the model holds when `fit` ends, is the average of the weights along the way. An `augmentation` gives
    every batch another guise, or, as `Views`, each example several, whose gradients are averaged before they are clipped; it is
    not applied to data that are measured. A `weight_decay` is in each example's gradient before it is clipped, or shrinks the
    weights by itself. With a `curriculum`, only those of the drawn examples take part in a step whose difficulty it admits; if
    that is the loss of a logistic regression, the plan's first steps train it, and the learning-rate schedule, the averaging and
    the epochs of a loss begin after them. `standardize` is a layer of the model that waits for statistics of the training set:
    they are released, with the noise of the plan's first `whole_releases`, before the first step.

    *Guarantee.* Whatever the optimizer sees was released by the plan's mechanism, and paid for in the ledger beforehand.

    >>> from tacit.privacy import Flat, PrivacyPlan
    >>> inputs, targets = torch.randn(64, 3), torch.randint(0, 2, (64,))
    >>> model = nn.Linear(3, 2)
    >>> plan = PrivacyPlan.for_examples(64, batch_size=16, epochs=2, clipping=Flat(1.0)).calibrated(epsilon=3, delta=1e-5)
    >>> trainer = PrivateTrainer(
    ...     model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=nn.CrossEntropyLoss(reduction="none"),
    ...     plan=plan,
    ... )
    >>> history = trainer.fit((inputs, targets))
    >>> certificate = trainer.certificate()
    >>> certificate["releases"], certificate["epsilon"] <= 3, certificate["valid_for_release"]
    (8, True, True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer,
        loss: PerExampleLoss,
        plan: PrivacyPlan,
        delta: float = 1e-5,
        learning_rate_schedule: LRScheduler | None = None,
        averaging: Averaging | None = None,
        augmentation: Augmentation | None = None,
        weight_decay: WeightDecay | None = None,
        curriculum: SampleCurriculum | None = None,
        seed: int | None = None,
        run_directory: str | os.PathLike[str] | None = None,
        resume: bool = False,
        physical_batch_size: int | None = None,
        show_training_loss: bool = False,
        diagnostics: int = 0,
        standardize: Standardize | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        _check_optimizer(optimizer, model)
        views = augmentation.count if isinstance(augmentation, Views) else 1
        self.model, self.optimizer, self.loss, self.plan = model, optimizer, loss, plan
        self.delta = check_delta(delta)
        self.learning_rate_schedule = learning_rate_schedule
        self._average = None if averaging is None else AveragedWeights(averaging)
        self._augmentation = augmentation
        self._generator = torch.Generator()  # of the augmentation
        self._weight_decay = weight_decay
        rates = {} if weight_decay is None else weight_decay.rates(model)
        self._rates = rates if weight_decay is not None and weight_decay.when == "before-clipping" else {}
        self.directory = None if run_directory is None else RunDirectory(Path(run_directory))
        self.show_training_loss = show_training_loss
        self.diagnostics = check_count("diagnostics", diagnostics, at_least=0)
        self.standardize = standardize
        if len(plan.whole_releases) != (standardize is not None):
            raise UserError(
                "a layer that standardises by the training set is paid by one of the plan's whole_releases, which is for such a "
                "layer alone: give both or neither"
            )
        self._gradient = ClippedGradient(
            model,
            loss=loss if views == 1 else MeanOverViews(loss, views),
            clipping=plan.clipping,
            physical_batch_size=physical_batch_size,
            with_losses=any(number.name == LOSS for number in plan.beside),
            weight_decay=self._rates,
        )
        self._participation = Participation(curriculum, plan, physical_batch_size=physical_batch_size)
        self._seed, self._resume, self._facts = seed, resume, dict(facts or {})
        if curriculum is not None:
            self._facts["curriculum"] = curriculum.to_dict()
        self._ledger: Ledger | None = None
        self._mechanism: GaussianMechanism | None = None
        self._randomness: Randomness | None = None
        self._released: dict[str, float] = {}  # the mechanism's state, from the checkpoint
        self._seconds = 0.0
        self._physical_batch_size: int | None = None
        self._evaluate_every = 1
        self._saving, self._accounting = Chore(_SAVING), Chore(_ACCOUNTING)
        self._stop = StopRequest()
        if self.directory is not None:
            self.directory.check(resume=resume)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def sample_rate(self) -> float:
        """The share of the training examples that a batch holds, in expectation: what an epoch is counted by."""
        return self.plan.sample_rate

    def fit(
        self,
        dataset: Any,
        *,
        validate_on: Any = None,
        evaluate_every: int | None = None,
        progress: bool = False,
        export: Callable[[Path], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Make every step the plan still has, on batches the plan's sampler draws; returns one row of figures an epoch.

        `validate_on` is held-out data, measured exactly after the first epoch, the last, and every `evaluate_every` (by default
        as many as keep it to about 2% of the time): the guarantee does not cover it. In a run directory, `export` writes the
        finished model to the path it is given (by default its weights, as safetensors); the certificate names the file's hash.
        """
        examples = as_examples(dataset)
        held_out = None if validate_on is None else as_examples(validate_on)
        if evaluate_every is not None:
            self._evaluate_every = check_count("evaluate_every", evaluate_every)
        elif held_out is not None:
            self._evaluate_every = evaluations_apart(len(examples), len(held_out))
        try:
            history = self._fit(examples, held_out, progress)
            self._finish(export)
        finally:
            self.close()
        return history

    def _fit(self, examples: Examples, held_out: Examples | None, progress: bool) -> list[dict[str, Any]]:
        mechanism, ledger, randomness = self._opened(examples=len(examples), evaluated_on_held_out=held_out is not None)
        if self.show_training_loss:
            ledger.record_disclosure("the training loss")
        if self.diagnostics:
            ledger.record_disclosure(f"diagnostics of {self.diagnostics} training examples")
        if held_out is not None and shares_memory(examples, held_out):
            ledger.record_disclosure("the accuracy on training examples")
        if self.standardize is not None and bool(self.standardize.measured) and not ledger.whole_releases:
            raise UserError(
                "the layer that standardises has statistics from elsewhere, which this run has not paid for; make a new one"
            )
        if unpaid_statistics(self.model, self.standardize):
            ledger.record_disclosure("statistics in a layer that standardises, which this run has not paid for,")
        sampler: PoissonSampler | SortedPasses = self._sampler(len(examples), randomness)
        if self._participation.sorted:
            sampler = SortedPasses.of(examples, self.sample_rate, first=mechanism.next_step)
        sampled_by = SORTED if self._participation.sorted else "tacit"
        epochs = round(self.plan.steps * self.sample_rate, 1)
        self._physical_batch_size = None
        history: list[dict[str, Any]] = []
        started = time.monotonic() - self._seconds
        with (
            self._stop,
            progress_of(self.plan.steps, first=mechanism.next_step, epochs=epochs, show=progress) as reporter,
        ):
            if self.standardize is not None and not bool(self.standardize.measured):
                give_statistics(self.standardize, examples, mechanism, self.device)
                self._save()  # so that they are released once
            if self._participation.warm_up:
                self._participation.prepare(self.model, examples.batch(np.arange(1), self.device)[0])
            while mechanism.steps_left > 0:
                self._begin_step(mechanism.next_step)
                indices = sampler.draw()
                self._update(self._release(self._chunks(examples, indices), sampled_by=sampled_by))
                self._seconds = time.monotonic() - started
                step = mechanism.next_step
                reporter.step(step)
                ends, last = _ends_epoch(step, self.sample_rate), mechanism.steps_left == 0
                # saved first: whatever happens while it is measured, nothing that was paid for is lost
                due = self._saving.due(0.0 if ends else _CHECKPOINT_SECONDS)
                if last or self._stop.requested or due or step == self._participation.warm_up:
                    self._save()
                if ends or last:
                    history.append(self._measure(examples, indices, held_out, reporter))
                if self._stop.requested and mechanism.steps_left > 0:
                    self._certify()
                    raise Interrupted
        return history

    def _finish(self, export: Callable[[Path], None] | None) -> None:
        """The model's file, its hash in the ledger, the certificate."""
        if self._average is not None:
            self._average.put(self.model)
        if self.directory is None or self._ledger is None:
            return
        if export is None:
            save_tensors(self.directory.model, self.model.state_dict(), {})
        else:
            export(self.directory.model)
        self._ledger.record_model(sha256_of(self.directory.model))
        self._certify()

    def step(self, batch: tuple[Any, Tensor]) -> PrivateGradient:
        """One step on a batch of your own choosing: (inputs, targets), of any size, also empty.

        The plan counts on Poisson sampling at its rate. Draw batches by `plan.sampler(...)`; since that cannot be checked here,
        the certificate says that the caller chose them and is void for release.
        """
        mechanism, _, _ = self._opened(examples=None, evaluated_on_held_out=False)
        if self.standardize is not None and not bool(self.standardize.measured):
            raise UserError("the layer that standardises has no statistics yet, and one batch gives none; use fit")
        if self._participation.sorted:
            raise UserError("a sorted pass takes its batches from all examples, not from the caller; use fit")
        self._participation.prepare(self.model, batch[0])
        self._begin_step(mechanism.next_step)
        private = self._release([self._participation.of(self.model, *batch)], sampled_by="caller")
        self._update(private)
        return private

    def certificate(self) -> dict[str, Any]:
        """What is guaranteed so far, computed from the ledger."""
        if self._ledger is None:
            raise UserError("there is nothing to certify yet; call fit or step first")
        return certificate_of(self._ledger.entries)

    def close(self) -> None:
        """Give the run directory up for other processes, as `fit` does at its end."""
        if self._ledger is not None:
            self._ledger.close()

    def _opened(self, **facts: Any) -> tuple[GaussianMechanism, Ledger, Randomness]:
        """The ledger, opened when the first data come, and the mechanism and randomness that go with it."""
        if self._mechanism is None or self._ledger is None or self._randomness is None:
            facts = {**self._facts, "reproducible": self._seed is not None, **facts}
            if self.directory is None:
                self._ledger = Ledger.in_memory(self.plan, delta=self.delta, **facts)
            else:
                self._ledger = self.directory.open_ledger(self.plan, resume=self._resume, delta=self.delta, facts=facts)
            randomness = self._seeded(self._ledger.launches)
            mechanism = self.plan.mechanism(randomness, self._ledger)
            if self.directory is not None:
                try:
                    self._load_or_begin()
                    mechanism.restore(self._released)
                except UserError:
                    self.directory.certify_again(self._ledger)
                    raise
                # From here on more is spent; no certificate is better than one that says too little.
                self.directory.certificate.unlink(missing_ok=True)
            self._mechanism, self._randomness = mechanism, randomness
        return self._mechanism, self._ledger, self._randomness

    def _seeded(self, launch: int) -> Randomness:
        """The randomness of this launch, and the augmentation's beside it."""
        if self._seed is None:
            self._generator.seed()
            return Randomness.from_operating_system()
        self._generator.manual_seed((self._seed + launch) % 2**63)
        return Randomness.from_seed(self._seed, launch=launch)

    def _sampler(self, examples: int, randomness: Randomness) -> PoissonSampler:
        return self.plan.sampler(examples, randomness)

    def _chunks(self, examples: Examples, indices: Indices) -> Iterator[tuple[Any, Tensor]]:
        """The batch in pieces that fit in memory, made only when they are needed."""
        if len(indices) == 0:
            return
        if self._physical_batch_size is None:
            views = int(getattr(self._gradient.loss, "views", 1))
            few = self._batch(examples, indices[: max(_PROBED // views, 1)])
            self._physical_batch_size = self._gradient.physical_batch_size_for(*few)
        size = self._physical_batch_size
        for start in range(0, len(indices), size):
            inputs, targets = self._plain(examples, indices[start : start + size])
            inputs, targets = self._participation.of(self.model, inputs, targets)
            if len(targets):
                yield (inputs if self._participation.warming_up else self._augmented(inputs)), targets

    def _batch(self, examples: Examples, indices: Indices) -> tuple[Any, Tensor]:
        inputs, targets = self._plain(examples, indices)
        return self._augmented(inputs), targets

    def _plain(self, examples: Examples, indices: Indices) -> tuple[Any, Tensor]:
        inputs, targets = examples.batch(indices, self.device)
        return channels_last(inputs), targets

    def _augmented(self, inputs: Any) -> Any:
        return inputs if self._augmentation is None else self._augmentation(inputs, self._generator)

    def _release(self, chunks: Iterator[Any] | Sequence[Any], *, sampled_by: str) -> PrivateGradient:
        assert self._mechanism is not None
        gradient = self._participation.gradient if self._participation.warming_up else self._gradient
        gradient.clipping = self._mechanism.clipping  # it may follow what was released
        return self._mechanism.release(gradient.over(chunks), sampled_by=sampled_by)

    def _begin_step(self, step: int) -> None:
        """Tell the curriculum, and a loss that changes with time, which epoch it is: a public number."""
        self._participation.begin_step(step)
        begin_epoch = getattr(self.loss, "begin_epoch", None)
        if begin_epoch is not None:
            begin_epoch(math.floor(max(step - self._participation.warm_up, 0) * self.sample_rate + 1e-9))

    def _update(self, private: PrivateGradient) -> None:
        """Only a private gradient reaches the optimizer."""
        if self._participation.warming_up:
            self._participation.update(private)
            return
        for name, parameter in self.model.named_parameters():
            gradient = private.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        if isinstance(self.optimizer, LearnsNoise):
            assert self.plan.expected_batch_size is not None  # the mechanism has divided by it
            self.optimizer.learn_noise(
                {
                    parameter: private.noise_stds[name] / self.plan.expected_batch_size
                    for name, parameter in self.model.named_parameters()
                    if name in private.noise_stds
                }
            )
        if self._weight_decay is not None and self._weight_decay.when == "after-noise":
            self._weight_decay.shrink(self.model, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._average is not None:
            assert self._mechanism is not None
            before = self._participation.warm_up
            self._average.update(self.model, self._mechanism.next_step - before, self.plan.steps - before)
        if self.learning_rate_schedule is not None:
            self.learning_rate_schedule.step()

    def _measure(
        self, examples: Examples, indices: Indices, held_out: Examples | None, reporter: Reporter
    ) -> dict[str, Any]:
        assert self._ledger is not None
        assert self._mechanism is not None
        step = self._ledger.releases
        row: dict[str, Any] = {
            "step": step,
            "epoch": round(step * self.sample_rate, 2),
            "seconds": round(self._seconds, 2),
        }
        last = self._mechanism.steps_left == 0
        if last or self._accounting.due():
            with self._accounting:
                levels, whole = released_levels(self._ledger.entries), whole_levels(self._ledger.entries)
                spent = math.inf  # of batches that no sampler drew
                if not unsampled(self._ledger.entries):
                    spent = self.plan.epsilon_after(levels, self.delta, whole=whole, coarse=True)
            row["epsilon"] = spent if math.isfinite(spent) else None
        epoch = math.floor(step * self.sample_rate + 1e-9)
        if held_out is not None and (epoch <= 1 or epoch % self._evaluate_every == 0 or last):
            with nullcontext() if self._average is None else self._average.in_place(self.model):
                row["test_accuracy"], row["test_loss"] = evaluate(self.model, held_out, self.loss)
        if self.show_training_loss:
            row["training_loss"] = mean_loss(self.model, examples, self.loss, indices)
        if self.diagnostics:
            row["diagnostics"] = diagnosed(
                self.model, self.loss, self._mechanism.clipping, examples, self.diagnostics, held_out
            )
        kernels.trim_memory()  # which batches of many sizes have cut into pieces
        reporter.measured(row)
        if self.directory is not None:
            self.directory.append_metrics(row)
        return row

    def _certify(self) -> None:
        if self.directory is not None and self._ledger is not None:
            self.directory.write_certificate(self._ledger)

    def _save(self) -> None:
        """A checkpoint of the model and the optimizer as they are."""
        if self.directory is None:
            return
        assert self._ledger is not None
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self._average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self._average.tensors.items()}
        tensors |= {f"curriculum.{name}": tensor for name, tensor in self._participation.tensors.items()}
        state = {"optimizer": pack(self.optimizer.state_dict(), tensors, "optimizer")}
        if self.learning_rate_schedule is not None:
            schedule = self.learning_rate_schedule.state_dict()
            state["learning_rate_schedule"] = pack(schedule, tensors, "learning_rate_schedule")
        covered = {"entries": len(self._ledger.entries), "head": self._ledger.head}
        released = {} if self._mechanism is None else self._mechanism.state
        facts = {"ledger": covered, "seconds": self._seconds, "state": state, "released": released}
        with self._saving:
            save_tensors(self.directory.checkpoint, tensors, facts)

    def _load_or_begin(self) -> None:
        assert self.directory is not None
        assert self._ledger is not None
        if self.directory.checkpoint.exists():
            self._load()
        elif self._ledger.releases:
            raise UserError(
                f"{self.directory.checkpoint} is missing; what the run had learned is lost: start a new one"
            )
        else:
            self._save()

    def _load(self) -> None:
        """The last checkpoint. Releases made after it are lost, yet paid for: the run goes on with the steps that are left."""
        assert self.directory is not None
        assert self._ledger is not None
        path = self.directory.checkpoint
        tensors, facts = load_tensors(path)
        try:
            covered, state, seconds = facts["ledger"], facts["state"], float(facts["seconds"])
            released = {str(name): float(value) for name, value in facts.get("released", {}).items()}
            entry = self._ledger.entries[covered["entries"] - 1]
            if entry["hash"] != covered["head"]:
                raise IndexError
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise UserError(f"{path} is not a checkpoint of tacit") from None
        except IndexError:
            raise UserError(
                f"{path} and {self.directory.ledger} are not of the same run, or the ledger was cut"
            ) from None
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        load_weights(self.model, weights, path)
        averages = {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
        if averages and self._average is None:
            raise UserError(f"{path} is a checkpoint of a run that averages its weights; go on with the same averaging")
        if self._average is not None:
            self._average.restore(averages, self.model)
        self._participation.restore(
            {name.removeprefix("curriculum."): t for name, t in tensors.items() if name.startswith("curriculum.")},
            self.device,
        )
        try:
            self.optimizer.load_state_dict(unpack(state["optimizer"], tensors))
            if self.learning_rate_schedule is not None:
                self.learning_rate_schedule.load_state_dict(unpack(state["learning_rate_schedule"], tensors))
                lost = [e["step"] for e in self._ledger.entries[covered["entries"] :] if e["kind"] == "release"]
                self._pass_over(sum(step >= self._participation.warm_up for step in lost))
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise UserError(f"{path} is a checkpoint of another optimizer: {str(error)[:200]}") from None
        self._seconds, self._released = seconds, released

    def _pass_over(self, lost: int) -> None:
        """Bring the learning-rate schedule to where the plan is, past the steps that an interruption lost."""
        assert self.learning_rate_schedule is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch misses the optimizer's steps, which are lost
            for _ in range(lost):
                self.learning_rate_schedule.step()


def _ends_epoch(step: int, sample_rate: float) -> bool:
    """Whether the expected number of passes over the data reaches a whole number with this step."""
    return math.floor(step * sample_rate + 1e-9) > math.floor((step - 1) * sample_rate + 1e-9)


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= own:
        raise UserError("the optimizer holds parameters that are not the model's; make it from model.parameters()")
