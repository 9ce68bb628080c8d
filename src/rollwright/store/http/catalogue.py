"""Every call by its name, and the two formats that it can be written in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rollwright.store.http import looking_calls, playing_calls
from rollwright.store.http.messages import Call, Entry
from rollwright.store.http.shape import json_values, msgpack_values

_MODULES = (playing_calls, looking_calls)

CALLS: Mapping[str, type[Call[Any]]] = {
    value.name: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Call) and hasattr(value, "name")
}

BATCH = "batch"
"""Stands where a call's name does, for a list of calls."""

MAX_BATCH = 1024
"""Calls in one batch: each is a task of the server, and its other callers wait meanwhile."""


_Entries = Annotated[list[Entry], msgspec.Meta(max_length=MAX_BATCH)]


@dataclass(frozen=True)
class Format:
    media_type: str
    encode: Callable[[Any], bytes]
    calls: Mapping[str, Callable[[bytes], Call[Any]]]
    """Decodes a call's arguments, by the call's name."""
    batch: Callable[[bytes], list[Entry]]
    count: Callable[[bytes, int], int]
    """How many values a body holds, up to a limit."""


MSGPACK = Format(
    "application/msgpack",
    msgspec.msgpack.Encoder().encode,
    {name: msgspec.msgpack.Decoder(call).decode for name, call in CALLS.items()},
    msgspec.msgpack.Decoder(_Entries).decode,
    msgpack_values,
)
JSON = Format(
    "application/json",
    msgspec.json.Encoder().encode,
    {name: msgspec.json.Decoder(call).decode for name, call in CALLS.items()},
    msgspec.json.Decoder(_Entries).decode,
    json_values,
)

FORMATS = {each.media_type: each for each in (MSGPACK, JSON)}
