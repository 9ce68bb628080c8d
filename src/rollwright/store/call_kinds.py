"""`StoreCall`: the base of every call record, with all that follows from a record rather than from its handler.

Always true of a record:
- It is frozen, names its call and knows the type of its result. Its arguments were checked when it was made or decoded,
  so a backend that gets one does not check again, and a mistake reads the same in memory, in SQL and over HTTP.
- `repeatable` names everything that the call creates, so that sending the same record twice executes it once.
- `parts` cuts it into requests within the bounds below, and joins their results. The bounds hold for one request over
  HTTP only: they are enforced where a record is decoded. A call in the same process has no bounds.
"""

import re
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, cast, get_args, get_origin

import msgspec
from msgspec.structs import replace

from rollwright.store.checks import check_claim, new_id
from rollwright.store.records import AttemptedRollout, Page

MAX_WAIT_SECONDS = 30.0
"""Longest wait of one request: below the idle limits of usual proxies (60 s). The client asks again."""

MAX_COUNT = 2**31 - 1
"""Bound of offsets, so that every backend's integers hold them."""

MAX_ITEMS = 1000
"""Records that one request takes or gives: a few milliseconds of the server's time, which all its callers share. The
client sends and reads more in several requests."""

MAX_FILTER_IDS = 10_000
"""Ids that one query may name: they are looked up, and no records are made of them."""

MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A page ends early when it gets larger, and so do trajectories that are read together. A reply that its caller has
not read yet takes memory, and copying it takes time."""

MAX_CURSOR = 2**63 - 1
"""Bound of cursors in a log: a 64-bit column."""

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
"""A rollout id and an attempt id."""

Result = TypeVar("Result")
Item = TypeVar("Item")
Claimed = TypeVar("Claimed", AttemptedRollout, list[AttemptedRollout])
Execute = Callable[["StoreCall[Any]"], Coroutine[Any, Any, Any]]

_packed = msgspec.msgpack.Encoder(enc_hook=repr).encode


class StoreCall(
    msgspec.Struct, Generic[Result], frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True
):
    """One call of the store."""

    name: ClassVar[str]
    """Name of the `Store` method, and the last part of the path over HTTP: the class's name in snake case."""
    result: ClassVar[Any]
    """Type of the result: the type argument of the base class."""
    reply: ClassVar[Any]
    """Type that travels over HTTP: the result's own, except where a reply can hold a part of the result."""
    wide: ClassVar[bool] = False
    """Whether the store may have to visit many records for it. The server executes one such call at a time, so that
    the others, which visit few, always come between."""
    bulky: ClassVar[bool] = False
    """Whether its request or reply may be large, or late: then a client does not batch it with other calls."""
    split_by: ClassVar[str | None] = None
    """The field with a list that may be sent in several requests, each with up to `MAX_ITEMS` of it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        cls.result = _result_type(cls)
        if "reply" not in cls.__dict__:
            cls.reply = cls.result

    def waits(self) -> bool:
        """Whether the store may wait for something to happen before it returns."""
        timeout: float = getattr(self, "timeout", 0.0)
        return timeout > 0

    def waiting(self, seconds: float) -> Self:
        """The same call with another timeout."""
        return self if getattr(self, "timeout", seconds) == seconds else replace(self, timeout=seconds)

    def is_satisfied(self, result: Result) -> bool:
        """Whether a waiting call has what it waits for."""
        return bool(result)

    def is_bulky(self) -> bool:
        return self.bulky

    def repeatable(self) -> Self:
        """The same call with every id chosen that would otherwise be generated where it is executed."""
        return self

    def fits(self) -> bool:
        """Whether one request can hold the call, and one reply its result."""
        items = None if self.split_by is None else getattr(self, self.split_by)
        return items is None or len(items) <= MAX_ITEMS

    def parts(self) -> Generator["StoreCall[Any]", Any, Result]:
        """For a call that does not fit: yields calls that do, each repeatable, is sent the reply to each, and returns
        the whole result."""
        assert self.split_by is not None
        whole: Any = None
        for some in portions(getattr(self, self.split_by)):
            part = yield replace(self, **{self.split_by: some}).repeatable()
            whole = part if whole is None else whole + part  # lists, or numbers
        return cast(Result, whole)

    def bounded(self, execute: Execute) -> Coroutine[Any, Any, Any]:
        """Executes the call for a reply that is no larger than one reply may be."""
        return execute(self)


def _result_type(call: type[StoreCall[Any]]) -> Any:
    """The type argument of `StoreCall`, through the generic classes between: `PagedCall[Rollout]` is `Page[Rollout]`."""
    base = call.__orig_bases__[0]  # type: ignore[attr-defined]
    origin, arguments = get_origin(base), get_args(base)
    if origin is StoreCall:
        return arguments[0]
    inner = origin.result
    return arguments[0] if isinstance(inner, TypeVar) else inner[arguments[0]]


def portions(items: Sequence[Item]) -> Iterator[list[Item]]:
    """As many items at a time as one request may hold."""
    for start in range(0, len(items), MAX_ITEMS):
        yield list(items[start : start + MAX_ITEMS])


class OnceCall(StoreCall[Result], Generic[Result], frozen=True, kw_only=True, gc=False):
    """A call that would do or return something else if it were executed again later."""

    call_id: Id | None = None
    """The idempotency key: a server that gets it again returns the first result again."""

    def repeatable(self) -> Self:
        return replace(self, call_id=new_id("call"))


class ClaimCall(StoreCall[Claimed], Generic[Claimed], frozen=True, kw_only=True, gc=False):
    """A call that gives out attempts. A caller that stops waiting for it hands them back."""

    worker_id: Id | None = None
    claim_id: Id | None = None
    """A repeat with the same claim id gets the same attempts."""
    call_id: Id | None = None
    """Names the call for `withdraw_call`, when its caller stopped waiting."""

    def __post_init__(self) -> None:
        check_claim(1, self.worker_id, self.claim_id)

    def repeatable(self) -> Self:
        call_id = new_id("call")
        return replace(self, claim_id=self.claim_id or call_id, call_id=call_id)


class PagedCall(StoreCall[Page[Item]], Generic[Item], frozen=True, kw_only=True, gc=False):
    """A query. `limit=-1`, all matches, is possible in the same process only."""

    bulky = True
    identity: ClassVar[str]
    """The field of an item that tells it from the others."""

    limit: Limit = MAX_ITEMS
    offset: Count = 0

    def fits(self) -> bool:
        return False  # how many items one page holds depends on their size

    def parts(self) -> Generator[StoreCall[Any], Any, Page[Item]]:
        items: list[Item] = []
        while True:
            size = MAX_ITEMS if self.limit < 0 else min(self.limit - len(items), MAX_ITEMS)
            page: Page[Item] = yield replace(self, limit=size, offset=self.offset + len(items))
            items += page.items
            if not page.items or len(items) == self.limit or self.offset + len(items) >= page.total:
                break
        if len(items) > MAX_ITEMS:  # between two pages an item may have moved to a later place
            items = list({getattr(item, self.identity): item for item in items}.values())
        return Page(items, page.total, self.limit, self.offset)

    async def bounded(self, execute: Execute) -> Page[Item]:
        page: Page[Item] = await execute(self)
        size = 0
        for place, item in enumerate(page.items):
            size += len(_packed(item))
            if size > MAX_PAGE_BYTES:
                return replace(page, items=page.items[: max(1, place)])
        return page


class LogCall(StoreCall[list[Item]], Generic[Item], frozen=True, kw_only=True, gc=False):
    """Reads a log from a cursor on."""

    after: Cursor = 0
    limit: Limit = MAX_ITEMS

    def fits(self) -> bool:
        return 0 <= self.limit <= MAX_ITEMS

    def behind(self, last: Item) -> Self:
        """The same call from the entry `last` on, without waiting."""
        raise NotImplementedError

    def parts(self) -> Generator[StoreCall[Any], Any, list[Item]]:
        found: list[Item] = []
        call = self
        while True:
            size = max(0, min(self.limit - len(found), MAX_ITEMS))
            read: list[Item] = yield replace(call, limit=size)
            found += read
            if len(read) < size or len(found) >= self.limit:
                return found
            call = self.behind(read[-1])
