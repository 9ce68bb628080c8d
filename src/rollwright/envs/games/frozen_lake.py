"""Frozen lake: walk over the ice to the goal without falling into a hole.

Start and goal are random cells, and on ice that is not slippery the goal is reachable within `max_steps` actions. On
slippery ice each slip depends on (seed, step) alone, so an episode is still a function of its seed and answers, and a fork
slips exactly like the original.

A lake's part (`rollwright.envs.splits`) depends on its holes and goal, not on its start; with `split: structure`, on its
holes, and on its start and goal.

Levels do not come from Gymnasium's generator, because it always starts in one corner and ends in the opposite one, and its
random stream may change with the numpy version.
"""

from functools import cache, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from rollwright import rng
from rollwright.envs.games.grid_game import DEFAULT_MAX_STEPS, GridGame, Move
from rollwright.envs.parsing import ANSWER_PATTERN
from rollwright.envs.splits import LevelSplit, Part, part_of, structural_part, views, well_spaced
from rollwright.errors import ConfigError

FORMAT_PENALTY = -0.01
"""Small relative to the goal's reward of 1, so that the format never outweighs the game."""

PLAYER, ICE, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_ON_GOAL = "P_OGX√"

_MAX_TRIES = 10_000
"""Far more tries than any feasible combination of options needs (the defaults need 1.1 on average)."""

_STRUCTURES = 100
"""Factor of that for a split by structure: of the lakes of 4x4 cells, one in 32 has holes that are well spaced."""


class Lake(NamedTuple):
    """A level. Cells are numbered row by row."""

    start: int
    goal: int
    holes: frozenset[int]

    def part(self, size: int, split: LevelSplit = LevelSplit.BOARD) -> Part | None:
        """`HELD_OUT` or `TRAIN`, invariant under the eight symmetries of the square: by holes and goal, or by structure, and
        then `None` for a lake of neither part."""
        if split is LevelSplit.STRUCTURE:
            return structural_part("frozen lake", size, self.holes, self.start, self.goal)
        seen = views(size, size, (self.goal,), self.holes)
        return part_of("frozen lake", (f"{size} {view}" for view in seen))

    def straight_distance(self, size: int) -> int:
        """Actions from start to goal if there were no holes."""
        (row, column), (to_row, to_column) = divmod(self.start, size), divmod(self.goal, size)
        return abs(to_row - row) + abs(to_column - column)


class LakeRules(NamedTuple):
    """The options that a level is drawn by."""

    size: int
    p: float
    min_distance: int
    max_steps: int
    part: Part
    split: LevelSplit
    needs_detour: bool

    def has(self, lake: Lake) -> bool:
        """Whether the lake is of the part."""
        return self.part is Part.ALL or self.part is lake.part(self.size, self.split)


@lru_cache(maxsize=4096)
def draw_lake(rules: LakeRules, seed: int) -> Lake:
    """The level of a seed. It is kept, because the members of a group and later validations ask for the same ones."""
    drawn, cells = rng.generator("frozen lake", seed), range(rules.size**2)
    by_structure = rules.split is LevelSplit.STRUCTURE and rules.part is not Part.ALL
    for _ in range(_MAX_TRIES * (_STRUCTURES if by_structure else rules.part.one_in)):
        holes = frozenset(cell for cell in cells if drawn.random() >= rules.p)
        if by_structure and not well_spaced(holes, rules.size):
            continue
        ice = [cell for cell in cells if cell not in holes]
        if len(ice) < 2:
            continue
        start = ice.pop(int(drawn.random() * len(ice)))
        lake = Lake(start, ice[int(drawn.random() * len(ice))], holes)
        if by_structure and not rules.has(lake):
            continue  # before a way is looked for, which takes longer
        way = shortest_path(lake, rules.size, start, rules.max_steps)
        if way is None or len(way) < rules.min_distance:
            continue
        if rules.needs_detour and len(way) == lake.straight_distance(rules.size):
            continue
        if rules.has(lake):
            return lake
    raise ConfigError(
        f"FrozenLake: found no level with size={rules.size}, p={rules.p}, min_distance={rules.min_distance}, "
        f"max_steps={rules.max_steps}, part={rules.part}, split={rules.split}, needs_detour={rules.needs_detour}; "
        "lower min_distance, or raise p or max_steps"
    )


def shortest_path(lake: Lake, size: int, start: int, limit: int) -> tuple[int, ...] | None:
    """Directions of a shortest path to the goal; `None`: it has more than `limit` steps."""
    neighbours = _neighbours(size)
    ways: dict[int, tuple[int, ...]] = {start: ()}
    layer = [start]
    for _ in range(limit):
        reached = []
        for cell in layer:
            for direction, to in enumerate(neighbours[cell]):
                if to == lake.goal:
                    return (*ways[cell], direction)
                if to not in ways and to not in lake.holes:
                    ways[to] = (*ways[cell], direction)
                    reached.append(to)
        layer = reached
    return None


class FrozenLake(GridGame):
    """The FrozenLake environment."""

    action_names = ("Left", "Down", "Right", "Up")
    symbols = MappingProxyType(
        {
            PLAYER: "the player",
            ICE: "safe ice",
            HOLE: "a hole",
            GOAL: "the goal",
            PLAYER_IN_HOLE: "the player in a hole",
            PLAYER_ON_GOAL: "the player on the goal",
        }
    )

    _seed: int
    _lake: Lake
    _player: int

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        min_distance: int = 1,
        part: str = "all",
        split: str = "board",
        needs_detour: bool = False,
        board: str | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        format_penalty: float = FORMAT_PENALTY,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
    ) -> None:
        """`p` is the probability of ice, `min_distance` the least number of actions from start to goal, `part` the set
        of lakes that levels are drawn from (`all`, `train` or `held_out`), `split` how lakes are parted (by `board` or by
        `structure`), and `board` a fixed level as text. With `needs_detour` no level has a way as short as without holes."""
        super().__init__(max_steps, format_penalty, action_pattern, answer_template)
        if size < 2:
            raise ConfigError(f"size must be 2 or more, got {size}")
        if not 0 < p <= 1:
            raise ConfigError(f"p must be above 0 and at most 1, got {p}")
        if not 1 <= min_distance <= max_steps:
            raise ConfigError(f"min_distance must be from 1 to max_steps ({max_steps}), got {min_distance}")
        self._fixed = None if board is None else read_lake(board)
        self._size = size if board is None else len(board.split())
        self._is_slippery = is_slippery
        self._neighbours = _neighbours(self._size)
        self._rules = LakeRules(
            self._size, p, min_distance, max_steps, Part.parse(part), LevelSplit.parse(split), needs_detour
        )

    @property
    def rules(self) -> str:
        ice = (
            "The ice is slippery: one action in three, on average, takes you where you want, and the others "
            "take you to the left or the right of that direction."
            if self._is_slippery
            else "The ice is not slippery: an action takes you exactly one cell in its direction."
        )
        return (
            "You cross a frozen lake. Reach the goal and stay out of the holes. "
            f"{ice} At the edge of the grid you stay where you are. "
            "Reaching the goal gives a reward of 1; falling into a hole ends the game with nothing."
        )

    def _load_level(self, seed: int) -> None:
        self._seed = seed
        self._lake = self._fixed or draw_lake(self._rules, seed)
        self._player = self._lake.start

    def _slip(self, step: int) -> int:
        """Quarter turns by which the action at `step` slips: -1, 0 or 1."""
        return rng.digest("frozen lake slip", self._seed, step) % 3 - 1 if self._is_slippery else 0

    def _move(self, action: int) -> Move:
        before = self._player
        self._player = self._neighbours[before][(action + self._slip(self._steps)) % 4]
        success = self._player == self._lake.goal
        return Move(
            reward=1.0 if success else 0.0,
            effective=self._player != before,
            terminated=success or self._player in self._lake.holes,
            success=success,
        )

    def _skip(self) -> Move:
        return Move(reward=0.0, effective=False)

    def _solve(self, limit: int) -> tuple[int, ...] | None:
        """Compensates each step for its slip, which is known from the seed."""
        way = shortest_path(self._lake, self._size, self._player, limit)
        if way is None:
            return None
        return tuple((direction - self._slip(step)) % 4 for step, direction in enumerate(way, self._steps))

    def _render(self) -> str:
        lake, player = self._lake, self._player
        cells = [HOLE if cell in lake.holes else ICE for cell in range(self._size**2)]
        cells[lake.goal] = GOAL
        if player == lake.goal:
            cells[player] = PLAYER_ON_GOAL
        else:
            cells[player] = PLAYER_IN_HOLE if player in lake.holes else PLAYER
        return "\n".join("".join(cells[row : row + self._size]) for row in range(0, len(cells), self._size))


@cache
def _neighbours(size: int) -> tuple[tuple[int, int, int, int], ...]:
    """Target cell of each action from each cell; at the edge, the cell itself."""
    return tuple(
        (
            cell - 1 if cell % size > 0 else cell,
            cell + size if cell // size < size - 1 else cell,
            cell + 1 if cell % size < size - 1 else cell,
            cell - size if cell // size > 0 else cell,
        )
        for cell in range(size**2)
    )


def read_lake(board: str) -> Lake:
    """Parses a board; it must be a square with one player and one goal."""
    rows = board.split()
    cells = "".join(rows)
    if any(len(row) != len(rows) for row in rows):
        raise ConfigError("board: must have as many columns as rows")
    if unknown := sorted(set(cells) - {PLAYER, ICE, HOLE, GOAL}):
        raise ConfigError(f"board: unknown symbol {unknown[0]!r}; known: {PLAYER} {ICE} {HOLE} {GOAL}")
    if cells.count(PLAYER) != 1 or cells.count(GOAL) != 1:
        raise ConfigError(f"board: needs one player {PLAYER} and one goal {GOAL}")
    holes = frozenset(at for at, symbol in enumerate(cells) if symbol == HOLE)
    return Lake(cells.index(PLAYER), cells.index(GOAL), holes)
