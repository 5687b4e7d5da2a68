"""What is measured: which networks, at which batch sizes, with whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants import EPOCH_FIELD, FIELD

BATCHES: dict[str, tuple[int, ...]] = {
    "mnist-cnn": (32, 128, 512, 2048, 4096),
    "cifar-cnn": (32, 128, 512),
    "scatter-cnn": (128,),
    "resnet-20": (128,),
    "wrn-16-4": (128,),
    "transformer": (128,),
}
ALL_BATCHES = (32, 128, 512, 2048, 4096)
EPOCHS = {"mnist-cnn": 8192, "cifar-cnn": 4096}
ALL_EPOCHS = {**EPOCHS, "scatter-cnn": 4096, "resnet-20": 2048, "transformer": 4096, "wrn-16-4": 512}
USUAL_BATCH = 128
# Who races at the other batch sizes, unless everything is asked for.
SHORT_FIELD = ("plain-nhwc", "plain-kept", "tacit", "opacus-hooks", "opacus-ew", "opacus-ghost")


@dataclass(frozen=True)
class Case:
    """One race: everybody in `contestants` at the same task. `examples` is the size of the data set in an epoch."""

    kind: str
    network: str
    batch: int
    contestants: tuple[str, ...]
    examples: int | None = None

    @property
    def name(self) -> str:
        """The name of its result, without the ending."""
        return f"{self.kind}-{self.network}-{self.batch}"


def cases(
    *,
    quick: bool = False,
    full: bool = False,
    only: Sequence[str] | None = None,
    batches: Sequence[int] | None = None,
    contestants: Sequence[str] | None = None,
) -> list[Case]:
    """The races asked for, the ones everybody looks at first."""

    def chosen(field: Sequence[str]) -> tuple[str, ...]:
        return tuple(key for key in field if contestants is None or key in contestants)

    found = []
    for network, usual in BATCHES.items():
        sizes = batches or ((USUAL_BATCH,) if quick else ALL_BATCHES if full else usual)
        for size in sizes:
            everybody = full or size == USUAL_BATCH or batches is not None
            found.append(Case("step", network, size, chosen(FIELD if everybody else SHORT_FIELD)))
    if not quick and batches is None:
        found.append(Case("width", "cifar-cnn", USUAL_BATCH, chosen(("plain-nhwc", "tacit"))))
        found.append(Case("width", "cifar-cnn-x2", USUAL_BATCH, chosen(("plain-nhwc", "tacit"))))
        parts = ("plain-nhwc", "plain-kept", "tacit", "tacit-no-noise", "tacit-2", "tacit-10", "tacit-40")
        networks = ("mnist-cnn", "cifar-cnn", "resnet-20", "wrn-16-4")
        found += [Case("groups", network, USUAL_BATCH, chosen(parts)) for network in networks]
        pair = chosen(("tacit", "tacit-decay"))
        found += [Case("decay", network, USUAL_BATCH, pair) for network in (*networks, "transformer")]
        for network, examples in (ALL_EPOCHS if full else EPOCHS).items():
            found.append(Case("epoch", network, USUAL_BATCH, chosen(EPOCH_FIELD), examples))
    found = [case for case in found if case.contestants and (only is None or case.network.removesuffix("-x2") in only)]
    return sorted(found, key=lambda case: (case.kind != "step", case.batch != USUAL_BATCH))
