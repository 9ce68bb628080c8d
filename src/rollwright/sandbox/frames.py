"""Messages between processes: frames of a length and msgpack."""

import struct
from typing import IO

import msgspec

LENGTH = struct.Struct(">I")
"""What stands before each frame: its length in bytes."""


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def write_frame(to: IO[bytes], message: msgspec.Struct) -> None:
    to.write(frame(message))
    to.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """`None` at the end of the stream."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return body if len(body) == length else None
