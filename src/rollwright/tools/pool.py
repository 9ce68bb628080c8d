"""A pool of leased resources: at most `size` exist, and each has at most one lease.

Always true: a lease ends by `release`, which does not await and is idempotent, or is reaped when its handle is garbage
collected or exceeds `max_lease_seconds`. A free slot goes to the longest waiter. A cancelled waiter keeps no slot, even
if it was served at the same moment. A released resource is leased again only if `renew` returns true; otherwise it is
closed, and its slot becomes free after that.

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
from rollwright.tools.time_limit import pause_timer

Resource = TypeVar("Resource")
Key = Hashable

_CLOSE_SECONDS = 30.0
"""Timeout for renewing or closing a resource, after which it is abandoned, so that its slot is not lost."""

_log = logging.getLogger(__name__)


class LeaseEnded(RollwrightError):
    """A lease was used after its release or reaping."""


class _LeasedResource(Generic[Resource]):
    """State of a lease that the pool keeps; it must not refer to the `Lease`, whose collection ends it."""

    __slots__ = ("is_over", "key", "resource", "timer")

    def __init__(self, resource: Resource, key: Key) -> None:
        self.resource = resource
        self.key = key
        self.is_over = False
        self.timer: asyncio.TimerHandle | None = None


class Lease(Generic[Resource]):
    """Exclusive use of a resource until `release`."""

    __slots__ = ("__weakref__", "_holding", "_pool")

    def __init__(self, pool: "Pool[Resource]", holding: _LeasedResource[Resource]) -> None:
        self._pool = pool
        self._holding = holding

    @property
    def is_over(self) -> bool:
        """Whether it was released or reaped."""
        return self._holding.is_over

    @property
    def resource(self) -> Resource:
        """The resource; raises `LeaseEnded` after the end of the lease."""
        if self._holding.is_over:
            raise LeaseEnded("the lease is over: it was released, or lasted too long")
        return self._holding.resource

    def release(self) -> None:
        """Returns the resource to the pool at once."""
        self._pool._return(self._holding, may_renew=True)


class Pool(Generic[Resource]):
    """Creates resources on demand and leases them."""

    def __init__(
        self,
        make: Callable[[Key], Awaitable[Resource]],
        *,
        size: int,
        close: Callable[[Resource], Awaitable[None]] | None = None,
        renew: Callable[[Resource], Awaitable[bool]] | None = None,
        max_lease_seconds: float | None = None,
    ) -> None:
        """`make` creates a resource for a key and must clean up if it is cancelled. Without `renew` every lease gets a new
        resource. A lease that lasts longer than `max_lease_seconds` is reaped."""
        if size < 1:
            raise ConfigError(f"pool size: must be at least 1, got {size}")
        self._make = make
        self._size = size
        self._close = close
        self._renew = renew
        self._max_lease_seconds = max_lease_seconds
        self._busy = 0
        """Slots of resources that are leased, being created, or being returned."""
        self._idle: dict[Key, list[Resource]] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task[None]] = set()
        self._leased: set[_LeasedResource[Resource]] = set()
        self._is_closed = False
        self.made = 0
        """Number of resources created so far."""
        self.reaped = 0
        """Number of leases that were dropped without release or lasted too long."""

    @property
    def leased(self) -> int:
        """Number of leased resources."""
        return len(self._leased)

    @property
    def idle(self) -> int:
        """Number of idle resources."""
        return sum(map(len, self._idle.values()))

    @property
    def waiting(self) -> int:
        """Number of waiters."""
        return sum(not waiter.done() for waiter in self._waiters)

    async def acquire(self, key: Key = "") -> Lease[Resource]:
        """Leases a resource for `key`; waiters are served in FIFO order."""
        if self._is_closed:
            raise RollwrightError("the pool is closed")
        await self._acquire_slot()
        closing: asyncio.Task[None] | None = None
        try:
            resource = self._take_idle(key)
            if resource is None:
                closing = self._evict_idle()
                if closing is not None:
                    await asyncio.shield(closing)
                resource = await self._make(key)
                self.made += 1
        except BaseException:
            if closing is None or closing.done():
                self._free_slot()
            else:  # the evicted resource occupies the slot until it is closed
                closing.add_done_callback(lambda _: self._free_slot())
            raise
        return self._lease(resource, key)

    async def close(self) -> None:
        """Closes idle resources now and leased ones when they are returned; `acquire` raises from now on."""
        self._is_closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(RollwrightError("the pool is closed"))
        self._waiters.clear()
        idle = [resource for resources in self._idle.values() for resource in resources]
        self._idle.clear()
        await asyncio.gather(*map(self._close_resource, idle), *self._background)

    async def _acquire_slot(self) -> None:
        if self._busy < self._size and not self.waiting:
            self._busy += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with pause_timer():
                await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free_slot()  # the slot was assigned in the same loop iteration as the cancellation
            else:
                waiter.cancel()
            raise

    def _free_slot(self) -> None:
        self._busy -= 1
        while self._waiters and self._busy < self._size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._busy += 1
                waiter.set_result(None)

    def _take_idle(self, key: Key) -> Resource | None:
        resources = self._idle.get(key)
        if not resources:
            return None
        resource = resources.pop()
        if not resources:
            del self._idle[key]
        return resource

    def _evict_idle(self) -> "asyncio.Task[None] | None":
        """Closes an idle resource of another key, if a new resource would exceed `size`."""
        if self._busy + self.idle <= self._size:
            return None
        resource = self._take_idle(next(iter(self._idle)))
        assert resource is not None
        return self._run_in_background(self._close_resource(resource))

    def _lease(self, resource: Resource, key: Key) -> Lease[Resource]:
        loop = asyncio.get_running_loop()
        holding = _LeasedResource(resource, key)
        self._leased.add(holding)
        lease = Lease(self, holding)
        weakref.finalize(lease, _reap_dropped, loop, self, holding).atexit = False
        if self._max_lease_seconds is not None:
            holding.timer = loop.call_later(self._max_lease_seconds, self._reap, holding)
        return lease

    def _reap(self, holding: _LeasedResource[Resource]) -> None:
        if not holding.is_over:
            self.reaped += 1
            _log.warning("a lease was dropped without release, or lasted too long; its resource is closed")
            self._return(holding, may_renew=False)

    def _return(self, holding: _LeasedResource[Resource], *, may_renew: bool) -> None:
        if holding.is_over:
            return
        holding.is_over = True
        if holding.timer is not None:
            holding.timer.cancel()
        self._leased.discard(holding)
        if self._close is None and self._renew is None:
            self._free_slot()
            return
        self._run_in_background(self._recycle(holding, may_renew))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs `work` in a task of the pool, which the end of a rollout does not cancel."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _recycle(self, holding: _LeasedResource[Resource], may_renew: bool) -> None:
        try:
            if may_renew and not self._is_closed and await self._try_renew(holding.resource):
                self._idle.setdefault(holding.key, []).append(holding.resource)
            else:
                await self._close_resource(holding.resource)
        finally:
            self._free_slot()

    async def _try_renew(self, resource: Resource) -> bool:
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

    async def _close_resource(self, resource: Resource) -> None:
        if self._close is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._close(resource)
        except BaseException as error:
            if is_cancellation(error):
                raise
            _log.warning("a resource could not be closed: %r", error)


def _reap_dropped(
    loop: asyncio.AbstractEventLoop, pool: Pool[Resource], holding: _LeasedResource[Resource]
) -> None:
    """Reaps the lease of a collected handle. Finalizers run in any thread, and possibly after the loop has ended."""
    if not holding.is_over:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(pool._reap, holding)
