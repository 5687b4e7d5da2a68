"""How many examples fit: an estimate from the probe, so that memory stays flat however large the logical batch is."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tacit.gradients import kernels
from tacit.gradients.capture import Call
from tacit.gradients.generic import Layout

BUDGET = 2**30
LARGEST = 512


def rules_bytes(calls: list[Call], layouts: list[Layout], trainable: dict[str, nn.Parameter], saved: int) -> int:
    """Bytes an example in the rules engine: what autograd keeps, the gradients that are held, for ghost norms the output
    gradients instead, and room for two outputs with their gradients on their way.

    *Guarantee.* An estimate; it bears on memory alone.

    >>> rules_bytes([], [], {}, saved=100)
    100
    """
    from tacit.gradients.adding import is_ghost
    from tacit.gradients.rules import by_parameter

    def size(call: Call) -> int:
        tensors = [t for t in call.outputs if isinstance(t, Tensor) and len(t.shape)]
        return sum(t.numel() * t.element_size() for t in tensors) // 3  # the probe has three examples

    sizes = sorted(size(call) for call in calls)
    held = 0
    for name, uses in by_parameter(calls, layouts).items():
        if is_ghost(uses, "rules"):
            held += max((size(call) for call in calls if name in call.unit.parameters.values()), default=0)
        else:
            held += trainable[name].numel() * max(trainable[name].element_size(), 4)
    if kernels.instruction_set() is None:  # then the gradient of each view is held, before they are added up
        held *= max((layout.views for layout in layouts), default=1)
    return saved + held + 4 * sum(sizes[-1:])


def whole_model_bytes(trainable: dict[str, nn.Parameter], saved: int) -> int:
    """Bytes an example when the whole model is differentiated for each.

    *Guarantee.* An estimate; it bears on memory alone.

    >>> whole_model_bytes(dict(nn.Linear(4, 4, bias=False).named_parameters()), saved=100)
    328
    """
    return 2 * (saved + sum(p.numel() * max(p.element_size(), 4) for p in trainable.values()))


def fitting(bytes_per_example: int, device: torch.device) -> int:
    """The largest number of examples within 1 GiB, or within a quarter of the memory that is free if that is less.

    *Guarantee.* Between 1 and 512.

    >>> fitting(2**40, torch.device("cpu")), fitting(1, torch.device("cpu"))
    (1, 512)
    """
    budget = min(BUDGET, _available(device) // 4)
    return max(1, min(LARGEST, budget // max(bytes_per_example, 1)))


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 4 * BUDGET
