"""Partial views: the few peers that a node gossips with, out of a swarm of any size.

Pure: no clock, no network. Invariants:
- Memory is bounded: `PLACES` drawn members, `KEPT` proven ones, a reserve of `RESERVE`.
- A place belongs to the peer with the lowest lot for it, of all that were heard of (min-wise sampling, as in Brahms). The lots
  are keyed by a secret of the node. So being named often or first gains nothing, and a share of the keys gets that share of
  the places.
- Peers that one source named hold at most `NAMED_BY_ONE` places; a peer that wrote itself does not count for its source.
- A proven peer (a group of it was accepted here, which cost it the work of playing) has a place of its own, which no stranger
  takes. Half of all draws are of proven peers, and only they are believed about others once a node has `ENOUGH` members: those
  who lie about whom they know name each other, and would soon be all that is heard of.
- A member that does not answer `UNANSWERED` times in a row leaves its place to the reserve. It returns when a record of it is
  younger than its silence. Reserve members are tried now and then: after a partition, both sides find each other again.
"""

import random
import struct
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from rollwright.swarm.transports.peer_table import RandomSet

PLACES = 16
"""Drawn members. With a fifth of all peers malicious, all 16 are so once in 10^11 draws."""

KEPT = 16
"""Places of proven peers, the most recent ones."""

ENOUGH = 4
"""Members from which on strangers are not believed about others."""

RESERVE = 128
"""Peers remembered beside the members, by lot: enough for some of every part of a partitioned swarm."""

MOST_KNOWN = PLACES + KEPT + RESERVE

NAMED_BY_ONE = 4
"""Places whose peers one source named: a quarter, so a newcomer's first contact cannot fill its view."""

UNANSWERED = 2
"""Messages without an answer: one may be lost, or its answer late."""

FROM_RESERVE = 0.25
"""Share of draws that try a peer of the reserve."""

BANISHED_SECONDS = 600.0
"""For which a peer that offers what it does not deliver is not spoken to."""

_SILENT = 512
"""Silent peers that are remembered; the oldest are forgotten."""

_lots = struct.Struct(f">{PLACES}I")


class PeerView:
    def __init__(self, own: str, secret: bytes) -> None:
        """`secret`: up to 64 bytes that no other node knows; decides every draw."""
        self._own = own
        self._secret = secret
        self._random = random.Random(blake2b(b"view", key=secret).digest())
        self._places: list[str | None] = [None] * PLACES
        self._lots: list[int] = [0] * PLACES
        """The lot of each place's peer."""
        self._members: dict[str, int] = {}
        """Peers with a place, drawn or kept, with their messages in a row without an answer."""
        self._sources: dict[str, str] = {}
        """Who named a member or a peer of the reserve: the peer itself, if it wrote."""
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._reserve = RandomSet(self._random)
        self._silent: OrderedDict[str, float] = OrderedDict()
        """Peers that did not answer, with the time; of banished ones, the time until which they are."""

    def is_wanted(self, peer: str, named_by: str, time: float) -> bool:
        """Whether the peer would get a place, or its record tells news; `time`: of the record. Only then is its signature
        worth a check."""
        if peer == self._own or peer in self._members:
            return False
        if time <= self._silent.get(peer, float("-inf")):
            return False
        if self._winnable(peer) and (named_by == peer or self._named_by(named_by) < NAMED_BY_ONE):
            return True
        return peer not in self._reserve and len(self._reserve) < RESERVE

    def add(self, peer: str, named_by: str) -> None:
        """Give a verified peer the places that it wins; the displaced peers and those without a place go to the reserve."""
        if peer == self._own:
            return
        self._silent.pop(peer, None)
        if named_by == peer or peer not in self._sources:
            self._sources[peer] = named_by
        if peer in self._members:
            return
        won = self._winnable(peer) if self._may_enter(peer) else []
        if not won:
            self._to_reserve(peer)
            return
        self._reserve.discard(peer)
        self._members[peer] = 0
        displaced = set()
        lots = self._lots_of(peer)
        for place in won:
            displaced.add(self._places[place])
            self._places[place], self._lots[place] = peer, lots[place]
        for each in displaced - {None} - set(self._places) - self._kept.keys():
            assert each is not None
            del self._members[each]
            self._to_reserve(each)

    def prefer(self, peer: str) -> None:
        """Keep a place for a proven peer; the one that was proven longest ago loses its."""
        if peer == self._own:
            return
        self._kept[peer] = None
        self._kept.move_to_end(peer)
        self._reserve.discard(peer)
        self._members.setdefault(peer, 0)
        self._sources[peer] = peer
        if len(self._kept) > KEPT:
            gone, _ = self._kept.popitem(last=False)
            if gone not in self._places:
                del self._members[gone]
                self._to_reserve(gone)

    def believes(self, source: str) -> bool:
        """Whether what this source says of others is taken."""
        return source in self._kept or len(self._members) < ENOUGH

    def is_proven(self, peer: str) -> bool:
        return peer in self._kept

    def banish(self, peer: str, now: float) -> None:
        """Forget a peer, and do not take it back for a while."""
        if peer in self._members:
            self._remove(peer, now)
        self._reserve.discard(peer)
        self._sources.pop(peer, None)
        self._note_silent(peer, now + BANISHED_SECONDS)

    def is_banished(self, peer: str, now: float) -> bool:
        return self._silent.get(peer, now) > now

    def note_answer(self, peer: str) -> None:
        if peer in self._members:
            self._members[peer] = 0
        self.add(peer, peer)  # a peer of the reserve is there again

    def note_silence(self, peer: str, now: float) -> None:
        """Count a message without an answer, or with a useless one."""
        if peer in self._members:
            self._members[peer] += 1
            if self._members[peer] >= UNANSWERED:
                self._remove(peer, now)

    def draw(self, count: int) -> list[str]:
        """Peers to gossip with: proven and other members in turn, now and then one of the reserve instead."""
        kept = self._shuffled(self._kept)
        others = self._shuffled(self._members.keys() - self._kept.keys())
        drawn: list[str] = []
        for number in range(count):
            if len(self._reserve) and (not self._members or self._random.random() < FROM_RESERVE):
                tried = self._reserve.draw()
                if tried not in drawn:
                    drawn.append(tried)
                    continue
            first, second = (kept, others) if number % 2 == 0 else (others, kept)
            if first or second:
                drawn.append((first or second).pop())
        return drawn

    def sample(self, count: int) -> list[str]:
        """Peers to tell others of: proven ones and, for more variety, as many others."""
        kept, others = self._shuffled(self._kept), self._shuffled(self._members.keys() - self._kept.keys())
        reserve = (self._reserve.draw() for _ in range(min(count, len(self._reserve))))
        return list(dict.fromkeys([*kept[:count], *others[: count // 2], *reserve]))

    def _shuffled(self, peers: Iterable[str]) -> list[str]:
        ordered = sorted(peers)
        self._random.shuffle(ordered)
        return ordered

    @property
    def members(self) -> set[str]:
        return set(self._members)

    def __contains__(self, peer: str) -> bool:
        return peer in self._members or peer in self._reserve

    def __len__(self) -> int:
        return len(self._members)

    def _lots_of(self, peer: str) -> tuple[int, ...]:
        return _lots.unpack(blake2b(peer.encode(), key=self._secret, digest_size=_lots.size).digest())

    def _winnable(self, peer: str) -> list[int]:
        lots = self._lots_of(peer)
        return [
            place for place in range(PLACES) if self._places[place] is None or lots[place] < self._lots[place]
        ]

    def _may_enter(self, peer: str) -> bool:
        source = self._sources[peer]
        return source == peer or self._named_by(source) < NAMED_BY_ONE

    def _named_by(self, source: str) -> int:
        """Members that this source named, itself not counted."""
        return sum(self._sources[each] == source for each in self._members if each != source)

    def _remove(self, peer: str, now: float) -> None:
        del self._members[peer]
        self._kept.pop(peer, None)
        self._note_silent(peer, now)
        answering = sorted(each for each in self._reserve if each not in self._silent)
        self._to_reserve(peer)
        for place in [place for place, each in enumerate(self._places) if each == peer]:
            # The next lowest lot, as if the silent peer had never been heard of.
            self._places[place] = None
            free = [each for each in answering if each in self._members or self._may_enter(each)]
            best = min(free, key=lambda each: self._lots_of(each)[place], default=None)
            if best is not None:
                self._places[place], self._lots[place] = best, self._lots_of(best)[place]
                self._members.setdefault(best, 0)
                self._reserve.discard(best)

    def _note_silent(self, peer: str, until: float) -> None:
        self._silent[peer] = until
        if len(self._silent) > _SILENT:
            self._silent.popitem(last=False)

    def _to_reserve(self, peer: str) -> None:
        self._reserve.add(peer)
        if len(self._reserve) > RESERVE:
            gone = self._reserve.draw()
            self._reserve.discard(gone)
            self._sources.pop(gone, None)
