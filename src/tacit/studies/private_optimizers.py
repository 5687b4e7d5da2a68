"""Paper C: three private optimizers on three deeper nets, the ladder of additions, and what its own settings really cost.

The paper's techniques are accounted honestly: in every variant but those with an epsilon claimed (of `literal`, and DiceSGD), the
noise is what epsilon 3 needs. With k groups clipped at B each, one example moves the sum by sqrt(k) B; the paper adds noise as
for B.
"""

from __future__ import annotations

from typing import Any

from tacit.studies.study import Comparison, Printed, Study, Variant, merged

_ONE = "one run"
_GROUPS = 40

_MODELS = {"resnet20": "resnet-20", "wrn16-4": "wrn-16-4", "efficientnet": "efficientnet-b0"}
# what the paper prints, by network and optimizer: minimum, maximum, median and median absolute deviation of five runs
_TABLE = {
    ("resnet20", "rmsprop"): (58.6, 59.5, 59.0, 0.4),
    ("resnet20", "sgd"): (47.1, 47.6, 47.6, 0.2),
    ("resnet20", "adagrad"): (35.4, 37.3, 36.9, 0.7),
    ("wrn16-4", "rmsprop"): (50.8, 51.1, 50.9, 0.1),
    ("wrn16-4", "sgd"): (49.2, 50.1, 49.1, 0.4),  # so it prints them, with a median below the minimum
    ("wrn16-4", "adagrad"): (30.2, 31.6, 30.6, 0.5),
    ("efficientnet", "rmsprop"): (48.4, 49.6, 49.1, 0.6),
    ("efficientnet", "sgd"): (24.6, 25.4, 25.1, 0.4),
    ("efficientnet", "adagrad"): (17.3, 19.6, 18.2, 0.8),
}
_AUGMIX = {"names": ["augmix"], "severity": 3.0, "width": 3, "depth": -1, "alpha": 1.0}


def _printed(network: str, optimizer: str) -> Printed:
    low, high, median, deviation = _TABLE[network, optimizer]
    return Printed(
        median, 3.0, f"median of 5 runs: min {low}, max {high}, MAD {deviation}; an epsilon that does not hold"
    )


def _base(model: str, batch: int, clipping_norm: float) -> dict[str, dict[str, Any]]:
    return {
        "data": {"source": "cifar10"},
        "model": {"name": model, "activation": "silu"},
        "loss": {"name": "cross-entropy"},
        "privacy": {
            "epsilon": 3.0,
            "delta": 1e-5,
            "batch_size": batch,
            "epochs": 50,
            "clipping_norm": clipping_norm,
        },
    }


def _optimizer(name: str) -> dict[str, dict[str, Any]]:
    """The paper's settings of an optimizer; torch's where it is silent."""
    schedule = {"name": "CosineAnnealingLR", "eta_min": 9e-5}
    if name == "rmsprop":
        options = {"name": "RMSprop", "lr": 8e-4, "momentum": 0.9, "weight_decay": 1e-4}
        return {"optimizer": options, "learning_rate_schedule": schedule}
    if name == "adagrad":
        return {"optimizer": {"name": "Adagrad", "lr": 8e-4}, "learning_rate_schedule": schedule}
    return {"optimizer": {"name": "SGD", "lr": 0.1}}


def _of_the_table(network: str, optimizer: str) -> Variant:
    """One cell of the paper's table: everything it puts together, with the noise that epsilon 3 needs."""
    batch = 1024 if optimizer == "sgd" else 4096
    values = {
        **_base(_MODELS[network], batch, 1.0),
        **_optimizer(optimizer),
        "averaging": {"name": "exponential", "decay": 0.95},
    }
    values = merged(values, privacy={"groups": _GROUPS})
    if optimizer != "sgd":
        values["augmentation"] = dict(_AUGMIX)
    return Variant(f"{network}/{optimizer}", values, 1, _printed(network, optimizer))


def _ladder() -> list[Variant]:
    """One addition after the other, to ResNet-20 with DP-SGD."""
    start = {**_base("resnet-20-plain", 256, 1.5), **_optimizer("sgd")}
    norm = merged(start, model={"name": "resnet-20-norm"})
    standardised = merged(norm, model={"name": "resnet-20"})
    averaged = {
        **merged(standardised, privacy={"batch_size": 512}),
        "averaging": {"name": "exponential", "decay": 0.95},
    }
    larger = merged(averaged, privacy={"batch_size": 1024})
    grouped = merged(larger, privacy={"groups": _GROUPS, "clipping_norm": 1.0})
    rungs = {
        "1-plain": (start, 29.58),
        "2-group-norm": (norm, 38.11),
        "3-standardised": (standardised, 38.13),
        "4-averaged-512": (averaged, 44.04),
        "5-batch-1024": (larger, 46.76),
        "6-grouped": (grouped, 47.61),
    }
    return [
        Variant(f"ladder/{name}", values, 1, Printed(accuracy, 3.0, _ONE)) for name, (values, accuracy) in rungs.items()
    ]


def _literal() -> list[Variant]:
    """The noise that the paper adds: 2.8 times each group's own norm, the same everywhere or divided by the layer's number."""
    values = _of_the_table("resnet20", "rmsprop").values
    whole = {key: value for key, value in values["privacy"].items() if key != "epsilon"}
    stated, forty = 2.8, range(_GROUPS)
    equal = stated / _GROUPS**0.5
    by_layer = stated / sum((j + 1) ** 2 for j in forty) ** 0.5
    printed = _printed("resnet20", "rmsprop")
    return [
        Variant(
            "literal/grouped",
            {**values, "privacy": {**whole, "noise_multiplier": equal}},
            1,
            printed,
            claimed=3.0,
        ),
        Variant(
            "literal/grouped-per-layer",
            {**values, "privacy": {**whole, "noise_multiplier": by_layer, "noise_allocation": "depth"}},
            1,
            printed,
            claimed=3.0,
        ),
    ]


def _baselines() -> list[Variant]:
    """DiceSGD, with its authors' noise and without their assumptions; of its settings the paper says nothing."""
    found = []
    for network, accuracy in (("resnet20", 40.7), ("wrn16-4", 41.3)):
        values = {**_base(_MODELS[network], 1024, 1.0), **_optimizer("sgd")}
        values = merged(values, privacy={"error_norm": 1.0 / 1024, "error_noise": "theorem"})
        found.append(Variant(f"{network}/dice", values, 1, Printed(accuracy, 3.0, "baseline"), claimed=3.0))
    return found


def _better() -> list[Variant]:
    """What we would do with the same network, the same epochs, and epsilon 3: one clipping norm, steps ten times as large, a
    longer average; and then one more thing at a time.

    With as many epochs at the same epsilon, noise of all steps together hardly depends on the batch, so that a smaller one, with
    more steps, is as good until the noise multiplier comes near 1."""
    base = {
        **_base("resnet-20", 1024, 1.0),
        "optimizer": {"name": "SGD", "lr": 1.0},
        "averaging": {"name": "exponential", "decay": 0.995},
    }
    squares = {"name": "tailored", "threshold_epoch": 7.0, "gamma": 2.0, "late": "cross-entropy", "penalty": "none"}
    # fewer epochs with larger steps: as much signal for as much noise, in less time
    short = merged(base, privacy={"batch_size": 2048, "epochs": 30}, optimizer={"lr": 3.0}, averaging={"decay": 0.99})
    return [
        Variant("better/thirty-epochs", short),
        Variant("better/sgd", base),
        Variant("better/sgd-rate-2", merged(base, optimizer={"lr": 2.0})),
        Variant("better/sgd-rate-4", merged(base, optimizer={"lr": 4.0})),
        Variant("better/squares-early", merged(base, loss=squares)),
        Variant("better/squares-early-rate-2", merged(base, loss=squares, optimizer={"lr": 2.0})),
        Variant("better/flip-crop", {**base, "augmentation": {"names": ["flip", "crop"], "padding": 4}}),
        Variant("better/views-4", {**base, "augmentation": {"names": ["flip", "crop"], "padding": 4, "views": 4}}),
        Variant("better/automatic", merged(base, privacy={"clipping": "automatic"})),
        Variant("better/corrected", merged(base, optimizer={"name": "PrivateRMSprop", "lr": 2e-3})),
    ]


STUDY = Study(
    name="private-optimizers",
    paper="Muppidi and Garlapati, Privacy-Preserving Optimizers for Image Classification",
    variants=[_of_the_table(network, optimizer) for network in _MODELS for optimizer in ("rmsprop", "sgd", "adagrad")]
    + _baselines()
    + _ladder()
    + _literal()
    + _better(),
    comparisons=[
        Comparison(f"{network}/rmsprop", f"{network}/sgd", "DP-RMSProp does better than DP-SGD") for network in _MODELS
    ]
    + [
        Comparison(
            "better/thirty-epochs",
            "resnet20/rmsprop",
            "one norm and a large step do better than forty groups",
            whose="Ours",
        ),
    ],
    curves={network: [f"{network}/{name}" for name in ("rmsprop", "sgd", "adagrad")] for network in _MODELS}
    | {
        "ladder": [variant.name for variant in _ladder()],
        "literal": [variant.name for variant in _literal()],
        "better": [variant.name for variant in _better()][:7],  # as many as there are colours
    },
)
