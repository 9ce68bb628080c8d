"""Train and held-out parts of a game's boards.

A board's part is a hash of its fixed cells, invariant under rotation, reflection and the start position. So a level of one
part shares no game state with a level of the other, for any seeds.

Some games can also part levels by structure, which is decided for each level alone, too, and leaves many levels in neither
part. Then the obstacles of two levels are equal or differ in four cells at least (`well_spaced`), and both the obstacles and
the pair of start and goal are of one part only (`structural_part`). So no level to train on is within three changed cells of
a held-out one, and none has a path from the start of a held-out one to its goal, whichever way either is turned.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache, lru_cache, reduce
from operator import xor
from typing import Self

from rollwright import rng
from rollwright.errors import ConfigError

_HELD_OUT = 10
"""One board in this many is held out: enough for evaluation, and most remain for training."""

_HELD_OUT_STRUCTURES = 3
"""One set of obstacles in this many is held out, and one pair of start and goal; a held-out level needs both."""


class LevelSplit(StrEnum):
    """How levels are parted."""

    BOARD = "board"
    """By their fixed cells."""
    STRUCTURE = "structure"
    """By obstacles that differ in four cells at least, and by start and goal."""

    @classmethod
    def parse(cls, name: str) -> Self:
        """The split of this name; raises `ConfigError` for an unknown one."""
        if name not in list(cls):
            raise ConfigError(f"split must be one of {', '.join(cls)}, got {name!r}")
        return cls(name)


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


def well_spaced(cells: Collection[int], size: int) -> bool:
    """Whether a set of cells of a square is one of those of which any two differ in four cells at least: it has an even
    number of cells, and the exclusive or of their numbers is that of the first and the last cell.

    Two such sets differ in an even number of cells whose numbers have an exclusive or of 0, and no two different numbers
    have. Where `size` is a power of two, a mirror image changes all bits of a row or column number, and a turn swaps the two,
    so a set that is turned or mirrored is one of them, too.
    """
    if size & (size - 1):
        raise ConfigError(f"split: structure needs a size that is a power of two, got {size}")
    return len(cells) % 2 == 0 and reduce(xor, cells, 0) == size * size - 1


def structural_part(game: str, size: int, obstacles: frozenset[int], start: int, goal: int) -> Part | None:
    """`HELD_OUT` if both the obstacles and the pair of start and goal are held out, whichever way they are turned; `TRAIN` if
    neither is; `None` for a level of no part."""
    if not well_spaced(obstacles, size):
        return None
    held_out = _is_held_out(game, size, "obstacles", obstacles)
    if held_out != _is_held_out(game, size, "ends", (start,), (goal,)):
        return None
    return Part.HELD_OUT if held_out else Part.TRAIN


@lru_cache(maxsize=8192)
def _is_held_out(game: str, size: int, what: str, *kinds: Collection[int]) -> bool:
    seen = min(views(size, size, *kinds))
    return rng.digest(f"{game} {size} {what}", seen) % _HELD_OUT_STRUCTURES == 0


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
