"""Random draws keyed by their purpose.

Always true: a draw depends on its key alone, never on global random state, the process, the order in which coroutines run, or
`hash()`. The same key gives the same number on every machine, so a retry, a resumed run and a second worker see the same
level and the same draws.
"""

import random
from hashlib import blake2b
from typing import NamedTuple

KeyPart = str | int

_MANTISSA_BITS = 53
"""A float in [0, 1) has 53 bits of mantissa; more bits of the digest would be rounded away."""


def digest(*key: KeyPart) -> int:
    """64 well-mixed bits that depend on `key` alone; `1` and `"1"` are different parts."""
    text = "\x1f".join(
        [f"str:{part}" if type(part) is str else f"{type(part).__name__}:{part}" for part in key]
    )
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(*key: KeyPart) -> float:
    """A float in [0, 1)."""
    return (digest(*key) >> (64 - _MANTISSA_BITS)) / (1 << _MANTISSA_BITS)


def seed(*key: KeyPart) -> int:
    """A non-negative 31-bit integer, the range every environment and library accepts as a seed."""
    return digest(*key) & 0x7FFF_FFFF


def generator(*key: KeyPart) -> random.Random:
    """A private generator, for a key that needs many draws."""
    return random.Random(digest(*key))


_HALF = 1 << 32
"""Values of half a 64-bit digest: fine enough for a share, and for an index into far fewer items."""


class DrawPair(NamedTuple):
    """Two independent draws from one digest."""

    share: float
    """In [0, 1)."""
    pick: int
    """32 bits; modulo the number of items it is an index."""


def draw_pair(*key: KeyPart) -> DrawPair:
    """Two independent draws for the price of one digest."""
    upper, lower = divmod(digest(*key), _HALF)
    return DrawPair(upper / _HALF, lower)
