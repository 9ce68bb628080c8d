"""Adapter for OpenEnv: a server at an address, or a folder or package whose server is started here.

An answer becomes an action by the server's own schema: the whole answer where the action has one text field, else a JSON
object in the answer, whose fields the schema names. Rewards are the server's, at every step. The seed is passed to the
server's `reset`; whether levels follow from it is the environment's affair. It cannot be forked.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollwright.envs.base import EnvironmentFailure, Info, PromptTemplates, Reset, Step
from rollwright.envs.foreign import PROGRAMS, ForeignEnv, ForeignPackage, ForeignReply
from rollwright.envs.parsing import ANSWER_PATTERN, AnswerFormat
from rollwright.errors import ConfigError

PACKAGE = ForeignPackage("openenv", PROGRAMS / "openenv_client.py", ("openenv-core[core]==0.3.0",))

PROMPTS = PromptTemplates(
    system="You act in an environment, step by step. Collect as much reward as you can.",
    opening="{instruction}\n\n{observation}",
    turn="{observation}",
)

_JSON = re.compile(r"\{.*\}", re.DOTALL)

_BESIDE = ("metadata", "done", "reward")
"""Fields of actions and observations that every OpenEnv environment has; they are not part of the game."""


class OpenEnv(ForeignEnv):
    """One session with an OpenEnv server."""

    def __init__(
        self,
        place: str,
        *,
        max_steps: int = 50,
        format_penalty: float = 0.0,
        timeout: float = 60.0,
        reset: Mapping[str, Any] | None = None,
        action_pattern: str = ANSWER_PATTERN,
        answer_template: str | None = None,
    ) -> None:
        """`timeout`: seconds for one message of the server. `reset`: arguments of the server's reset beside the seed."""
        if max_steps < 1:
            raise ConfigError(f"max_steps must be 1 or more, got {max_steps}")
        if format_penalty > 0:
            raise ConfigError(f"format_penalty must be zero or negative, got {format_penalty}")
        folder = Path(place)
        served = str(folder.resolve()) if folder.is_dir() else place
        options = {"place": served, "timeout": timeout}
        super().__init__(PACKAGE, options)
        schema = PACKAGE.describe(options)["action"]
        self._fields: dict[str, Any] = {
            name: each for name, each in schema.get("properties", {}).items() if name not in _BESIDE
        }
        self._required = [name for name in schema.get("required", self._fields) if name in self._fields]
        self._format = AnswerFormat(action_pattern, answer_template)
        self._max_steps = max_steps
        self._format_penalty = format_penalty
        self._reset_options = dict(reset or {})
        self._steps = 0
        self._text = ""

    @property
    def instruction(self) -> str:
        if self._text_field is not None:
            what = self._fields[self._text_field].get("description") or self._text_field
            return self._format.request(f"your action ({what})", "your text")
        described = "; ".join(
            f"{name} ({each.get('type', 'any')}): {each.get('description', '')}".rstrip(": ")
            for name, each in self._fields.items()
        )
        return f"An action is a JSON object with {described}. {self._format.request('it', '{…}')}"

    @property
    def _text_field(self) -> str | None:
        """The only field of an action that is one text."""
        if len(self._fields) == 1:
            name, each = next(iter(self._fields.items()))
            return name if each.get("type") == "string" else None
        return None

    @property
    def prompts(self) -> PromptTemplates:
        return PROMPTS

    async def reset(self, seed: int) -> Reset:
        self._steps = 0
        reply = await self._begin(seed=seed, options=self._reset_options)
        self._text = _text(reply)
        return Reset(self._text, {"success": False})

    async def step(self, answer: str) -> Step:
        self._steps += 1
        last = self._steps >= self._max_steps
        action = self._parse_action(answer)
        if action is None:
            told = f"{self._text}\n(That was no action.)"
            return Step(
                told, 0.0, False, last, {"action": None, "valid": False, "penalty": self._format_penalty}
            )
        reply = await self._ask("step", action=action)
        self._text = _text(reply)
        reward = reply["reward"] if reply["reward"] is not None else 0.0
        if not isinstance(reward, int | float):
            raise EnvironmentFailure(f"openenv: the server's reward is {reward!r}; accepted: a number")
        info: Info = {
            "action": json.dumps(action),
            "valid": True,
            "penalty": 0.0,
            "success": bool(reply["done"]) and reward > 0,
        }
        return Step(self._text, float(reward), bool(reply["done"]), last and not reply["done"], info)

    def actions(self) -> Sequence[str]:
        """No finite list of actions exists."""
        return ()

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return self._format.write(action)

    def _parse_action(self, answer: str) -> dict[str, Any] | None:
        found = self._format.find(answer)
        if found is None:
            return None
        if self._text_field is not None:
            return {self._text_field: found}
        match = _JSON.search(found)
        try:
            action = json.loads(match[0]) if match else None
        except ValueError:
            return None
        if not isinstance(action, dict) or any(name not in action for name in self._required):
            return None
        return {name: action[name] for name in self._fields if name in action}


def _text(reply: ForeignReply) -> str:
    """The fields of an observation, a line each; a single text as it is."""
    observation = reply["observation"]
    if not isinstance(observation, dict):
        return str(observation)
    fields = {name: each for name, each in observation.items() if name not in _BESIDE}
    if len(fields) == 1:
        only = next(iter(fields.values()))
        if isinstance(only, str):
            return only
    return "\n".join(
        f"{name}: {each if isinstance(each, str) else json.dumps(each, sort_keys=True)}"
        for name, each in fields.items()
    )
