"""A zenoh node that announces to nobody: messages to single peers, and content by queries; the link of the gossip.

Invariants: nothing is subscribed to but this node's own messages, and no token is watched, so what arrives does not grow with
the swarm. Peers to begin with are found by their tokens below a random prefix of their names, which is widened until there
are some: about as many answers in any swarm. zenoh itself keeps a link to every peer it hears of; between thousands of nodes
its routers hold the links (`zenoh: {mode: client}`).
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from rollwright.swarm.gossip_messages import MAX_MESSAGE_BYTES
from rollwright.swarm.transports.zenoh import PEER_NAME, ZenohTransport
from rollwright.swarm.transports.zenoh_queries import ReplyThread

_DEPTH = 3
"""Hex digits of the first prefix: three stand for one in 4,096 nodes."""

_FIND_SECONDS = 2.0
"""For the tokens below one prefix to come."""

_MOST_FOUND = 4096
"""Names kept of one search; any node may declare any number of tokens."""


class ZenohLink(ZenohTransport):
    """Made by `open`."""

    def __init__(self, swarm: str, peer: str, clock: Callable[[], float]) -> None:
        super().__init__(swarm, peer, clock)
        self._root = f"{self._root}/views"
        self._outgoing = ReplyThread()
        self._lots = random.SystemRandom()
        self._receive: Callable[[bytes], None] = lambda _: None

    def listen(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive

    def send(self, peer: str, message: bytes) -> None:
        self._outgoing.send(lambda: self._put_message(peer, message))

    async def find(self, count: int) -> Sequence[str]:
        prefix = [self._lots.choice("0123456789abcdef") for _ in range(_DEPTH)]
        found: set[str] = set()
        while True:
            found |= await self._below(prefix)
            if len(found) >= count or not prefix:
                return self._lots.sample(sorted(found), min(count, len(found)))
            prefix.pop()

    async def close(self) -> None:
        self._outgoing.close()
        await super().close()

    def _declare(self, session: Any) -> list[Any]:
        token = "/".join([self._root, "alive", *self._peer[:_DEPTH], self._peer])
        return [
            session.declare_queryable(f"{self._root}/content/{self._peer}/*", self._serve, complete=True),
            session.declare_subscriber(f"{self._root}/gossip/{self._peer}", self._arrive),
            session.liveliness().declare_token(token),
        ]

    def _arrive(self, sample: Any) -> None:
        if len(sample.payload) <= MAX_MESSAGE_BYTES:  # more is not worth a copy
            self._receive(sample.payload.to_bytes())

    def _put_message(self, peer: str, message: bytes) -> None:
        import zenoh

        session = self._session
        if session is not None:
            session.put(
                f"{self._root}/gossip/{peer}", message, congestion_control=zenoh.CongestionControl.DROP
            )

    async def _below(self, prefix: Sequence[str]) -> set[str]:
        """The peers whose names begin so, as their tokens say."""
        import zenoh

        loop = asyncio.get_running_loop()
        names: set[str] = set()
        ended = asyncio.Event()

        def note(reply: Any) -> None:
            name = "" if reply.ok is None else str(reply.ok.key_expr).rpartition("/")[2]
            if PEER_NAME.match(name) and name != self._peer and len(names) < _MOST_FOUND:
                names.add(name)

        def end() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(ended.set)

        session = self._session
        if session is None:
            return set()
        key = "/".join([self._root, "alive", *prefix, "**"])
        with contextlib.suppress(zenoh.ZError, TimeoutError):
            await asyncio.to_thread(
                session.liveliness().get, key, zenoh.handlers.Callback(note, end), timeout=_FIND_SECONDS
            )
            await asyncio.wait_for(ended.wait(), 2 * _FIND_SECONDS)
        return set(names)
