"""Deals the rows of an update out to ranks by their costs. Pure.

Always true: every rank computes the same deal from the same costs, so nothing about it is communicated; every item is dealt
once; the most loaded rank has at most 4/3 of the load of the best possible deal.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, the indices of its items: the costliest item first, each to the least loaded rank."""
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    found: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        load, rank = heappop(loads)
        found[rank].append(item)
        heappush(loads, (load + costs[item], rank))
    return [sorted(items) for items in found]


def imbalance(costs: Sequence[int], dealt: Sequence[Sequence[int]]) -> float:
    """Load of the most loaded rank divided by the mean load, minus 1: 0 if all ranks finish together."""
    loads = [sum(costs[item] for item in items) for items in dealt]
    return max(loads) * len(loads) / sum(loads) - 1 if sum(loads) else 0.0
