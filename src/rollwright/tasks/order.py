"""The order in which rows are drawn, and which rows are held out.

Pure functions of the run's seed. Training goes through the rows in epochs: every row once, in an order of its own for
each epoch. The order is a keyed permutation that is computed for one place at a time (a Feistel network with cycle
walking), so ten million rows cost no table, and every process finds the same row without asking another. Whether a row
is held out depends on its content alone: rows that are added to a file later change nothing for those that were there.
"""

from collections.abc import Sequence

from rollwright import rng

_ROUNDS = 8
"""Rounds of the Feistel network. Four leave a bias among a dozen rows (chi-squared 5 times its expectation over 20,000
orders); eight leave none that is seen there."""

_SPLIT_STEPS = 1_000_000
"""Resolution of the held-out share: one in a million."""


def is_held_out(row_key: int, share: float) -> bool:
    """Whether the row with this hash of its content belongs to the held-out `share` of all rows."""
    return _mix(row_key, 0, 0) % _SPLIT_STEPS < share * _SPLIT_STEPS


def draw_of(index: int, tag: str, slot_tags: Sequence[str]) -> int:
    """How many groups of its tag come before the group at `index`, when slots take turns."""
    rounds, slot = divmod(index, len(slot_tags))
    return rounds * slot_tags.count(tag) + slot_tags[:slot].count(tag)


def epoch_row(run_seed: int, tag: str, draw: int, rows: int) -> int:
    """The row of the `draw`-th group of a tag: all rows in a shuffled order, then all again in another."""
    epoch, place = divmod(draw, rows)
    return permute(place, rows, rng.digest("task order", run_seed, tag, epoch))


def permute(place: int, size: int, key: int) -> int:
    """Where `place` goes in the permutation of `range(size)` that belongs to `key`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    # The network permutes a power of four that is at least `size`. Following the cycle until it is back inside keeps it
    # a permutation of `range(size)`, and takes under four steps on average.
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right, number, key) & mask)
        place = left << half | right
        if place < size:
            return place


def _mix(value: int, number: int, key: int) -> int:
    """64 bits that depend on all three: the finalizer of splitmix64, seeded."""
    mixed = (value * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + key) & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
