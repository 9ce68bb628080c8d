"""What the episodes of verifiers that run in this process share: which episode a task belongs to, and the interception server.

verifiers sends every model call of a rollout to its interception server, which records it and relays it to a provider. Here
the provider is the run that plays the episode: `PlayingServer` gives each rollout a client of that episode. A call whose answer
comes whole is asked without HTTP; what is streamed goes to the episode's address, over one pool of connections.

A loop that plays in this process reaches the server's own handler without a socket (`PlayingServer.complete`): what it looks
at, refuses, rewrites and records is the same.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx
from multidict import CIMultiDict
from pydantic import ValidationError
from pydantic._internal import _fields
from pydantic_core import from_json, to_json
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import model_error
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

if hasattr(_fields, "takes_validated_data_argument"):
    # pydantic looks at the signature of a default factory each time it is called, which is half of what verifiers' record of a
    # turn costs; the answer for one factory is always the same.
    known = functools.lru_cache(maxsize=4096)(_fields.takes_validated_data_argument)
    _fields.takes_validated_data_argument = known  # type: ignore[assignment]

MODEL = "policy"

AGENT_HEADER = "x-rollwright-agent"


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode."""

    ask: Callable[[Any], Awaitable[Any]]
    """Answers a chat completion, without HTTP."""
    base_url: str
    api_key: str

    def client(self) -> EvalClientConfig:
        """The endpoint of the episode, as verifiers describes one."""
        return EvalClientConfig(
            base_url=self.base_url or "http://run.invalid/v1", api_key_var="ROLLWRIGHT_KEY_OF_EPISODE"
        )


PLAYING: ContextVar[PlayedEpisode] = ContextVar("PLAYING")
"""The episode that the running code is part of; tasks inherit it."""


class EpisodeClient(EvalClient):
    """The endpoint of one episode; verifiers' own client would open a pool of connections for each."""

    def __init__(self, playing: PlayedEpisode, agent: str, pool: httpx.AsyncClient) -> None:
        self._playing = playing
        self._agent = agent
        self.base_url = playing.base_url
        self.api_key = playing.api_key
        self.headers: Mapping[str, str] = {AGENT_HEADER: agent}
        self.client = pool

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        if not isinstance(dialect, ChatDialect):
            return await super().get_response(dialect, body, sampling, session_id, turn, headers)
        told = to_json(body, inf_nan_mode="null").decode()
        answer = await self._playing.ask({"body": told, "agent": self._agent})
        if answer["status"] != 200:
            raise model_error(f"upstream {answer['status']}: {answer['body']}", status_code=answer["status"])
        try:
            raw = from_json(answer["body"])
            response = dialect.parse_response(dialect.validate_response(raw))
        except (ValueError, ValidationError) as error:
            raise model_error(f"malformed answer: {error}", status_code=502) from error
        response.raw = raw
        return response

    async def close(self) -> None:
        """Does nothing: all episodes share the pool."""


class PlayingServer(InterceptionServer):
    """The interception server of all episodes in this process."""

    current: "PlayingServer"
    """Of this process; harnesses that play in it find their sessions here."""

    async def start(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=30.0)
        self.pool = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.stack.push_async_callback(self.pool.aclose)
        self._complete = self._handler_for(ChatDialect())
        PlayingServer.current = self
        await super().start()

    async def complete(self, secret: str, body: bytes) -> tuple[int, bytes]:
        """Answers a chat completion of the rollout with this secret: HTTP status and body."""
        # A rollout that ends cancels the calls that it has left, so each is a task of its own.
        answer = await asyncio.ensure_future(self._complete(HandledRequest(secret, body)))
        return answer.status, answer.body

    def register(self, session: RolloutSession) -> tuple[str, str]:
        playing = PLAYING.get()
        if session.ctx.client != playing.client():  # a seat with a provider of its own, such as a judge
            return super().register(session)
        key = session.ctx.client.model_dump_json()
        self.clients[key] = EpisodeClient(playing, agent_name(session), self.pool)
        try:
            return super().register(session)
        finally:
            del self.clients[key]  # the next episode has an address of its own


class HandledRequest(dict[Any, Any]):
    """What the server's handler looks at of a request."""

    path = "/v1/chat/completions"

    def __init__(self, secret: str, body: bytes) -> None:
        super().__init__()
        self.headers: CIMultiDict[str] = CIMultiDict(authorization=f"Bearer {secret}")
        self.content_length = len(body)
        self._read_bytes: bytes | None = body

    async def read(self) -> bytes:
        return self._read_bytes or b""


def agent_name(session: RolloutSession) -> str:
    """The seat of a rollout."""
    return session.trace.agent.name if session.trace.agent is not None else "agent"
