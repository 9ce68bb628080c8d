"""Keys in an order that can change, smallest first.

Every call is O(log n), amortised. A key that moved or left stays in the heap as a stale entry until it comes
up, or until stale entries are more than half of the heap and all of them are thrown out at once.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key")
Order = tuple[float, int]
"""What to sort by, and a number of the key's own so that two keys never tie."""

_SLACK = 64
"""Stale entries that are never worth a clean-up."""


class OrderedIndex(Generic[Key]):
    def __init__(self) -> None:
        self._orders: dict[Key, Order] = {}
        self._heap: list[tuple[Order, Key]] = []

    def __len__(self) -> int:
        return len(self._orders)

    def set(self, key: Key, order: Order) -> None:
        """Adds the key, or moves it."""
        self._orders[key] = order
        heappush(self._heap, (order, key))
        if len(self._heap) > 2 * len(self._orders) + _SLACK:
            self._clean()

    def discard(self, key: Key) -> None:
        self._orders.pop(key, None)

    def first(self) -> tuple[Order, Key] | None:
        heap, orders = self._heap, self._orders
        while heap:
            order, key = heap[0]
            if orders.get(key) is order:
                return heap[0]
            heappop(heap)
        return None

    def pop(self) -> Key | None:
        first = self.first()
        if first is None:
            return None
        heappop(self._heap)
        del self._orders[first[1]]
        return first[1]

    def _clean(self) -> None:
        self._heap = [(order, key) for key, order in self._orders.items()]
        heapify(self._heap)
