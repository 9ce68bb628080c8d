"""Which foreign groups a node trains on: those with something to learn from, drawn by lot, everybody in turn.

The order of SAPO: groups whose members all got the same reward are left out *first*, because their advantages are zero
and they would take the place of others; the rest is drawn. Here each peer's first group by lot comes before anybody's
second one, and so on. So the draw is uniform over the peers, and over the groups of each; where all have as many, over
all groups; and nobody gives more than another that has something left, however quick or loud it is.

True of it: whose groups are all refused might as well not be there. The places of the others in the order follow from
their own groups and the key alone, and places go to the first in that order that are not out. Pure, and since a node's
key is secret, nobody can make a group that is drawn for sure.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from rollwright import draws
from rollwright.draws import KeyPart
from rollwright.swarm.envelope import Manifest

FLAT = 1e-9
"""Rewards that differ by no more are equal: what is left of rounding."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether there is nothing to learn from a group: every advantage is zero."""
    return max(rewards) - min(rewards) <= FLAT


def in_turns(candidates: Sequence[Manifest], key: Sequence[KeyPart]) -> list[Manifest]:
    """All that there is something to learn from: one of every peer, then a second of every peer, and so on. By lot, which
    of a peer's groups it is; by another lot, who comes first in a turn: the lowest of many lots would be low."""

    def lot(manifest: Manifest) -> int:
        return draws.digest(*key, manifest.peer, manifest.digest)

    turns: Counter[str] = Counter()
    placed: list[tuple[int, int, Manifest]] = []
    for manifest in sorted((each for each in candidates if not is_flat(each.rewards)), key=lot):
        turn = turns[manifest.peer]
        turns[manifest.peer] += 1
        placed.append((turn, draws.digest(*key, manifest.peer, turn), manifest))
    return [manifest for *_, manifest in sorted(placed, key=lambda each: each[:2])]


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
