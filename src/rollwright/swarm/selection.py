"""Selection of foreign groups: those with a learning signal, in random order, every peer in turn.

The order of SAPO: groups whose members all have the same reward are dropped *first*, because their advantages are zero and
they would take the place of others; the rest is drawn. Here each peer's first group comes before any peer's second, and so
on. So the draw is uniform over the peers and over the groups of each; where all peers have equally many, over all groups;
and no peer gives more than another that has groups left, however fast or loud it is.

Keys cost nothing, so strangers may come in any number. Where some peers are proven, no more strangers than proven peers
(and never fewer than `STRANGERS`) share a turn with them; the other strangers come later in the turn, and peers that did
not answer the last time come last. Which strangers share the turn is drawn anew in every round.

Invariant: as long as there are no more strangers than that, a peer whose groups are all refused might as well not be there:
the positions of the others follow from their own groups and the key alone. Pure; and since a node's key is secret, no peer
can craft a group that is drawn for sure.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from rollwright import rng
from rollwright.rng import KeyPart
from rollwright.swarm.signed import Manifest

FLAT = 1e-9
"""Rewards that differ by no more are equal: rounding errors."""

STRANGERS = 8
"""Strangers (peers of which no group was accepted yet) that share a turn with proven peers: newcomers get in, a flood does
not."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that every advantage is zero."""
    return max(rewards) - min(rewards) <= FLAT


def in_turns(
    candidates: Sequence[Manifest],
    key: Sequence[KeyPart],
    *,
    proven: Collection[str] = (),
    silent: Collection[str] = (),
) -> list[Manifest]:
    """Order the groups with a learning signal: one of every peer, then a second of every peer, and so on. One draw decides
    which of a peer's groups comes first, another the order of the peers in a turn: with a single draw, the peer with more
    groups would have the lower minimum.

    `proven`: peers of which a group was accepted; `silent`: peers that did not answer the last fetch."""

    def lot(manifest: Manifest) -> int:
        return rng.digest(*key, manifest.peer, manifest.digest)

    useful = [each for each in candidates if not is_flat(each.rewards)]
    later = _later({each.peer for each in useful}, key, proven, silent)
    turns: Counter[str] = Counter()
    placed: list[tuple[int, int, int, Manifest]] = []
    for manifest in sorted(useful, key=lot):
        turn = turns[manifest.peer]
        turns[manifest.peer] += 1
        placed.append((turn, later.get(manifest.peer, 0), rng.digest(*key, manifest.peer, turn), manifest))
    return [manifest for *_, manifest in sorted(placed, key=lambda each: each[:3])]


def _later(
    peers: set[str], key: Sequence[KeyPart], proven: Collection[str], silent: Collection[str]
) -> dict[str, int]:
    """The peers that come later in each turn, with their rank."""
    known = peers.intersection(proven)
    strangers = sorted(peers - known - set(silent), key=lambda peer: rng.digest(*key, peer, "stranger"))
    room = max(STRANGERS, len(known)) if known else len(strangers)
    return {**dict.fromkeys(strangers[room:], 1), **dict.fromkeys(peers.intersection(silent), 2)}


def places(
    order: Sequence[Manifest],
    count: int,
    *,
    is_out: Callable[[Manifest], bool],
    per_peer: int | None = None,
) -> list[int]:
    """Positions in the order of the groups that get a place: the first `count` that are not out, at most `per_peer` of each
    peer. `is_out` is called in order, and only for groups that would have a place otherwise: it may depend on the groups
    before."""
    given: Counter[str] = Counter()
    found: list[int] = []
    for place, manifest in enumerate(order):
        if len(found) >= count:
            break
        if (per_peer is None or given[manifest.peer] < per_peer) and not is_out(manifest):
            given[manifest.peer] += 1
            found.append(place)
    return found
