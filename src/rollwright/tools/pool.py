"""Resources that are leased: at most `size` exist, each in one hand or none.

Always true: whoever has a lease gives it back by `release`, which does not wait and may be called twice, or loses it
when the handle is dropped or the lease lasts too long; a slot that becomes free goes to whoever has waited longest; a
waiter that was cancelled takes nothing with it, also when it was being served at that moment. A resource that comes
back is leased again only where `renew` says it is as new; else it is closed, and its slot is free when it is.

A pool belongs to one event loop.
"""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rollwright.aio import is_cancellation
from rollwright.errors import ConfigError, RollwrightError
from rollwright.tools.time_limit import in_line

Resource = TypeVar("Resource")
Key = Hashable

_CLOSE_SECONDS = 30.0
"""For renewing or closing a resource; then it is given up, so that its slot is not lost."""

_log = logging.getLogger(__name__)


class LeaseOver(RollwrightError):
    """A lease that was given back, or was taken away, is used."""


class _Holding(Generic[Resource]):
    """A resource that is out."""

    __slots__ = ("clock", "is_over", "key", "resource")

    def __init__(self, resource: Resource, key: Key) -> None:
        self.resource = resource
        self.key = key
        self.is_over = False
        self.clock: asyncio.TimerHandle | None = None


class Lease(Generic[Resource]):
    """The right to use a resource, until it is released."""

    __slots__ = ("__weakref__", "_holding", "_pool")

    def __init__(self, pool: "Pool[Resource]", holding: _Holding[Resource]) -> None:
        self._pool = pool
        self._holding = holding

    @property
    def is_over(self) -> bool:
        """Whether it was given back, or was taken away."""
        return self._holding.is_over

    @property
    def resource(self) -> Resource:
        if self._holding.is_over:
            raise LeaseOver("the lease is over: it was given back, or lasted too long")
        return self._holding.resource

    def release(self) -> None:
        """Gives the resource back at once."""
        self._pool._return(self._holding, may_renew=True)


class Pool(Generic[Resource]):
    """Makes resources when they are asked for, and lends them."""

    def __init__(
        self,
        make: Callable[[Key], Awaitable[Resource]],
        *,
        size: int,
        close: Callable[[Resource], Awaitable[None]] | None = None,
        renew: Callable[[Resource], Awaitable[bool]] | None = None,
        max_lease_seconds: float | None = None,
    ) -> None:
        """`make` gets what was asked for; if it is cancelled, it leaves nothing behind. Without `renew` every lease has
        a resource of its own. A lease that lasts longer than `max_lease_seconds` is taken away."""
        if size < 1:
            raise ConfigError(f"pool size: must be at least 1, got {size}")
        self._make = make
        self._size = size
        self._close = close
        self._renew = renew
        self._max_lease_seconds = max_lease_seconds
        self._busy = 0
        """Slots of resources that are out, being made, or coming back."""
        self._idle: dict[Key, list[Resource]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._out: set[_Holding[Resource]] = set()
        self._is_closed = False
        self.made = 0
        """Resources so far."""
        self.reaped = 0
        """Leases that were dropped without being given back, or were taken away."""

    @property
    def leased(self) -> int:
        return len(self._out)

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    async def acquire(self, key: Key = "") -> Lease[Resource]:
        """A lease on a resource for `key`; waits for its turn."""
        if self._is_closed:
            raise RollwrightError("the pool is closed")
        await self._slot()
        closing: asyncio.Task[None] | None = None
        try:
            resource = self._taken(key)
            if resource is None:
                closing = self._make_room()
                if closing is not None:
                    await asyncio.shield(closing)
                resource = await self._make(key)
                self.made += 1
        except BaseException:
            if closing is None or closing.done():
                self._free()
            else:  # the slot is that of a resource which is still there
                closing.add_done_callback(lambda _: self._free())
            raise
        return self._lent(resource, key)

    async def close(self) -> None:
        """Closes what is idle now and what is out when it comes back; nothing is lent any more."""
        self._is_closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(RollwrightError("the pool is closed"))
        self._waiters.clear()
        idle = [resource for resources in self._idle.values() for resource in resources]
        self._idle.clear()
        await asyncio.gather(*map(self._put_away, idle), *self._background)

    async def _slot(self) -> None:
        if self._busy < self._size and not self.waiting:
            self._busy += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with in_line():
                await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free()  # it was this one's turn at that very moment
            else:
                waiter.cancel()
            raise

    def _free(self) -> None:
        self._busy -= 1
        while self._waiters and self._busy < self._size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._busy += 1
                waiter.set_result(None)

    def _taken(self, key: Key) -> Resource | None:
        resources = self._idle.get(key)
        if not resources:
            return None
        resource = resources.pop()
        if not resources:
            del self._idle[key]
        return resource

    def _make_room(self) -> "asyncio.Task[None] | None":
        """Closes an idle resource that was made for something else, if the new one would be one too many."""
        if self._busy + self.idle <= self._size:
            return None
        resource = self._taken(next(iter(self._idle)))
        assert resource is not None
        return self._in_background(self._put_away(resource))

    def _lent(self, resource: Resource, key: Key) -> Lease[Resource]:
        loop = asyncio.get_running_loop()
        holding = _Holding(resource, key)
        self._out.add(holding)
        lease = Lease(self, holding)
        weakref.finalize(lease, _dropped, loop, self, holding).atexit = False
        if self._max_lease_seconds is not None:
            holding.clock = loop.call_later(self._max_lease_seconds, self._reap, holding)
        return lease

    def _reap(self, holding: _Holding[Resource]) -> None:
        if not holding.is_over:
            self.reaped += 1
            _log.warning("a lease was dropped, or lasted too long; its resource is closed")
            self._return(holding, may_renew=False)

    def _return(self, holding: _Holding[Resource], *, may_renew: bool) -> None:
        if holding.is_over:
            return
        holding.is_over = True
        if holding.clock is not None:
            holding.clock.cancel()
        self._out.discard(holding)
        if self._close is None and self._renew is None:
            self._free()
            return
        self._in_background(self._come_back(holding, may_renew))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """In a task of the pool's own, which the end of a rollout does not interrupt."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _come_back(self, holding: _Holding[Resource], may_renew: bool) -> None:
        try:
            if may_renew and not self._is_closed and await self._is_as_new(holding.resource):
                self._idle.setdefault(holding.key, []).append(holding.resource)
            else:
                await self._put_away(holding.resource)
        finally:
            self._free()

    async def _is_as_new(self, resource: Resource) -> bool:
        if self._renew is None:
            return False
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                return await self._renew(resource)
        except BaseException as error:
            if is_cancellation(error):
                raise
            _log.warning("a resource could not be renewed: %r", error)
            return False

    async def _put_away(self, resource: Resource) -> None:
        if self._close is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._close(resource)
        except BaseException as error:
            if is_cancellation(error):
                raise
            _log.warning("a resource could not be closed: %r", error)


def _dropped(loop: asyncio.AbstractEventLoop, pool: Pool[Resource], holding: _Holding[Resource]) -> None:
    """A handle is gone. The collector may find that out in any thread, and after the loop has ended."""
    if not holding.is_over:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(pool._reap, holding)
