"""Request bodies are decoded within bounds: their values are counted first, and large ones leave the event loop.

Always true: a large body with more values than allowed is never decoded; large bodies are counted and decoded in a
thread, one at a time. A decoder holds the GIL while it works, so the number of values bounds how long all other callers
wait: text and binary data are copied at gigabytes per second, but each value takes up to 0.1 µs, and executing the call
takes more. Escaped characters of JSON count as well, many of them as one value.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import TypeVar

from rollwright.store.http.errors import HttpRefusal

MAX_VALUES = 100_000
"""Decoded within about 10 ms, and packed again by the store. A thousand rollouts in one call have about 20,000."""

SMALL_BODY = 64 * 1024
"""Bytes up to which a body is decoded at once: it cannot hold more than 65,536 values, a millisecond or two. Beyond it
the way to a thread and back (0.1 ms) is small against the decoding."""

_SLICE = 256 * 1024
"""Bytes that are counted in one go, below a tenth of a millisecond."""

_FELT, _LONGEST_PAUSE = 0.005, 0.1
"""Seconds: a delay that callers hardly notice, and the longest pause before the next large body."""

_JSON_MARKS = (b",", b"[", b"{")
"""Every value but the first stands behind one of them. Those within texts count too: it is an upper bound."""

_ESCAPES = 16
"""Escaped characters that take as long as a value; others of a text take next to nothing."""

Decoded = TypeVar("Decoded")


class BodyDecoder:
    """Decodes the bodies of one server: large ones one at a time, off the event loop. After a slow one, other callers
    have the GIL for as long as it took before the next begins. Belongs to one event loop."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._next = 0.0
        """When the next may begin, by the loop's clock."""

    async def decode(
        self,
        decode: Callable[[bytes], Decoded],
        body: bytes,
        count: Callable[[bytes, int], int],
        most: int = MAX_VALUES,
    ) -> Decoded:
        """Rejects a large body that holds more values than `most`."""
        if len(body) <= SMALL_BODY:
            return decode(body)
        clock = asyncio.get_running_loop().time
        async with self._one:
            began = clock()
            if began < self._next:
                await asyncio.sleep(self._next - began)
                began = clock()
            try:
                return await asyncio.to_thread(_decode_checked, decode, body, count, most)
            finally:
                took = clock() - began
                self._next = clock() + (min(took, _LONGEST_PAUSE) if took > _FELT else 0.0)


def _decode_checked(
    decode: Callable[[bytes], Decoded], body: bytes, count: Callable[[bytes, int], int], most: int
) -> Decoded:
    if count(body, most) > most:
        raise HttpRefusal(413, "too_large", f"the body holds more than {most:,} values; send it in parts")
    return decode(body)


def json_values(body: bytes, limit: int) -> int:
    """How many values a JSON text holds at most; counts no further than the limit."""
    found = 1
    for start in range(0, len(body), _SLICE):
        found += sum(body.count(mark, start, start + _SLICE) for mark in _JSON_MARKS)
        found += body.count(b"\\", start, start + _SLICE) // _ESCAPES
        if found > limit:
            break
    return found


def msgpack_values(body: bytes, limit: int) -> int:
    """How many values msgpack data holds; counts no further than the limit. Damaged data is left to the decoder."""
    found, at, end = 0, 0, len(body)
    while at < end and found <= limit:
        found += 1
        skip = _SKIPS[body[at]]
        if skip > 0:
            at += skip
        else:
            width = -skip
            length = body[at + 1 : at + 1 + width]
            if len(length) < width:
                break
            at += 1 + width + _LENGTHS[width].unpack(length)[0] + (body[at] in _EXTENSIONS)
    return found


_EXTENSIONS = (0xC7, 0xC8, 0xC9)
"""Have one byte for their type behind the length."""

_LENGTHS = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}


def _skip(head: int) -> int:
    """Bytes from a value's head to the next head, which for arrays and maps is the first of their own; negative: the
    width of a length that tells."""
    if 0xA0 <= head <= 0xBF:
        return 1 + (head & 0x1F)
    sized = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    if head in sized:
        return -sized[head]
    numbers = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    extensions = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
    counts = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    return 1 + (numbers | extensions | counts).get(head, 0)


_SKIPS = [_skip(head) for head in range(256)]
