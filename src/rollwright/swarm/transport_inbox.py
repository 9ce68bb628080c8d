"""What every transport keeps in memory: manifests that came and were not read, and content that others may fetch.

True of both: they hold a bounded number of bytes. Manifests are kept apart by who signed them, so a peer that floods
pushes out its own alone; what nobody signed shares one small place, kept only to be counted. Safe to use from threads.
"""

import threading
from collections import OrderedDict, deque

from rollwright.swarm.envelope import unseal
from rollwright.swarm.refusals import Refused
from rollwright.swarm.transport import MAX_CONTENT_BYTES, MAX_MANIFEST_BYTES, Announced

MAX_PER_PEER = 64
"""Unread manifests of one peer; a node announces a handful in a round."""

MAX_PEERS = 1024
"""Peers with unread manifests; with the above, at most 128 MiB, reached only by a thousand keys that flood."""

HELD_BYTES = 64 << 20
"""Content that a node holds for others: some 2,500 groups, the last few hundred rounds."""

_UNSIGNED = ""


class Inbox:
    """Manifests that came, in order, until they are read."""

    def __init__(self, own: str, max_per_peer: int = MAX_PER_PEER, max_peers: int = MAX_PEERS) -> None:
        """`own`: the peer whose manifests are not of interest here."""
        self._own = own
        self._max_per_peer = max_per_peer
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._lanes: dict[str, deque[tuple[int, bytes]]] = {}
        self._count = 0
        self._missed = 0

    def add(self, manifest: bytes) -> None:
        if len(manifest) > MAX_MANIFEST_BYTES:
            manifest = manifest[:MAX_MANIFEST_BYTES]  # enough to be refused and counted
        try:
            sender = unseal(manifest).peer
        except Refused:
            sender = _UNSIGNED
        if sender == self._own:
            return
        with self._lock:
            if sender not in self._lanes and len(self._lanes) >= self._max_peers:
                self._missed += 1
                return
            lane = self._lanes.setdefault(sender, deque())
            if any(manifest == held for _, held in lane):
                return  # it came by two ways
            if len(lane) >= self._max_per_peer:
                lane.popleft()
                self._missed += 1
            self._count += 1
            lane.append((self._count, manifest))

    def read(self, since: int) -> Announced:
        """All behind the cursor; what lies before it was read, and is forgotten."""
        with self._lock:
            for sender, lane in list(self._lanes.items()):
                while lane and lane[0][0] <= since:
                    lane.popleft()
                if not lane:
                    del self._lanes[sender]
            unread = sorted(each for lane in self._lanes.values() for each in lane)
            missed, self._missed = self._missed, 0
            return Announced([manifest for _, manifest in unread], self._count, missed)


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
