"""How one example's gradient is bounded, and what noise that bound needs.

A clipping splits the parameters into groups and bounds each example's gradient in each group. Everything else follows
from the bounds C_j alone: the sensitivity of the clipped sum, sqrt(sum_j C_j^2), and the noise standard deviations s_j
that give a wanted noise multiplier. A release of the clipped sum with noise s_j in group j is, after rescaling each
group by 1/s_j, one Gaussian mechanism of unit noise and sensitivity sqrt(sum_j (C_j/s_j)^2), so its *effective*
noise multiplier is (sum_j (C_j/s_j)^2)^(-1/2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tacit.privacy.beside import Adaptive
from tacit.privacy.validation import UserError, check_choice, check_count, check_positive

if TYPE_CHECKING:
    from torch import Tensor


ALLOCATIONS = ("equal", "bound", "dimension", "depth")

_SMALLEST_RATIO = 1e-300  # so that 1 / ratio is a float
_SMALLEST_STABILITY = 1e-6


@runtime_checkable
class Clipping(Protocol):
    """What the engine, the mechanism and the accountant need to know of a clipping.

    >>> isinstance(Flat(1.0), Clipping)
    True
    """

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        """The bound C_j of each group."""

    @property
    def sensitivity(self) -> float:
        """How far one example can move the clipped sum, in the Euclidean norm."""

    @property
    def stability(self) -> float | None:
        """None: only what is longer than its bound is scaled. Else every gradient is, to C_j norm / (norm + stability)."""

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        """The noise s_j of each group whose effective multiplier is the wanted one."""

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """The group of each parameter, by its name."""

    def to_dict(self) -> dict[str, Any]:
        """A plain description, from which `clipping_from_dict` makes the same clipping."""


def effective_multiplier(clipping_norms: Iterable[float], noise_stds: Iterable[float]) -> float:
    """The noise multiplier of a grouped release: (sum_j (C_j/s_j)^2)^(-1/2).

    *Guarantee.* Releasing the clipped sum with independent noise N(0, s_j^2) on every coordinate of group j is a Gaussian
    mechanism with exactly this multiplier; a group without noise gives 0, which is no privacy.

    Forty groups clipped at 1 with noise 2.8 each are far from a multiplier of 2.8:

    >>> round(effective_multiplier([1.0] * 40, [2.8] * 40), 4)
    0.4427
    """
    ratios = []
    for norm, std in zip(clipping_norms, noise_stds, strict=True):
        if std <= 0:
            return 0.0
        ratios.append(norm / std)
    # hypot, because squares of small norms would leave the range of a float.
    return 1 / max(math.hypot(*ratios), _SMALLEST_RATIO)


def clip_factors(norms: Tensor, clipping: Clipping) -> Tensor:
    """One factor an example and group, from the norms before clipping (both [batch, groups]): min(1, C_j / norm), or, where
    gradients are normalised, C_j / (norm + stability).

    *Guarantee.* An example's factors depend on its own norms alone, and factor times norm is at most C_j. An example with
    a norm that is not finite in any group gets the factor 0 in all of them.

    >>> import torch
    >>> clip_factors(torch.tensor([[0.5], [2.0], [float("nan")]]), Flat(1.0)).flatten().tolist()
    [1.0, 0.5, 0.0]
    """
    import torch

    bounds = torch.tensor(clipping.clipping_norms, dtype=norms.dtype, device=norms.device)
    stability = clipping.stability
    factors = torch.clamp(bounds / norms, max=1.0) if stability is None else bounds / (norms + stability)
    if stability is None and len(norms) and float(factors.amin()) >= torch.finfo(norms.dtype).tiny:
        # then no norm is infinite or nan either
        return factors
    # A factor below the smallest normal number has lost its precision, and could be too large.
    kept = (
        torch.isfinite(norms).all(dim=1, keepdim=True) & factors.isfinite() & (factors >= torch.finfo(norms.dtype).tiny)
    )
    return torch.where(kept, factors, torch.zeros_like(norms))


@dataclass(frozen=True)
class Flat:
    """Clip each example's whole gradient at one norm.

    *Guarantee.* Adding or removing one example moves the clipped sum by at most `clipping_norm`.

    >>> Flat(0.1).noise_stds(2.0)
    (0.2,)
    """

    clipping_norm: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clipping_norm", check_positive("clipping_norm", self.clipping_norm))

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        return (self.clipping_norm,)

    @property
    def sensitivity(self) -> float:
        return self.clipping_norm

    @property
    def stability(self) -> None:
        return None

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        return (noise_multiplier * self.clipping_norm,)

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        return (0,) * len(names)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "flat", "clipping_norm": self.clipping_norm}


@dataclass(frozen=True)
class Grouped:
    """Clip each example's gradient separately in several groups of parameters.

    `groups` holds, for each group, the name patterns of its parameters (`*` and `?` as in file names); every parameter must
    belong to exactly one group. `noise_shape` says how much noise each group gets *relative* to the others (equal by default):
    the shape is kept and rescaled, so that the effective multiplier is always the one asked for.

    *Guarantee.* Adding or removing one example moves the clipped sum by at most sqrt(sum_j C_j^2), and
    `effective_multiplier(clipping_norms, noise_stds(sigma)) == sigma` for every noise shape.

    >>> clipping = Grouped(groups=(("conv*",), ("head.*",)), clipping_norms=(0.3, 0.4))
    >>> round(clipping.sensitivity, 6), tuple(round(s, 6) for s in clipping.noise_stds(2.0))
    (0.5, (1.0, 1.0))
    >>> clipping.group_of(["conv1.weight", "conv1.bias", "head.weight"])
    (0, 0, 1)
    """

    groups: tuple[tuple[str, ...], ...]
    clipping_norms: tuple[float, ...]
    noise_shape: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.groups, str) or any(isinstance(patterns, str) for patterns in self.groups):
            raise UserError("groups must hold one list of name patterns a group, such as [['conv*'], ['head.*']]")
        object.__setattr__(self, "groups", tuple(tuple(patterns) for patterns in self.groups))
        if not self.groups:
            raise UserError("groups must hold at least one group of parameters")
        for name in ("clipping_norms", "noise_shape"):
            values = getattr(self, name)
            if values is None:
                continue
            values = tuple(check_positive(f"each of {name}", value) for value in values)
            if len(values) != len(self.groups):
                raise UserError(f"{name} must hold one number a group: {len(self.groups)}, not {len(values)}")
            object.__setattr__(self, name, values)
        if effective_multiplier(self.clipping_norms, self.noise_shape or (1.0,) * len(self.groups)) <= 0:
            raise UserError("clipping_norms and noise_shape are too far apart for floating-point numbers")

    @classmethod
    def by_name(cls, names: Iterable[str], *, clipping_norm: float) -> Grouped:
        """One group a layer: parameters whose names differ only in the last part are clipped together.

        Each group's bound is `clipping_norm / sqrt(number of groups)`, so that the sensitivity is `clipping_norm`.

        >>> Grouped.by_name(["a.weight", "a.bias", "b.weight"], clipping_norm=1.0).groups
        (('a.weight', 'a.bias'), ('b.weight',))
        """
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        bound = check_positive("clipping_norm", clipping_norm) / math.sqrt(max(len(layers), 1))
        return cls(tuple(tuple(members) for members in layers.values()), (bound,) * len(layers))

    @classmethod
    def balanced(cls, sizes: Mapping[str, int], *, groups: int, clipping_norm: float) -> Grouped:
        """So many groups of about as many numbers each, from the sizes of the parameters.

        Each group's bound is `clipping_norm / sqrt(groups)`, so that the sensitivity is `clipping_norm`. The largest parameters
        are dealt out first, each to the group that is smallest then.

        >>> Grouped.balanced({"a": 5, "b": 3, "c": 1}, groups=2, clipping_norm=1.0).groups
        (('a',), ('b', 'c'))
        """
        if check_count("groups", groups) > len(sizes):
            raise UserError(f"{groups} groups are more than the {len(sizes)} parameters; choose at most {len(sizes)}")
        members: list[list[str]] = [[] for _ in range(groups)]
        totals = [0] * groups
        for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
            smallest = min(range(groups), key=lambda j: (totals[j], len(members[j])))
            members[smallest].append(name)
            totals[smallest] += size
        order = list(sizes)
        dealt = sorted((sorted(names, key=order.index) for names in members), key=lambda names: order.index(names[0]))
        bound = check_positive("clipping_norm", clipping_norm) / math.sqrt(groups)
        return cls(tuple(tuple(names) for names in dealt), (bound,) * groups)

    def allocated(self, allocation: str, sizes: Mapping[str, int]) -> Grouped:
        """The same groups with their noise shared out in another way:

        - "equal": the same standard deviation everywhere;
        - "bound": in proportion to the bounds C_j, so that every group has the same part of the privacy;
        - "dimension": in proportion to sqrt(C_j) / d_j^(1/4) for a group of d_j numbers, which makes the noise as a whole as
          small as it can be: it minimises sum_j d_j s_j^2;
        - "depth": divided by j + 1 in group j = 0, 1, ..., as the paper on private optimizers has it by layer.

        *Guarantee.* As for every noise shape: the effective multiplier stays the one asked for.

        >>> clipping = Grouped((("a",), ("b",)), (1.0, 1.0)).allocated("depth", {"a": 4, "b": 64})
        >>> [round(std, 4) for std in clipping.noise_stds(1.0)]
        [2.2361, 1.118]
        """
        check_choice("noise allocation", allocation, ALLOCATIONS)
        if allocation == "equal":
            return dataclasses.replace(self, noise_shape=None)
        widths = [0] * len(self.groups)
        for group, size in zip(self.group_of(list(sizes)), sizes.values()):
            widths[group] += size
        shape = {
            "bound": self.clipping_norms,
            "dimension": tuple(norm**0.5 / width**0.25 for norm, width in zip(self.clipping_norms, widths)),
            "depth": tuple(1 / (j + 1) for j in range(len(self.groups))),
        }[allocation]
        return dataclasses.replace(self, noise_shape=shape)

    @property
    def sensitivity(self) -> float:
        return math.hypot(*self.clipping_norms)

    @property
    def stability(self) -> None:
        return None

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        shape = self.noise_shape or (1.0,) * len(self.groups)
        scale = noise_multiplier / effective_multiplier(self.clipping_norms, shape)
        return tuple(scale * relative for relative in shape)

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        assigned = []
        for name in names:
            groups = [j for j, patterns in enumerate(self.groups) if any(fnmatchcase(name, p) for p in patterns)]
            if len(groups) != 1:
                found = f"in {len(groups)} groups" if groups else "in no group"
                raise UserError(f"every parameter must be in exactly one group; {name!r} is {found}")
            assigned.append(groups[0])
        unused = sorted(set(range(len(self.groups))) - set(assigned))
        if unused:
            raise UserError(f"group {unused[0]} {list(self.groups[unused[0]])} matches no parameter")
        return tuple(assigned)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "grouped",
            "groups": [list(patterns) for patterns in self.groups],
            "clipping_norms": list(self.clipping_norms),
            "noise_shape": None if self.noise_shape is None else list(self.noise_shape),
        }


@dataclass(frozen=True)
class Automatic:
    """Normalise instead of clip: every example's gradient, in every group, is scaled to C_j norm / (norm + stability).

    Then the bound no longer matters apart from the learning rate, so there is one thing less to tune (Bu et al., "Automatic
    Clipping: Differentially Private Deep Learning Made Easier and Stronger", 2023). A small `stability` makes all
    gradients count alike; a large one leaves short gradients shorter.

    *Guarantee.* That of `of`, the clipping whose bounds and groups it has: norm / (norm + stability) is below 1.

    >>> import torch
    >>> clip_factors(torch.tensor([[0.09], [9.99]]), Automatic(Flat(1.0))).flatten().tolist()
    [10.0, 0.10000000149011612]
    """

    of: Flat | Grouped
    stability: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.of, Flat | Grouped):
            raise UserError(f"Automatic is of Flat(...) or Grouped(...), not {self.of!r}")
        # With less, a gradient so small that its computed norm is 0 could come out larger than the bound.
        if not check_positive("stability", self.stability) >= _SMALLEST_STABILITY:
            raise UserError(
                f"stability must be at least {_SMALLEST_STABILITY:g}, not {self.stability!r}; 0.01 is usual"
            )
        object.__setattr__(self, "stability", float(self.stability))

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        return self.of.clipping_norms

    @property
    def sensitivity(self) -> float:
        return self.of.sensitivity

    def noise_stds(self, noise_multiplier: float) -> tuple[float, ...]:
        return self.of.noise_stds(noise_multiplier)

    def group_of(self, names: Sequence[str]) -> tuple[int, ...]:
        return self.of.group_of(names)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "automatic", "of": self.of.to_dict(), "stability": self.stability}


def clipping_from_dict(description: dict[str, Any]) -> Clipping:
    """The clipping that `to_dict` described.

    >>> clipping_from_dict(Flat(0.1).to_dict())
    Flat(clipping_norm=0.1)
    """
    fields = dict(description)
    kinds = ["flat", "grouped", "automatic", "adaptive", "error-feedback"]
    kind = check_choice("clipping kind", str(fields.pop("kind", None)), kinds)
    try:
        if kind == "error-feedback":
            from tacit.privacy.dice import ErrorFeedback

            return ErrorFeedback(**fields)
        if kind == "adaptive":
            return Adaptive(**fields)
        if kind == "automatic":
            return Automatic(of=clipping_from_dict(fields.pop("of")), **fields)  # type: ignore[arg-type]
        return Flat(**fields) if kind == "flat" else Grouped(**fields)
    except (TypeError, KeyError) as error:
        raise UserError(f"the clipping {description!r} cannot be read: {error}") from None
