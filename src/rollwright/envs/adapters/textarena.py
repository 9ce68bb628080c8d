"""Adapter for TextArena's games, for one player or against opponents.

The policy plays one seat. Opponents are random among the moves that the game lists, a function, a model behind an
OpenAI-compatible address, or a policy of the run: the one that is trained itself, or a frozen one of `policies`. Their moves
are part of the environment: they are not recorded as turns and not trained.
The reward is the seat's own, at the end of the game. Each game runs in its own process, and a copy of it is exact.
"""

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from rollwright import rng
from rollwright.envs.adapters.opponents import ModelOpponent
from rollwright.envs.base import EnvironmentFailure, Info, OpponentPlayer, PromptTemplates, Reset, Step
from rollwright.envs.foreign import PROGRAMS, ForeignEnv, ForeignPackage, ForeignReply
from rollwright.errors import ConfigError
from rollwright.registry import import_object

PACKAGE = ForeignPackage("textarena", PROGRAMS / "textarena_game.py", ("textarena==0.7.4",))

PROMPTS = PromptTemplates(
    system="You play a game. Make one move in each of your answers, in the form that the game asks for.",
    opening="{observation}",
    turn="{observation}",
)

Opponent = Callable[[str], "str | Awaitable[str]"]
"""Takes everything that the opponent's seat has seen and returns its move."""

_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
"""Reasoning before a move: games look for brackets anywhere in a text, and would find a considered move there."""

_LISTED = re.compile(r"\[[^\[\]\n]{1,24}\]")
_LISTING = re.compile(r"(?:available|valid|legal|possible)[^\n]*moves?[^\n]*:(.*)", re.IGNORECASE)


class TextArena(ForeignEnv):
    """One seat of a game."""

    stateless = True

    def __init__(
        self,
        game: str,
        *,
        seat: int | str = 0,
        players: int | None = None,
        opponent: str | Mapping[str, Any] | None = None,
        max_steps: int = 50,
        format_penalty: float = 0.0,
        **options: Any,
    ) -> None:
        """`seat`: the policy's, from 0 on, or `alternate` (by the level). `players`: how many play; unset, the fewest that the
        game allows. `opponent`: who plays the other seats: `random`, `module:name` of a function that takes what its seat has
        seen and returns a move, `{base_url, model}` of a served model, `policy` for the policy that is trained itself, or
        `{policy: NAME}` for one of `policies`. `options` are passed to the game."""
        said = PACKAGE.describe({"game": game, "players": players, "options": options})
        self._players: int = said["players"]
        super().__init__(PACKAGE, {"game": game, "players": self._players, "options": options})
        if max_steps < 1:
            raise ConfigError(f"max_steps must be 1 or more, got {max_steps}")
        if format_penalty > 0:
            raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
        if seat != "alternate" and not (isinstance(seat, int) and 0 <= seat < self._players):
            raise ConfigError(f"seat must be alternate or 0 to {self._players - 1}, got {seat!r}")
        if self._players > 1 and opponent is None:
            raise ConfigError(
                f"{game} has {self._players} players; give opponent: random, module:name, policy, {{policy: NAME}} or "
                "{base_url, model}"
            )
        self._opponent_policy = _policy_name(opponent)
        self._opponent = None
        if opponent is not None and self._opponent_policy is None:
            self._opponent = _load_opponent(opponent)
        self._policies: OpponentPlayer | None = None
        self._chosen_seat = seat
        self._max_steps = max_steps
        self._format_penalty = format_penalty
        self._seat = 0
        self._seed = 0
        self._steps = 0
        self._moves = 0
        self._seen: dict[int, str] = {}
        self._latest = ""

    def use_opponents(self, play: OpponentPlayer) -> None:
        self._policies = play

    @property
    def instruction(self) -> str:
        return ""

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        self._seed, self._steps, self._moves, self._seen = seed, 0, 0, {}
        self._seat = seed % self._players if self._chosen_seat == "alternate" else int(self._chosen_seat)
        state = await self._play_others(await self._begin(seed=seed))
        if "rewards" in state:
            raise EnvironmentFailure(f"the game of level {seed} was over before seat {self._seat} had a move")
        self._latest = state["observation"]
        return Reset(self._latest, {"success": False})

    async def step(self, answer: str) -> Step:
        move = _THOUGHT.sub("", answer)
        self._steps += 1
        state = await self._play_others(await self._ask("step", move=move))
        info: Info = {
            "action": move,
            "valid": not state.get("invalid", False),
            "penalty": 0.0,
            "success": False,
        }
        if "rewards" not in state:
            info["penalty"] = 0.0 if info["valid"] else self._format_penalty
            self._latest = state["observation"]
            return Step(self._latest, 0.0, False, self._steps >= self._max_steps, info)
        seat = str(self._seat)
        reward = float(state["rewards"].get(seat, 0.0))
        info["success"] = reward > 0 if self._players > 1 else reward >= 1
        info["valid"] = self._seat not in state["invalid_seats"]
        info["penalty"] = 0.0 if info["valid"] else self._format_penalty
        return Step(state["observations"].get(seat, ""), reward, True, False, info)

    def fork(self) -> Self:
        twin = self._forked()
        twin._seen = dict(self._seen)
        return twin

    def actions(self) -> Sequence[str]:
        """The moves that the game has listed last; many games list none."""
        return _listed_moves(self._latest)

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return action

    async def _play_others(self, state: ForeignReply) -> ForeignReply:
        """Lets the opponents move until it is the policy's turn, or the end."""
        while "rewards" not in state and state["seat"] != self._seat:
            seat = state["seat"]
            self._seen[seat] = f"{self._seen.get(seat, '')}\n{state['observation']}".strip()
            state = await self._ask("step", move=await self._opponent_move(seat, state["observation"]))
        return state

    async def _opponent_move(self, seat: int, latest: str) -> str:
        self._moves += 1
        if self._opponent_policy is not None:
            return await self._policy_move(seat)
        if self._opponent is None:
            return _random_move(self._seen[seat], latest, (self._seed, seat, self._moves))
        move = self._opponent(self._seen[seat])
        if inspect.isawaitable(move):
            move = await move
        if not isinstance(move, str):
            raise EnvironmentFailure(f"the opponent returned a {type(move).__name__}; accepted: a text")
        return move

    async def _policy_move(self, seat: int) -> str:
        assert self._opponent_policy is not None
        if self._policies is None:
            raise EnvironmentFailure("opponent: a policy of the run plays only in a run's episodes")
        prompts = [("system", PROMPTS.system), ("user", self._seen[seat])]
        return _THOUGHT.sub("", await self._policies(self._opponent_policy, seat, prompts))


def _policy_name(opponent: str | Mapping[str, Any] | None) -> str | None:
    """The policy of the run that plays the other seats, empty for the trained one; `None`: none does."""
    if opponent == "policy":
        return ""
    if isinstance(opponent, Mapping) and "policy" in opponent:
        if len(opponent) > 1 or not isinstance(opponent["policy"], str):
            raise ConfigError(
                f"opponent: {dict(opponent)} names a policy and more; accepted: {{policy: NAME}}"
            )
        return opponent["policy"]
    return None


def _random_move(seen: str, latest: str, key: tuple[int, int, int]) -> str:
    """One of the moves that the game lists last."""
    for text in (latest, seen):
        if moves := _listed_moves(text):
            return moves[rng.digest("opponent", *key) % len(moves)]
    raise EnvironmentFailure("opponent random: the game lists no moves; give a function or a served model")


def _listed_moves(text: str) -> list[str]:
    listing = _LISTING.findall(text)
    return _LISTED.findall(listing[-1]) if listing else []


def _load_opponent(opponent: str | Mapping[str, Any]) -> Opponent | None:
    """`None` stands for the random player."""
    if opponent == "random":
        return None
    if isinstance(opponent, str):
        found = import_object(opponent)
        if not callable(found):
            raise ConfigError(f"opponent {opponent!r} is not a function")
        return found  # type: ignore[no-any-return]
    try:
        return ModelOpponent(**opponent)
    except TypeError as error:
        raise ConfigError(f"opponent: {error}; accepted: base_url, model, api_key_env, max_tokens") from error
