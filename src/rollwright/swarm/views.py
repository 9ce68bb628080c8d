"""Partial views: the few peers that a node gossips with, out of a swarm of any size.

Pure: no clock, no network. Invariants:
- Memory is bounded: `PLACES` drawn members, `KEPT` proven ones, a reserve of `RESERVE`. Half of all draws are of proven peers.
- Being heard of leads to the reserve only; a place has to be earned. A *proven* peer made a group that was accepted here, which
  cost it the work of playing. A *carrier* passed on the manifest of such a group, in an exchange that this node opened. So who
  opens many exchanges, or is named often, gains nothing; who passes on nothing, or only what does not hold up, gets no place.
- The `PLACES` of carriers are drawn: each belongs to the carrier with the lowest lot for it, of all that there were (min-wise
  sampling, as in Brahms). The lots are keyed by a secret of the node, so no peer can choose whose view it enters.
- Only members are believed about others: those who lie about whom they know name each other, and would soon be all that is heard
  of. Peers that one source named hold at most `NAMED_BY_ONE` places of the reserve, and peers that are known only because they
  wrote have a part of it of their own (`CALLERS`).
- A member that does not answer `UNANSWERED` times in a row leaves its place to the reserve. It returns when it does its work
  again. Reserve members are tried now and then: after a partition, both sides find each other again.
"""

import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from rollwright.swarm.transports.peer_table import RandomSet

PLACES = 16
"""Drawn members: carriers. With a fifth of them malicious, all 16 are so once in 10^11 draws."""

KEPT = 16
"""Places of proven peers, the most recent ones."""

RESERVE = 128
"""Peers remembered beside the members, by lot: enough for some of every part of a partitioned swarm."""

CALLERS = 32
"""Of the reserve: peers that wrote and were named by nobody. Enough for newcomers, and hostile peers that write several times as
often as honest ones are no more than this part of what is tried."""

MOST_KNOWN = PLACES + KEPT + RESERVE

NAMED_BY_ONE = 8
"""Peers of the reserve that one source named: who has thousands of accomplices to name gets no more of them tried than an honest
peer that names the few members of its view."""

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
        """Who named a peer of the reserve."""
        self._named: Counter[str] = Counter()
        """Peers of the reserve that each source named."""
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._reserve = RandomSet(self._random)
        """Peers that others named, or that were members."""
        self._callers = RandomSet(self._random)
        """Peers that wrote, of which nothing else is known."""
        self._silent: OrderedDict[str, float] = OrderedDict()
        """Peers that did not answer, with the time; of banished ones, the time until which they are."""

    def is_wanted(self, peer: str, named_by: str, time: float) -> bool:
        """Whether the peer would get a place if it were accepted, or is one more for the reserve; `time`: of the record. Only then
        is its signature worth a check."""
        if peer == self._own or peer in self._members or peer in self._reserve:
            return False
        if time <= self._silent.get(peer, float("-inf")):
            return False
        if self._named[named_by] >= NAMED_BY_ONE:
            return False
        return len(self._reserve) < RESERVE - CALLERS or bool(self._winnable(peer))

    def add(self, peer: str, named_by: str) -> None:
        """Remember a verified peer, to be tried."""
        if peer == self._own:
            return
        self._silent.pop(peer, None)
        if peer in self._members or peer in self._reserve:
            return
        if named_by == peer:
            self._callers.add(peer)
            if len(self._callers) > CALLERS:
                self._callers.discard(self._callers.draw())
        else:
            self._callers.discard(peer)
            self._to_reserve(peer, named_by)

    def accept(self, peer: str, now: float) -> None:
        """Give a carrier the places that it wins; the displaced ones go to the reserve."""
        if peer == self._own or peer in self._places or self.is_banished(peer, now):
            return
        won = self._winnable(peer)
        if not won:
            if peer not in self._members:
                self._to_reserve(peer)
            return
        self._forget_reserve(peer)
        self._members.setdefault(peer, 0)
        displaced = set()
        lots = self._lots_of(peer)
        for place in won:
            displaced.add(self._places[place])
            self._places[place], self._lots[place] = peer, lots[place]
        for each in displaced - {None} - set(self._places) - self._kept.keys():
            assert each is not None
            del self._members[each]
            self._to_reserve(each)

    def prefer(self, peer: str, now: float) -> None:
        """Keep a place for a proven peer; the one that was proven longest ago loses its. A banished peer gets none: good groups
        do not make up for what it does to others' manifests."""
        if peer == self._own or self.is_banished(peer, now):
            return
        self._kept[peer] = None
        self._kept.move_to_end(peer)
        self._forget_reserve(peer)
        self._members.setdefault(peer, 0)
        if len(self._kept) > KEPT:
            gone, _ = self._kept.popitem(last=False)
            if gone not in self._places:
                del self._members[gone]
                self._to_reserve(gone)

    def believes(self, source: str) -> bool:
        """Whether what this source says of others is taken."""
        return source in self._members

    def withdraw(self, peer: str) -> None:
        """Take the places of a carrier, not that of a proven peer; it may earn them again."""
        if peer not in self._places:
            return
        self._places = [None if each == peer else each for each in self._places]
        if peer not in self._kept:
            del self._members[peer]
            self._to_reserve(peer)

    def demote(self, peer: str, now: float) -> None:
        """Take a peer's places, and try it no more until it is heard of again."""
        if peer in self._members:
            self._remove(peer, now)
        self._forget_reserve(peer)

    def banish(self, peer: str, now: float) -> None:
        """Forget a peer, and do not take it back for a while."""
        self.demote(peer, now)
        self._note_silent(peer, now + BANISHED_SECONDS)

    def is_banished(self, peer: str, now: float) -> bool:
        return self._silent.get(peer, now) > now

    def note_answer(self, peer: str, now: float) -> None:
        if peer in self._members:
            self._members[peer] = 0
        if not self.is_banished(peer, now):
            self.add(peer, peer)  # found by its name, or a peer of the reserve that is there again

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
            if not self._members or self._random.random() < FROM_RESERVE:
                tried = self._draw_reserve()
                if tried is not None and tried not in drawn:
                    drawn.append(tried)
                    continue
            first, second = (kept, others) if number % 2 == 0 else (others, kept)
            if first or second:
                drawn.append((first or second).pop())
        return drawn

    def _draw_reserve(self) -> str | None:
        """In proportion to the two parts' limits, not to who fills them."""
        callers = len(self._callers) and self._random.random() < CALLERS / RESERVE
        for part in (self._callers, self._reserve) if callers else (self._reserve, self._callers):
            if len(part):
                return part.draw()
        return None

    def sample(self, count: int) -> list[str]:
        """Peers to tell others of: members only, proven ones and others in equal parts."""
        kept, others = self._shuffled(self._kept), self._shuffled(self._members.keys() - self._kept.keys())
        half = max(count // 2, count - len(kept))
        return [*others[:half], *kept[: count - min(half, len(others))]]

    def _shuffled(self, peers: Iterable[str]) -> list[str]:
        ordered = sorted(peers)
        self._random.shuffle(ordered)
        return ordered

    @property
    def members(self) -> set[str]:
        return set(self._members)

    def __contains__(self, peer: str) -> bool:
        return peer in self._members or peer in self._reserve or peer in self._callers

    def __len__(self) -> int:
        return len(self._members)

    def _lots_of(self, peer: str) -> tuple[int, ...]:
        return _lots.unpack(blake2b(peer.encode(), key=self._secret, digest_size=_lots.size).digest())

    def _winnable(self, peer: str) -> list[int]:
        lots = self._lots_of(peer)
        return [
            place for place in range(PLACES) if self._places[place] is None or lots[place] < self._lots[place]
        ]

    def _remove(self, peer: str, now: float) -> None:
        del self._members[peer]
        self._kept.pop(peer, None)
        self._note_silent(peer, now)
        self._to_reserve(peer)
        self._places = [None if each == peer else each for each in self._places]

    def _note_silent(self, peer: str, until: float) -> None:
        self._silent[peer] = until
        if len(self._silent) > _SILENT:
            self._silent.popitem(last=False)

    def _to_reserve(self, peer: str, named_by: str = "") -> None:
        """`named_by`: unset for a former member, which nobody has to vouch for."""
        if peer in self._reserve:
            return
        self._callers.discard(peer)
        self._reserve.add(peer)
        if named_by:
            self._sources[peer] = named_by
            self._named[named_by] += 1
        if len(self._reserve) > RESERVE - CALLERS:
            self._forget_reserve(self._reserve.draw())

    def _forget_reserve(self, peer: str) -> None:
        self._reserve.discard(peer)
        self._callers.discard(peer)
        if (source := self._sources.pop(peer, None)) is not None:
            self._named[source] -= 1
            if not self._named[source]:
                del self._named[source]
