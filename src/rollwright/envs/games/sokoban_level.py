"""A Sokoban level as plain data, the shortest solution from any of its states, and the drawing of levels.

Cells are numbered along the rendered text: row by row, with one cell for each line break. The border is
wall and the line breaks count as wall, so a step never needs a check for the edge.

Every level that `draw` returns has no box on a target, and a solution of at most `depth` actions: it is
made by playing backwards from the solved state, and its shortest solution is then searched for.

Rooms are parted by their walls and targets (see `parts`): one with its box or player elsewhere is in the same part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from rollwright.envs.splits import Part, part_of, views
from rollwright.errors import ConfigError

UNREACHABLE = 1 << 16
"""As a number of pushes: more than any limit on actions."""

_CARVING_STEPS_PER_SIDE = 1.7
"""Length of the walk that digs a room, for each row and column: leaves a room both open and winding."""

_TURN_PROBABILITY = 0.35
"""How often that walk changes direction."""

_WIDEN_PROBABILITY = 0.5
"""How often it digs the cell beside it too, so that there is room to walk around a box."""

_PULL_PROBABILITY = 0.8
"""How often the backward player takes a box along when it could: mere walking makes short solutions."""

_PLAYS_PER_ROOM = 6
"""Backward plays before a new room is dug, which costs about as much as four of them."""

_MAX_ROOMS = 2_000
"""Of the part asked for: far beyond what a size that has room for its boxes needs (the built-in tags: 4 and 11 on
average)."""

_SHORTEST_WANTED = range(5)
"""How many actions beyond one for each box a level's shortest solution has at least, drawn evenly: a spread
of lengths with its median at 4 to 6 where 10 actions are allowed."""


class State(NamedTuple):
    """What moves."""

    player: int
    boxes: tuple[int, ...]
    """In ascending order, so that equal states are equal tuples."""


@dataclass(frozen=True)
class Room:
    """What stands still."""

    width: int
    is_open: bytes
    """1 for each cell that is not wall."""
    targets: tuple[int, ...]
    """In ascending order."""
    steps: tuple[int, int, int, int] = field(init=False, repr=False)
    """What up, down, left and right add to a cell's number."""
    pushes: tuple[int, ...] = field(init=False, repr=False)
    """For each cell: the fewest pushes that bring a box from there to a target in an empty room."""

    def __post_init__(self) -> None:
        stride = self.width + 1
        object.__setattr__(self, "steps", (-stride, stride, -1, 1))
        object.__setattr__(self, "pushes", _pushes_to_target(self))

    def part(self) -> Part:
        """`HELD_OUT` or `TRAIN`, by walls and targets alone and the same in all eight views."""
        stride = self.width + 1
        targets, floor = (
            [cell - cell // stride for cell in cells]  # without the line breaks before it
            for cells in (self.targets, (cell for cell, free in enumerate(self.is_open) if free))
        )
        return part_of("sokoban", views(len(self.is_open) // stride, self.width, targets, floor))


class Level(NamedTuple):
    room: Room
    start: State


def _pushes_to_target(room: Room) -> tuple[int, ...]:
    found = [UNREACHABLE] * len(room.is_open)
    layer = list(room.targets)
    pushes = 0
    while layer:
        for cell in layer:
            found[cell] = pushes
        pushes += 1
        layer = [
            cell - step
            for cell in layer
            for step in room.steps
            # a box reaches `cell` by `step` when the player has room behind it
            if found[cell - step] == UNREACHABLE
            and room.is_open[cell - step]
            and room.is_open[cell - 2 * step]
        ]
    return tuple(found)


def solve(room: Room, start: State, limit: int) -> tuple[int, ...] | None:
    """A shortest solution of at most `limit` actions, as indices into `room.steps`; `None`: there is none.

    Breadth first over the states; left out is what cannot be solved with the actions that remain.
    """
    if start.boxes == room.targets:
        return ()
    if _fewest_actions(room, *start) > limit:
        return None
    moves = tuple(enumerate(room.steps))
    is_open, targets = room.is_open, room.targets
    came_from: dict[State, tuple[State, int] | None] = {start: None}
    layer = [start]
    for remaining in range(limit - 1, -1, -1):
        reached = []
        for state in layer:
            player, boxes = state
            for action, step in moves:
                to = player + step
                if not is_open[to]:
                    continue
                if to not in boxes:
                    after = State(to, boxes)
                elif is_open[to + step] and to + step not in boxes:
                    after = State(to, pushed(boxes, to, to + step))
                else:
                    continue
                if after in came_from or _fewest_actions(room, *after) > remaining:
                    continue
                came_from[after] = (state, action)
                if after.boxes == targets:
                    return _actions_to(after, came_from)
                reached.append(after)
        layer = reached
    return None


def _actions_to(end: State, came_from: dict[State, tuple[State, int] | None]) -> tuple[int, ...]:
    actions = []
    before = came_from[end]
    while before is not None:
        state, action = before
        actions.append(action)
        before = came_from[state]
    return tuple(reversed(actions))


def _fewest_actions(room: Room, player: int, boxes: tuple[int, ...]) -> int:
    """A bound from below: the pushes each box needs, and the way to the nearest box that needs one."""
    pushes, stride = room.pushes, room.width + 1
    total = 0
    walk = UNREACHABLE
    row, column = divmod(player, stride)
    for box in boxes:
        if needed := pushes[box]:
            total += needed
            box_row, box_column = divmod(box, stride)
            walk = min(walk, abs(row - box_row) + abs(column - box_column) - 1)
    return total + walk if total else 0


def pushed(boxes: tuple[int, ...], box: int, to: int) -> tuple[int, ...]:
    """The boxes after one of them moved."""
    if len(boxes) == 1:
        return (to,)
    return tuple(sorted(to if each == box else each for each in boxes))


def draw(rng: Random, height: int, width: int, num_boxes: int, depth: int, part: Part = Part.ALL) -> Level:
    """A level of this part whose shortest solution has at most `depth` actions."""
    wanted = min(depth, num_boxes + _pick(rng, _SHORTEST_WANTED))
    for _ in range(_MAX_ROOMS * part.one_in):
        is_open = _dig(rng, height, width)
        cells = [cell for cell, free in enumerate(is_open) if free]
        if len(cells) < 2 * num_boxes + 1:
            continue
        room = Room(width, is_open, tuple(sorted(_sample(rng, cells, num_boxes))))
        if part is not Part.ALL and part is not room.part():
            continue
        for _ in range(_PLAYS_PER_ROOM):
            start = _play_backwards(rng, room, cells, depth)
            if any(box in room.targets for box in start.boxes):
                continue
            solution = solve(room, start, depth)
            if solution is not None and len(solution) >= wanted:
                return Level(room, start)
    raise ConfigError(
        f"Sokoban: found no level with dim_room=[{height}, {width}], num_boxes={num_boxes}, part={part} "
        f"that takes at most {depth} actions; use a larger room, fewer boxes, or a higher search_depth and max_steps"
    )


def _pick(rng: Random, choices: Sequence[int]) -> int:
    """Python promises the same stream from `random()` in every version, but not from `choice()`."""
    return choices[int(rng.random() * len(choices))]


def _sample(rng: Random, cells: Sequence[int], count: int) -> list[int]:
    pool = list(cells)
    return [pool.pop(int(rng.random() * len(pool))) for _ in range(count)]


def _dig(rng: Random, height: int, width: int) -> bytes:
    """A room: the cells that a random walk inside the border passes, and at times those beside it."""
    stride = width + 1
    is_open = bytearray(height * stride)
    rows, columns = range(1, height - 1), range(1, width - 1)
    row, column = _pick(rng, rows), _pick(rng, columns)
    down, right = 0, 1
    for _ in range(int(_CARVING_STEPS_PER_SIDE * (height + width))):
        is_open[row * stride + column] = 1
        if rng.random() < _WIDEN_PROBABILITY and row + right in rows and column + down in columns:
            is_open[(row + right) * stride + column + down] = 1
        if rng.random() < _TURN_PROBABILITY:
            down, right = ((-1, 0), (1, 0), (0, -1), (0, 1))[int(rng.random() * 4)]
        row = min(max(row + down, rows[0]), rows[-1])
        column = min(max(column + right, columns[0]), columns[-1])
    return bytes(is_open)


def _play_backwards(rng: Random, room: Room, cells: Sequence[int], moves: int) -> State:
    """Where random backward moves from the solved state lead: walking, and pulling boxes along."""
    boxes = room.targets
    player = _pick(rng, [cell for cell in cells if cell not in boxes])
    for _ in range(moves):
        ways = [step for step in room.steps if room.is_open[player + step] and player + step not in boxes]
        if not ways:
            break
        step = _pick(rng, ways)
        if player - step in boxes and rng.random() < _PULL_PROBABILITY:
            boxes = pushed(boxes, player - step, player)
        player += step
    return State(player, boxes)
