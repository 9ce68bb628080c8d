"""A served model that plays the other seats of a game.

It is asked greedily, so that a game that is replayed after a crash meets the same opponent, as far as its server repeats
itself. A server that cannot be asked is the environment's failure, never a reward.
"""

import os
from dataclasses import dataclass

import msgspec

from rollwright.envs.base import EnvironmentFailure
from rollwright.errors import ConfigError
from rollwright.http import HttpClient, HttpFault, Url
from rollwright.trajectory.usage import TokenUsage, note_call

_SECONDS = 120.0
_MAX_ANSWER = 4 << 20


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True)
class ModelOpponent:
    """An OpenAI-compatible chat endpoint."""

    base_url: str
    """For example `http://127.0.0.1:8000/v1`."""
    model: str
    api_key_env: str | None = None
    """Name of the environment variable that holds the key."""
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if self.api_key_env is not None and self.api_key_env not in os.environ:
            raise ConfigError(f"opponent.api_key_env: the environment has no variable {self.api_key_env}")
        Url.parse(self.base_url)

    async def __call__(self, seen: str) -> str:
        body = msgspec.json.encode(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": seen}],
                "temperature": 0,
                "max_tokens": self.max_tokens,
            }
        )
        headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        client = HttpClient(headers, keep_alive=0, max_answer=_MAX_ANSWER)
        url = Url.parse(f"{self.base_url.rstrip('/')}/chat/completions")
        try:
            response = await client.request("POST", url, body, _SECONDS)
        except HttpFault as error:
            raise EnvironmentFailure(f"opponent {self.base_url}: {error}") from error
        finally:
            await client.close()
        if response.status != 200:
            raise EnvironmentFailure(f"opponent {self.base_url}: status {response.status}")
        try:
            said = msgspec.json.decode(response.body, type=_Completion)
            used = said.usage or _Usage()
            note_call(
                self.model, TokenUsage(1, used.prompt_tokens, 0, used.completion_tokens), agent="opponent"
            )
            return said.choices[0].message.content or ""
        except (msgspec.MsgspecError, IndexError) as error:
            raise EnvironmentFailure(f"opponent {self.base_url}: not a completion: {error}") from error
