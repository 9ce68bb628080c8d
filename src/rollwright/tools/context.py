"""What a rollout's tools hold: its leases, from the first call to the rollout's end.

A tool that takes a `ToolContext` can lease a resource; the same rollout gets the same one for the same pool and key.
All are given back when the context closes: by `async with`, or when the task that made the context ends, however that
happens. Closing does not wait for anything, so it cannot be interrupted.
"""

import asyncio
from types import TracebackType
from typing import Any, Self, TypeVar

from rollwright.errors import RollwrightError
from rollwright.tools.pool import Key, Lease, Pool

Resource = TypeVar("Resource")


class ToolContext:
    """One rollout's; made in the task that plays it."""

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id
        self._leases: dict[tuple[int, Key], Lease[Any]] = {}
        self._asking: dict[tuple[int, Key], asyncio.Lock] = {}
        self._is_closed = False
        self._owner = asyncio.current_task()
        if self._owner is not None:
            self._owner.add_done_callback(self._owner_ended)

    async def lease(self, pool: Pool[Resource], key: Key = "") -> Resource:
        """The rollout's resource of this pool for `key`. If it has none yet, or lost it, it waits for one; calls of one
        turn that ask for the same at the same time get the same."""
        place = (id(pool), key)
        async with self._asking.setdefault(place, asyncio.Lock()):
            held = self._leases.get(place)
            if held is None or held.is_over:
                self._refuse_if_closed()
                held = await pool.acquire(key)
                self._leases[place] = held
                if self._is_closed:
                    held.release()
                self._refuse_if_closed()
            resource: Resource = held.resource
            return resource

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _owner_ended(self, _: object) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RollwrightError(f"rollout {self.rollout_id} is over; its tools are closed")
