"""The call tree: the position of each generation call among the decisions of an attempt, fixed before it is answered.

Always true: a node's name depends only on the names and ranks of the nodes above it, so the same call has the same name
in every attempt; a node is settled when its call has ended, however it ended; later calls skip a call that failed.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from rollwright.rng import digest
from rollwright.trajectory import Turn

_ROOT = 0
"""Name of the position above the roots."""


class CallNode:
    """Position of one generation call in the tree."""

    __slots__ = ("_waiters", "before", "children", "depth", "name", "number", "rank", "settled", "turn_id")

    def __init__(self, before: "CallNode | None", rank: int, number: int) -> None:
        self.before = before
        self.rank = rank
        """Index among the calls after the same node."""
        self.number = number
        """Index in the order of the calls."""
        self.name: int = digest(_ROOT if before is None else before.name, rank)
        self.depth: int = 1 if before is None else before.depth + 1
        self.children = 0
        """Number of calls made after it."""
        self.turn_id: int | None = None
        """Id of its turn; `None` until the call has ended, and if it failed."""
        self.settled = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def parent(self) -> int | None:
        """Id of the preceding turn: that of the nearest ancestor that has one."""
        before = self.before
        while before is not None and before.turn_id is None:
            before = before.before
        return None if before is None else before.turn_id

    async def wait(self) -> None:
        """Waits until it is settled."""
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
    """All calls of one attempt."""

    def __init__(self) -> None:
        self._roots = 0
        self._reserved = 0
        self._tail: CallNode | None = None
        """The latest call; a call without an explicit predecessor follows it."""
        self._by_turn: list[CallNode] = []
        self._branched = False

    def of(self, turn: Turn) -> CallNode:
        return self._by_turn[turn.id]

    def reserve(self, after: Turn | msgspec.UnsetType | None) -> CallNode:
        """Adds a node after `after`; by default after the latest call."""
        before = self._tail
        if after is not msgspec.UNSET:
            before = None if after is None else self._by_turn[after.id]
        if before is None:
            rank = self._roots
            self._roots += 1
        else:
            rank = before.children
            before.children += 1
        node = CallNode(before, rank, self._reserved)
        self._reserved += 1
        self._branched |= rank > 0
        self._tail = node
        return node

    def commit(self, node: CallNode, turn: Turn) -> None:
        node.turn_id = turn.id
        self._by_turn.append(node)

    def settle(self, node: CallNode) -> None:
        node.settle()
        if node.turn_id is None:
            self._forget(node)

    def _forget(self, node: CallNode) -> None:
        """Frees the position of a failed call, so that a retry of the call has the same name."""
        if self._tail is node:
            self._tail = node.before
        if node.before is None:
            self._roots -= self._roots == node.rank + 1
        else:
            node.before.children -= node.before.children == node.rank + 1

    def order(self) -> Sequence[int] | None:
        """Turn ids in depth-first order, siblings in call order; `None`: they are in that order already."""
        if not self._branched:
            return None
        below: dict[int | None, list[int]] = {}
        for node in sorted(self._by_turn, key=lambda node: node.number):
            below.setdefault(node.parent, []).append(node.turn_id)  # type: ignore[arg-type]
        ordered: list[int] = []
        stack = below.get(None, [])[::-1]
        while stack:
            ordered.append(turn := stack.pop())
            stack.extend(reversed(below.get(turn, ())))
        return ordered
