"""The gate that every manifest passes: is it somebody's, of this swarm, new, fresh and within its quota?

Plain state in, decision out: no clock, no network, no file. True of it: a manifest is let through at most once, over
restarts too if its state is kept (`snapshot`); one that was tampered with changes nothing; what it remembers is bounded:
what lies behind a peer's window counts as seen, and of a peer that was forgotten only what is fresh could pass again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from rollwright.errors import FormatError
from rollwright.swarm.envelope import Manifest, unseal
from rollwright.swarm.refusals import Refusal, Refused
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.transport import MAX_CONTENT_BYTES

WINDOW = 256
"""Manifests of a peer that are remembered; its numbers may come in any order, and leave gaps."""

MAX_PEERS = 4096
"""Peers whose sequence numbers are remembered; with their windows, some 30 MB."""

MAX_CANDIDATES = 8192
"""Manifests that wait to be chosen; about 15 MB."""


ANY_LEAD = 1 << 53
"""Rounds that a peer may be ahead: a node that joins late has to believe the others."""

MANIFESTS_PER_ROUND = 32
"""Manifests that one peer may announce while this node's round lasts."""


@dataclass
class _Seen:
    """What is remembered of one peer."""

    floor: int = 0
    """Numbers up to here are forgotten, and count as used."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Of the manifests that are remembered, by sequence number."""
    round: int = 0
    """The last that it told of."""
    admitted: int = 0
    """In this node's round `counted_in`."""
    counted_in: int = -1


class Gate:
    def __init__(
        self,
        swarm: str,
        own: str,
        settings: SwarmConfig | None = None,
        is_quarantined: Callable[[str], bool] = lambda _: False,
        *,
        max_round_lead: int = ANY_LEAD,
        manifests_per_round: int = MANIFESTS_PER_ROUND,
    ) -> None:
        """`settings` say how old a manifest may be. `max_round_lead`: rounds that a peer may be ahead."""
        self._swarm = swarm
        self._own = own
        self._settings = settings or SwarmConfig()
        self._max_round_lead, self._manifests_per_round = max_round_lead, manifests_per_round
        self._is_quarantined = is_quarantined
        self._peers: OrderedDict[str, _Seen] = OrderedDict()

    def admit(self, data: bytes, *, round: int, now: float) -> Manifest:
        """The manifest, if it may be used in this node's `round`; raises `Refused`."""
        manifest = unseal(data)
        if manifest.swarm != self._swarm:
            raise Refused(Refusal.OTHER_SWARM, f"{manifest.swarm!r}")
        if manifest.peer == self._own:
            raise Refused(Refusal.OWN)
        if self._is_quarantined(manifest.peer):
            raise Refused(Refusal.QUARANTINED, manifest.peer[:16])
        seen = self._state(manifest.peer)
        _mark(seen, manifest, data)
        if manifest.sequence == max(seen.digests) and self._believable(manifest, round):
            seen.round = manifest.round
        self._check_fresh(manifest, round, now)
        if manifest.size > MAX_CONTENT_BYTES:
            raise Refused(Refusal.TOO_LARGE, f"{manifest.size} bytes of content")
        if seen.counted_in != round:
            seen.counted_in, seen.admitted = round, 0
        if seen.admitted >= self._manifests_per_round:
            raise Refused(Refusal.OVER_QUOTA, f"more than {self._manifests_per_round} in a round")
        seen.admitted += 1
        return manifest

    def rounds(self) -> dict[str, int]:
        """The last round that each peer told of."""
        return {peer: seen.round for peer, seen in self._peers.items()}

    def sequences(self) -> dict[str, int]:
        """The highest number that each peer has used: it moves with everything that a peer announces."""
        return {peer: max(seen.digests, default=seen.floor) for peer, seen in self._peers.items()}

    def is_fresh(self, manifest: Manifest, round: int) -> bool:
        return manifest.round >= round - self._settings.max_round_lag

    def snapshot(self) -> bytes:
        """What must not be forgotten over a restart."""
        state = {
            peer: (seen.floor, sorted(seen.digests.items()), seen.round) for peer, seen in self._peers.items()
        }
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> None:
        try:
            state = msgspec.msgpack.decode(data, type=dict[str, tuple[int, list[tuple[int, bytes]], int]])
        except msgspec.MsgspecError as error:
            raise FormatError(f"not what a gate remembers: {error}") from error
        self._peers = OrderedDict(
            (peer, _Seen(floor, dict(digests), told)) for peer, (floor, digests, told) in state.items()
        )

    def _state(self, peer: str) -> _Seen:
        seen = self._peers.setdefault(peer, _Seen())
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return seen

    def _believable(self, manifest: Manifest, round: int) -> bool:
        return manifest.round <= round + self._max_round_lead

    def _check_fresh(self, manifest: Manifest, round: int, now: float) -> None:
        if not self.is_fresh(manifest, round):
            raise Refused(Refusal.OLD_ROUND, f"round {manifest.round}, here it is {round}")
        if not self._believable(manifest, round):
            raise Refused(Refusal.FUTURE_ROUND, f"round {manifest.round}, here it is {round}")
        if abs(manifest.created - now) > self._settings.max_clock_skew:
            raise Refused(
                Refusal.CLOCK_SKEW, f"{manifest.created - now:+.0f} s; set the clock of one of the two"
            )


def _mark(seen: _Seen, manifest: Manifest, data: bytes) -> None:
    """Remembers the sequence number; raises `Refused` for one that was used before."""
    digest = sha256(data).digest()[:16]
    number = manifest.sequence
    if (earlier := seen.digests.get(number)) is not None:
        if earlier != digest:
            raise Refused(Refusal.EQUIVOCATION, f"two manifests with sequence {number}")
        raise Refused(Refusal.REPLAY, f"sequence {number} again")
    if number <= seen.floor:
        raise Refused(Refusal.REPLAY, f"sequence {number} lies behind what is remembered")
    seen.digests[number] = digest
    if len(seen.digests) > WINDOW:
        seen.floor = min(seen.digests)
        del seen.digests[seen.floor]


class Candidates:
    """Manifests that passed the gate and wait to be chosen. When there is no more room, the peer goes short that has the
    most, so nobody pushes out another that has fewer."""

    def __init__(self, limit: int = MAX_CANDIDATES) -> None:
        self._limit = limit
        self._waiting: OrderedDict[tuple[str, str], tuple[Manifest, bytes]] = OrderedDict()
        """By peer and digest of the content, with the envelope: it is the evidence, should the content be bad. Two
        peers may announce the same content; which of them may is found out when it is looked at."""
        self._of_peer: dict[str, OrderedDict[str, None]] = {}
        """For each peer, the digests that wait, the oldest first."""

    def add(self, manifest: Manifest, envelope: bytes) -> None:
        """Raises `Refused` for content that the peer has announced already, and when it has its share of the room."""
        key = manifest.peer, manifest.digest
        if key in self._waiting:
            raise Refused(Refusal.DUPLICATE, f"content {manifest.digest[:12]} is announced already")
        if len(self._waiting) >= self._limit:
            self._make_room(manifest.peer)
        self._waiting[key] = (manifest, envelope)
        self._of_peer.setdefault(manifest.peer, OrderedDict())[manifest.digest] = None

    def _make_room(self, peer: str) -> None:
        most = max(self._of_peer, key=lambda each: len(self._of_peer[each]))
        if len(self._of_peer.get(peer, ())) + 1 > len(self._of_peer[most]):
            raise Refused(Refusal.OVER_QUOTA, f"more than {self._limit} groups wait, of many peers")
        self._forget(most, next(iter(self._of_peer[most])))

    def _forget(self, peer: str, digest: str) -> None:
        del self._waiting[peer, digest]
        del self._of_peer[peer][digest]
        if not self._of_peer[peer]:
            del self._of_peer[peer]

    def fresh(self, is_fresh: Callable[[Manifest], bool]) -> list[Manifest]:
        """Those that can still be taken; the others are forgotten."""
        for key, (manifest, _) in list(self._waiting.items()):
            if not is_fresh(manifest):
                self._forget(*key)
        return [manifest for manifest, _ in self._waiting.values()]

    def envelope(self, manifest: Manifest) -> bytes:
        """As it was signed."""
        return self._waiting[manifest.peer, manifest.digest][1]

    def take(self, manifest: Manifest) -> None:
        """It does not wait any more."""
        self._forget(manifest.peer, manifest.digest)

    def __len__(self) -> int:
        return len(self._waiting)
