"""What travels between the client and the server beside the call records: formats, batches and errors.

The body of `POST /v1/{call}` is the call's record as JSON or msgpack, the reply's body its result. Fields are checked
while they are decoded; an unknown field is rejected. Bytes are base64 text in JSON. Two names stand beside those of
the calls: `batch`, for a list of calls, and `withdraw_call`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rollwright.store.call_kinds import Id, StoreCall
from rollwright.store.calls import CALLS
from rollwright.store.http.decoding import json_values, msgpack_values
from rollwright.store.http.errors import ErrorBody

BATCH = "batch"
"""Stands where a call's name does, for a list of calls."""

MAX_BATCH = 1024
"""Calls in one batch: each is a task of the server, and its other callers wait meanwhile."""


class WithdrawCall(StoreCall[None], frozen=True):
    """The caller of a claim does not wait for its result any more: the claimed rollouts go back to the queue. The server
    executes it on its record of recent calls; no store has it."""

    call_id: Id


class BatchEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a batch."""

    call: str
    arguments: msgspec.Raw


class BatchOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one call of a batch: a result or an error."""

    answer: Any = msgspec.UNSET
    refusal: ErrorBody | msgspec.UnsetType = msgspec.UNSET


class RawOutcome(msgspec.Struct, frozen=True):
    """`BatchOutcome`, its result not decoded yet."""

    answer: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    refusal: ErrorBody | msgspec.UnsetType = msgspec.UNSET


ACCEPTED: Mapping[str, type[StoreCall[Any]]] = {**CALLS, WithdrawCall.name: WithdrawCall}
"""Everything that a server accepts, by name."""

_Entries = Annotated[list[BatchEntry], msgspec.Meta(max_length=MAX_BATCH)]


@dataclass(frozen=True)
class Format:
    """A media type with its codecs."""

    media_type: str
    encode: Callable[[Any], bytes]
    calls: Mapping[str, Callable[[bytes], StoreCall[Any]]]
    """Decodes a call's record, by the call's name."""
    batch: Callable[[bytes], list[BatchEntry]]
    count: Callable[[bytes, int], int]
    """The number of values in a body, up to a limit."""


MSGPACK = Format(
    "application/msgpack",
    msgspec.msgpack.Encoder().encode,
    {name: msgspec.msgpack.Decoder(kind).decode for name, kind in ACCEPTED.items()},
    msgspec.msgpack.Decoder(_Entries).decode,
    msgpack_values,
)
JSON = Format(
    "application/json",
    msgspec.json.Encoder().encode,
    {name: msgspec.json.Decoder(kind).decode for name, kind in ACCEPTED.items()},
    msgspec.json.Decoder(_Entries).decode,
    json_values,
)

FORMATS = {each.media_type: each for each in (MSGPACK, JSON)}
