"""Boards to train on and boards held out.

A game parts its boards once and for all, by what stands still on them: a board that is turned or mirrored, or begun from
another place, is in the same part. So a level of one part shares no state of the game with a level of the other, whatever
the seeds.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import Self

from rollwright import rng
from rollwright.errors import ConfigError

_HELD_OUT = 10
"""One board in so many is held out: enough to evaluate on, and most are left to train on."""


class Part(StrEnum):
    """Which boards may be drawn."""

    ALL = "all"
    TRAIN = "train"
    HELD_OUT = "held_out"

    @classmethod
    def named(cls, name: str) -> Self:
        if name not in list(cls):
            raise ConfigError(f"part must be one of {', '.join(cls)}, got {name!r}")
        return cls(name)

    @property
    def one_in(self) -> int:
        """How many boards are drawn for each that is in this part, rounded: what a limit on tries is multiplied by."""
        return _HELD_OUT if self is Part.HELD_OUT else 1


def part_of(game: str, views: Iterable[str]) -> Part:
    """`HELD_OUT` or `TRAIN`, for the board of this game that has all these views."""
    return Part.TRAIN if rng.digest(f"{game} part", min(views)) % _HELD_OUT else Part.HELD_OUT


def views(rows: int, columns: int, *kinds: Collection[int]) -> Iterator[str]:
    """The eight ways to look at a board, turned and mirrored: where the cells of each kind are, numbered row by row."""
    for moved in _moved(rows, columns):
        yield " ".join([str(cell) for kind in kinds for cell in sorted([moved[each] for each in kind])])


@cache
def _moved(rows: int, columns: int) -> Sequence[Sequence[int]]:
    """For each of the eight ways, where it shows each cell."""
    cells = range(rows * columns)
    return [
        [_place(cell, rows, columns, turned, mirrored) for cell in cells]
        for turned in range(4)
        for mirrored in (False, True)
    ]


def _place(cell: int, rows: int, columns: int, turned: int, mirrored: bool) -> int:
    """Where a cell is after so many quarter turns and, if so, a mirror."""
    row, column = divmod(cell, columns)
    for _ in range(turned):
        row, column, rows, columns = column, rows - 1 - row, columns, rows
    return row * columns + (columns - 1 - column if mirrored else column)
