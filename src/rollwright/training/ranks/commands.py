"""Calls of rank 0 that the other ranks make with it.

Always true: a call is announced in the key-value store, where ranks wait for as long as rollouts take, and its content
follows by broadcast, which has a time limit. Contents are MessagePack; nothing is unpickled.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rollwright.training.ranks.group import Store
from rollwright.training.rows import Row

POLL = timedelta(seconds=5)
"""Interval after which a waiting rank looks whether it is still wanted."""

_FIELDS = tuple(Row.__struct_fields__)


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Rows with their arrays as bytes."""
    return msgspec.msgpack.encode([[_encoded(getattr(row, name)) for name in _FIELDS] for row in rows])


def decode_rows(content: bytes) -> list[Row]:
    return [
        Row(**dict(zip(_FIELDS, map(_decoded, values), strict=True)))
        for values in msgspec.msgpack.decode(content)
    ]


def _encoded(value: Any) -> Any:
    return [value.typecode, value.tobytes()] if isinstance(value, array) else value


def _decoded(value: Any) -> Any:
    return array(value[0], value[1]) if isinstance(value, list) else value


class Channel:
    """The calls of one group of ranks, in their order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._count = 0

    def send(self, kind: str, content: bytes = b"") -> None:
        """Announces a call; of rank 0."""
        self._store.set(self._key(self._count), f"{kind} {len(content)}")
        if self._count:  # all ranks have made the call before this one
            self._store.delete_key(self._key(self._count - 1))
        self._count += 1
        if content:
            dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)

    def receive(self, wanted: Callable[[], bool] = lambda: True) -> tuple[str, bytes]:
        """Waits for the next call; of the other ranks. `wanted`: asked now and then; false ends them."""
        key = self._key(self._count)
        while True:
            try:
                self._store.wait([key], POLL)
                break
            except dist.DistStoreError:
                if not wanted():
                    return "stop", b""
        kind, size = self._store.get(key).decode().split()
        self._count += 1
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            dist.broadcast(content, 0)
        return kind, content.numpy().tobytes()

    def _key(self, number: int) -> str:
        return f"call/{number}"


def wait_for(
    store: Store, keys: Sequence[str], seconds: float, failed: Callable[[], str | None]
) -> str | None:
    """Waits until the store has these keys; returns why they will not come, or `None`."""
    end = time.monotonic() + seconds
    while not store.check(list(keys)):
        if (reason := failed()) is not None:
            return reason
        if time.monotonic() > end:
            return f"did not start within {seconds:g} s"
        time.sleep(0.05)
    return None
