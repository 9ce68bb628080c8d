"""Base class of the built-in board games: action counting, answer parsing, forking and instructions.

Always true of a game:
- An episode is a function of its options, its seed and the answers so far.
- Every answer counts as one action, malformed ones included; at `max_steps` the game is truncated.
- A malformed answer leaves the board unchanged; its cost is in `info["penalty"]`.
- Attributes hold immutable values, so a shallow copy is an exact and independent fork.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Self

from rollwright.envs.base import Info, PromptTemplates, Reset, Step
from rollwright.envs.parsing import AnswerFormat
from rollwright.errors import ConfigError, RollwrightError

DEFAULT_MAX_STEPS = 10
"""Action limit of an episode, sufficient for every generated level."""

_TURN = (
    "Turn {turn_idx}. The state is:\n{observation}\n"
    "Actions left: {actions_left}. Use at most {max_response_length} tokens for your reply."
)

PROMPTS = PromptTemplates(
    system="You play a game on a grid. Work towards its goal and collect as much reward as you can.",
    opening="{instruction}\n\n" + _TURN,
    turn=_TURN,
)


class Move(NamedTuple):
    """Effect of one action."""

    reward: float
    effective: bool
    """Whether the board changed."""
    terminated: bool = False
    success: bool = False


class GridGame(ABC):
    """A one-player game on a grid of symbols; subclasses implement the board."""

    action_names: tuple[str, ...]
    """Names of the actions; the game identifies an action by its index."""

    def __init__(
        self, max_steps: int, format_penalty: float, action_pattern: str, answer_template: str | None
    ) -> None:
        if max_steps < 1:
            raise ConfigError(f"max_steps must be 1 or more, got {max_steps}")
        if format_penalty > 0:
            raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
        self._max_steps = max_steps
        self._format_penalty = format_penalty
        self._format, self._by_name = _answer_parser(action_pattern, answer_template, self.action_names)
        self._steps = 0
        self._running = False
        self._plan: tuple[int, ...] | None = None
        """A shortest solution from the current state; empty: unsolvable; `None`: not computed yet."""

    # -- implemented by the game --------------------------------------------------------------------------

    @property
    @abstractmethod
    def rules(self) -> str:
        """Goal, rewards and end conditions under the options."""

    @property
    @abstractmethod
    def symbols(self) -> Mapping[str, str]:
        """Symbols of an observation and their meanings."""

    @abstractmethod
    def _load_level(self, seed: int) -> None:
        """Sets up the level of a seed."""

    @abstractmethod
    def _move(self, action: int) -> Move:
        """Applies an action."""

    @abstractmethod
    def _skip(self) -> Move:
        """Effect of an action without a move, for malformed answers."""

    @abstractmethod
    def _solve(self, limit: int) -> tuple[int, ...] | None:
        """A shortest solution from the current state of at most `limit` actions."""

    @abstractmethod
    def _render(self) -> str:
        """The board as text, one line per row."""

    # -- Env ----------------------------------------------------------------------------------------------

    @property
    def instruction(self) -> str:
        meanings = ", ".join(f"{symbol} = {meaning}" for symbol, meaning in self.symbols.items())
        return (
            f"{self.rules}\n"
            f"Symbols of a state: {meanings}.\n"
            f"Available actions: {', '.join(self.action_names)}.\n"
            f"{self._format.request('one action', self.action_names[0])}"
        )

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        self._load_level(seed)
        self._steps = 0
        self._running = True
        self._plan = None
        return Reset(self._render(), {"success": False})

    async def step(self, answer: str) -> Step:
        if not self._running:
            raise RollwrightError(f"{type(self).__name__}: no episode is running; call reset first")
        found = self._format.find(answer)
        action = None if found is None else self._by_name.get(found.lower())
        if action is None:
            move = self._skip()
            self._plan = None
        else:
            move = self._move(action)
            self._plan = self._plan[1:] if self._plan and self._plan[0] == action else None
        self._steps += 1
        truncated = not move.terminated and self._steps >= self._max_steps
        self._running = not (move.terminated or truncated)
        info: Info = {
            "action": None if action is None else self.action_names[action],
            "valid": action is not None,
            "penalty": self._format_penalty if action is None else 0.0,
            "success": move.success,
            "metrics": {"effective": float(move.effective)},
        }
        return Step(self._render(), move.reward, move.terminated, truncated, info)

    async def close(self) -> None:
        self._running = False

    # -- Forkable and Playable ----------------------------------------------------------------------------

    def fork(self) -> Self:
        return copy.copy(self)

    def actions(self) -> Sequence[str]:
        return self.action_names

    def best_action(self) -> str | None:
        if not self._running:
            return None
        if self._plan is None:
            self._plan = self._solve(self._max_steps - self._steps) or ()
        return self.action_names[self._plan[0]] if self._plan else None

    def answer(self, action: str) -> str:
        return self._format.write(action)


@lru_cache(maxsize=256)
def _answer_parser(
    action_pattern: str, answer_template: str | None, names: tuple[str, ...]
) -> tuple[AnswerFormat, Mapping[str, int]]:
    """Answer format and the index of each lower-case action name; cached, because many games share them."""
    by_name = {name.lower(): index for index, name in enumerate(names)}
    return AnswerFormat(action_pattern, answer_template, names[0]), by_name
