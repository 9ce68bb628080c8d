"""A simulated network: regions with latencies, loss, partitions, and a count of every byte.

Invariants: a message arrives once or not at all, after the latency of its way and the time that its bytes take; nothing
arrives at a node that has left or across a partition; what a run does follows from its seed. Every message counts with
`HEADER` bytes, as a datagram or a frame of a stream would.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from rollwright import rng
from rollwright.swarm.transports.base import (
    CALL_SECONDS,
    Announced,
    FetchFailed,
    FetchProblem,
    Peer,
    check_content,
)
from rollwright.swarm.transports.gossip import GossipTransport
from rollwright.swarm.transports.inbox import Held, Inbox
from rollwright.swarm.transports.peer_table import PeerTable, Rank

REGIONS = 4
LATENCIES = (
    (0.015, 0.090, 0.140, 0.220),
    (0.090, 0.020, 0.080, 0.170),
    (0.140, 0.080, 0.025, 0.110),
    (0.220, 0.170, 0.110, 0.030),
)
"""Seconds one way within and between regions: two coasts, another continent, its far end."""

JITTER = 0.5
"""Share of the latency by which a message may be later."""

BYTES_PER_SECOND = 1.25e6
"""Of a node's line: 10 Mbit/s."""

LOSS = 0.01
"""Share of messages that are lost."""

HEADER = 60
"""Bytes of IP, transport and framing for each message."""

HOSTILE_ANSWERS = 0.4
"""Share of names that hostile nodes put into a search for peers, twice their share of the swarm."""


class Traffic:
    """The bytes of one node, by kind."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def copy(self) -> "Traffic":
        copied = Traffic()
        copied.received, copied.sent = self.received.copy(), self.sent.copy()
        return copied


class SimulatedNetwork:
    """The nodes that are there, and what passes between them."""

    def __init__(self, seed: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._random = rng.generator("swarm network", seed)
        self._loop = asyncio.get_running_loop()
        self.links: dict[str, SimulatedLink] = {}
        self.names: list[str] = []
        """Of all that are there."""
        self.hostile: list[str] = []
        """Names that hostile nodes put into searches."""
        self.traffic: dict[str, Traffic] = {}
        self.parted: frozenset[int] = frozenset()
        """Regions that cannot be reached from the others."""

    def join(self, link: "SimulatedLink") -> None:
        self.links[link.peer] = link
        self.names.append(link.peer)
        self.traffic.setdefault(link.peer, Traffic())

    def leave(self, peer: str) -> None:
        if self.links.pop(peer, None) is not None:
            self.names.remove(peer)

    def are_apart(self, one: int, other: int) -> bool:
        """Whether two regions are on different sides of a partition."""
        return (one in self.parted) != (other in self.parted)

    def pass_on(self, kind: str, sender: "SimulatedLink", receiver: str, size: int) -> float | None:
        """Count a message; return its delay, or `None` if it does not arrive."""
        size += HEADER
        self.traffic[sender.peer].sent[kind] += size
        there = self.links.get(receiver)
        if there is None or self.are_apart(sender.region, there.region) or self._random.random() < LOSS:
            return None
        self.traffic[receiver].received[kind] += size
        latency = LATENCIES[sender.region][there.region]
        return latency * (1.0 + JITTER * self._random.random()) + size / BYTES_PER_SECOND

    def deliver(self, sender: "SimulatedLink", receiver: str, message: bytes) -> None:
        """Send a message that announces: a manifest, or one of the gossip."""
        delay = self.pass_on("announce", sender, receiver, len(message))
        if delay is not None and self.links[receiver].listens:
            self._loop.call_later(delay, self._arrive, receiver, message)

    def _arrive(self, receiver: str, message: bytes) -> None:
        there = self.links.get(receiver)
        if there is not None:
            there.receive(message)

    def find(self, asker: "SimulatedLink", count: int) -> list[str]:
        """Names of peers: of all that can be reached, and those that hostile nodes add."""
        drawn = self._random.sample(self.names, min(2 * count, len(self.names)))
        honest = [
            each
            for each in drawn
            if each != asker.peer and not self.are_apart(self.links[each].region, asker.region)
        ]
        return [
            self._random.choice(self.hostile)
            if self.hostile and self._random.random() < HOSTILE_ANSWERS
            else each
            for each in honest[:count]
        ]


class SimulatedLink:
    """One node's access to the network; a `transports.gossip.PeerLink`."""

    def __init__(self, network: SimulatedNetwork, peer: str, region: int) -> None:
        self.network = network
        self.peer = peer
        self.region = region
        self.held = Held(4 << 20)
        self.listens = True
        """Whether messages are handed over; if not, their bytes are counted all the same."""
        self.receive: Callable[[bytes], None] = lambda _: None
        network.join(self)

    def listen(self, receive: Callable[[bytes], None]) -> None:
        self.receive = receive

    def send(self, peer: str, message: bytes) -> None:
        self.network.deliver(self, peer, message)

    async def find(self, count: int) -> Sequence[str]:
        return self.network.find(self, count)

    async def publish(self, digest: str, content: bytes) -> None:
        self.held.add(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        there = self.network.links.get(peer)
        asked = self.network.pass_on("fetch", self, peer, len(digest) // 2)
        if there is None or asked is None:
            await asyncio.sleep(deadline)
            raise FetchFailed(FetchProblem.DEADLINE, digest)
        content = there.held.get(digest)
        answered = self.network.pass_on("content", there, self.peer, len(content or b""))
        await asyncio.sleep(deadline if answered is None else asked + answered)
        if answered is None:
            raise FetchFailed(FetchProblem.DEADLINE, digest)
        if content is None:
            raise FetchFailed(FetchProblem.ABSENT, digest)
        return check_content(content, digest, max_bytes)

    async def close(self) -> None:
        self.network.leave(self.peer)


class ArrivalTimes:
    """When manifests were announced, and when they arrived where; of some, by lot."""

    def __init__(self) -> None:
        self.announced: dict[bytes, float] = {}
        self.delays: dict[bytes, list[float]] = {}

    def note_announced(self, manifest: bytes, now: float) -> None:
        self.announced[manifest] = now
        self.delays[manifest] = []

    def note_arrived(self, manifest: bytes, now: float) -> None:
        if (began := self.announced.get(manifest)) is not None:
            self.delays[manifest].append(now - began)


class WatchedInbox(Inbox):
    """An inbox that notes arrival times."""

    def __init__(self, own: str, times: ArrivalTimes, clock: Callable[[], float]) -> None:
        super().__init__(own)
        self._times = times
        self._clock = clock

    def add(self, manifest: bytes) -> str | None:
        self._times.note_arrived(manifest, self._clock())
        return super().add(manifest)


class BroadcastTransport:
    """Full announcement on the simulated network: every manifest goes to every node, as with `announce: all`."""

    def __init__(self, link: SimulatedLink, inbox: Inbox, note_announced: Callable[[bytes], None]) -> None:
        self._link = link
        self._note_announced = note_announced
        self._network = link.network
        self._inbox = inbox
        self._peers = PeerTable(link.peer)
        self.checked = 0
        """Signatures."""
        link.listen(self._hear)

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self._note_announced(manifest)
        for peer in list(self._network.links):
            if peer != self._link.peer:
                self._network.deliver(self._link, peer, manifest)

    def _hear(self, manifest: bytes) -> None:
        self.checked += 1
        peer = self._inbox.add(manifest)
        if peer is not None:
            now = self._network.clock()
            self._peers.raise_to(Rank.SIGNED, peer, seen=now)
            self._peers.note(peer, alive=True, seen=now)

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        await self._link.publish(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        return await self._link.fetch(peer, digest, max_bytes, deadline)

    def peers(self) -> Sequence[Peer]:
        return self._peers.all()

    def prefer(self, peer: str) -> None:
        self._inbox.prefer(peer)

    async def close(self) -> None:
        await self._link.close()


class SimulatedGossip(GossipTransport):
    """Partial views on the simulated network, as with `announce: views`."""

    note_announced: Callable[[bytes], None]

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self.note_announced(manifest)
        await super().announce(manifest, deadline)

    def _hear(self, message: bytes) -> None:
        # The network delivers on the event loop, so the hand-over from another thread is not needed.
        if not self._closed:
            self._take(message)
