"""Targets that are text: recipes, changes of them, and the options of a command line."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from importlib import resources

from tacit.cli import account, ensemble, shared
from tacit.privacy.schedules import levels, schedule_from_text
from tacit.privacy.validation import UserError
from tacit.training.recipe import Recipe

from .target import Target, written

WORDS = (
    *b"[ ] { } [[ = . , \" ''' ' # inf nan 1979-05-27T07:32:00Z privacy. epsilon schedule groups layers \\u0000".split(),
    *(b"\n", b"noise_multiplier = ", b"0x" + b"f" * 9000, b"a." * 2000, b"[" * 2000, b"{a=" * 500),
)


def recipe(content: bytes) -> None:
    """Read and checked; written and read again; and, where the noise is given and need not be searched for, its plan made."""
    found = Recipe.of(content)
    text = found.to_toml()
    again = Recipe.of(text.encode())
    assert again == found, "a recipe that is written and read again is another"
    if found.privacy.epsilon is None:
        found.plan(1500)


def recipe_file(content: bytes) -> None:
    Recipe.load(written("own.toml", content))


@cache
def recipe_seeds() -> list[bytes]:
    folder = resources.files("tacit") / "recipes"
    named = [item.read_bytes() for item in folder.iterdir() if item.name.endswith(".toml")]
    given = b'[privacy]\nnoise_multiplier = 1.5\nbatch_size = 64\nepochs = 2\ngroups = [["a.*"], ["*"]]\n'
    driven = b'[privacy]\nschedule = "linear:5:1"\nsample_rate = 0.1\nclipping_norm = [1.0, 2]\n'
    driven += b'[optimizer]\nname = "Adam"\nlr = 1e-3\n'
    return [*named, given, driven]


def changes(content: bytes) -> None:
    """A line a change, as `--set` has them."""
    Recipe.load("digits", content.decode("utf-8", "surrogateescape").split("\n"))


def change_seeds() -> list[bytes]:
    return [
        b"privacy.epsilon=1.5\nmodel.name=linear",
        b'optimizer.layers."0.*"=0.1\noptimizer.lr=none',
        b'augmentation.names=["flip", "crop"]\naugmentation.views=4',
        b"data.resize=[28, 32]\nprivacy.schedule=exponential:5:1\nloss.name=tailored",
    ]


def schedule(content: bytes) -> None:
    """The first byte are the epochs, the second the steps, as powers of ten; the rest is the text."""
    powers = [*content[:2], 0, 0]
    steps = 10 ** (powers[1] % 16)
    found = schedule_from_text(content[2:].decode("latin-1"), float(10.0 ** (powers[0] - 20)) if powers[0] else None)
    levels(found, steps)
    levels(found.scaled(0.5), min(steps, 1000))


def schedule_seeds() -> list[bytes]:
    texts = [
        b"constant:1.3",
        b"linear:5:1",
        b"exponential:5:1:20",
        b"piecewise:1:5",
        b"quadratic:5:1",
        b"logarithmic:5:1:3",
    ]
    texts += [b"table:5,2,1", b"loss-driven:1:3:0.69"]
    return [bytes([powers, steps]) + text for text in texts for powers, steps in ((0, 2), (21, 3), (21, 12))]


def options(content: bytes) -> None:
    """The options that are numbers in a text, one a line."""
    rate, steps, epochs, norms, stds, groups, weights = (*content.decode("latin-1").split("\n"), *[""] * 7)[:7]
    with contextlib.suppress(UserError):
        found = shared.sample_rate_of(rate)
        shared.steps_of(_whole(steps), _real(epochs), found)
    account.Grouping.of(_whole(groups), norms or None, stds or None, per_layer=len(weights) % 2 == 1)
    ensemble.weights_of(weights)


def account_of(content: bytes) -> None:
    """`tacit account`, by RDP, which answers sooner."""
    rate, steps, epochs, noise, schedule, delta, groups = (*content.decode("latin-1").split("\n"), *[""] * 7)[:7]
    with contextlib.redirect_stdout(io.StringIO()):
        account.command(
            noise_multiplier=_real(noise), schedule=[schedule] if schedule else None, sample_rate=rate, steps=_whole(steps),
            epochs=_real(epochs), delta=_real(delta) or 1e-5, accountant="rdp", groups=_whole(groups), clipping_norms=None,
            noise_stds=None, per_layer=False, plot=None, as_json=True,
        )  # fmt: skip


def account_seeds() -> list[bytes]:
    return [
        b"1024/50000\n1440\n\n1.54\n\n1e-5\n",
        b"0.01\n\n3\n\nexponential:5:1\n1e-6\n",
        b"0.5\n100\n\n2.8\n\n1e-5\n40",
        b"1e-3\n1000000000000\n\n50\n\n1e-5\n",
        b"1e-3\n1000000000000\n\n\nlinear:5:1\n1e-5\n",
    ]


def _whole(text: str) -> int | None:
    """As the command line takes it: None if there is none."""
    try:
        return int(text)
    except ValueError:
        return None


def _real(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


TARGETS = [
    Target("recipe", recipe, recipe_seeds, WORDS),
    Target("recipe-file", recipe_file, recipe_seeds, WORDS),
    Target("changes", changes, change_seeds, WORDS),
    Target("schedule", schedule, schedule_seeds, (b":", b",", b"linear:", b"table:", b"1e308", b"nan", b"1" * 20)),
    Target(
        "options",
        options,
        lambda: [b"1024/50000\n\n20\n1,0.5\n2,3\n2\n0.5,0.3", b"1/3\n7\n\n\n\n40\nequal"],
        (b"/", b",", b"1_0"),
    ),
    Target("account", account_of, account_seeds, (b"\n", b"/", b":", b"1e12"), seconds=60.0, inputs=20),
]
