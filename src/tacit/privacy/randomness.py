"""Random numbers for sampling and noise: ChaCha20, keyed by the operating system.

A certificate rests on noise that nobody can predict, so the generator is cryptographic and its 256-bit keys come from the
operating system. `Randomness.from_seed` is the exception for research: whoever knows the seed can subtract the noise, and
the certificate says that it is void for release.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.validation import UserError, check_count


class Randomness:
    """Two independent streams, one for sampling and one for noise.

    *Guarantee.* Made by `from_operating_system`, the two ChaCha20 keys are fresh 256-bit numbers of the operating system, so no
    two objects ever repeat each other's numbers. Made by `from_seed`, the keys are SHA-256 of seed, launch and stream: the same
    pair of seed and launch repeats, a different launch (a resumed run) does not.

    >>> Randomness.from_operating_system().reproducible
    False
    >>> first, again = Randomness.from_seed(7), Randomness.from_seed(7)
    >>> bool((first.normal(3) == again.normal(3)).all())
    True
    """

    def __init__(self, *, sampling_key: int, noise_key: int, reproducible: bool) -> None:
        from randomgen import ChaCha

        self.reproducible = reproducible
        self._process = os.getpid()
        self._sampling = np.random.Generator(ChaCha(key=sampling_key, rounds=20))
        self._noise = np.random.Generator(ChaCha(key=noise_key, rounds=20))

    @classmethod
    def from_operating_system(cls) -> Randomness:
        """Keys nobody knows: what a certificate for release needs."""
        return cls(sampling_key=secrets.randbits(256), noise_key=secrets.randbits(256), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int, *, launch: int = 0) -> Randomness:
        """Keys that whoever knows the seed can repeat: for research, void for release.

        `launch` counts how often a run was started, so that a resumed run never draws the same noise twice.
        """
        check_count("seed", seed, at_least=0)
        sampling_key, noise_key = (
            int.from_bytes(hashlib.sha256(f"tacit {stream} {seed} {launch}".encode()).digest(), "little")
            for stream in ("sampling", "noise")
        )
        return cls(sampling_key=sampling_key, noise_key=noise_key, reproducible=True)

    def __reduce__(self) -> NoReturn:
        # A copy would draw the same noise again: the difference of two releases would then have none.
        raise TypeError("Randomness cannot be copied, pickled or stored; make a new one")

    def bernoulli(self, count: int, probability: float) -> NDArray[np.bool_]:
        """`count` independent coins that show True with this probability (to 53 bits)."""
        self._check_process()
        return self._sampling.random(count) < probability

    def normal(self, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Independent standard normal numbers in double precision."""
        self._check_process()
        return self._noise.standard_normal(shape)

    def _check_process(self) -> None:
        # A forked process would draw its parent's noise again.
        if os.getpid() != self._process:
            raise UserError("a forked process cannot use its parent's randomness; make a new one there")
