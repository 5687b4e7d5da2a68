"""Who takes part. Each contestant lives in a file of its own and is imported only in its own process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.contestants.setup import Contestant, Setup

NCHW = "channels first"
NHWC = "channels last"


@dataclass(frozen=True)
class Entry:
    """A contestant before it starts.

    `layouts` are tried once each and the fastest is raced; so are `splits`: whether a batch above 512 is also tried in pieces
    of 512. `micro_batches` says that it can work in pieces if the whole batch needs too much memory.
    """

    title: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    private: bool = True
    layouts: tuple[str, ...] = (NCHW, NHWC)
    splits: bool = False
    micro_batches: bool = False
    package: str | None = None

    def make(self, setup: Setup) -> Contestant:
        """The contestant itself; imports its library."""
        module = importlib.import_module(f"benchmarks.contestants.{self.module}")
        return module.make(setup, **self.options)


def _opacus(mode: str) -> Entry:
    return Entry(f"Opacus, {mode}", "opacus_", {"mode": mode}, micro_batches=True, package="opacus")


def _grouped(groups: int) -> Entry:
    return Entry(f"tacit, {groups} groups", "tacit_", {"groups": groups}, layouts=(NHWC,), package="tacit")


CONTESTANTS: dict[str, Entry] = {
    "plain-nchw": Entry("not private, channels first", "plain", private=False, layouts=(NCHW,), splits=True),
    "plain-nhwc": Entry("not private, channels last", "plain", private=False, layouts=(NHWC,), splits=True),
    "plain-kept": Entry(
        "not private, channels last, freed memory kept",
        "plain",
        {"kept": True},
        private=False,
        layouts=(NHWC,),
        splits=True,
    ),
    "plain-compile": Entry(
        "not private, torch.compile", "plain", {"compiled": True}, private=False, layouts=(NHWC,), splits=True
    ),
    "plain-jax": Entry(
        "not private, JAX jit", "jax_privacy_", {"private": False}, private=False, layouts=(NHWC,), package="jax"
    ),
    "tacit": Entry("**tacit**", "tacit_", layouts=(NHWC,), package="tacit"),
    "tacit-40": _grouped(40),
    "tacit-no-noise": Entry("tacit, clipped but no noise", "tacit_", {"noise": False}, layouts=(NHWC,)),
    "opacus-hooks": _opacus("hooks"),
    "opacus-functorch": _opacus("functorch"),
    "opacus-ew": _opacus("ew"),
    "opacus-ghost": _opacus("ghost"),
    "fastdp": Entry("fastDP, MixOpt", "fastdp_", package="fastDP"),
    "opake": Entry("opake", "opake_", micro_batches=True, package="opake"),
    "jax-privacy": Entry(
        "JAX Privacy, jit", "jax_privacy_", layouts=(NHWC,), micro_batches=True, package="jax_privacy"
    ),
    # for the growth with the number of groups alone
    "tacit-2": _grouped(2),
    "tacit-10": _grouped(10),
    # for its cost alone
    "tacit-decay": Entry("tacit, weight decay before clipping", "tacit_", {"decay": 1e-2}, layouts=(NHWC,)),
}

FIELD = tuple(key for key in CONTESTANTS if key not in ("tacit-2", "tacit-10", "tacit-decay"))
EPOCH_FIELD = tuple(
    key
    for key in FIELD
    if key not in ("plain-nchw", "plain-kept", "plain-compile", "plain-jax", "tacit-40", "tacit-no-noise")
)
