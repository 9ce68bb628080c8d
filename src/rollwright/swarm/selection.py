"""Which foreign groups a node trains on: those with something to learn from, drawn by lot, everybody in turn.

The order of SAPO: groups whose members all got the same reward are left out *first*, because their advantages are zero
and they would take the place of others; the rest is drawn. Here each peer's first group by lot comes before anybody's
second one, and so on. So the draw is uniform over the peers, and over the groups of each; where all have as many, over
all groups; and nobody gives more than another that has something left, however quick or loud it is.

Keys cost nothing, so strangers may come in any number. Where some peers have given groups that held up, no more strangers
than those (and never fewer than `STRANGERS`) are in a turn with them; the others come after them in it, and who did not
answer the last time comes last. Which strangers that are is drawn anew in every round.

True of it: as long as there are no more strangers than that, whose groups are all refused might as well not be there. The
places of the others in the order follow from their own groups and the key alone, and places go to the first in that order
that are not out. Pure, and since a node's
key is secret, nobody can make a group that is drawn for sure.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from rollwright import draws
from rollwright.draws import KeyPart
from rollwright.swarm.signed import Manifest

FLAT = 1e-9
"""Rewards that differ by no more are equal: what is left of rounding."""

STRANGERS = 8
"""Peers of which no group has held up yet that are drawn among the others: new ones come in, and a flood does not."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether there is nothing to learn from a group: every advantage is zero."""
    return max(rewards) - min(rewards) <= FLAT


def in_turns(
    candidates: Sequence[Manifest],
    key: Sequence[KeyPart],
    *,
    proven: Collection[str] = (),
    silent: Collection[str] = (),
) -> list[Manifest]:
    """All that there is something to learn from: one of every peer, then a second of every peer, and so on. By lot, which
    of a peer's groups it is; by another lot, who comes first in a turn: the lowest of many lots would be low.

    `proven`: peers of which a group held up; `silent`: those that did not answer when they were asked last."""

    def lot(manifest: Manifest) -> int:
        return draws.digest(*key, manifest.peer, manifest.digest)

    useful = [each for each in candidates if not is_flat(each.rewards)]
    later = _later({each.peer for each in useful}, key, proven, silent)
    turns: Counter[str] = Counter()
    placed: list[tuple[int, int, int, Manifest]] = []
    for manifest in sorted(useful, key=lot):
        turn = turns[manifest.peer]
        turns[manifest.peer] += 1
        placed.append((turn, later.get(manifest.peer, 0), draws.digest(*key, manifest.peer, turn), manifest))
    return [manifest for *_, manifest in sorted(placed, key=lambda each: each[:3])]


def _later(
    peers: set[str], key: Sequence[KeyPart], proven: Collection[str], silent: Collection[str]
) -> dict[str, int]:
    """Who comes behind the others in each turn, and how far."""
    known = peers.intersection(proven)
    strangers = sorted(peers - known - set(silent), key=lambda peer: draws.digest(*key, peer, "stranger"))
    room = max(STRANGERS, len(known)) if known else len(strangers)
    return {**dict.fromkeys(strangers[room:], 1), **dict.fromkeys(peers.intersection(silent), 2)}


def places(
    order: Sequence[Manifest],
    count: int,
    *,
    is_out: Callable[[Manifest], bool],
    per_peer: int | None = None,
) -> list[int]:
    """Where in the order those stand that have a place: the first `count` that are not out, at most `per_peer` of each.
    `is_out` is asked in order, and only of those that would have a place otherwise: it may go by who stands before."""
    given: Counter[str] = Counter()
    found: list[int] = []
    for place, manifest in enumerate(order):
        if len(found) >= count:
            break
        if (per_peer is None or given[manifest.peer] < per_peer) and not is_out(manifest):
            given[manifest.peer] += 1
            found.append(place)
    return found
