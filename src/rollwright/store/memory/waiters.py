"""Waiting dequeues, first in, first out.

Every operation is O(1) in the number of waiters: joining, leaving from any place, and being served. A claim id waits at
most once: a caller that asks again under the same id lost its earlier connection, and the earlier waiter is released.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from rollwright.store.memory.rows import StoredAttempt
from rollwright.store.waiting import resolve


@dataclass(eq=False, slots=True)
class Waiter:
    """One waiting `dequeue`."""

    limit: int
    worker_id: str | None
    claim_id: str | None
    future: "asyncio.Future[None]"
    attempts: list[StoredAttempt] = field(default_factory=list)


class Waiters:
    def __init__(self) -> None:
        # Not a dict: after deletions at its front, finding a dict's first key is O(n).
        self.waiting: OrderedDict[Waiter, None] = OrderedDict()
        self._by_claim: dict[str, Waiter] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def join(self, waiter: Waiter) -> None:
        if waiter.claim_id is not None:
            earlier = self._by_claim.get(waiter.claim_id)
            if earlier is not None:
                self.leave(earlier)
                resolve(earlier.future)
            self._by_claim[waiter.claim_id] = waiter
        self.waiting[waiter] = None

    def leave(self, waiter: Waiter) -> None:
        """Does nothing for a waiter that has left already."""
        self.waiting.pop(waiter, None)
        self._forget(waiter)

    def next(self) -> Waiter | None:
        """Removes and returns the first that still waits."""
        while self.waiting:
            waiter, _ = self.waiting.popitem(last=False)
            self._forget(waiter)
            if not waiter.future.done():
                return waiter
        return None

    def release_all(self) -> None:
        """Wakes every waiter without an attempt."""
        while (waiter := self.next()) is not None:
            resolve(waiter.future)

    def _forget(self, waiter: Waiter) -> None:
        if waiter.claim_id is not None and self._by_claim.get(waiter.claim_id) is waiter:
            del self._by_claim[waiter.claim_id]
