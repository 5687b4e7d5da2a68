"""One forward and one backward pass that record, at each unit, what came in and the gradient of what came out.

A *unit* is a module whose parameters' gradients follow from these two alone: a layer with a rule, or any other module
that owns parameters, taken whole with its subtree (generic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules import module as module_hooks
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from tacit.gradients.batches import Batch, Loss, losses_of
from tacit.gradients.contribution import Contribution
from tacit.gradients.conv import conv
from tacit.gradients.embedding import embedding
from tacit.gradients.linear import linear
from tacit.gradients.norm import GroupNormBackward, group_norm, instance_norm, layer_norm
from tacit.gradients.refusals import described
from tacit.gradients.standardized import WeightStandardizedConv2d, standardized_conv
from tacit.privacy.validation import UserError

Rule = Callable[..., dict[str, Contribution]]  # of a module, its inputs and its output gradients

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    WeightStandardizedConv2d: standardized_conv,  # before its base: the first that fits is taken
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.Embedding: embedding,
}
# A subclass that overrides one of these computes something else than the rule knows.
_DECIDING_METHODS = ("__call__", "forward", "_conv_forward", "_apply_instance_norm", "standardized_weight")


class NoRule(Exception):
    """This model, or this batch, cannot go through the rules; the reason says why. Another engine can take it.

    *Guarantee.* Raised before anything is added up, so that no half of a sum is used.

    >>> str(NoRule("its layout is unusual"))
    'its layout is unusual'
    """


@dataclass(frozen=True)
class Unit:
    """A module that is recorded; `parameters` maps its trainable parameters' names inside it to those in the model.

    *Guarantee.* `rule` is set only if the module computes exactly what the rule knows.

    >>> Unit("fc", nn.Linear(2, 3), linear, {"weight": "fc.weight"}).described
    "'fc' (Linear)"
    """

    name: str
    module: nn.Module
    rule: Rule | None
    parameters: dict[str, str]

    @property
    def described(self) -> str:
        return described(self.name, self.module)


@dataclass
class Call:
    """One call of a unit: its arguments, and where in the autograd graph its outputs lie.

    *Guarantee.* `gradients` are those at the outputs as the unit gave them, whatever was done to them in place afterwards.

    >>> Call(Unit("fc", nn.Linear(2, 3), linear, {}), leaves=[torch.zeros(1, 2)], spec=None).gradients
    []
    """

    unit: Unit
    leaves: list[Any]  # of (args, kwargs), tensors detached
    spec: Any
    versions: list[int | None] = field(default_factory=list)
    sources: list[Node] = field(default_factory=list)
    edges: list[GradientEdge | None] = field(default_factory=list)
    shapes: list[torch.Size | None] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    backward: GroupNormBackward | None = None  # ours instead of the module's own
    place: int = 0  # in the order in which calls ended
    kept: Tensor | None = None  # what it gave, if that was asked for
    kept_version: int = 0
    outputs: list[Any] = field(default_factory=list)  # only in a probe
    drew_random_numbers: bool = False  # only in a probe


def find_units(model: nn.Module, trainable: dict[str, nn.Parameter]) -> list[Unit]:
    """The units of a model, top down.

    *Guarantee.* Every trainable parameter lies in a unit (or in none that is ever called, which `check_graph` notices).

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.PReLU())
    >>> [(unit.name, unit.rule is not None) for unit in find_units(model, dict(model.named_parameters()))]
    [('0', True), ('2', False)]
    """
    names = {id(parameter): name for name, parameter in trainable.items()}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[Unit]:
        if module in seen:
            return
        seen.add(module)
        own = {inner: names[id(p)] for inner, p in module.named_parameters(recurse=False) if id(p) in names}
        inside = {inner: names[id(p)] for inner, p in module.named_parameters() if id(p) in names}
        # lists of parameters have no forward of their own: whoever holds them uses them
        lists = any(isinstance(child, (nn.ParameterList, nn.ParameterDict)) for child in module.children())
        rule = _rule_of(module)
        if rule is not None and own.keys() <= {"weight", "bias"}:
            if own:
                yield Unit(name, module, rule, own)
        elif inside and (own or lists or is_parametrized(module)):
            yield Unit(name, module, None, inside)
            return
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    return list(visit("", model))


def _rule_of(module: nn.Module) -> Rule | None:
    if is_parametrized(module) or any(method in vars(module) for method in _DECIDING_METHODS):
        return None
    for base, rule in RULES.items():
        if isinstance(module, base):
            kind = type(module)
            same = all(getattr(kind, m, None) is getattr(base, m, None) for m in _DECIDING_METHODS)
            return rule if same else None
    return None


def capture(
    model: nn.Module,
    units: list[Unit],
    loss: Loss,
    batch: Batch,
    *,
    probing: bool = False,
    keeps: Mapping[int, bool] | None = None,
) -> tuple[list[Call], Tensor]:
    """Run the model once; the calls of its units in the order in which they ended, and the losses. What layers with
    a rule gave is kept where `keeps` says so of the call's place in that order.

    *Guarantee.* The hooks are gone when it returns or raises; nothing else of the model is touched.

    >>> model = nn.Linear(2, 3)
    >>> batch = Batch.of(torch.zeros(4, 2), None)
    >>> calls, losses = capture(model, find_units(model, dict(model.named_parameters())), lambda o, t: o.sum(1), batch)
    >>> len(calls), losses.shape
    (1, torch.Size([4]))
    """
    calls: list[Call] = []
    running: list[Call] = []  # generic units that have begun and not ended; what happens inside is theirs

    def record_rule(unit: Unit) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not running:
                call = _begin(unit, args, kwargs)
                output = _with_own_backward(call, args, output)
                _end(call, output, probing)
                call.place = len(calls)
                if keeps and keeps.get(call.place) and isinstance(output, Tensor):
                    call.kept, call.kept_version = output.detach(), output._version
                calls.append(call)
            return output

        return hook

    def begin_generic(unit: Unit) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            call = _begin(unit, args, kwargs)
            if probing:
                call.outputs = [_random_state(batch)]
            running.append(call)

        return hook

    def end_generic(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        call = running.pop()
        if not running:
            call.drew_random_numbers = probing and not torch.equal(call.outputs[0], _random_state(batch))
            _end(call, output, probing)
            call.place = len(calls)
            calls.append(call)

    with hooks() as handles, torch.enable_grad():
        for unit in units:
            if unit.rule is not None:
                # first of all forward hooks: it must see what the layer computed, not what another hook made of it
                hook = record_rule(unit)
                handles.append(unit.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
            else:
                # around all other hooks: they are part of what is computed again
                begin = begin_generic(unit)
                handles.append(unit.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                handles.append(unit.module.register_forward_hook(end_generic, with_kwargs=True))
        return calls, losses_of(model, loss, batch)


def backward(calls: list[Call], losses: Tensor, arrived: Callable[[Call], None] | None = None) -> None:
    """Fill in the gradients of the summed loss at the outputs of all calls. Parameters get none.

    With `arrived`, each call is handed over as soon as its gradients are there, while they are still near in memory, and
    then forgotten: its gradients and arguments are not kept until the end of the pass.

    *Guarantee.* Arguments that were changed in place after they were recorded are refused, not used.

    >>> backward([], torch.zeros(3))
    """
    for call in calls:
        for leaf, version in zip(call.leaves, call.versions):
            if isinstance(leaf, Tensor) and leaf._version != version:
                raise UserError(
                    f"an input of {call.unit.described} is changed in place after use, so its gradient cannot be computed; "
                    "use an operation that is not in place there"
                )
    passed = _passed_through(calls) if arrived is not None else []
    at_once = {id(call) for call in passed}
    handles = []
    for call in passed:
        assert arrived is not None
        handles.append(_hand_over(call, arrived))
    last = [call for call in calls if id(call) not in at_once]
    edges = [edge for call in last for edge in call.edges if edge is not None]
    found: list[Tensor | None] = []
    try:
        if edges and losses.requires_grad:
            found = list(torch.autograd.grad(losses, edges, torch.ones_like(losses), allow_unused=True))
    finally:
        for handle in handles:
            handle.remove()
    gradients = iter(found or [None] * len(edges))
    for call in last:
        call.gradients = [None if edge is None else next(gradients) for edge in call.edges]
        for i, (gradient, shape) in enumerate(zip(call.gradients, call.shapes)):
            if gradient is not None and shape is not None:
                call.gradients[i] = gradient.reshape(shape)
    del gradients, found
    while arrived is not None and last:
        arrived(last.pop())


def _passed_through(calls: list[Call]) -> list[Call]:
    """The calls of rules whose node the backward pass runs through on its way to an earlier call."""
    ends = {edge.node for call in calls for edge in call.edges if edge is not None}
    single = [
        call for call in calls if call.unit.rule is not None and len(call.edges) == 1 and call.edges[0] is not None
    ]
    return [call for call in single if _meets(call.sources, ends)]


def _meets(starts: Iterable[Node], wanted: set[Node]) -> bool:
    seen: set[Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node in wanted:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return False


def _hand_over(call: Call, arrived: Callable[[Call], None]) -> Any:
    (edge,), (shape,) = call.edges, call.shapes
    assert edge is not None
    output = edge.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[output]
        if gradient is not None:
            call.gradients = [gradient if shape is None else gradient.reshape(shape)]
            arrived(call)
            call.gradients, call.leaves, call.kept = [None], [], None

    return edge.node.register_prehook(hook)


def check_graph(calls: list[Call], losses: Tensor, trainable: dict[str, nn.Parameter]) -> None:
    """Raise `NoRule` if a parameter is used outside the calls of its unit, which the recorded gradients would miss; or if there
    are forward hooks of all modules, which see, and may change, an output before it is recorded.

    The graph is walked from the loss and from what enters units, not through units; inside a generic unit no
    parameter may occur but its own.

    *Guarantee.* After it, each trainable parameter reaches the loss through recorded calls of its units alone.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> check_graph([], (weight * 3).sum(), {"weight": weight})
    Traceback (most recent call last):
    ...
    tacit.gradients.capture.NoRule: the parameter 'weight' is used outside the module that owns it
    """
    if module_hooks._global_forward_hooks:
        raise NoRule("forward hooks of all modules may change what a layer gives")
    names = {id(parameter): name for name, parameter in trainable.items()}
    ends = {edge.node for call in calls for edge in call.edges if edge is not None}
    starts = [losses.grad_fn] if losses.grad_fn is not None else []
    outside = _reached([*starts, *(node for call in calls for node in call.sources)], stops=ends)
    strangers = [names[key] for key in outside if key in names]
    for call in calls:
        if call.unit.rule is None:
            inside = _reached([edge.node for edge in call.edges if edge is not None], stops=set(call.sources))
            own = set(call.unit.parameters.values())
            strangers += [names[key] for key in inside if key in names and names[key] not in own]
    if strangers:
        raise NoRule(f"the parameter {strangers[0]!r} is used outside the module that owns it")


def _reached(starts: Iterable[Node], stops: set[Node]) -> set[int]:
    """The ids of the leaf tensors that are reached without passing through a stop."""
    found, seen, waiting = set(), set(stops), list(starts)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.add(id(leaf))
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found


@contextmanager
def hooks() -> Iterator[list[Any]]:
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _begin(unit: Unit, args: Any, kwargs: Any) -> Call:
    if unit.rule is not None and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        leaves, spec = [args[0]], None  # what nearly every layer gets; flattening it takes longer
    else:
        leaves, spec = pytree.tree_flatten((args, kwargs))
    call = Call(unit, leaves=[leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec=spec)
    call.versions = [leaf._version if isinstance(leaf, Tensor) else None for leaf in leaves]
    call.sources = [get_gradient_edge(t).node for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    return call


def _with_own_backward(call: Call, args: Any, output: Any) -> Any:
    """The output, from which the way back goes through our own backward pass if the rule has one."""
    module = call.unit.module
    if not isinstance(module, nn.GroupNorm) or len(args) != 1 or not GroupNormBackward.fits(args[0], output):
        return output
    call.backward = GroupNormBackward(module, call.leaves[0])
    return call.backward.passed_by(args[0], output)


def _end(call: Call, output: Any, probing: bool) -> None:
    outputs = [output] if isinstance(output, Tensor) else pytree.tree_leaves(output)
    for leaf in outputs:
        edge = None
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # A linear layer returns a view; what is done to it in place goes past the view, but not past its base.
            base = leaf._base if call.unit.rule is not None and leaf._is_view() and leaf.is_contiguous() else None
            whole = base is not None and base.numel() == leaf.numel() and base.is_contiguous()
            edge = get_gradient_edge(base if base is not None and whole else leaf)
            if edge.node in call.sources:  # handed through untouched: no parameter is in it
                edge = None
        call.edges.append(edge)
        call.shapes.append(leaf.shape if isinstance(leaf, Tensor) else None)
    call.outputs = [o.detach().clone() if isinstance(o, Tensor) else o for o in outputs] if probing else []


def _random_state(batch: Batch) -> Tensor:
    for leaf in batch.leaves:
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
            return torch.cuda.get_rng_state(leaf.device)
    return torch.get_rng_state()
