"""From a batch to a clipped sum by the rules: one forward pass, one backward pass, and what each recorded call contributes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from tacit.gradients.adding import Adding, Sums
from tacit.gradients.batches import Batch, Loss
from tacit.gradients.capture import Call, NoRule, Rule, Unit, backward, capture, check_graph
from tacit.gradients.contribution import Contribution, added_up, at_least_float32, by_view
from tacit.gradients.conv import conv
from tacit.gradients.embedding import embedding
from tacit.gradients.generic import Layout, generic
from tacit.gradients.linear import linear
from tacit.gradients.norm import layer_norm
from tacit.gradients.standardized import standardized_conv
from tacit.gradients.toward import Decay, Toward
from tacit.privacy.clipping import Clipping
from tacit.privacy.validation import UserError

# But for linear layers', weights with at most so many numbers are held with the other small gradients, and decay there.
_SMALL = 512


def contributions(
    call: Call, layout: Layout, decay: Decay | None = None, wanted: dict[int, bool] | None = None
) -> dict[str, Contribution]:
    """What one call adds to the gradients of its unit's parameters, by their names in the model; nothing if it is not reached.
    If the weight decays, inner products with it are asked for, and given where a rule can; if that takes what the call gave, and
    it was not kept, `wanted` is told of the call's place; or that it is of no use if it was kept and is not good enough.

    *Guarantee.* Row i comes from example i's rows alone, and is in float32 or better.

    >>> unit = Unit("fc", nn.Linear(2, 1), linear, {"bias": "fc.bias"})
    >>> call = Call(unit, leaves=[torch.ones(1, 2)], spec=None, gradients=[torch.ones(1, 1)])
    >>> contributions(call, Layout([0], [0]))["fc.bias"].per_example()
    tensor([[1.]])
    """
    unit = call.unit
    if all(gradient is None for gradient in call.gradients):
        return {}
    if unit.rule is None:
        found = generic(call, layout)
    elif call.backward is not None and not call.backward.passed:
        (gradient,) = call.gradients
        assert gradient is not None
        found = _added_up(call.backward.contributions(gradient), layout.views)
    else:
        inputs = next(leaf for leaf in call.leaves if isinstance(leaf, Tensor))
        (gradient,) = call.gradients
        assert gradient is not None
        if not gradient.dtype == inputs.dtype == torch.float32:
            gradient = at_least_float32(gradient)
            if inputs.is_floating_point():  # under autocast the two have different types
                dtype = torch.promote_types(inputs.dtype, gradient.dtype)
                inputs, gradient = inputs.to(dtype), gradient.to(dtype)
        toward = None
        weight = unit.parameters.get("weight")
        # on the CPU: elsewhere products may be made in less than float32
        if (
            decay is not None
            and weight in decay.rates
            and gradient.is_cpu
            and (unit.rule is linear or decay.parameters[weight].numel() > _SMALL)
        ):
            kept = call.kept
            if kept is not None and (kept.dtype != gradient.dtype or kept._version != call.kept_version):
                kept = None  # rounded to less than the inner products are made in, or changed since
                if wanted is not None:
                    wanted[call.place] = False
            toward = Toward(decay, weight, kept, wanted, call.place)
        found = _by_rule(unit.rule, unit.module, inputs, gradient, layout.views, toward)
    return {name: found[inner] for inner, name in unit.parameters.items()}


def _by_rule(
    rule: Rule, module: nn.Module, inputs: Tensor, gradient: Tensor, views: int, toward: Toward | None
) -> dict[str, Contribution]:
    """What the rule answers, with an example's views taken together: the norm of their *sum* is wanted."""
    if toward is not None and rule in (conv, standardized_conv):
        return rule(module, inputs, gradient, views, toward)
    if toward is not None and rule in (linear, embedding):
        if views > 1:
            inputs, gradient = by_view(inputs, views), by_view(gradient, views)
            kept = None if toward.kept is None else by_view(toward.kept, views)
            toward = Toward(toward.decay, toward.name, kept, toward.wanted, toward.place)
        return rule(module, inputs, gradient, toward)
    if views == 1:
        return rule(module, inputs, gradient)
    if rule in (linear, layer_norm, embedding):  # one more axis of positions
        return rule(module, by_view(inputs, views), by_view(gradient, views))
    if rule in (conv, standardized_conv):
        return rule(module, inputs, gradient, views)
    return _added_up(rule(module, inputs, gradient), views)


def _added_up(found: dict[str, Contribution], views: int) -> dict[str, Contribution]:
    if views == 1:
        return found
    return {
        name: Contribution(lambda of=of: added_up(of.per_example(), views))  # type: ignore[misc]
        for name, of in found.items()
    }


def by_parameter(calls: list[Call], layouts: list[Layout]) -> dict[str, list[Contribution]]:
    """The contributions of all calls, gathered by parameter: several where it is tied or its module is called again.

    *Guarantee.* None is left out.

    >>> by_parameter([], [])
    {}
    """
    found: dict[str, list[Contribution]] = {}
    for call, layout in zip(calls, layouts, strict=True):
        for name, contribution in contributions(call, layout).items():
            found.setdefault(name, []).append(contribution)
    return found


def rules_sum(
    model: nn.Module,
    loss: Loss,
    trainable: dict[str, nn.Parameter],
    clipping: Clipping,
    batch: Batch,
    units: list[Unit],
    layouts: list[Layout],
    strategy: str,
    decay: Decay | None = None,
    kept: dict[int, bool] | None = None,
) -> tuple[Sums | None, Tensor]:
    """One forward pass, and one backward pass that takes the norms as it goes. `kept` says of places, in the order of the calls,
    whether decay takes the outputs there: nothing at first; what was missed, or of no use, is put in for the next batch.

    *Guarantee.* As for `Adding`; a batch that does not look as the probe found it raises `NoRule`.

    >>> from tacit.privacy.clipping import Flat
    >>> from tacit.gradients.capture import find_units
    >>> model = nn.Linear(1, 1, bias=False)
    >>> parameters = dict(model.named_parameters())
    >>> batch = Batch.of(torch.tensor([[0.5], [2.0]]), None)
    >>> units, layouts = find_units(model, parameters), [Layout([0], [0])]
    >>> rules_sum(model, lambda o, t: o[:, 0], parameters, Flat(1.0), batch, units, layouts, "rules")[0]
    {'weight': tensor([[1.5000]])}
    """
    decay, kept = decay or None, {} if kept is None else kept  # None is asked for faster
    calls, losses = capture(model, units, loss, batch, keeps=kept if decay is not None else None)
    if len(calls) != len(layouts):
        raise NoRule("the model calls other modules than in its probe")
    for call, layout in zip(calls, layouts):
        _check_layout(call, layout, batch.size)
    check_graph(calls, losses, trainable)
    adding = Adding(trainable, clipping, batch.size, strategy, decay)
    uses = Counter(name for call in calls for name in call.unit.parameters.values())
    waiting: dict[str, list[Contribution]] = {}

    def arrived(call: Call) -> None:
        for name, contribution in contributions(call, layouts[call.place], decay, kept).items():
            found = waiting.setdefault(name, [])
            found.append(contribution)
            if len(found) == uses[name]:
                adding.take(name, waiting.pop(name))

    backward(calls, losses, arrived)
    for name, found in waiting.items():  # some of its calls do not reach the loss
        adding.take(name, found)
    return adding.finish()


def _check_layout(call: Call, layout: Layout, size: int) -> None:
    shapes = [leaf.shape if isinstance(leaf, Tensor) else None for leaf in call.leaves] + call.shapes
    axes = layout.inputs + layout.outputs
    fits = len(shapes) == len(axes)
    for shape, axis in zip(shapes, axes):
        rows = size * layout.views
        fits = fits and (axis is None or (shape is not None and len(shape) > axis and shape[axis] == rows))
    if not fits:
        raise NoRule(f"{call.unit.described} has another layout than in its probe")


def check_strategy(engine: str, reason: str) -> None:
    """Refuse to fall back when the rules were asked for by name.

    *Guarantee.* A forced engine is the one that runs.

    >>> check_strategy("auto", "it is unusual")
    """
    if engine not in ("auto", "vmap", "loop"):
        raise UserError(f'engine={engine!r} cannot take this model: {reason}; use engine="auto"')
