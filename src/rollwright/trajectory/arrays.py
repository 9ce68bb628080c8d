"""Token ids and log-probabilities as flat 32-bit arrays: four bytes per token, in memory and on disk."""

import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from rollwright.errors import FormatError

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:  # `array` takes no type argument at run time before Python 3.12
    TokenIds = array
    """Signed 32-bit token ids."""
    Floats = array
    """32-bit floats, the precision in which engines return log-probabilities."""

_WIDTH = 4


def token_ids(values: Iterable[int] = ()) -> TokenIds:
    """An array of token ids."""
    # `array` would read bytes as machine words; as token ids they are integers below 256.
    return array("i", list(values) if isinstance(values, bytes | bytearray | memoryview) else values)


def floats(values: Iterable[float] = ()) -> Floats:
    """An array of 32-bit floats."""
    return array("f", values)


def pack(values: TokenIds | Floats) -> bytes:
    """The array as little-endian bytes on any machine."""
    if sys.byteorder == "little":
        return values.tobytes()
    swapped = array(values.typecode, values)
    swapped.byteswap()
    return swapped.tobytes()


def unpack(typecode: str, data: bytes) -> TokenIds | Floats:
    """The array of type `i` or `f` that `pack` encoded."""
    if len(data) % _WIDTH:
        raise FormatError(f"token array of {len(data)} bytes is not a multiple of {_WIDTH}")
    values: TokenIds | Floats = array(typecode, data)
    if sys.byteorder != "little":
        values.byteswap()
    return values
