"""Messages of the gossip: an offer, its reply, and deliveries.

Invariants: every length is bounded before anything is decoded. An offer is signed by its sender for one receiver, swarm and
time; a reply by its sender for the one exchange that its token names. So nobody can write in another's name. A delivery needs
no signature: only manifests with the ids that were asked for count. Records are signed by the peers they are about.
"""

import math
import struct
from hashlib import sha256
from typing import Annotated, NamedTuple

import msgspec

from rollwright.errors import FormatError
from rollwright.swarm.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, is_signed
from rollwright.swarm.msgpack_guard import check_shape
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.signed import Hex32
from rollwright.swarm.transports.base import MAX_MANIFEST_BYTES

OFFERED = 16
"""Manifests that one message offers."""

RECORDS = 8
"""Records of peers in one message."""

DELIVERED = 8
"""Manifests in one delivery."""

TOKEN_BYTES = 8
ID_BYTES = 16
"""Of a manifest: the beginning of the SHA-256 of its bytes. Enough to tell manifests apart; what is delivered is signed."""

MAX_MESSAGE_BYTES = DELIVERED * MAX_MANIFEST_BYTES + 1024

_OFFER, _REPLY, _DELIVERY = b"RWG\x01", b"RWG\x02", b"RWG\x03"
_OFFER_DOMAIN = b"rollwright swarm offer\x00"
_REPLY_DOMAIN = b"rollwright swarm reply\x00"
_RECORD_DOMAIN = b"rollwright swarm record\x00"
_MAX_ITEMS, _MAX_DEPTH = 64, 2

_record = struct.Struct(f">{KEY_BYTES}sd{SIGNATURE_BYTES}s")

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
ManifestId = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Offered = Annotated[tuple[ManifestId, ...], msgspec.Meta(max_length=OFFERED)]
PackedRecord = Annotated[bytes, msgspec.Meta(min_length=_record.size, max_length=_record.size)]
Records = Annotated[tuple[PackedRecord, ...], msgspec.Meta(max_length=RECORDS)]
Envelope = Annotated[bytes, msgspec.Meta(max_length=MAX_MANIFEST_BYTES)]


class GossipOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Opens an exchange with one peer."""

    swarm: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    sender: Hex32
    receiver: Hex32
    time: float
    """Seconds since 1970, by the sender's clock."""
    token: Token
    manifests: Offered
    records: Records
    """The sender's own first."""


class OfferReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers an offer."""

    token: Token
    wanted: Offered
    manifests: Offered
    """What the receiver of the offer has to offer itself."""
    records: Records


class Delivery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Brings manifests; the opener's also says what it wants of the reply."""

    token: Token
    envelopes: Annotated[tuple[Envelope, ...], msgspec.Meta(max_length=DELIVERED)]
    wanted: Offered = ()


class PeerRecord(NamedTuple):
    """A peer says that it is there."""

    peer: str
    time: float
    """When it said so, by its own clock."""
    packed: bytes


_encoder = msgspec.msgpack.Encoder()
_offers = msgspec.msgpack.Decoder(GossipOffer)
_replies = msgspec.msgpack.Decoder(OfferReply)
_deliveries = msgspec.msgpack.Decoder(Delivery)


def swarm_mark(swarm: str) -> bytes:
    """Tells swarms apart on the wire."""
    return sha256(swarm.encode()).digest()[:8]


def manifest_id(envelope: bytes) -> bytes:
    return sha256(envelope).digest()[:ID_BYTES]


def sign_record(identity: Identity, mark: bytes, now: float) -> PeerRecord:
    key = bytes.fromhex(identity.peer)
    signature = identity.sign(_RECORD_DOMAIN + mark + key + struct.pack(">d", now))
    return PeerRecord(identity.peer, now, _record.pack(key, now, signature))


def read_record(packed: bytes) -> PeerRecord:
    """The record as it claims to be; `is_genuine` tells whether it is."""
    key, time, _ = _record.unpack(packed)
    if not math.isfinite(time):
        raise PeerRefused(PeerRefusal.MALFORMED, "a record without a time")
    return PeerRecord(key.hex(), time, packed)


def is_genuine(record: PeerRecord, mark: bytes) -> bool:
    """Whether the peer itself signed the record, for this swarm."""
    key, time, signature = _record.unpack(record.packed)
    return is_signed(record.peer, _RECORD_DOMAIN + mark + key + struct.pack(">d", time), signature)


def sign_offer(offer: GossipOffer, identity: Identity) -> bytes:
    body = _encoder.encode(offer)
    return _OFFER + identity.sign(_OFFER_DOMAIN + body) + body


def sign_reply(reply: OfferReply, receiver: str, identity: Identity) -> bytes:
    body = _encoder.encode(reply)
    return _REPLY + identity.sign(_REPLY_DOMAIN + receiver.encode() + body) + body


def encode_delivery(delivery: Delivery) -> bytes:
    return _DELIVERY + _encoder.encode(delivery)


def read_message(data: bytes) -> GossipOffer | OfferReply | Delivery:
    """Decode a message; raise `PeerRefused` for anything else. Signatures are checked by `check_offer` and `check_reply`."""
    kind, body = data[: len(_OFFER)], data[len(_OFFER) :]
    if len(data) > MAX_MESSAGE_BYTES or kind not in (_OFFER, _REPLY, _DELIVERY):
        raise PeerRefused(PeerRefusal.MALFORMED, f"{len(data)} bytes that are no gossip")
    if kind != _DELIVERY:
        body = body[SIGNATURE_BYTES:]
    try:
        check_shape(body, max_items=_MAX_ITEMS, max_depth=_MAX_DEPTH)
        if kind == _OFFER:
            offer = _offers.decode(body)
            if not math.isfinite(offer.time):
                raise FormatError("an offer without a time")
            return offer
        return _replies.decode(body) if kind == _REPLY else _deliveries.decode(body)
    except (msgspec.MsgspecError, FormatError, ValueError) as error:
        raise PeerRefused(PeerRefusal.MALFORMED, str(error)) from error


def check_offer(data: bytes, offer: GossipOffer) -> None:
    """Raise `PeerRefused` unless the sender signed exactly these bytes."""
    _check(data, offer.sender, _OFFER_DOMAIN)


def check_reply(data: bytes, sender: str, receiver: str) -> None:
    """Raise `PeerRefused` unless `sender` signed exactly these bytes for `receiver`."""
    _check(data, sender, _REPLY_DOMAIN + receiver.encode())


def _check(data: bytes, sender: str, domain: bytes) -> None:
    at = len(_OFFER)
    signature, body = data[at : at + SIGNATURE_BYTES], data[at + SIGNATURE_BYTES :]
    if not is_signed(sender, domain + body, signature):
        raise PeerRefused(PeerRefusal.BAD_SIGNATURE, f"not signed by {sender[:16]}")
