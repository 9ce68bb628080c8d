"""Bounds check of untrusted msgpack, before it is decoded.

Walks the bytes once, without recursion and without building objects: no length may exceed the remaining bytes, nesting and
the number of items are limited, and extension types are refused. So the decoder can exhaust neither memory nor stack.
"""

import struct

from rollwright.errors import FormatError

_FIXED = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
"""Payload bytes of nil, booleans, floats and integers, by type byte."""

_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Width of the length field of binary data and strings."""

_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
"""Width of the count field."""

_UNSIGNED = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}


def check_shape(data: bytes, *, max_items: int, max_depth: int) -> None:
    """Raise `FormatError` unless `data` is exactly one msgpack value within the limits."""
    at, items = 0, 0
    open_counts = [1]
    """For each open container, the values that it still lacks."""
    while open_counts:
        if open_counts[-1] == 0:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        items += 1
        if items > max_items:
            raise FormatError(f"more than {max_items} items")
        at, inside = _value(data, at)
        if inside:
            if len(open_counts) > max_depth:
                raise FormatError(f"nested deeper than {max_depth}")
            if inside > len(data) - at:
                raise FormatError(f"promises {inside} items where {len(data) - at} bytes are left")
            open_counts.append(inside)
    if at != len(data):
        raise FormatError(f"{len(data) - at} bytes behind the end")


def _value(data: bytes, at: int) -> tuple[int, int]:
    """The position behind the value's head and payload, and the number of values that it contains."""
    if at >= len(data):
        raise FormatError("ends too early")
    kind, at = data[at], at + 1
    if kind <= 0x7F or kind >= 0xE0:
        return at, 0
    if kind <= 0x8F:
        return at, 2 * (kind & 0x0F)
    if kind <= 0x9F:
        return at, kind & 0x0F
    if kind <= 0xBF:
        return _skip(data, at, kind & 0x1F), 0
    if kind in _FIXED:
        return _skip(data, at, _FIXED[kind]), 0
    if kind in _SIZED:
        length, at = _read_number(data, at, _SIZED[kind])
        return _skip(data, at, length), 0
    if kind in _ARRAYS:
        count, at = _read_number(data, at, _ARRAYS[kind])
        return at, count
    if kind in _MAPS:
        count, at = _read_number(data, at, _MAPS[kind])
        return at, 2 * count
    raise FormatError(f"a value of kind 0x{kind:02x}, which nothing here has")


def _read_number(data: bytes, at: int, width: int) -> tuple[int, int]:
    end = _skip(data, at, width)
    return _UNSIGNED[width].unpack_from(data, at)[0], end


def _skip(data: bytes, at: int, length: int) -> int:
    if length > len(data) - at:
        raise FormatError(f"promises {length} bytes where {len(data) - at} are left")
    return at + length
