"""What a rollout's tools hold: its leases, from the first call to the rollout's end.

A tool that takes a `ToolContext` can lease a resource; the same rollout gets the same one for the same pool and key.
All are given back when the context closes: by `async with`, or when the task that made the context ends, however that
happens. Closing does not wait for anything, so it cannot be interrupted.

Calls that ask for the same thing before it is there wait for one and the same lease. If one of them gives it back, the
others do not get a new one in its place, whichever runs first: what they were about to build on is gone, and they see it.
"""

import asyncio
from types import TracebackType
from typing import Any, Self, TypeVar

from rollwright.errors import RollwrightError
from rollwright.tools.pool import Key, Lease, Pool
from rollwright.tools.time_limit import Callers

Resource = TypeVar("Resource")


class _Asking:
    """A lease that calls wait for together."""

    def __init__(self, pool: Pool[Any], key: Key) -> None:
        self.callers = Callers()
        asking = pool.acquire(key)
        self.task = asyncio.get_running_loop().create_task(asking, context=self.callers.context())


class ToolContext:
    """One rollout's; made in the task that plays it."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._leases: dict[tuple[int, Key], Lease[Any]] = {}
        self._asking: dict[tuple[int, Key], _Asking] = {}
        self._is_closed = False
        self._owner = asyncio.current_task()
        if self._owner is not None:
            self._owner.add_done_callback(self._owner_ended)

    async def lease(self, pool: Pool[Resource], key: Key = "") -> Resource:
        """The rollout's resource of this pool for `key`. If it has none yet, or lost it, it waits for one; calls of one
        turn that ask for the same at the same time get the same."""
        place = (id(pool), key)
        held: Lease[Resource] | None = self._leases.get(place)
        if held is not None and not held.is_over:
            return held.resource
        self._refuse_if_closed()
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = _Asking(pool, key)
            asking.task.add_done_callback(lambda task: self._answered(place, task))
        try:
            with asking.callers.joined():
                await asyncio.wait({asking.task})
        finally:
            if not asking.callers.count and not asking.task.done():  # nobody wants it any more
                self._asking.pop(place)
                asking.task.cancel()
        self._refuse_if_closed()
        held = asking.task.result()
        return held.resource

    def give_back(self, pool: Pool[Any], key: Key = "") -> None:
        """Before the rollout ends, for example because the resource is broken."""
        held = self._leases.pop((id(pool), key), None)
        if held is not None:
            held.release()

    def close(self) -> None:
        """Gives everything back at once."""
        self._is_closed = True
        if self._owner is not None:
            self._owner.remove_done_callback(self._owner_ended)
        for lease in self._leases.values():
            lease.release()
        self._leases.clear()
        for asking in self._asking.values():
            asking.task.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answered(self, place: tuple[int, Key], task: "asyncio.Task[Lease[Any]]") -> None:
        """Keeps the lease before anybody who waits for it runs."""
        if (asking := self._asking.get(place)) is not None and asking.task is task:
            del self._asking[place]
        if task.cancelled() or task.exception() is not None:
            return
        if self._is_closed:
            task.result().release()
        else:
            self._leases[place] = task.result()

    def _owner_ended(self, _: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RollwrightError(f"rollout {self.rollout_id} is over; its tools are closed")
