"""A priority queue whose keys can be moved and removed, smallest first.

Every call is O(log n), amortised. The heap may hold outdated entries, of keys that moved or left: each is corrected
when it reaches the top, and all at once when they are more than half of the heap. Moving a key to a later place, as
every heartbeat does to a lease, is O(1): its old entry still reaches the top early enough.
"""

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic, TypeVar

Key = TypeVar("Key")
Order = tuple[float, int]
"""The sort value, and a number unique to the key so that two keys never tie."""

_SLACK = 64
"""Number of outdated entries that is never worth a clean-up."""


class OrderedIndex(Generic[Key]):
    def __init__(self) -> None:
        self._orders: dict[Key, Order] = {}
        self._heap: list[tuple[Order, Key]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def set(self, key: Key, order: Order) -> None:
        """Adds the key, or moves it."""
        before = self._orders.get(key)
        self._orders[key] = order
        if before is not None and before <= order:
            return
        heappush(self._heap, (order, key))
        if len(self._heap) > 2 * len(self._orders) + _SLACK:
            self._heap = [(order, key) for key, order in self._orders.items()]
            heapify(self._heap)

    def discard(self, key: Key) -> None:
        self._orders.pop(key, None)

    @property
    def bound(self) -> float:
        """A lower bound of every key's sort value."""
        return self._heap[0][0][0] if self._heap else inf

    def first(self) -> tuple[Order, Key] | None:
        heap, orders = self._heap, self._orders
        while heap:
            order, key = heap[0]
            current = orders.get(key)
            if current is order:
                return heap[0]
            if current is None or current < order:
                heappop(heap)
            else:
                heapreplace(heap, (current, key))
        return None

    def pop(self) -> Key | None:
        first = self.first()
        if first is None:
            return None
        heappop(self._heap)
        del self._orders[first[1]]
        return first[1]
