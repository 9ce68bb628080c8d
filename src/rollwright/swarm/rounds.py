"""Which round it is. Pure.

Nodes wait for nobody, so each counts its own rounds; a round only says how old a group is. A node that joins late or
was away goes on with the round that the swarm is in, or everything it makes would count as old.
"""

from collections.abc import Iterable


def next_round(last: int, told: Iterable[int]) -> int:
    """The round after `last`, or the swarm's where that is ahead: the lower median of what the peers that are there
    told, so that it takes at least half of them to move a node that has more than one."""
    rounds = sorted(told)
    ahead = rounds[(len(rounds) - 1) // 2] if rounds else 0
    return max(last + 1, ahead)
