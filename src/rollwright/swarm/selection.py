"""Which foreign groups a node trains on: those with something to learn from, drawn uniformly, nobody too often.

The order of SAPO: groups whose members all got the same reward are left out *first*, because their advantages are zero
and they would take the place of others; the rest is drawn uniformly. Pure: the draw follows from its key alone, and
since a node's key is secret, nobody can make a group that is drawn for sure.
"""

import math
from collections.abc import Mapping, Sequence

from rollwright import draws
from rollwright.draws import KeyPart
from rollwright.swarm.envelope import Manifest

FLAT = 1e-9
"""Rewards that differ by no more are equal: what is left of rounding."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether there is nothing to learn from a group: every advantage is zero."""
    return max(rewards) - min(rewards) <= FLAT


def fair_share(count: int, peers: int) -> int:
    """How many of `count` groups one of `peers` peers may give: twice its even share, so that one that is quick or
    loud cannot take the place of the others."""
    return max(1, math.ceil(2 * count / max(1, peers)))


def choose(
    candidates: Sequence[Manifest],
    count: int,
    *,
    per_peer: int,
    key: Sequence[KeyPart],
    taken: Mapping[str, int] | None = None,
) -> list[Manifest]:
    """At most `count` groups, uniformly drawn under `key`; no peer gives more than `per_peer`, those `taken` from it
    already included."""
    given = dict(taken or {})
    useful = [each for each in candidates if not is_flat(each.rewards)]
    chosen: list[Manifest] = []
    for manifest in sorted(useful, key=lambda each: draws.digest(*key, each.peer, each.digest)):
        if len(chosen) >= count:
            break
        if given.get(manifest.peer, 0) < per_peer:
            given[manifest.peer] = given.get(manifest.peer, 0) + 1
            chosen.append(manifest)
    return chosen
