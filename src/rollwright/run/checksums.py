"""CRC-32 that not only finds damage but undoes it where one byte is wrong. Pure.

A checksum of 32 bits is a linear function of the data, so what a wrong byte does to it depends on the difference and on
how many bytes follow, and on nothing else. Going through the data from its end, the one place and the one difference
that explain a wrong checksum are found in a single pass. Damage to more than one byte is taken for that of one with a
chance of about `len(data) / 2**24`; so whoever corrects a record also checks that it can be read.
"""

import zlib

crc32 = zlib.crc32

LARGEST_CORRECTED = 4 * 2**20
"""Bytes of a record that is still tried: a second of work, for a record that is lost otherwise."""

_POLYNOMIAL = 0xEDB88320


def _byte_steps() -> list[int]:
    """What the checksum becomes when a byte with only this in it follows."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_STEP = _byte_steps()
_BY_TOP = {step >> 24: value for value, step in enumerate(_STEP)}
"""The steps have different highest bytes, so a step can be taken back."""
_DIFFERENCE = {step: value for value, step in enumerate(_STEP) if value}


def corrected(data: bytes, checksum: int) -> bytes | None:
    """The data with one byte changed so that it has this checksum; `None`: one byte is not what is wrong with it."""
    if len(data) > LARGEST_CORRECTED:
        return None
    difference = crc32(data) ^ checksum
    for place in range(len(data) - 1, -1, -1):
        if (wrong := _DIFFERENCE.get(difference)) is not None:
            return data[:place] + bytes([data[place] ^ wrong]) + data[place + 1 :]
        value = _BY_TOP[difference >> 24]
        difference = ((difference ^ _STEP[value]) << 8 & 0xFFFFFFFF) | value
    return None


def differs_in_one_byte(one: int, other: int) -> bool:
    """Whether a checksum can be the other with one of its own bytes damaged."""
    return one != other and sum(bool((one ^ other) >> shift & 0xFF) for shift in (0, 8, 16, 24)) == 1
