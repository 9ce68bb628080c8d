"""A transport that announces over a partial view: the async shell of `rollwright.swarm.gossip` over a link.

Invariants: a node's traffic does not grow with the swarm (`gossip`); content is fetched from its owner as with every
transport; sending waits for nobody. The messages that wait to be read are bounded: the oldest are dropped.
"""

import asyncio
import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rollwright.swarm.gossip import Gossip, Outgoing
from rollwright.swarm.identity import Identity
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import open_signed
from rollwright.swarm.transports.base import CALL_SECONDS, Announced, Peer, check_manifest
from rollwright.swarm.transports.inbox import Inbox
from rollwright.swarm.transports.peer_table import PeerTable, Rank

FEW = 4
"""Members below which a node asks the link for peers: a view this small may be cut off."""

FOUND = 8
"""Peers asked of the link at once."""

ALIVE_INTERVALS = 24
"""Intervals for which a peer counts as alive after a sign of life; a peer is heard of by way of others, once in a round."""

_WAITING = 512
"""Messages that wait for the event loop."""


class PeerLink(Protocol):
    """What the gossip needs of a network: messages to one peer, and content by its digest."""

    def listen(self, receive: Callable[[bytes], None]) -> None:
        """Call `receive` for each message that arrives; on any thread."""
        ...

    def send(self, peer: str, message: bytes) -> None:
        """Send without waiting; what cannot be delivered is lost."""
        ...

    async def find(self, count: int) -> Sequence[str]:
        """Names of about so many peers to begin with, drawn from all that there are; may be empty, and may be lies."""
        ...

    async def publish(self, digest: str, content: bytes) -> None: ...

    async def fetch(
        self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS
    ) -> bytes: ...

    async def close(self) -> None: ...


class GossipTransport:
    """Made by `start`."""

    def __init__(
        self,
        identity: Identity,
        swarm: SwarmConfig,
        link: PeerLink,
        *,
        clock: Callable[[], float] = time.time,
        entropy: bytes | None = None,
        gossip_type: type[Gossip] = Gossip,
    ) -> None:
        """`entropy`: unset: the system's. `gossip_type`: lets a simulation have nodes that break the rules."""
        entropy = entropy or os.urandom(16)
        self._interval = swarm.communication.gossip_interval
        self.gossip = gossip_type(
            identity,
            swarm.name,
            interval=self._interval,
            hold_seconds=swarm.max_clock_skew,
            max_clock_skew=swarm.max_clock_skew,
            entropy=entropy,
        )
        self._link = link
        self._clock = clock
        self._inbox = Inbox(identity.peer)
        self._peers = PeerTable(identity.peer)
        self._waiting: deque[bytes] = deque(maxlen=_WAITING)
        self._lock = threading.Lock()
        self._reading = False
        """Whether the event loop will read the waiting messages."""
        self._jitter = random.Random(entropy)
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        identity: Identity,
        swarm: SwarmConfig,
        link: PeerLink,
        *,
        clock: Callable[[], float] = time.time,
        entropy: bytes | None = None,
    ) -> "GossipTransport":
        """Join over a link that is open."""
        made = cls(identity, swarm, link, clock=clock, entropy=entropy)
        made.join()
        return made

    def join(self, inbox: Inbox | None = None) -> None:
        """Begin to gossip. `inbox`: for arriving manifests, in place of its own."""
        self._inbox = inbox or self._inbox
        self._link.listen(self._hear)
        self._ticking = asyncio.create_task(self._tick(), name="gossip")

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self.gossip.announce(check_manifest(manifest), self._clock())

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        counts, self.gossip.counts = self.gossip.counts, type(self.gossip.counts)()
        for reason, count in counts.items():
            self._inbox.pass_over(reason, count)
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        await self._link.publish(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        return await self._link.fetch(peer, digest, max_bytes, deadline)

    def peers(self) -> Sequence[Peer]:
        oldest = self._clock() - ALIVE_INTERVALS * self._interval
        return [each._replace(alive=each.seen >= oldest) for each in self._peers.all()]

    def prefer(self, peer: str) -> None:
        self._peers.raise_to(Rank.PROVEN, peer, seen=self._clock())
        self._inbox.prefer(peer)
        self.gossip.prefer(peer, self._clock())

    async def close(self) -> None:
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self._link.close()

    async def _tick(self) -> None:
        while True:
            if len(self.gossip.view) < FEW:
                self._send(self.gossip.meet(await self._link.find(FOUND), self._clock()))
            self._send(self.gossip.tick(self._clock()))
            # Nodes that started together must not speak together for ever.
            await asyncio.sleep(self._interval * self._jitter.uniform(0.8, 1.2))

    def _send(self, messages: Iterable[Outgoing]) -> None:
        for each in messages:
            self._link.send(each.peer, each.data)

    def _hear(self, message: bytes) -> None:
        """Called on any thread."""
        with self._lock:
            self._waiting.append(message)
            if self._reading:
                return
            self._reading = True
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._read)

    def _read(self) -> None:
        """Read one message: checking signatures takes some tenths of a millisecond, and the node has other work."""
        with self._lock:
            self._reading = bool(self._waiting) and not self._closed
            if not self._reading:
                return
            message = self._waiting.popleft()
        self._take(message)
        self._loop.call_soon(self._read)

    def _take(self, message: bytes) -> None:
        now = self._clock()
        self._send(self.gossip.receive(message, now))
        for manifest in self.gossip.take_arrived():
            self._inbox.add(manifest)
            peer = open_signed(manifest).peer
            self._peers.raise_to(Rank.SIGNED, peer, seen=now)
            self._peers.note(peer, alive=True, seen=now)
