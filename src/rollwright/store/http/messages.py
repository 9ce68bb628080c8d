"""What travels between the client and the server: one frozen record for each call of the store.

A call knows its name (the last part of its path), the type of its answer, and how to make itself on a store, so
that the server, the client and the OpenAPI page need no further table. Fields are checked while they are decoded;
a field that is not listed is refused. Bytes are base64 text in JSON.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

from rollwright.store.contract import Store, StoreError
from rollwright.store.records import Page

MAX_WAIT_SECONDS = 30.0
"""Longest wait of one request: below the idle limits of usual proxies (60 s). The client asks again."""

MAX_COUNT = 2**31 - 1
"""Bound of offsets, so that every backend's integers hold them."""

MAX_ITEMS = 1000
"""Records that one request takes or gives: a few milliseconds of the server's time, which all its callers share. The
client sends and reads more in portions."""

MAX_FILTER_IDS = 10_000
"""Ids that one query may name: they are looked up, and no records are made of them."""

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page of records ends early when it gets larger, and so do trajectories that are asked for together. What one caller
has not taken yet takes memory, and copying it time."""

MAX_CURSOR = 2**63 - 1
"""Bound of places in a log: a 64-bit column."""

Id = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,200}(?!\n)$")]
"""As in `store.checks`; without the look-ahead, Python's `$` would let a final line break pass."""

Wait = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_SECONDS)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Cursor = Annotated[int, msgspec.Meta(ge=0, le=MAX_CURSOR)]
Limit = Annotated[int, msgspec.Meta(ge=0, le=MAX_ITEMS)]
"""0: only how many there are."""
Ids = Annotated[list[Id], msgspec.Meta(max_length=MAX_ITEMS)]
FilterIds = Annotated[list[Id], msgspec.Meta(max_length=MAX_FILTER_IDS)]
Pair = tuple[Id, Id]
"""A rollout and an attempt."""

_packed = msgspec.msgpack.Encoder(enc_hook=repr).encode

Answer = TypeVar("Answer")
Item = TypeVar("Item")


class Call(
    msgspec.Struct, Generic[Answer], frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """One call of the store."""

    name: ClassVar[str]
    answer: ClassVar[Any]
    """The type that the answer is decoded into."""
    wide: ClassVar[bool] = False
    """Whether the store may have to look at many records for it. The server makes one such call at a time, so that the
    others, which look at few, always come between."""

    async def make(self, store: Store) -> Answer:
        """Makes the call. Only those that the server answers out of what it remembers have no way to."""
        raise StoreError(f"{self.name}: is no call of a store")

    def waits(self) -> bool:
        wait: float = getattr(self, "timeout", 0.0)
        return wait > 0


class Once(Call[Answer], Generic[Answer], frozen=True, kw_only=True):
    """A call that would do or answer something else if it were made again later."""

    call_id: Id | None = None
    """The same in every repeat of one call: a repeat gets the first answer again."""


class WirePage(msgspec.Struct, Generic[Item], frozen=True):
    """`Page`, as it travels: it may hold fewer items than there are and than were asked for. The next one begins at
    `offset` and as many items as this one has, until there are `total`."""

    items: list[Item]
    total: int
    limit: int
    offset: int

    @classmethod
    def of(cls, page: Page[Item]) -> "WirePage[Item]":
        return cls(_first(page.items), page.total, page.limit, page.offset)


def _first(items: Sequence[Item]) -> list[Item]:
    """As many as one page may hold; at least one."""
    size = 0
    for place, item in enumerate(items):
        size += len(_packed(item))
        if size > MAX_PAGE_BYTES:
            return list(items[: max(1, place)])
    return list(items)


class TrajectoryPage(msgspec.Struct, frozen=True):
    """Trajectories, as many as one answer may hold."""

    trajectories: dict[str, bytes]
    unread: list[str]
    """Rollouts that were not looked at, because the answer was full: to be asked for again."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a batch."""

    call: str
    arguments: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True):
    """Why a call was not made: the body of every answer with a status from 400."""

    kind: str
    """For programs; see `refusals.py`."""
    message: str
    """For people: one line."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of one call of a batch: an answer or a refusal."""

    answer: Any = msgspec.UNSET
    refusal: Refusal | msgspec.UnsetType = msgspec.UNSET


class RawOutcome(msgspec.Struct, frozen=True):
    """`Outcome`, its answer not decoded yet."""

    answer: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    refusal: Refusal | msgspec.UnsetType = msgspec.UNSET
