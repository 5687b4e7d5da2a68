"""Spoiling bytes: flipped bits, numbers at the edges, pieces cut out, doubled, moved, or taken from another input."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

LONGEST = 1 << 16
"""Bytes of an input: more of them find little, slowly."""
EDGES = [0, 1, -1, 127, 128, 255, 256, 2**15 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
NUMBERS = [
    *(
        b"0 -1 1 2 9 0.0 -0.0 1e-320 1e308 1e309 -1e309 nan inf NaN Infinity -Infinity 1e12 1000000000000 4294967296 "
        b"18446744073709551616 true false null none 0x7fffffffffffffff 1e-300 0.5 1/3 16777217"
    ).split(),
    b"9" * 400,
    b"9" * 5000,
]
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)


def mutated(content: bytes, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> bytes:
    """One to a few changes, of kinds drawn by chance; `tokens` are words of the format, `others` inputs to borrow from."""
    spoiled = bytearray(content)
    for _ in range(1 if chance.random() < 0.5 else chance.randint(2, 6)):
        chance.choice(_CHANGES)(spoiled, others, tokens, chance)
    return bytes(spoiled[:LONGEST])


def _place(content: bytearray, chance: random.Random) -> int:
    # Formats say what they are at their beginning, so half of the changes are made there.
    return chance.randrange(min(len(content), 64) if chance.random() < 0.5 else len(content)) if content else 0


def _piece(content: bytes | bytearray, chance: random.Random) -> tuple[int, int]:
    start = chance.randrange(len(content)) if content else 0
    return start, min(len(content), start + (1 << chance.randrange(9)))


def _flip(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    if content:
        content[_place(content, chance)] ^= 1 << chance.randrange(8)


def _byte(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    if content:
        content[_place(content, chance)] = chance.randrange(256)


def _edge(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    """A number of one to eight bytes, in either order."""
    size, at = chance.choice((1, 2, 4, 8)), _place(content, chance)
    number = (chance.choice(EDGES) + chance.randint(-1, 1)) % (1 << 8 * size)
    content[at : at + size] = number.to_bytes(size, chance.choice(("little", "big")))


def _number(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    """Another number in the place of one that is written in digits."""
    found = list(_NUMBER.finditer(content))
    if found:
        match = chance.choice(found)
        content[match.start() : match.end()] = chance.choice(NUMBERS)


def _token(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    start, end = _piece(content, chance)
    content[start : chance.choice((start, end))] = chance.choice(list(tokens) or NUMBERS)


def _cut(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    start, end = _piece(content, chance)
    del content[start:end]


def _truncate(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    del content[_piece(content, chance)[0] :]


def _double(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    """A piece many times over: nesting, and long lists."""
    start, end = _piece(content, chance)
    content[end:end] = content[start:end] * min(1 << chance.randrange(11), LONGEST // max(end - start, 1))


def _move(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    start, end = _piece(content, chance)
    piece = content[start:end]
    del content[start:end]
    at = _place(content, chance)
    content[at:at] = piece


def _splice(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    other = chance.choice(others) if others else b""
    start, end = _piece(other, chance)
    at = _place(content, chance)
    content[at : chance.choice((at, at + end - start))] = other[start:end]


def _line(content: bytearray, others: Sequence[bytes], tokens: Sequence[bytes], chance: random.Random) -> None:
    """Lines in another order, or twice: for formats that have lines."""
    lines = bytes(content).splitlines(keepends=True)
    if lines:
        line = chance.choice(lines)
        lines.insert(chance.randrange(len(lines) + 1), line) if chance.random() < 0.5 else lines.remove(line)
        content[:] = b"".join(lines)


_CHANGES = (_flip, _byte, _edge, _number, _number, _token, _token, _cut, _truncate, _double, _move, _splice, _line)
