"""What stands in the place of a trajectory's bytes when these are elsewhere: a reference to an object, or why it cannot be read.

Invariants: neither can be mistaken for a trajectory, and reading one as such raises a `FormatError` that names the object.
"""

from typing import Annotated

import msgspec

from rollwright.errors import FormatError

_REFERENCE, _UNREADABLE = b"RWO\x01", b"RWO\x02"


class ObjectReference(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Location of a trajectory's bytes, and the digest by which they are recognised."""

    key: Annotated[str, msgspec.Meta(max_length=1024)]
    """Relative to the place of all objects of the store."""
    sha256: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: int

    def to_bytes(self) -> bytes:
        return _REFERENCE + msgspec.msgpack.encode(self)


def read_reference(data: bytes) -> ObjectReference | None:
    """The reference in the place of a trajectory; `None`: these are other bytes."""
    if not data.startswith(_REFERENCE):
        return None
    try:
        return msgspec.msgpack.decode(data[len(_REFERENCE) :], type=ObjectReference)
    except msgspec.MsgspecError:
        return None


def unreadable(why: str) -> bytes:
    """What takes the place of a trajectory that cannot be read."""
    return _UNREADABLE + why.encode()


def check_present(data: bytes) -> bytes:
    """Return the bytes; raise a `FormatError` if the trajectory is elsewhere."""
    if data.startswith(_UNREADABLE):
        raise FormatError(data[len(_UNREADABLE) :].decode(errors="replace"))
    if (reference := read_reference(data)) is not None:
        raise FormatError(
            f"the trajectory is the object {reference.key}, which was not read; set ROLLWRIGHT_TRAJECTORIES to where the "
            "store's trajectories are"
        )
    return data
