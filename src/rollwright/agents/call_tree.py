"""Places: where in the tree of decisions a call stands, fixed before anybody answers it.

Always true: a place's name depends only on the names and ranks of the places above it, so the same call has the same
name in every attempt; a place is settled once its call has ended in any way; a call that failed is skipped by those
that were asked for behind it.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from rollwright.draws import digest
from rollwright.trajectory import Turn

_ROOT = 0
"""Name of what stands above the roots."""


class CallNode:
    """One call's."""

    __slots__ = ("_waiters", "before", "children", "depth", "name", "number", "rank", "settled", "turn_id")

    def __init__(self, before: "CallNode | None", rank: int, number: int) -> None:
        self.before = before
        self.rank = rank
        """Among those behind the same place."""
        self.number = number
        """In the order of asking."""
        self.name: int = digest(_ROOT if before is None else before.name, rank)
        self.depth: int = 1 if before is None else before.depth + 1
        self.children = 0
        """Calls that were asked for behind it."""
        self.turn_id: int | None = None
        """Its turn; `None` while it has none, and for ever if the call failed."""
        self.settled = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def parent(self) -> int | None:
        """The turn before it: of the nearest place above that has one."""
        before = self.before
        while before is not None and before.turn_id is None:
            before = before.before
        return None if before is None else before.turn_id

    async def wait(self) -> None:
        """Until it is settled."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def settle(self) -> None:
        self.settled = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class CallTree:
    """All places of one attempt."""

    def __init__(self) -> None:
        self._roots = 0
        self._reserved = 0
        self._tail: CallNode | None = None
        """Behind which a call stands that names no other."""
        self._by_turn: list[CallNode] = []
        self._branched = False

    def of(self, turn: Turn) -> CallNode:
        return self._by_turn[turn.id]

    def reserve(self, after: Turn | msgspec.UnsetType | None) -> CallNode:
        """A new place behind `after`; left out: behind the call that was asked for last."""
        before = self._tail
        if after is not msgspec.UNSET:
            before = None if after is None else self._by_turn[after.id]
        if before is None:
            rank = self._roots
            self._roots += 1
        else:
            rank = before.children
            before.children += 1
        place = CallNode(before, rank, self._reserved)
        self._reserved += 1
        self._branched |= rank > 0
        self._tail = place
        return place

    def commit(self, place: CallNode, turn: Turn) -> None:
        place.turn_id = turn.id
        self._by_turn.append(place)

    def settle(self, place: CallNode) -> None:
        place.settle()
        if place.turn_id is None:
            self._forget(place)

    def _forget(self, place: CallNode) -> None:
        """A call that failed gives its place back, so that the same call made again stands where it stood."""
        if self._tail is place:
            self._tail = place.before
        if place.before is None:
            self._roots -= self._roots == place.rank + 1
        else:
            place.before.children -= place.before.children == place.rank + 1

    def order(self) -> Sequence[int] | None:
        """Turn ids such that each branch stands together, in the order asked for; `None`: they do already."""
        if not self._branched:
            return None
        below: dict[int | None, list[int]] = {}
        for place in sorted(self._by_turn, key=lambda place: place.number):
            below.setdefault(place.parent, []).append(place.turn_id)  # type: ignore[arg-type]
        ordered: list[int] = []
        stack = below.get(None, [])[::-1]
        while stack:
            ordered.append(turn := stack.pop())
            stack.extend(reversed(below.get(turn, ())))
        return ordered
