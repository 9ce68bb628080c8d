"""A rollout's leases on pooled resources, held from its first tool call to its end.

A tool that takes a `ToolContext` can lease a resource; a rollout gets the same resource for the same pool and key. All
leases are released when the context closes: at the end of `async with`, or when the task that created the context ends
for any reason. Closing does not await, so it cannot be interrupted.

Concurrent calls for the same pool and key wait for one lease. If one call releases it, the others do not get a new lease,
in whichever order they run: the state they depend on is gone, and they see an error.
"""

import asyncio
from types import TracebackType
from typing import Any, Self, TypeVar

from rollwright.errors import RollwrightError
from rollwright.sandbox.attempts import NO_BOX, find_boxes
from rollwright.sandbox.box import Box, BoxError
from rollwright.tools.pool import Key, Lease, Pool
from rollwright.tools.time_limit import SharedTimer

Resource = TypeVar("Resource")


class _PendingLease:
    """A lease that one or more calls wait for."""

    def __init__(self, pool: Pool[Any], key: Key) -> None:
        self.callers = SharedTimer()
        acquiring = pool.acquire(key)
        self.task = asyncio.get_running_loop().create_task(acquiring, context=self.callers.context())


class ToolContext:
    """Leases of one rollout; create it in the task that runs the rollout."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._leases: dict[tuple[int, Key], Lease[Any]] = {}
        self._pending: dict[tuple[int, Key], _PendingLease] = {}
        self._is_closed = False
        self._boxes = find_boxes()
        self._owner = asyncio.current_task()
        if self._owner is not None:
            self._owner.add_done_callback(self._close_with_owner)

    async def lease(self, pool: Pool[Resource], key: Key = "") -> Resource:
        """Returns the rollout's resource of `pool` for `key`, and waits for a lease if it holds none. Concurrent calls for
        the same pool and key share one lease."""
        place = (id(pool), key)
        held: Lease[Resource] | None = self._leases.get(place)
        if held is not None and not held.is_over:
            return held.resource
        self._refuse_if_closed()
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = _PendingLease(pool, key)
            pending.task.add_done_callback(lambda task: self._store_lease(place, task))
        try:
            with pending.callers.joined():
                await asyncio.wait({pending.task})
        finally:
            if not pending.callers.count and not pending.task.done():  # every caller was cancelled
                self._pending.pop(place)
                pending.task.cancel()
        self._refuse_if_closed()
        held = pending.task.result()
        return held.resource

    async def box(self) -> Box:
        """The box of the attempt that the tools run in; a `BoxError` says that it has none."""
        if self._boxes is None:
            raise BoxError(NO_BOX)
        return await self._boxes.box()

    def release(self, pool: Pool[Any], key: Key = "") -> None:
        """Releases a lease before the rollout ends, for example because the resource is broken."""
        held = self._leases.pop((id(pool), key), None)
        if held is not None:
            held.release()

    def close(self) -> None:
        """Releases all leases at once."""
        self._is_closed = True
        if self._owner is not None:
            self._owner.remove_done_callback(self._close_with_owner)
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()
        for pending in self._pending.values():
            pending.task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _store_lease(self, place: tuple[int, Key], task: "asyncio.Task[Lease[Any]]") -> None:
        """Stores an acquired lease before any of its waiters runs."""
        if (pending := self._pending.get(place)) is not None and pending.task is task:
            del self._pending[place]
        if task.cancelled() or task.exception() is not None:
            return
        if self._is_closed:
            task.result().release()
        else:
            self._leases[place] = task.result()

    def _close_with_owner(self, _: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RollwrightError(f"rollout {self.rollout_id} is over; its tools are closed")
