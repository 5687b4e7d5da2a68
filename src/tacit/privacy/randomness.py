"""Random numbers for sampling and noise: ChaCha20, keyed by the operating system.

A certificate rests on noise that nobody can predict, so the generator is cryptographic and its 256-bit keys come from the
operating system. `Randomness.from_seed` is the exception for research: whoever knows the seed can subtract the noise, and
the certificate says that it is void for release.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tacit.privacy.validation import UserError, check_count

if TYPE_CHECKING:
    from torch import Tensor

_WORDS = 2**17  # 64-bit words a cipher: 1 MiB, so that what works on them stays in the cache
_ZEROS = memoryview(bytes(8 * _WORDS))


class Keystream:
    """The ChaCha20 keystream (RFC 8439) of one key, in pieces that never repeat.

    *Guarantee.* Every `fill` encrypts under its own nonce: how many were made before, in 96 bits. It starts at block 0 and takes
    at most 2^14 of the nonce's 2^32 blocks, so no block is used twice, whether an implementation counts blocks in 32 bits (as the
    RFC says) or carries into the nonce (as OpenSSL does). Threads may share an object.

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
        self._fills = itertools.count()

    def fill(self, words: NDArray[np.uint64]) -> None:
        """Overwrite the array, of at most 2^17 words, with random bits that no other call gives."""
        if words.nbytes > len(_ZEROS):
            raise ValueError(f"a piece of keystream has at most {_WORDS} words, not {len(words)}")
        nonce = next(self._fills).to_bytes(12, "little")
        self._encryptor(bytes(4) + nonce).update_into(_ZEROS[: words.nbytes], words.view(np.uint8).data)


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
        self._process = os.getpid()
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
        below = int(probability * 2.0**64)
        coins = np.zeros(count, dtype=np.bool_)
        words = np.empty(min(count, _WORDS), dtype=np.uint64)
        for start in range(0, count if below > 0 else 0, _WORDS):
            piece = words[: count - start]
            self._sampling.fill(piece)
            np.less_equal(piece, np.uint64(min(below, 2**64) - 1), out=coins[start : start + _WORDS])
        return coins

    def normal(self, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
        """Independent standard normal numbers in double precision, by Box and Muller's transform of 128 random bits a pair.

        *Guarantee.* They are exact normal numbers, rounded: the pair (r cos t, r sin t) has r = sqrt(-2 log u) with u the middle
        of one of 2^63 cells of (0, 1), each as probable, and t one of 2^64 angles; the rest is the rounding of doubles. All of
        it moves a number by less than 1e-6 but for a probability of 1e-14, then in the tails. The largest is 9.4, which exact
        numbers exceed with probability 5e-21, one of 1e10 of them with probability 5e-11. Beside the result, at most 3 MB are
        in use.
        """
        import torch

        self._check_process()
        numbers = torch.empty(shape, dtype=torch.float64, device="cpu")
        flat, count = numbers.view(-1), numbers.numel()
        words = np.empty(min(_WORDS, count + count % 2), dtype=np.uint64)
        for start in range(0, count, _WORDS):
            piece = flat[start : start + _WORDS]
            used = words[: count - start + count % 2]
            self._noise.fill(used)
            _box_muller(torch.from_numpy(used.view(np.int64)), piece)
        return numbers.numpy()

    def _check_process(self) -> None:
        # A forked process would draw its parent's noise again.
        if os.getpid() != self._process:
            raise UserError("a forked process cannot use its parent's randomness; make a new one there")


def _box_muller(words: Tensor, normals: Tensor) -> None:
    """Fill `normals` from as many random words, or one more if they are odd; the words are used up."""
    import torch

    pairs = words.numel() // 2
    words[:pairs].bitwise_and_(2**63 - 1)  # not the absolute value, which -2^63 does not have
    uniform = words.double()
    radius, angle = uniform[:pairs].add_(0.5), uniform[pairs:]
    uniform.mul_(2.0**-63)
    radius.log_().mul_(-2.0).sqrt_()
    angle.mul_(math.pi)
    torch.cos(angle, out=normals[:pairs]).mul_(radius)
    rest = normals[pairs:]  # one less than there are pairs, at the end of an odd count
    torch.sin(angle[: rest.numel()], out=rest).mul_(radius[: rest.numel()])
