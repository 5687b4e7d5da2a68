"""Random numbers for sampling and noise: ChaCha20, keyed by the operating system.

A certificate rests on noise that nobody can predict, so the generator is cryptographic and its 256-bit keys come from the
operating system. `Randomness.from_seed` is the exception for research: whoever knows the seed can subtract the noise, and
the certificate says that it is void for release.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.normals import box_muller
from tacit.privacy.validation import UserError, check_count

_WORDS = 2**14  # 64-bit words at a time: 128 KiB, so that what works on them stays in the cache
_ZEROS = memoryview(bytes(8 * _WORDS))
_BYTES_A_NONCE = 2**36

_forks = 0  # of this process since its first ancestor that had this module


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # where processes fork at all
    os.register_at_fork(after_in_child=_count_fork)


class Keystream:
    """The ChaCha20 keystream (RFC 8439) of one key, in pieces that never repeat.

    *Guarantee.* No block of it is used twice. A nonce, which is how many there were before in 96 bits, starts at block 0 and
    serves for at most 2^30 of its 2^32 blocks, so it does not matter whether an implementation counts blocks in 32 bits (as the
    RFC says) or carries into the nonce (as OpenSSL does). Bytes count as used before they are drawn. Threads may share an object.

    >>> words = np.zeros(2, dtype=np.uint64)
    >>> Keystream(bytes(32)).fill(words)
    >>> words.tobytes().hex()
    '76b8e0ada0f13d90405d6ae55386bd28'
    """

    def __init__(self, key: bytes) -> None:
        # Imported here, so that what draws nothing starts at once.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        self._encryptor: Callable[[bytes], Any] = lambda nonce: Cipher(
            algorithms.ChaCha20(key, nonce), mode=None
        ).encryptor()
        self._nonces = itertools.count()
        self._present: Any = None
        self._left = 0  # bytes that the present nonce may still give
        self._lock = threading.Lock()

    def fill(self, words: NDArray[np.uint64]) -> None:
        """Overwrite the array, of at most 2^14 words, with random bits that no other call gives."""
        if words.nbytes > len(_ZEROS):
            raise ValueError(f"a piece of keystream has at most {_WORDS} words, not {len(words)}")
        if words.size == 0:
            return
        with self._lock:
            if self._left < words.nbytes:
                self._present = self._encryptor(bytes(4) + next(self._nonces).to_bytes(12, "little"))
                self._left = _BYTES_A_NONCE
            self._left -= words.nbytes
            self._present.update_into(_ZEROS[: words.nbytes], words.view(np.uint8).data)


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

    def __init__(self, *, sampling_key: bytes, noise_key: bytes, reproducible: bool) -> None:
        self.reproducible = reproducible
        self._process = (os.getpid(), _forks)
        self._sampling = Keystream(sampling_key)
        self._noise = Keystream(noise_key)

    @classmethod
    def from_operating_system(cls) -> Randomness:
        """Keys nobody knows: what a certificate for release needs."""
        return cls(sampling_key=secrets.token_bytes(32), noise_key=secrets.token_bytes(32), reproducible=False)

    @classmethod
    def from_seed(cls, seed: int, *, launch: int = 0) -> Randomness:
        """Keys that whoever knows the seed can repeat: for research, void for release.

        `launch` counts how often a run was started, so that a resumed run never draws the same noise twice.
        """
        check_count("seed", seed, at_least=0)
        sampling_key, noise_key = (
            hashlib.sha256(f"tacit {stream} {seed} {launch}".encode()).digest() for stream in ("sampling", "noise")
        )
        return cls(sampling_key=sampling_key, noise_key=noise_key, reproducible=True)

    def __reduce__(self) -> NoReturn:
        # A copy would draw the same noise again: the difference of two releases would then have none.
        raise TypeError("Randomness cannot be copied, pickled or stored; make a new one")

    def bernoulli(self, count: int, probability: float) -> NDArray[np.bool_]:
        """`count` independent coins that show True with this probability.

        *Guarantee.* Exactly this probability if it is a multiple of 2^-64, as each double from 2^-11 on is; otherwise less, by
        less than 2^-64.
        """
        self._check_process()
        # Of 2^64 numbers, each as probable, so many are below. Their first 16 bits nearly always tell; the other 48 are drawn
        # when they do not.
        first, rest = divmod(int(probability * 2.0**64), 2**48)
        if first == 2**16:
            return np.ones(count, dtype=np.bool_)
        coins = np.zeros(count, dtype=np.bool_)
        words = np.empty(_WORDS, dtype=np.uint64)
        for start in range(0, count, _WORDS):
            piece = coins[start : start + _WORDS]
            used = words[: -(-piece.size // 4)]
            self._sampling.fill(used)
            drawn = used.view(np.uint16)[: piece.size]
            np.less(drawn, first, out=piece)
            undecided = np.flatnonzero(drawn == first)
            more = words[: undecided.size]
            self._sampling.fill(more)
            piece[undecided] = more >> np.uint64(16) < rest
        return coins

    def normal(self, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Independent standard normal numbers in double precision, by Box and Muller's transform of 160 random bits a pair.

        *Guarantee.* They are exact normal numbers, moved a little: the pair (r cos t, r sin t) has r = sqrt(-2 log u) with u the
        middle of one of 2^95 cells of (0, 1), each as probable, and t one of 2^64 angles; the rest is the rounding of doubles. A
        number is moved by less than 2^-50 r + 2^-95 e^(r^2 / 2) / r. The largest is 11.5, which exact numbers exceed with
        probability 1e-30. Beside the result, at most 1 MB is in use.
        """
        self._check_process()
        numbers = np.empty(shape, dtype=np.float64)
        flat = numbers.reshape(-1)
        words = np.empty(min(_WORDS, flat.size + flat.size % 2), dtype=np.uint64)
        more = np.empty(-(-words.size // 4), dtype=np.uint64)
        for start in range(0, flat.size, _WORDS):
            piece = flat[start : start + _WORDS]
            used = words[: piece.size + piece.size % 2]
            halves = more[: -(-used.size // 4)]
            self._noise.fill(used)
            self._noise.fill(halves)
            finer = halves.view(np.uint32)[: used.size // 2]
            if piece.size == used.size:
                box_muller(used, finer, piece)
            else:
                pairs = np.empty(used.size)
                box_muller(used, finer, pairs)
                piece[:] = pairs[:-1]
        return numbers

    def _check_process(self) -> None:
        # A forked process would draw its parent's noise again. Its number tells, unless the system gave it away anew; then the
        # count does, but for forks that Python was not told of.
        if (os.getpid(), _forks) != self._process:
            raise UserError("a forked process cannot use its parent's randomness; make a new one there")
