"""TextArena's games, a move at a time, for one seat or several.

An observation is what the game has said to a seat since its last move. The seat's own moves are left out: they stand in the
conversation as its answers. The package draws from Python's global random state, which here belongs to one game alone.
"""

import random
from typing import Any

import textarena

MOVE = textarena.ObservationType.PLAYER_ACTION
ADMIN = textarena.ObservationType.GAME_ADMIN


class UnplayableGame(Exception):
    """The user's settings name no game."""

    is_settings = True


class Game:
    """One game, reset any number of times."""

    def __init__(self, game: str, players: int, options: dict[str, Any]) -> None:
        self._game, self._players, self._options = game, players, options
        self._env: Any = None
        self._done = False

    def reset(self, seed: int) -> dict[str, Any]:
        random.seed(seed)
        self._env = textarena.make(self._game, **self._options)
        self._env.reset(num_players=self._players, seed=seed)
        self._done = False
        return self._state()

    def step(self, move: str) -> dict[str, Any]:
        self._done, _ = self._env.step(move)
        return self._state()

    def _state(self) -> dict[str, Any]:
        """Whose move it is and what that seat sees; at the end what every seat sees and earned."""
        if not self._done:
            seat = self._env.state.current_player_id
            text, invalid = self._take(seat)
            return {"seat": seat, "observation": text, "invalid": invalid}
        seen = {str(seat): self._take(seat) for seat in range(self._players)}
        rewards, info = self._env.close()
        return {
            "rewards": {str(seat): float(value) for seat, value in (rewards or {}).items()},
            "observations": {seat: text for seat, (text, _) in seen.items()},
            "invalid_seats": [seat for seat, each in (info or {}).items() if each.get("invalid_move")],
        }

    def _take(self, seat: int) -> tuple[str, bool]:
        """The messages to a seat that it has not seen, and whether one of them refuses its move."""
        state = self._env.state
        messages = state.observations.get(seat, [])
        state.observations[seat] = []
        names = state.role_mapping or {}
        told = []
        invalid = False
        for sender, text, kind in messages:
            if kind is MOVE and sender in (seat, textarena.GAME_ID):
                continue
            invalid = invalid or (kind is ADMIN and "invalid move" in text)
            told.append(
                text if sender == textarena.GAME_ID else f"[{names.get(sender, f'Player {sender}')}] {text}"
            )
        return "\n".join(told).strip(), invalid


def make(game: str, players: int, options: dict[str, Any]) -> Game:
    return Game(_id(game), players, options)


def describe(game: str, players: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """The game's id and the number of its seats; the fewest that it can be played with, where none is asked for."""
    found = _id(game)
    for count in [players] if players is not None else range(1, 16):
        try:
            env = textarena.make(found, **options)
            env.reset(num_players=count, seed=0)
        except TypeError as error:
            raise UnplayableGame(f"{game} refuses the settings {options}: {error}") from error
        except LookupError as error:
            # nltk's message is a page long; its point is that word lists are not on this machine
            raise UnplayableGame(
                f"{game} needs data that is not on this machine: {_first_words(error)}"
            ) from error
        except Exception as error:
            if players is not None or not isinstance(error, AssertionError | ValueError):
                raise UnplayableGame(f"{game} cannot be played by {count}: {_first_words(error)}") from error
            continue
        return {"id": found, "players": count, "version": getattr(textarena, "__version__", "")}
    raise UnplayableGame(f"{game}: no number of players up to 15 is accepted")


def _id(game: str) -> str:
    """The bare game where TextArena has one under that name: its wrappers repeat the whole history in every observation."""
    known = textarena.envs.registration.ENV_REGISTRY
    if f"{game}-raw" in known:
        return f"{game}-raw"
    if game in known:
        return game
    near = sorted({each.removesuffix("-raw").removesuffix("-train") for each in known if _alike(game, each)})
    raise UnplayableGame(
        f"no game {game!r}; " + (f"there are {', '.join(near[:8])}" if near else "see `textarena.envs`")
    )


def _alike(game: str, known: str) -> bool:
    return known.lower().startswith(game.lower().partition("-")[0][:4])


def _first_words(error: BaseException) -> str:
    words = " ".join(str(error).replace("*", " ").split())
    return words[:160] or type(error).__name__
