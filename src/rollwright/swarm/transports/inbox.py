"""The memory of a transport: unread manifests, and content that peers may fetch.

Invariants: both are bounded in bytes. Manifests are kept in one lane per signer, so a flooding peer pushes out only its own
manifests, the oldest by sequence number first: repeating old signed manifests pushes out nothing. When there are too many
signers, a random one that is not preferred is dropped. Unsigned input shares one small lane and is kept only to be counted.
Safe to use from threads.
"""

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.signed import open_signed
from rollwright.swarm.transports.base import MAX_CONTENT_BYTES, MAX_MANIFEST_BYTES, Announced, PassedOver
from rollwright.swarm.transports.peer_table import MAX_PEERS, RandomSet

MAX_PER_PEER = 64
"""Unread manifests of one peer; a node announces a handful in a round."""

HELD_BYTES = 64 << 20
"""Content held for peers: some 2,500 groups, the last few hundred rounds."""

_UNSIGNED = ""


class _Unread(NamedTuple):
    number: int
    """Order of arrival."""
    sequence: int
    """The peer's sequence number; of unsigned input, the order of arrival."""
    manifest: bytes


class Inbox:
    """Manifests in order of arrival, until they are read."""

    def __init__(self, own: str, max_per_peer: int = MAX_PER_PEER, max_peers: int = MAX_PEERS) -> None:
        """`own`: the peer whose manifests are ignored. The default limits allow at most 256 MiB, reached only by two thousand
        flooding keys."""
        self._own = own
        self._max_per_peer = max_per_peer
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._lanes: dict[str, list[_Unread]] = {}
        self._strangers = RandomSet()
        """Lanes of peers that are not preferred."""
        self._preferred: OrderedDict[str, None] = OrderedDict()
        self._count = 0
        self._missed = 0
        self._passed_over: Counter[str] = Counter()

    def add(self, manifest: bytes) -> str | None:
        """Keep a manifest until it is read; return its signer, or `None`."""
        if len(manifest) > MAX_MANIFEST_BYTES:
            manifest = manifest[:MAX_MANIFEST_BYTES]  # enough to be refused and counted
        try:
            signed = open_signed(manifest)
        except PeerRefused:
            self._put(_UNSIGNED, None, manifest)
            return None
        if signed.peer != self._own:
            # A peer's manifests of another swarm must not push out those of this one.
            self._put(f"{signed.peer}/{signed.swarm}", signed.sequence, manifest)
        return signed.peer

    def prefer(self, peer: str) -> None:
        """Protect a peer's lane from being dropped."""
        with self._lock:
            self._preferred[peer] = None
            self._preferred.move_to_end(peer)
            if len(self._preferred) > self._max_peers:
                self._preferred.popitem(last=False)
            for lane in [each for each in self._lanes if each.startswith(f"{peer}/")]:
                self._strangers.discard(lane)

    def pass_over(self, reason: str, count: int = 1) -> None:
        """Count ignored input, for the next `read`."""
        with self._lock:
            self._passed_over[reason] += count

    def read(self, since: int) -> Announced:
        """Return all manifests after the cursor; forget those before it."""
        with self._lock:
            for name, lane in list(self._lanes.items()):
                lane[:] = [each for each in lane if each.number > since]
                if not lane:
                    self._drop(name)
            unread = sorted(each for lane in self._lanes.values() for each in lane)
            missed, self._missed = self._missed, 0
            passed_over, self._passed_over = self._passed_over, Counter()
            return Announced([each.manifest for each in unread], self._count, missed, dict(passed_over))

    def _put(self, name: str, sequence: int | None, manifest: bytes) -> None:
        with self._lock:
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = []
                if name != _UNSIGNED and name.partition("/")[0] not in self._preferred:
                    self._strangers.add(name)
            elif any(manifest == each.manifest for each in lane):
                return  # it arrived on two paths
            self._count += 1
            lane.append(_Unread(self._count, self._count if sequence is None else sequence, manifest))
            if len(lane) > self._max_per_peer:
                lane.remove(min(lane, key=lambda each: each.sequence))
                if name == _UNSIGNED:
                    self._passed_over[PassedOver.UNSIGNED] += 1
                else:
                    self._missed += 1
            if len(self._strangers) > self._max_peers:
                crowded_out = self._strangers.draw()
                self._missed += len(self._lanes[crowded_out])
                self._drop(crowded_out)

    def _drop(self, name: str) -> None:
        del self._lanes[name]
        self._strangers.discard(name)


class Held:
    """Content by digest; the oldest is dropped when there is no room."""

    def __init__(self, limit: int = HELD_BYTES) -> None:
        self._limit = max(limit, MAX_CONTENT_BYTES)
        self._lock = threading.Lock()
        self._content: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def add(self, digest: str, content: bytes) -> None:
        with self._lock:
            if digest in self._content:
                return
            self._content[digest] = content
            self._bytes += len(content)
            while self._bytes > self._limit:
                _, gone = self._content.popitem(last=False)
                self._bytes -= len(gone)

    def get(self, digest: str) -> bytes | None:
        with self._lock:
            return self._content.get(digest)
