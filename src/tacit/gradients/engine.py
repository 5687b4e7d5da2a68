"""`ClippedGradient`: the clipped sum of a batch, by the fastest way that is right for the model at hand."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tacit.gradients import kernels, reference
from tacit.gradients.adding import Sums, all_finite, clip_and_add
from tacit.gradients.batches import Batch, Loss, losses_of, modules_of, norm_dtype, trainable_parameters
from tacit.gradients.capture import NoRule
from tacit.gradients.contribution import Contribution
from tacit.gradients.fallback import per_example_gradients
from tacit.gradients.memory import LARGEST, fitting
from tacit.gradients.probe import Route, probe
from tacit.gradients.refusals import refuse_known_mixers
from tacit.gradients.rules import check_strategy, rules_sum
from tacit.gradients.sandbox import unchanged
from tacit.gradients.toward import Decay
from tacit.privacy.clipping import Clipping
from tacit.privacy.mechanism import ClippedSum
from tacit.privacy.validation import UserError, check_choice, check_count, check_not_negative, nearest

ENGINES = ("auto", "rules", "ghost", "instantiate", "vmap", "loop")


class ClippedGradient:
    """Sums of clipped per-example gradients of a model's loss.

    `loss(outputs, targets)` gives one value an example. Inputs are a tensor, a tuple (`model(*inputs)`) or a dict
    (`model(**inputs)`), with the examples on the first axis of every tensor. `physical_batch_size` is how many examples are
    held at once (chosen by memory if None); it does not change the sum. `engine` is for tests: "auto" takes the rules
    where they hold, else `torch.func`, else a loop; "ghost" and "instantiate" are the rules with one way to clip everywhere.
    `weight_decay` is by parameter: so many times the parameter is added to *each example's* gradient of it before it is clipped.
    `with_losses` keeps the losses beside the norms, for a plan that releases their mean; it takes one more forward pass.

    *Guarantee.* Adding or removing one example moves the sum by at most `clipping.sensitivity`, and in group j by at most C_j,
    with decay or without (up to the rounding of floating-point arithmetic), if the model and the loss look at each example by
    itself. That is tried, not proved: layers known to mix are refused by name, and before the first batch of a kind some of its
    examples are exchanged or left out, while losses and gradients of the others must stay the same (`probe` says what is
    compared). Mixing that shows only on inputs, weights or batches unlike those tried, or in a loss that has changed since, is
    not found; the engines "vmap" and "loop" run each example by itself, and do not depend on it. A model that keeps something
    of the examples in parameters, buffers or tensor attributes is refused, as far as the same runs show it. An example whose
    gradient is not finite adds nothing and is counted. The model is left as it was: no hook, no attribute, no `.grad`, no other
    mode.

    >>> from tacit.privacy.clipping import Flat
    >>> model = nn.Linear(1, 1, bias=False)
    >>> grad = ClippedGradient(model, loss=lambda outputs, targets: (outputs * targets).sum(dim=1), clipping=Flat(1.0))
    >>> summed = grad(torch.tensor([[0.5], [2.0]]), torch.ones(2, 1))
    >>> summed.gradients["weight"], summed.norms.flatten(), summed.sensitivity
    (tensor([[1.5000]]), tensor([0.5000, 2.0000]), 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        clipping: Clipping,
        physical_batch_size: int | None = None,
        engine: str = "auto",
        with_losses: bool = False,
        weight_decay: Mapping[str, float] | None = None,
    ) -> None:
        if physical_batch_size is not None:
            physical_batch_size = check_count("physical_batch_size", physical_batch_size)
        self.model = model
        self.loss = loss
        self.clipping = clipping
        self.physical_batch_size = physical_batch_size
        self.engine = check_choice("engine", engine, ENGINES)
        self.with_losses = with_losses
        self._routes: dict[Hashable, Route] = {}
        refuse_known_mixers(model)
        trainable = trainable_parameters(model)
        self.weight_decay = _checked(weight_decay or {}, list(trainable))
        clipping.group_of(list(trainable))
        kernels.keep_memory()

    def __call__(self, inputs: Any, targets: Any) -> ClippedSum:
        """The clipped sum of one batch.

        *Guarantee.* See the class; an empty batch gives zeros, and does not run the model.
        """
        return self.over([(inputs, targets)])

    def over(self, chunks: Iterable[tuple[Any, Any]]) -> ClippedSum:
        """The clipped sum of one logical batch that comes in chunks, each example in exactly one of them.

        *Guarantee.* The same sum as in one call: sums of clipped gradients add up, and no example's factor depends on its chunk.
        Memory does not grow with the number of chunks.

        >>> from tacit.privacy.clipping import Flat
        >>> grad = ClippedGradient(nn.Linear(2, 1), loss=lambda outputs, targets: outputs[:, 0], clipping=Flat(1.0))
        >>> grad.over([]).gradients["bias"]
        tensor([0.])
        """
        trainable = trainable_parameters(self.model)
        decay = Decay(trainable, self.weight_decay)
        sums: Sums = {}
        first = next(iter(trainable.values()))
        groups = len(self.clipping.clipping_norms)
        norms = [torch.zeros(0, groups, dtype=norm_dtype(trainable), device=first.device)]
        losses = [norms[0].new_zeros(0)]
        for inputs, targets in chunks:
            batch = Batch.of(inputs, targets)
            if batch.size == 0:
                continue
            route = self._route(trainable, batch)
            step = self._physical(route, first.device)
            for start in range(0, batch.size, step):
                rows = batch if batch.size <= step else batch.rows(slice(start, start + step))
                part, part_norms = self._clipped(route, trainable, rows, decay)
                norms.append(part_norms)
                if self.with_losses:
                    losses.append(self._losses(route, rows).to(norms[0].dtype))
                for name, value in part.items():
                    sums[name] = sums[name].add_(value) if name in sums else value
        for name, p in trainable.items():  # no example reached it
            if name not in sums:
                sums[name] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        all_norms = torch.cat(norms)
        return ClippedSum(
            {name: sums[name] for name in trainable},
            norms=all_norms,
            clipping=self.clipping,
            not_finite=0 if all_finite(all_norms) else int((~all_norms.isfinite().all(dim=1)).sum()),
            losses=torch.cat(losses) if self.with_losses else None,
        )

    def _losses(self, route: Route, batch: Batch) -> Tensor:
        """One loss an example: together where the probe found that examples may be, else each example by itself."""
        size = batch.size if route.engine == "rules" else 1
        with torch.no_grad(), unchanged(self.model, self.loss):
            parts = [batch.rows(slice(start, start + size)) for start in range(0, batch.size, size)]
            return torch.cat([losses_of(self.model, self.loss, part) for part in parts])

    def physical_batch_size_for(self, inputs: Any, targets: Any) -> int:
        """How many examples like these are held at once.

        *Guarantee.* It bears on memory and speed alone; every size gives the same sum.

        >>> from tacit.privacy.clipping import Flat
        >>> grad = ClippedGradient(nn.Linear(2, 1), loss=lambda outputs, targets: outputs[:, 0], clipping=Flat(1.0))
        >>> grad.physical_batch_size_for(torch.zeros(3, 2), None)
        512
        """
        if self.physical_batch_size is not None:
            return self.physical_batch_size
        trainable = trainable_parameters(self.model)
        batch = Batch.of(inputs, targets)
        if batch.size == 0:
            return 1
        return self._physical(self._route(trainable, batch), next(iter(trainable.values())).device)

    def _physical(self, route: Route, device: torch.device) -> int:
        if self.physical_batch_size is not None:
            return self.physical_batch_size
        if route.engine == "loop":
            return LARGEST
        if route.fitting is None:
            route.fitting = fitting(route.bytes_per_example, device)
        return route.fitting

    def _route(self, trainable: dict[str, nn.Parameter], batch: Batch) -> Route:
        """The route for batches of this signature; a new one is probed first."""
        modules = tuple((id(module), module.training) for module in modules_of(self.model))
        key = (batch.signature(), modules, tuple(trainable))
        if key in self._routes:
            return self._routes[key]
        refuse_known_mixers(self.model)
        alone = self.engine in ("vmap", "loop")
        route = probe(self.model, self.loss, trainable, batch, 1 if alone else self.physical_batch_size)
        kernels.trim_memory()
        if route.engine != "rules":
            check_strategy(self.engine, route.reason)
        if alone:
            route.step_down(self.engine)
        if route.conclusive:
            self._routes[key] = route
        return route

    def _clipped(
        self, route: Route, trainable: dict[str, nn.Parameter], batch: Batch, decay: Decay
    ) -> tuple[Sums, Tensor]:
        """The clipped sum of the examples with a finite gradient, and the norms of all."""
        with unchanged(self.model, self.loss):
            sums, norms = self._computed(route, trainable, batch, decay)
        if sums is not None:
            return sums, norms
        finite = norms.isfinite().all(dim=1)
        if not finite.any():
            return {}, norms
        # 0 times a number that is not finite is not 0, so those examples must not be in the batch at all
        rest, rest_norms = self._clipped(route, trainable, batch.rows(finite.nonzero()[:, 0]), decay)
        norms[finite] = rest_norms
        return rest, norms

    def _computed(
        self, route: Route, trainable: dict[str, nn.Parameter], batch: Batch, decay: Decay
    ) -> tuple[Sums | None, Tensor]:
        if route.engine == "rules":
            try:
                return rules_sum(
                    self.model,
                    self.loss,
                    trainable,
                    self.clipping,
                    batch,
                    route.units,
                    route.layouts,
                    self.engine,
                    decay,
                    route.kept,
                )
            except NoRule as reason:
                check_strategy(self.engine, str(reason))
                route.step_down("vmap")
        if route.engine == "vmap":
            try:
                gradients = per_example_gradients(self.model, self.loss, trainable, batch)
            except UserError:
                raise
            except Exception as error:
                if self.engine == "vmap":
                    raise
                warnings.warn(  # the exception's own words may quote examples
                    f"torch.func.vmap cannot take this model ({type(error).__name__}); its gradients are computed one example "
                    "after the other, which is exact and slow",
                    stacklevel=4,
                )
                route.step_down("loop")
            else:
                uses = {name: [Contribution(lambda g=g: g)] for name, g in gradients.items()}  # type: ignore[misc]
                return clip_and_add(uses, trainable, self.clipping, batch.size, decay=decay)
        inputs, targets = batch.tree()
        summed = reference.clipped_sum(self.model, self.loss, self.clipping, inputs, targets, decay.rates)
        return dict(summed.gradients), summed.norms


def _checked(weight_decay: Mapping[str, float], names: list[str]) -> dict[str, float]:
    for name in weight_decay:
        if name not in names:
            raise UserError(f"weight decay of {name!r}: there is no such trainable parameter{nearest(name, names)}")
    return {
        name: check_not_negative(f"the weight decay of {name!r}", rate)
        for name, rate in weight_decay.items()
        if rate != 0
    }
