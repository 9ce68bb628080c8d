"""Makes a base model for SimpleSokoban: a small Llama that has copied a player of easy rooms.

    python models/make_sokoban.py

The player solves rooms whose shortest solution takes at most `EASY` actions, and now and then strays a step. The model
also learns to see what lies around the player and the box, and where the box and the target are (see `cloning`). Rooms
that take longer are not in the data: what the trained model can do there, it learned afterwards, or carried over. Every
room is drawn from the part to train on (see `rollwright.envs.splits`).
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from cloning import Example, Size, clone

from rollwright import rng
from rollwright.envs.games import sokoban_level
from rollwright.envs.games.sokoban import STANDARD_VOCAB, Sokoban
from rollwright.envs.games.sokoban_level import Room, State
from rollwright.envs.splits import Part

SIDE = 6
EASY = 4
EXAMPLES = 60_000
STRAY = 0.3
"""Share of moves that go anywhere: without it nothing but the copied way would ever be tried."""
STEPS = 1600
SIZE = Size(layers=3, hidden=64)

WALL, EMPTY, TARGET, DONE, BOX, PLAYER, PLAYER_ON_TARGET = (
    STANDARD_VOCAB[name]
    for name in ("wall", "empty", "target", "box_on_target", "box", "player", "player_on_target")
)
CELLS = (WALL, EMPTY, TARGET, DONE, BOX, PLAYER, PLAYER_ON_TARGET)
NEXT = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Rows and columns to the four neighbours, in the order of the moves."""
KINDS = 2 * SIDE - 1
"""Of answers: a distance in rows or columns, either way, is the widest."""


def states() -> Iterator[tuple[Room, State, int]]:
    """Rooms in every state on the way to their solution, with the next action."""
    generator = rng.generator("sokoban base model")
    while True:
        room, state = sokoban_level.draw(generator, SIDE, SIDE, 1, EASY, Part.TRAIN)
        way = sokoban_level.solve(room, state, EASY)
        for action in way or ():
            yield room, state, action
            state = _after(room, state, action)


def _after(room: Room, state: State, action: int) -> State:
    to = state.player + room.steps[action]
    boxes = state.boxes
    return State(to, sokoban_level.pushed(boxes, to, to + room.steps[action]) if to in boxes else boxes)


def example(room: Room, state: State, action: int) -> Example:
    stride = room.width + 1
    (box,), (target,), player = state.boxes, room.targets, state.player
    cells = [EMPTY if free else WALL for free in room.is_open]
    cells[target] = TARGET
    cells[box] = BOX
    cells[player] = PLAYER_ON_TARGET if player == target else PLAYER
    open_moves = [bool(room.is_open[player + step]) for step in room.steps]
    chances = [
        (1 - STRAY) * (move == action) + STRAY * may / sum(open_moves) for move, may in enumerate(open_moves)
    ]
    seen = [
        CELLS.index(cells[place + rows * stride + columns])
        for place in (player, box)
        for rows, columns in NEXT
    ]
    for here, there in ((player, box), (box, target)):
        (row, column), (to_row, to_column) = divmod(here, stride), divmod(there, stride)
        seen += [to_row - row + SIDE - 1, to_column - column + SIDE - 1]
    board = "".join(cells[at] for at in range(len(cells)) if at % stride != room.width)
    return Example(board, chances, seen)


def main() -> None:
    clone(
        [example(*each) for each in islice(states(), EXAMPLES)],
        moves=Sokoban.action_names,
        cells=CELLS,
        kinds=KINDS,
        steps=STEPS,
        size=SIZE,
        folder=Path(__file__).parent / "sokoban",
    )


if __name__ == "__main__":
    main()
