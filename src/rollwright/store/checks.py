"""Checks of arguments, called by the call records, and packing of plain data.

A value that passes is safe in a file name, a URL and a log line, and means the same in memory, in SQL and over HTTP.
Plain data is packed as msgpack, so that a store's state is never shared with its callers.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from rollwright.store.errors import StoreError
from rollwright.store.records import EnqueueRequest, RolloutConfig

ID_PATTERN = r"^[A-Za-z0-9._:-]{1,200}$"
"""Characters that need no quoting in URLs, file names, shells and SQL; long enough for nested names."""

LATEST = "latest"
"""Stands for the newest attempt of a rollout in place of an attempt id."""

MAX_PRIORITY = 2**31 - 1
"""The range of a 32-bit column."""

_ID = re.compile(ID_PATTERN.replace("$", r"\Z"))
_ID_BYTES = 8
"""64 random bits: a collision among a million rollouts of the same millisecond has odds below 1 in ten million."""

_IDS_AHEAD = 256
"""Ids whose random part is drawn at once: asking the system takes longer than all the rest of an id."""
_randoms: list[str] = []
if hasattr(os, "register_at_fork"):  # else a process and its fork would give the same ids
    os.register_at_fork(after_in_child=_randoms.clear)

Status = TypeVar("Status", bound=StrEnum)


def new_id(prefix: str) -> str:
    """Begins with the time, in milliseconds: consecutive ids lie side by side in an index."""
    try:
        random = _randoms.pop()  # one step of the interpreter: no two threads get the same
    except IndexError:
        digits = os.urandom(_ID_BYTES * _IDS_AHEAD).hex()
        random, *ahead = [digits[at : at + 2 * _ID_BYTES] for at in range(0, len(digits), 2 * _ID_BYTES)]
        _randoms.extend(ahead)
    return f"{prefix}-{time.time_ns() // 1_000_000:011x}{random}"


def check_id(value: str, what: str) -> str:
    if not isinstance(value, str) or _ID.match(value) is None:
        shown = repr(value)[:80]
        raise StoreError(f"{what} {shown} is not an id: 1 to 200 of the characters A-Z a-z 0-9 . _ : -")
    return value


class NewRollout(msgspec.Struct, frozen=True, gc=False):
    """A checked request, its plain data packed."""

    rollout_id: str
    input: bytes
    mode: str | None
    resources_id: str | None
    config: RolloutConfig
    metadata: bytes
    priority: int


def check_request(request: EnqueueRequest) -> NewRollout:
    """Generates an id if the caller gave none."""
    return NewRollout(
        new_id("ro") if request.rollout_id is None else check_id(request.rollout_id, "rollout_id"),
        pack(request.input, "input"),
        None if request.mode is None else check_id(request.mode, "mode"),
        None if request.resources_id is None else check_id(request.resources_id, "resources_id"),
        config_from_bytes(config_to_bytes(request.config)),
        pack_mapping(request.metadata, "metadata"),
        check_priority(request.priority),
    )


def check_change(
    mode: str | None, resources_id: str | None, config: RolloutConfig | None, priority: int | None
) -> RolloutConfig | None:
    """Returns the config with its fields in their own types: a caller may give a list for a tuple."""
    if mode is not None:
        check_id(mode, "mode")
    if resources_id is not None:
        check_id(resources_id, "resources_id")
    if priority is not None:
        check_priority(priority)
    return None if config is None else config_from_bytes(config_to_bytes(config))


def check_claim(limit: int, worker_id: str | None, claim_id: str | None) -> None:
    if limit < 1:
        raise StoreError(f"limit={limit} is not 1 or more")
    if worker_id is not None:
        check_id(worker_id, "worker_id")
    if claim_id is not None:
        check_id(claim_id, "claim_id")


def check_part(part: str | None, what: str) -> None:
    """A text to be found inside an id; one that no id can hold is rejected."""
    if part and _ID.match(part) is None:
        raise StoreError(f"{what} {part[:80]!r} is in no id: ids have A-Z a-z 0-9 . _ : -")


def clean_reason(reason: str | None) -> str | None:
    """A reason may quote any text; characters that a database cannot store are replaced, so that the report is accepted."""
    if reason is None:
        return None
    return reason.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def check_priority(priority: int) -> int:
    if type(priority) is not int or abs(priority) > MAX_PRIORITY:
        raise StoreError(
            f"priority {priority!r} is not a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return priority


def config_to_bytes(config: RolloutConfig) -> bytes:
    try:
        return msgspec.msgpack.encode(config)
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreError(f"config: {error}") from error


@lru_cache(maxsize=1024)
def config_from_bytes(data: bytes) -> RolloutConfig:
    """Cached, because the rollouts of a run share a handful of configs."""
    try:
        config = msgspec.msgpack.decode(data, type=RolloutConfig)
    except msgspec.MsgspecError as error:
        raise StoreError(f"config: {error}") from error
    for name in ("timeout_seconds", "unresponsive_seconds"):
        seconds = getattr(config, name)
        if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
            raise StoreError(f"config: {name}={seconds} is not a positive number of seconds or null")
    if config.max_attempts < 1:
        raise StoreError(f"config: max_attempts={config.max_attempts} is not 1 or more")
    return config


def pack(value: Any, what: str) -> bytes:
    """Plain data as bytes; anything else is rejected with the name of its argument."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{what} is not plain data: {error}") from error


def pack_mapping(value: Mapping[str, Any] | None, what: str) -> bytes:
    if not value:
        return EMPTY
    fields = dict(value)
    if not all(isinstance(key, str) for key in fields):
        raise StoreError(f"{what} has a key that is not a string")
    return pack(fields, what)


EMPTY = msgspec.msgpack.encode({})
"""An empty mapping, packed."""


unpack: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
"""Plain data from its bytes."""


def merged(old: bytes, added: Mapping[str, Any] | None, what: str) -> bytes:
    """Packed metadata with new keys merged into it."""
    return pack_mapping({**unpack(old), **added}, what) if added else old


def parse_status(kind: type[Status], value: Status | str) -> Status:
    try:
        found: Status = kind._value2member_map_[value]  # type: ignore[assignment]  # calling the enum takes longer
    except (KeyError, TypeError):
        accepted = ", ".join(kind)
        raise StoreError(f"status {value!r} is unknown; accepted: {accepted}") from None
    return found


def parse_statuses(
    kind: type[Status], value: Status | str | Iterable[Status | str] | None
) -> list[Status] | None:
    """One status or several as a list; `None`: no filter."""
    if value is None:
        return None
    if isinstance(value, str):
        return [parse_status(kind, value)]
    return list(dict.fromkeys(parse_status(kind, each) for each in value))


def check_page(
    limit: int, offset: int, sort_order: str = "asc", sort_by: str = "", sorts: tuple[str, ...] = ("",)
) -> None:
    if limit < -1 or offset < 0:
        raise StoreError(f"limit={limit}, offset={offset}: limit is -1 (all) or more, offset 0 or more")
    if sort_by not in sorts:
        raise StoreError(f"sort_by {sort_by!r} is unknown; accepted: {', '.join(sorts)}")
    if sort_order not in ("asc", "desc"):
        raise StoreError(f"sort_order {sort_order!r} is unknown; accepted: asc, desc")
