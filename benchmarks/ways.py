"""The cost model against measurement: for each kind of layer, both ways to clip it, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.models import NETWORKS
from benchmarks.report import with_region
from tacit.gradients.batches import trainable_parameters
from tacit.gradients.capture import Unit, find_units
from tacit.gradients.contribution import Contribution, instantiated

BATCH, ROUNDS = 64, 9


@dataclass(frozen=True)
class Layer:
    """One call of a layer with a weight that can be clipped in both ways."""

    title: str
    answer: Callable[[], Contribution]


def layers(network: str) -> list[Layer]:
    """The different layers of a network, with what came in and random gradients of what came out."""
    model = NETWORKS[network].model().to(memory_format=torch.channels_last)
    inputs, _ = NETWORKS[network].examples(BATCH)
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    found: dict[str, Layer] = {}

    def recording(unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            weight = list(module.weight.shape)
            title = f"{type(module).__name__} {weight}, {' x '.join(map(str, output.shape[2:])) or 'one'} positions"
            gradients = torch.randn_like(output)
            rule, given = unit.rule, args[0].detach()
            assert rule is not None
            if rule(module, given, gradients)["weight"].ghost is not None:
                found[title] = Layer(title, lambda: rule(module, given, gradients)["weight"])

        return hook

    units = [unit for unit in find_units(model, trainable_parameters(model)) if "weight" in unit.parameters]
    handles = [unit.module.register_forward_hook(recording(unit)) for unit in units if unit.rule is not None]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return list(found.values())


def measured(layer: Layer) -> tuple[float, float, bool]:
    """(milliseconds held, milliseconds by ghost norms, whether the cost model takes the ghost)."""
    factors = torch.rand(BATCH)
    best = {"held": float("inf"), "ghost": float("inf")}
    for _ in range(ROUNDS):
        for name in best:
            contribution = layer.answer()
            way = contribution.ghost if name == "ghost" else contribution.held or instantiated(contribution.per_example)
            assert way is not None
            started = time.perf_counter()
            _, add = way()
            add(factors)
            best[name] = min(best[name], 1000 * (time.perf_counter() - started))
            del add
    return best["held"], best["ghost"], layer.answer().ghost_is_cheaper


def write_ways(readme: Path) -> None:
    """Measure every kind of layer of every network, and put the table into the page."""
    rows, seen, chosen, fastest = [], set(), 0.0, 0.0
    with torch.no_grad():
        for network in track([name for name in NETWORKS if name != "cifar-cnn-x2"], description="layers"):
            for layer in layers(network):
                if layer.title in seen:
                    continue
                seen.add(layer.title)
                held, ghost, takes_ghost = measured(layer)
                taken = ghost if takes_ghost else held
                chosen, fastest = chosen + taken, fastest + min(held, ghost)
                verdict = f"{taken / min(held, ghost) - 1:.0%} slower" if taken > 1.02 * min(held, ghost) else "yes"
                rows.append(
                    f"| {layer.title} | {held:.2f} | {ghost:.2f} | {'ghost' if takes_ghost else 'held'} | {verdict} |"
                )
    head = "| layer | held, ms | ghost, ms | chosen | the faster one? |\n|---|---|---|---|---|\n"
    words = (
        f"\nEach kind of layer of the networks above at batch {BATCH}: norms and weighted sum, the best of {ROUNDS} turns. All "
        f"choices of the cost model together take {chosen / fastest - 1:.1%} longer than the faster way each time.\n\n"
    )
    readme.write_text(with_region(readme.read_text(), "ways", words + head + "\n".join(rows) + "\n"))
    print(words + head + "\n".join(rows))
