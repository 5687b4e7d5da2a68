"""Paper B: bounded activations. The tempered sigmoid's best averages beside tanh and ReLU, with cross-entropy."""

from __future__ import annotations

from tacit.studies.study import Comparison, Printed, Study, Variant, dp_sgd, merged

# Noise and learning rates are those of paper A, which has the same networks; the CIFAR-10 net is all-convolutional.
_SETTINGS = {
    "mnist": dp_sgd("mnist", "mnist-cnn", 0.5, 512, 40, 1.23),
    "fashion-mnist": dp_sgd("fashion-mnist", "mnist-cnn", 4.0, 2048, 40, 2.15),
    "cifar10": dp_sgd("cifar10", "all-conv", 1.0, 1024, 30, 1.54),
}
_SEARCHED, _MEAN, _BEST = "after a search", "mean of 10 runs", "the best found"
_PRINTED = {
    "mnist": {"relu": (96.6, 2.93, _SEARCHED), "tanh": (98.0, 2.93, _MEAN), "tempered": (98.1, 2.93, _BEST)},
    "fashion-mnist": {"relu": (81.9, 2.7, _SEARCHED), "tanh": (85.5, 2.7, _MEAN), "tempered": (86.0, 2.7, _BEST)},
    "cifar10": {"relu": (61.6, 7.53, _SEARCHED), "tanh": (63.84, 7.53, _MEAN), "tempered": (66.0, 7.53, _BEST)},
}


def _variant(group: str, name: str) -> Variant:
    activation = f"tempered-{group}" if name == "tempered" else name
    values = merged(_SETTINGS[group], model={"activation": activation})
    return Variant(f"{group}/{name}", values, 1 if group == "cifar10" else 5, Printed(*_PRINTED[group][name]))


# The four cases of the paper's figures of norms: private or not, ReLU or tempered.
_NOT_PRIVATE = {"noise_multiplier": 1e-9, "clipping_norm": 1000.0}


def _looked_into(name: str, activation: str, private: bool) -> Variant:
    values = merged(_SETTINGS["mnist"], model={"activation": activation})
    if not private:
        values = merged(values, privacy=_NOT_PRIVATE, optimizer={"lr": 0.05})
    return Variant(f"mnist/{name}", values, diagnostics=512)


_CASES = {
    "relu-inside": ("relu", True),
    "tempered-inside": ("tempered-mnist", True),
    "relu-not-private": ("relu", False),
    "tempered-not-private": ("tempered-mnist", False),
}
# Scale, inverse temperature, offset: a coarse view of what the paper searched, with a quarter of the epochs.
_PLACES = {
    f"mnist-surface/{scale:g}-{temperature:g}-{offset:g}": (scale, temperature, offset)
    for scale in (1.0, 2.0, 3.0)
    for temperature in (1.0, 2.0, 4.0)
    for offset in (0.0, 1.0)
}


def _at(name: str) -> Variant:
    activation = "tempered:" + ":".join(f"{number:g}" for number in _PLACES[name])
    return Variant(name, merged(_SETTINGS["mnist"], model={"activation": activation}, privacy={"epochs": 10}))


# Fashion-MNIST by DP-Adam, beside the DP-SGD above.
_ADAM = Variant(
    "fashion-mnist/tanh-adam",
    merged(_SETTINGS["fashion-mnist"], optimizer={"name": "Adam", "lr": 1.32e-3}),
    printed=Printed(86.0, 2.7, _SEARCHED),
)


STUDY = Study(
    name="tempered-sigmoids",
    paper="Papernot, Thakurta, Song, Chien and Erlingsson, Tempered Sigmoid Activations for Deep Learning with Differential "
    "Privacy, AAAI 2021",
    variants=[_variant(group, name) for group in _SETTINGS for name in ("relu", "tanh", "tempered")]
    + [_ADAM, *(_looked_into(name, *case) for name, case in _CASES.items()), *map(_at, _PLACES)],
    comparisons=[
        comparison
        for group in ("mnist", "fashion-mnist")
        for comparison in (
            Comparison(f"{group}/tanh", f"{group}/relu", "tanh does better than ReLU at equal epsilon"),
            Comparison(
                f"{group}/tempered", f"{group}/tanh", "tanh is in line with the best tempered sigmoids", alike=True
            ),
        )
    ],
    curves={group: [f"{group}/{name}" for name in ("relu", "tanh", "tempered")] for group in _SETTINGS},
    inside={"mnist": [f"mnist/{name}" for name in _CASES]},
    surface=_PLACES,
    axes=("scale", "inverse temperature", "offset"),
)
