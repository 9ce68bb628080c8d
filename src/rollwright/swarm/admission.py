"""Admission of manifests: signature, swarm, sequence number, round, clock and quota.

Pure: no clock, no network, no file. Invariants: a manifest is admitted at most once, over restarts too if the state is
kept (`snapshot`); a manifest that was tampered with changes nothing; memory is bounded. Sequence numbers below a peer's
window count as used, and of a forgotten peer only fresh manifests could pass again.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec

from rollwright.errors import FormatError
from rollwright.swarm.refusals import PeerRefusal, PeerRefused
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import Manifest, open_signed
from rollwright.swarm.transports.base import MAX_CONTENT_BYTES

WINDOW = 256
"""Sequence numbers remembered for each peer; they may arrive in any order and leave gaps."""

MAX_PEERS = 4096
"""Peers whose sequence numbers are remembered; about 30 MB with their windows."""

MAX_CANDIDATES = 8192
"""Manifests that wait for selection; about 15 MB."""


ANY_LEAD = 1 << 53
"""Rounds that a peer may be ahead: a node that joins late has to believe the others."""

MANIFESTS_PER_ROUND = 32
"""Manifests that one peer may announce while this node's round lasts."""


@dataclass
class _PeerState:
    """The memory of one peer."""

    floor: int = 0
    """Sequence numbers up to here are forgotten and count as used."""
    digests: dict[int, bytes] = field(default_factory=dict)
    """Digests of the remembered manifests, by sequence number."""
    round: int = 0
    """The last round that it announced."""
    admitted: int = 0
    """Manifests admitted in this node's round `counted_in`."""
    counted_in: int = -1


class Admission:
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
        """`settings` bound the age of a manifest, `max_round_lead` the rounds that a peer may be ahead."""
        self._swarm = swarm
        self._own = own
        self._settings = settings or SwarmConfig()
        self._max_round_lead, self._manifests_per_round = max_round_lead, manifests_per_round
        self._is_quarantined = is_quarantined
        self._peers: OrderedDict[str, _PeerState] = OrderedDict()

    def admit(self, data: bytes, *, round: int, now: float) -> Manifest:
        """Return the manifest if it may be used in this node's `round`; raise `PeerRefused` if not."""
        manifest = open_signed(data)
        if manifest.swarm != self._swarm:
            raise PeerRefused(PeerRefusal.OTHER_SWARM, f"{manifest.swarm!r}")
        if manifest.peer == self._own:
            raise PeerRefused(PeerRefusal.OWN)
        if self._is_quarantined(manifest.peer):
            raise PeerRefused(PeerRefusal.QUARANTINED, manifest.peer[:16])
        state = self._state(manifest.peer)
        _mark(state, manifest, data)
        if manifest.sequence == max(state.digests) and self._believable(manifest, round):
            state.round = manifest.round
        self._check_fresh(manifest, round, now)
        if manifest.size > MAX_CONTENT_BYTES:
            raise PeerRefused(PeerRefusal.TOO_LARGE, f"{manifest.size} bytes of content")
        if state.counted_in != round:
            state.counted_in, state.admitted = round, 0
        if state.admitted >= self._manifests_per_round:
            raise PeerRefused(PeerRefusal.OVER_QUOTA, f"more than {self._manifests_per_round} in a round")
        state.admitted += 1
        return manifest

    def rounds(self) -> dict[str, int]:
        """The last round that each peer announced."""
        return {peer: state.round for peer, state in self._peers.items()}

    def sequences(self) -> dict[str, int]:
        """The highest sequence number of each peer; it grows with every announcement."""
        return {peer: max(state.digests, default=state.floor) for peer, state in self._peers.items()}

    def is_fresh(self, manifest: Manifest, round: int) -> bool:
        return manifest.round >= round - self._settings.max_round_lag

    def snapshot(self) -> bytes:
        """The state that outlives a restart."""
        state = {
            peer: (state.floor, sorted(state.digests.items()), state.round)
            for peer, state in self._peers.items()
        }
        return msgspec.msgpack.encode(state)

    def restore(self, data: bytes) -> None:
        try:
            state = msgspec.msgpack.decode(data, type=dict[str, tuple[int, list[tuple[int, bytes]], int]])
        except msgspec.MsgspecError as error:
            raise FormatError(f"not the state of an admission: {error}") from error
        self._peers = OrderedDict(
            (peer, _PeerState(floor, dict(digests), told)) for peer, (floor, digests, told) in state.items()
        )

    def _state(self, peer: str) -> _PeerState:
        state = self._peers.setdefault(peer, _PeerState())
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return state

    def _believable(self, manifest: Manifest, round: int) -> bool:
        return manifest.round <= round + self._max_round_lead

    def _check_fresh(self, manifest: Manifest, round: int, now: float) -> None:
        if not self.is_fresh(manifest, round):
            raise PeerRefused(PeerRefusal.OLD_ROUND, f"round {manifest.round}, here it is {round}")
        if not self._believable(manifest, round):
            raise PeerRefused(PeerRefusal.FUTURE_ROUND, f"round {manifest.round}, here it is {round}")
        if abs(manifest.created - now) > self._settings.max_clock_skew:
            raise PeerRefused(
                PeerRefusal.CLOCK_SKEW, f"{manifest.created - now:+.0f} s; set the clock of one of the two"
            )


def _mark(state: _PeerState, manifest: Manifest, data: bytes) -> None:
    """Mark the sequence number as used; raise `PeerRefused` if it was used before."""
    digest = sha256(data).digest()[:16]
    number = manifest.sequence
    if (earlier := state.digests.get(number)) is not None:
        if earlier != digest:
            raise PeerRefused(PeerRefusal.EQUIVOCATION, f"two manifests with sequence {number}")
        raise PeerRefused(PeerRefusal.REPLAY, f"sequence {number} again")
    if number <= state.floor:
        raise PeerRefused(PeerRefusal.REPLAY, f"sequence {number} lies behind what is remembered")
    state.digests[number] = digest
    if len(state.digests) > WINDOW:
        state.floor = min(state.digests)
        del state.digests[state.floor]


class Candidates:
    """Admitted manifests that wait for selection. When there is no room, the peer with the most candidates loses its oldest,
    so no peer pushes out another that has fewer."""

    def __init__(self, limit: int = MAX_CANDIDATES) -> None:
        self._limit = limit
        self._waiting: OrderedDict[tuple[str, str], tuple[Manifest, bytes]] = OrderedDict()
        """By peer and content digest. The envelope is the evidence if the content is bad. Two peers may announce the same
        content; which of them may do so is found out when it is checked."""
        self._of_peer: dict[str, OrderedDict[str, None]] = {}
        """The waiting digests of each peer, the oldest first."""

    def add(self, manifest: Manifest, envelope: bytes) -> None:
        """Add a manifest; raise `PeerRefused` if the peer has announced the content before, or has used up its share."""
        key = manifest.peer, manifest.digest
        if key in self._waiting:
            raise PeerRefused(PeerRefusal.DUPLICATE, f"content {manifest.digest[:12]} is announced already")
        if len(self._waiting) >= self._limit:
            self._make_room(manifest.peer)
        self._waiting[key] = (manifest, envelope)
        self._of_peer.setdefault(manifest.peer, OrderedDict())[manifest.digest] = None

    def _make_room(self, peer: str) -> None:
        most = max(self._of_peer, key=lambda each: len(self._of_peer[each]))
        if len(self._of_peer.get(peer, ())) + 1 > len(self._of_peer[most]):
            raise PeerRefused(PeerRefusal.OVER_QUOTA, f"more than {self._limit} groups wait, of many peers")
        self._forget(most, next(iter(self._of_peer[most])))

    def _forget(self, peer: str, digest: str) -> None:
        del self._waiting[peer, digest]
        del self._of_peer[peer][digest]
        if not self._of_peer[peer]:
            del self._of_peer[peer]

    def fresh(self, is_fresh: Callable[[Manifest], bool]) -> list[Manifest]:
        """The candidates that can still be taken; the others are forgotten."""
        for key, (manifest, _) in list(self._waiting.items()):
            if not is_fresh(manifest):
                self._forget(*key)
        return [manifest for manifest, _ in self._waiting.values()]

    def envelope(self, manifest: Manifest) -> bytes:
        """The manifest's bytes as signed."""
        return self._waiting[manifest.peer, manifest.digest][1]

    def take(self, manifest: Manifest) -> None:
        """Remove a candidate."""
        self._forget(manifest.peer, manifest.digest)

    def __len__(self) -> int:
        return len(self._waiting)
