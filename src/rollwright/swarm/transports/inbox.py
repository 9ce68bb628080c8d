"""What every transport keeps in memory: manifests that came and were not read, and content that others may fetch.

True of both: they hold a bounded number of bytes. Manifests are kept apart by who signed them, so a peer that floods
pushes out its own alone, and among those the oldest by its own numbers: whoever repeats what a peer signed long ago
pushes nothing out. When too many have signed, one goes by lot, never one that is preferred. What nobody signed shares
one small place, kept only to be counted. Safe to use from threads.
"""

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.signed import open_signed
from rollwright.swarm.transports.base import MAX_CONTENT_BYTES, MAX_MANIFEST_BYTES, Announced, PassedOver
from rollwright.swarm.transports.peer_table import MAX_PEERS, LotSet

MAX_PER_PEER = 64
"""Unread manifests of one peer; a node announces a handful in a round."""

HELD_BYTES = 64 << 20
"""Content that a node holds for others: some 2,500 groups, the last few hundred rounds."""

_UNSIGNED = ""


class _Unread(NamedTuple):
    number: int
    """In which order it came."""
    sequence: int
    """The peer's own number; of what nobody signed, the order in which it came."""
    manifest: bytes


class Inbox:
    """Manifests that came, in order, until they are read."""

    def __init__(self, own: str, max_per_peer: int = MAX_PER_PEER, max_peers: int = MAX_PEERS) -> None:
        """`own`: the peer whose manifests are not of interest here. With the limits as they are, at most 256 MiB, reached
        only by two thousand keys that flood."""
        self._own = own
        self._max_per_peer = max_per_peer
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._lanes: dict[str, list[_Unread]] = {}
        self._strangers = LotSet()
        """Lanes of those that are not preferred."""
        self._preferred: OrderedDict[str, None] = OrderedDict()
        self._count = 0
        self._missed = 0
        self._passed_over: Counter[str] = Counter()

    def add(self, manifest: bytes) -> str | None:
        """Keeps it until it is read; who signed it, or `None`."""
        if len(manifest) > MAX_MANIFEST_BYTES:
            manifest = manifest[:MAX_MANIFEST_BYTES]  # enough to be refused and counted
        try:
            signed = open_signed(manifest)
        except PeerRefused:
            self._put(_UNSIGNED, None, manifest)
            return None
        if signed.peer != self._own:
            # What a peer signed in another swarm is not to push out what it signed in this one.
            self._put(f"{signed.peer}/{signed.swarm}", signed.sequence, manifest)
        return signed.peer

    def prefer(self, peer: str) -> None:
        """However many others come, this peer keeps its place."""
        with self._lock:
            self._preferred[peer] = None
            self._preferred.move_to_end(peer)
            if len(self._preferred) > self._max_peers:
                self._preferred.popitem(last=False)
            for lane in [each for each in self._lanes if each.startswith(f"{peer}/")]:
                self._strangers.discard(lane)

    def pass_over(self, reason: str, count: int = 1) -> None:
        """Counts what was not used, for the next reading."""
        with self._lock:
            self._passed_over[reason] += count

    def read(self, since: int) -> Announced:
        """All behind the cursor; what lies before it was read, and is forgotten."""
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
                return  # it came by two ways
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
    """Content by digest; the oldest goes when there is no more room."""

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
