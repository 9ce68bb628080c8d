"""Signed manifests: the announcement of one group.

Invariants: the signature covers every byte but itself, under a tag that no other kind of message has; a manifest's fields
determine its bytes, so it has one encoding; decoding one needs no more memory than it has bytes, whatever lengths it
claims.
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
"""The protocol version; grows when older nodes could not read, or would misread, newer messages."""

_MAGIC = b"RWM"
_HEADER = _MAGIC + bytes([PROTOCOL])
_DOMAIN = b"rollwright swarm manifest\x00"
"""Prefix of every signed message: a signature for one purpose is useless for another."""

MAX_GROUP = 64
"""Members of a group; published settings have 2 to 16."""

_MAX_ITEMS = 32 + MAX_GROUP
_MAX_DEPTH = 2

REMEMBERED = 1024
"""Envelopes whose verified signature is cached: the transport and the admission both read each."""

Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", max_length=2 * KEY_BYTES)]
"""32 bytes as lower-case hex: a peer's key, or a SHA-256."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Integers that a double represents exactly."""


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The announcement of one group. Its contents are claims until the group is verified."""

    swarm: Name
    peer: Hex32
    """The peer that played the group and signs."""
    round: Count
    sequence: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Grows with every manifest of a peer, across restarts too."""
    created: float
    """Seconds since 1970, by the peer's clock."""
    env: Name
    """Tag of the environment."""
    env_version: Name
    """Identifies the code and settings that turn a seed into a task, see `recipes.env_version`."""
    index: Count
    """Number of the task in the peer's stream."""
    digest: Hex32
    """SHA-256 of the content."""
    size: Count
    """Bytes of the content."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(min_length=2, max_length=MAX_GROUP)]
    """One for each member, as claimed."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def sign_manifest(manifest: Manifest, identity: Identity) -> bytes:
    """Encode and sign a manifest."""
    body = _encoder.encode(manifest)
    return _HEADER + identity.sign(_DOMAIN + _HEADER + body) + body


def open_signed(data: bytes) -> Manifest:
    """Decode an envelope and verify that the peer it names signed it; raise `PeerRefused` if not."""
    return _opened(data)


def remember_envelopes(count: int) -> None:
    """Change how many verified envelopes are cached, and forget all: a process with many nodes in it needs more."""
    global _opened
    _opened = lru_cache(maxsize=count)(_open)


def _open(data: bytes) -> Manifest:
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
        raise PeerRefused(PeerRefusal.MALFORMED, "not the canonical encoding of its fields")
    if not is_signed(manifest.peer, _DOMAIN + _HEADER + body, signature):
        raise PeerRefused(PeerRefusal.BAD_SIGNATURE, f"not signed by {manifest.peer[:16]}")
    return manifest


_opened = lru_cache(maxsize=REMEMBERED)(_open)
