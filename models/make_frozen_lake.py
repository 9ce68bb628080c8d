"""Makes the base model of the demo: a small Llama that has copied a player who ignores holes.

    python models/make_frozen_lake.py

The player walks towards the goal over whatever lies there, and now and then strays a step; it never walks against the
edge. The model also learns what lies in the twelve cells around it (see `cloning`). Nothing in this rewards staying out of
a hole, and no move in the data depends on where the holes are, so that what the trained model knows about that, it
learned afterwards. Every lake is drawn from the part to train on (see `rollwright.envs.splits`).
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cloning import Example, Size, clone

from rollwright import rng
from rollwright.envs.games.frozen_lake import FrozenLake, Lake
from rollwright.envs.splits import Part

SIDE = 4
ICE_SHARE = 0.75
"""As in the configuration that trains it."""
LAKES = 60_000
"""Drawn once; each is seen about five times, with a new move each time."""
STRAY = 0.25
"""Share of moves that go anywhere: without it nothing but the straight way would ever be tried."""
STEPS = 1200
SIZE = Size(layers=3, hidden=64)
"""Where am I, what lies around me, what do I do."""

CELLS = tuple(FrozenLake.symbols)
AROUND = (
    (0, -1),
    (1, 0),
    (0, 1),
    (-1, 0),
    (-1, -1),
    (-1, 1),
    (1, -1),
    (1, 1),
    (0, -2),
    (2, 0),
    (0, 2),
    (-2, 0),
)
"""Rows and columns from the player to the cells it knows: those it can reach in one step or two."""
OUTSIDE = 0
"""What lies beyond the edge; the others are `CELLS`, counted from 1."""


def lakes() -> Iterator[Lake]:
    """Lakes to train on, with the player on any cell that is no hole; whether a way exists does not matter."""
    generator = rng.generator("base model")
    while True:
        holes = frozenset(cell for cell in range(SIDE**2) if generator.random() >= ICE_SHARE)
        ice = [cell for cell in range(SIDE**2) if cell not in holes]
        if len(ice) < 2:
            continue
        start, goal = generator.sample(ice, 2)
        lake = Lake(start, goal, holes)
        if lake.part(SIDE) is Part.TRAIN:
            yield lake


def board(lake: Lake) -> str:
    cells = ["O" if cell in lake.holes else "_" for cell in range(SIDE**2)]
    cells[lake.goal], cells[lake.start] = "G", "P"
    return "".join(cells)


def around(drawn: str, start: int) -> list[int]:
    row, column = divmod(start, SIDE)
    seen = []
    for rows, columns in AROUND:
        at = row + rows, column + columns
        inside = all(0 <= each < SIDE for each in at)
        seen.append(1 + CELLS.index(drawn[at[0] * SIDE + at[1]]) if inside else OUTSIDE)
    return seen


def chances(lake: Lake) -> list[float]:
    """Of each move: towards the goal, or, when it strays, anywhere on the board."""
    (row, column), (to_row, to_column) = divmod(lake.start, SIDE), divmod(lake.goal, SIDE)
    nearer = [to_column < column, to_row > row, to_column > column, to_row < row]
    inside = [column > 0, row < SIDE - 1, column < SIDE - 1, row > 0]
    return [
        (1 - STRAY) * goes / sum(nearer) + STRAY * may / sum(inside)
        for goes, may in zip(nearer, inside, strict=True)
    ]


def main() -> None:
    drawn = list(islice(lakes(), LAKES))
    clone(
        [Example(board(lake), chances(lake), around(board(lake), lake.start)) for lake in drawn],
        moves=FrozenLake.action_names,
        cells=CELLS,
        kinds=len(CELLS) + 1,
        steps=STEPS,
        size=SIZE,
        folder=Path(__file__).parent / "frozen_lake",
    )


if __name__ == "__main__":
    main()
