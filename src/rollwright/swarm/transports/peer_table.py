"""A bounded table of peers that strangers cannot fill.

Invariants: peers are held in three ranks with separate limits, so a flood in one rank pushes no peer out of another. Being
heard of costs nothing and proves nothing; signing costs a key; an accepted group costs the work of playing it. When a rank
is full, a random peer of it is dropped, unreachable ones first: no peer can choose which. Safe to use from threads.
"""

import random
import threading
from collections.abc import Iterator
from enum import IntEnum

from rollwright.swarm.transports.base import Peer

MAX_PEERS = 1024
"""Peers of one rank; some 300 KB."""

_DRAWN = 8
"""Peers drawn when a rank is full; the first unreachable one is dropped. Constant, however large the table is."""


class Rank(IntEnum):
    """How well a peer is known."""

    HEARD = 0
    """Some node claims that it exists."""
    SIGNED = 1
    """A message signed with its key has arrived."""
    PROVEN = 2
    """A group of it was accepted here."""


class RandomSet:
    """A set with a random draw in constant time."""

    def __init__(self, lots: random.Random | None = None) -> None:
        """`lots`: of the draws; unset: those of the system, which nobody can foresee."""
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self._lots = lots or random.SystemRandom()

    def add(self, name: str) -> None:
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)

    def discard(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:  # the last one takes its place
            self._names[place] = last
            self._places[last] = place

    def draw(self) -> str:
        return self._lots.choice(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __len__(self) -> int:
        return len(self._names)


class PeerTable:
    def __init__(self, own: str, limit: int = MAX_PEERS) -> None:
        self._own = own
        self._limit = limit
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._ranks: dict[str, Rank] = {}
        self._members = {rank: RandomSet() for rank in Rank}

    def note(self, peer: str, *, alive: bool, seen: float) -> None:
        """It was heard of."""
        with self._lock:
            if peer == self._own:
                return
            if peer not in self._ranks:
                self._enter(peer, Rank.HEARD)
            if peer in self._ranks:
                self._peers[peer] = Peer(peer, alive, seen, self._ranks[peer] > Rank.HEARD)

    def raise_to(self, rank: Rank, peer: str, *, seen: float) -> bool:
        """Raise a peer to at least this rank; return whether it was unknown."""
        with self._lock:
            if peer == self._own:
                return False
            before = self._ranks.get(peer)
            if before is not None and before >= rank:
                return False
            known = self._peers.get(peer, Peer(peer, False, seen))
            if before is not None:
                self._leave(peer)
            self._enter(peer, rank)
            if peer in self._ranks:
                self._peers[peer] = known._replace(verified=rank > Rank.HEARD)
            return before is None

    def rank(self, peer: str) -> Rank | None:
        return self._ranks.get(peer)

    def is_alive(self, peer: str) -> bool:
        known = self._peers.get(peer)
        return known is not None and known.alive

    def of(self, rank: Rank) -> list[str]:
        """The peers of one rank, unordered."""
        with self._lock:
            return list(self._members[rank])

    def all(self) -> list[Peer]:
        """Sorted by id."""
        with self._lock:
            return [each for _, each in sorted(self._peers.items())]

    def __contains__(self, peer: str) -> bool:
        return peer in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def _enter(self, peer: str, rank: Rank) -> None:
        members = self._members[rank]
        members.add(peer)
        self._ranks[peer] = rank
        if len(members) > self._limit:
            drawn = [members.draw() for _ in range(_DRAWN)]
            self._leave(next((each for each in drawn if not self.is_alive(each)), drawn[0]))

    def _leave(self, peer: str) -> None:
        self._members[self._ranks.pop(peer)].discard(peer)
        self._peers.pop(peer, None)
