"""Which round it is. Pure.

Nodes wait for nobody, and some are faster than others; a round only says how old a group is. So it follows the swarm: a
node that joins late or was away goes on with the round that its peers are in, or everything it makes would count as old;
one that is faster, or was alone for a while, is at most one round ahead of them, or everything they make would.
"""

from collections.abc import Iterable


def next_round(last: int, told: Iterable[int]) -> int:
    """The round after `last`, held to that of the peers that are there: the lower median of what they told, so that it
    takes at least half of them to move a node that has more than one. Without peers a node counts for itself."""
    rounds = sorted(told)
    if not rounds:
        return last + 1
    swarm = rounds[(len(rounds) - 1) // 2]
    return min(max(last + 1, swarm), swarm + 1)
