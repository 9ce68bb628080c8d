"""Sokoban: push every box onto a target.

The level depends on the room's options and the seed, not on the symbols: two vocabularies show the same room for the same
seed. Rewards are those of gym-sokoban: -0.1 per action, +1 for a box pushed onto a target, -1 for a box pushed off it, and
+10 when all boxes are on targets, which ends the game.
"""

from collections.abc import Mapping
from types import MappingProxyType

from rollwright import rng
from rollwright.envs.games import sokoban_level
from rollwright.envs.games.grid_game import DEFAULT_MAX_STEPS, GridGame, Move
from rollwright.envs.games.sokoban_level import Level, Room, State
from rollwright.envs.parsing import ANSWER_PATTERN
from rollwright.envs.splits import Part
from rollwright.errors import ConfigError
from rollwright.registry import suggestion

FORMAT_PENALTY = -0.15
"""Larger than the cost of an action, 0.1, so that a malformed answer is always worse than a wasted action."""

STEP_REWARD = -0.1
BOX_REWARD = 1.0
SOLVED_REWARD = 10.0

SEARCH_DEPTH = DEFAULT_MAX_STEPS
"""Upper bound of a level's shortest solution, unless `max_steps` is lower."""

_SMALLEST_SIDE = 4
"""A smaller room has no space inside the border to push a box."""

STANDARD_VOCAB: Mapping[str, str] = MappingProxyType(
    {
        "wall": "#",
        "empty": "_",
        "target": "O",
        "box_on_target": "√",
        "box": "X",
        "player": "P",
        "player_on_target": "S",
    }
)

DIFFERENT_VOCAB: Mapping[str, str] = MappingProxyType(
    {
        "wall": "W",
        "empty": ".",
        "target": "G",
        "box_on_target": "C",
        "box": "B",
        "player": "A",
        "player_on_target": "@",
    }
)
"""Shares no symbol with the standard vocabulary, to test whether a model learned the game or the symbols."""

_MEANINGS = {
    "wall": "a wall",
    "empty": "free floor",
    "target": "a target",
    "box_on_target": "a box on a target",
    "box": "a box",
    "player": "the player",
    "player_on_target": "the player on a target",
}


class Sokoban(GridGame):
    """The Sokoban environment."""

    action_names = ("Up", "Down", "Left", "Right")

    _room: Room
    _floor: str
    """The room as text, without boxes and player."""
    _state: State

    def __init__(
        self,
        *,
        dim_room: tuple[int, int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = SEARCH_DEPTH,
        part: str = "all",
        grid_vocab: Mapping[str, str] = STANDARD_VOCAB,
        board: str | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        format_penalty: float = FORMAT_PENALTY,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
    ) -> None:
        """`dim_room` is rows and columns with the border, `part` which rooms are drawn (`all`, `train` or `held_out`),
        and `board` a fixed level in the symbols in use."""
        super().__init__(max_steps, format_penalty, action_pattern, answer_template)
        if min(dim_room) < _SMALLEST_SIDE:
            raise ConfigError(f"dim_room must be {_SMALLEST_SIDE} or more each way, got {list(dim_room)}")
        if num_boxes < 1:
            raise ConfigError(f"num_boxes must be 1 or more, got {num_boxes}")
        if search_depth < 1:
            raise ConfigError(f"search_depth must be 1 or more, got {search_depth}")
        self._dim_room = dim_room
        self._num_boxes = num_boxes
        self._depth = min(search_depth, max_steps)
        self._part = Part.parse(part)
        self._vocab = _merge_vocab(grid_vocab)
        self._fixed = None if board is None else read_level(board, self._vocab)

    @property
    def rules(self) -> str:
        return (
            "You are the player in a Sokoban room. Push every box onto a target: walking into a box pushes "
            "it one cell on, if the cell behind it is free. Boxes cannot be pulled, two boxes in a row "
            "cannot be pushed, and a box in a corner stays there. "
            f"Each action costs {-STEP_REWARD}, a box pushed onto a target gives {BOX_REWARD:g}, a box pushed "
            f"off one takes {BOX_REWARD:g}, and the last box onto its target gives {SOLVED_REWARD:g} more."
        )

    @property
    def symbols(self) -> Mapping[str, str]:
        return {self._vocab[name]: meaning for name, meaning in _MEANINGS.items()}

    def _load_level(self, seed: int) -> None:
        level = self._fixed or sokoban_level.draw(
            rng.generator("sokoban", seed), *self._dim_room, self._num_boxes, self._depth, self._part
        )
        self._room, self._state = level
        self._floor = _render_floor(level.room, self._vocab)

    def _move(self, action: int) -> Move:
        room = self._room
        player, boxes = self._state
        step = room.steps[action]
        to = player + step
        if not room.is_open[to]:
            return Move(STEP_REWARD, effective=False)
        if to not in boxes:
            self._state = State(to, boxes)
            return Move(STEP_REWARD, effective=True)
        beyond = to + step
        if not room.is_open[beyond] or beyond in boxes:
            return Move(STEP_REWARD, effective=False)
        self._state = State(to, sokoban_level.pushed(boxes, to, beyond))
        reward = STEP_REWARD + BOX_REWARD * ((beyond in room.targets) - (to in room.targets))
        solved = self._state.boxes == room.targets
        return Move(reward + SOLVED_REWARD if solved else reward, True, terminated=solved, success=solved)

    def _skip(self) -> Move:
        return Move(STEP_REWARD, effective=False)

    def _solve(self, limit: int) -> tuple[int, ...] | None:
        return sokoban_level.solve(self._room, self._state, limit)

    def _render(self) -> str:
        targets = self._room.targets
        vocab = self._vocab
        player, boxes = self._state
        cells = list(self._floor)
        for box in boxes:
            cells[box] = vocab["box_on_target"] if box in targets else vocab["box"]
        cells[player] = vocab["player_on_target"] if player in targets else vocab["player"]
        return "".join(cells)


def _merge_vocab(given: Mapping[str, str]) -> dict[str, str]:
    """The standard symbols with the replacements in `given`, validated."""
    for name, symbol in given.items():
        if name not in STANDARD_VOCAB:
            known = ", ".join(STANDARD_VOCAB)
            raise ConfigError(
                f"grid_vocab: unknown key {name!r}{suggestion(name, STANDARD_VOCAB)}; known: {known}"
            )
        if len(symbol) != 1 or symbol.isspace():
            raise ConfigError(f"grid_vocab.{name} must be one visible character, got {symbol!r}")
    vocab = {**STANDARD_VOCAB, **given}
    if len(set(vocab.values())) < len(vocab):
        raise ConfigError(f"grid_vocab: each symbol must be different, got {' '.join(vocab.values())}")
    return vocab


def _render_floor(room: Room, vocab: Mapping[str, str]) -> str:
    cells = [vocab["empty"] if free else vocab["wall"] for free in room.is_open]
    for target in room.targets:
        cells[target] = vocab["target"]
    stride = room.width + 1
    cells[room.width :: stride] = "\n" * (len(cells) // stride)
    return "".join(cells[:-1])


def read_level(board: str, vocab: Mapping[str, str] = STANDARD_VOCAB) -> Level:
    """Parses a board; it must be a walled room with one player and as many boxes as targets."""
    rows = board.split()
    if len({len(row) for row in rows}) > 1:
        raise ConfigError("board: every row must have the same length")
    names = {symbol: name for name, symbol in vocab.items()}
    text = "\n".join(rows) + "\n"
    if unknown := sorted(set(text) - set(names) - {"\n"}):
        raise ConfigError(f"board: unknown symbol {unknown[0]!r}; known: {' '.join(names)}")
    cells = ["wall" if symbol == "\n" else names[symbol] for symbol in text]
    border = rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)
    if set(border) != {vocab["wall"]}:
        raise ConfigError("board: the border must be wall")
    players, boxes, targets = (
        tuple(at for at, name in enumerate(cells) if name in kinds)
        for kinds in (
            ("player", "player_on_target"),
            ("box", "box_on_target"),
            ("target", "box_on_target", "player_on_target"),
        )
    )
    if len(players) != 1 or not boxes or len(boxes) != len(targets) or boxes == targets:
        raise ConfigError(
            "board: needs one player, as many boxes as targets, and a box that is not on a target; got "
            f"{len(players)} players, {len(boxes)} boxes, {len(targets)} targets"
        )
    room = Room(len(rows[0]), bytes(name != "wall" for name in cells), targets)
    return Level(room, State(players[0], boxes))
