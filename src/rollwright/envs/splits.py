"""Train and held-out parts of a game's boards.

A board's part is a hash of its fixed cells, invariant under rotation, reflection and the start position. So a level of one
part shares no game state with a level of the other, for any seeds.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import Self

from rollwright import rng
from rollwright.errors import ConfigError

_HELD_OUT = 10
"""One board in this many is held out: enough for evaluation, and most remain for training."""


class Part(StrEnum):
    """Set of boards that levels are drawn from."""

    ALL = "all"
    TRAIN = "train"
    HELD_OUT = "held_out"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The part of this name; raises `ConfigError` for an unknown one."""
        if name not in list(cls):
            raise ConfigError(f"part must be one of {', '.join(cls)}, got {name!r}")
        return cls(name)

    @property
    def one_in(self) -> int:
        """Draws per board in this part, rounded: the factor of a limit on tries."""
        return _HELD_OUT if self is Part.HELD_OUT else 1


def part_of(game: str, views: Iterable[str]) -> Part:
    """`HELD_OUT` or `TRAIN` for the board of `game` with these symmetric views; the smallest view is the canonical one."""
    return Part.TRAIN if rng.digest(f"{game} part", min(views)) % _HELD_OUT else Part.HELD_OUT


def views(rows: int, columns: int, *kinds: Collection[int]) -> Iterator[str]:
    """The eight rotations and reflections of a board, each as text: the sorted cell numbers of every kind of cell."""
    for numbers in _symmetries(rows, columns):
        yield " ".join([str(cell) for kind in kinds for cell in sorted([numbers[each] for each in kind])])


@cache
def _symmetries(rows: int, columns: int) -> Sequence[Sequence[int]]:
    """For each of the eight symmetries, the new number of every cell."""
    cells = range(rows * columns)
    return [
        [_transform(cell, rows, columns, turned, mirrored) for cell in cells]
        for turned in range(4)
        for mirrored in (False, True)
    ]


def _transform(cell: int, rows: int, columns: int, turned: int, mirrored: bool) -> int:
    """Number of a cell after `turned` quarter turns and an optional reflection."""
    row, column = divmod(cell, columns)
    for _ in range(turned):
        row, column, rows, columns = column, rows - 1 - row, columns, rows
    return row * columns + (columns - 1 - column if mirrored else column)
