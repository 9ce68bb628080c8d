"""A swarm within one process, for tests and benchmarks.

Behaves like a network without delays: late joiners get the last manifests of every peer; a peer whose link is cut neither
receives nor sends until it is healed, and has then missed the announcements of the meantime.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from rollwright.swarm.transports.base import (
    CALL_SECONDS,
    Announced,
    FetchFailed,
    FetchProblem,
    Peer,
    check_content,
    check_manifest,
)
from rollwright.swarm.transports.inbox import MAX_PER_PEER, Held, Inbox


class MemorySwarm:
    """The network that its transports share."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.members: dict[str, MemoryTransport] = {}
        self._cut: set[str] = set()

    def join(self, peer: str) -> "MemoryTransport":
        """The transport of a node; a node that left may join again."""
        joined = MemoryTransport(self, peer)
        for other in self.reachable(peer):
            for manifest in other.recent:
                joined.inbox.add(manifest)
        self.members[peer] = joined
        return joined

    def cut(self, peer: str) -> None:
        """Cut a node's link."""
        self._cut.add(peer)

    def heal(self, peer: str) -> None:
        self._cut.discard(peer)

    def reachable(self, peer: str) -> list["MemoryTransport"]:
        """The transports that `peer` can reach now."""
        if peer in self._cut:
            return []
        return [each for name, each in sorted(self.members.items()) if name != peer and name not in self._cut]


class MemoryTransport:
    def __init__(self, swarm: MemorySwarm, peer: str) -> None:
        self._swarm = swarm
        self._peer = peer
        self.inbox = Inbox(peer)
        self.held = Held()
        self.recent: deque[bytes] = deque(maxlen=MAX_PER_PEER)
        """Manifests for nodes that join later."""
        self._seen: dict[str, float] = {}

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        self.recent.append(check_manifest(manifest))
        for other in self._swarm.reachable(self._peer):
            other.inbox.add(manifest)

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        return self.inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        self.held.add(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        holder = {each.peer: each for each in self._swarm.reachable(self._peer)}.get(peer)
        if holder is None:
            raise FetchFailed(
                FetchProblem.DEADLINE, digest
            )  # a network would take the whole deadline to say so
        content = holder.held.get(digest)
        if content is None:
            raise FetchFailed(FetchProblem.ABSENT, digest)
        return check_content(content, digest, max_bytes)

    @property
    def peer(self) -> str:
        return self._peer

    def peers(self) -> Sequence[Peer]:
        alive = {each.peer for each in self._swarm.reachable(self._peer)}
        now = self._swarm.clock()
        self._seen.update(dict.fromkeys(alive, now))
        return [Peer(each, each in alive, seen) for each, seen in sorted(self._seen.items())]

    def prefer(self, peer: str) -> None:
        self.inbox.prefer(peer)

    async def close(self) -> None:
        if self._swarm.members.get(self._peer) is self:
            del self._swarm.members[self._peer]
