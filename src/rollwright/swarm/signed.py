"""A manifest in its envelope: what a node has made, signed.

True of it: the signature covers every byte but itself, under a tag that no other kind of message has; the bytes of a
manifest are determined by its fields, so one manifest has one form; and reading one costs no more memory than it has
bytes, whatever lengths it claims.
"""

import math
from functools import lru_cache
from typing import Annotated

import msgspec

from rollwright.errors import FormatError
from rollwright.swarm.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed
from rollwright.swarm.msgpack_guard import check_shape
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.transports.base import MAX_MANIFEST_BYTES

PROTOCOL = 1
"""Grows when older nodes could not read, or would misread, what newer ones send."""

_MAGIC = b"RWM"
_HEADER = _MAGIC + bytes([PROTOCOL])
_DOMAIN = b"rollwright swarm manifest\x00"
"""Stands before everything that is signed here: a signature for one purpose is of no use for another."""

MAX_GROUP = 64
"""Members of a group; published settings have 2 to 16."""

_MAX_ITEMS = 32 + MAX_GROUP
_MAX_DEPTH = 2

_REMEMBERED = 1024
"""Envelopes whose signature need not be checked again: each is looked at by the transport and by the gate."""

Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", max_length=2 * KEY_BYTES)]
"""32 bytes as lower-case hex: a peer's key, or a SHA-256."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Whole numbers that every language can hold exactly."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a node announces of one group. The claims in it are claims until the content is verified."""

    swarm: Name
    peer: Hex32
    """Who made the group, and signs."""
    round: Count
    sequence: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Grows with every manifest of a peer, over its restarts too."""
    created: float
    """Seconds since 1970, by the peer's clock."""
    env: Name
    """Tag of the environment."""
    env_version: Name
    """What decides which task a seed gives, see `recipes.env_version`."""
    index: Count
    """Which of the peer's tasks."""
    digest: Hex32
    """SHA-256 of the content."""
    size: Count
    """Bytes of the content."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(min_length=2, max_length=MAX_GROUP)]
    """As the peer claims, one for each member."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def sign_manifest(manifest: Manifest, identity: Identity) -> bytes:
    """The manifest as bytes, signed."""
    body = _encoder.encode(manifest)
    return _HEADER + identity.sign(_DOMAIN + _HEADER + body) + body


@lru_cache(maxsize=_REMEMBERED)
def open_signed(data: bytes) -> Manifest:
    """The manifest in an envelope that is whole, of this protocol and signed by the peer it names; raises `PeerRefused`."""
    if len(data) > MAX_MANIFEST_BYTES or data[: len(_MAGIC)] != _MAGIC or len(data) <= len(_HEADER):
        raise PeerRefused(PeerRefusal.MALFORMED, f"{len(data)} bytes that are no manifest")
    if data[len(_MAGIC)] != PROTOCOL:
        raise PeerRefused(
            PeerRefusal.OTHER_PROTOCOL,
            f"version {data[len(_MAGIC)]}, this release speaks {PROTOCOL}; update the older one",
        )
    signature = data[len(_HEADER) : len(_HEADER) + SIGNATURE_BYTES]
    body = data[len(_HEADER) + SIGNATURE_BYTES :]
    try:
        check_shape(body, max_items=_MAX_ITEMS, max_depth=_MAX_DEPTH)
        manifest = _decoder.decode(body)
    except (msgspec.MsgspecError, FormatError, ValueError) as error:
        raise PeerRefused(PeerRefusal.MALFORMED, str(error)) from error
    if (
        not all(map(math.isfinite, (manifest.created, *manifest.rewards)))
        or _encoder.encode(manifest) != body
    ):
        raise PeerRefused(PeerRefusal.MALFORMED, "not the one form that this manifest has")
    if not is_signed(manifest.peer, _DOMAIN + _HEADER + body, signature):
        raise PeerRefused(PeerRefusal.BAD_SIGNATURE, f"not signed by {manifest.peer[:16]}")
    return manifest
