"""Keys in an order that can change, smallest first.

Every call is O(log n), amortised. The heap may hold entries whose key has moved on or left: they are put
right when they come up, or all at once when they are more than half of the heap. Moving a key back, as every
heartbeat moves a lease, costs O(1): its old entry still comes up early enough.
"""

from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic, TypeVar

Key = TypeVar("Key")
Order = tuple[float, int]
"""What to sort by, and a number of the key's own so that two keys never tie."""

_SLACK = 64
"""Outdated entries that are never worth a clean-up."""


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
        """No key comes before this."""
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
