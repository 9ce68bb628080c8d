"""What the episodes of verifiers that run in this process share: which episode a task belongs to, and the interception server.

verifiers sends every model call of a rollout to its interception server, which records it and relays it to a provider. Here
the provider is the run that plays the episode: `PlayingServer` gives each rollout a client of that episode's address and key,
over one pool of connections.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic._internal import _fields
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.clients.eval import EvalClient
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
        self.base_url = playing.base_url
        self.api_key = playing.api_key
        self.headers: Mapping[str, str] = {AGENT_HEADER: agent}
        self.client = pool

    async def close(self) -> None:
        """The pool is everybody's."""


class PlayingServer(InterceptionServer):
    """The interception server of all episodes in this process."""

    current: "PlayingServer"
    """Of this process; harnesses that play in it find their sessions here."""

    async def start(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=30.0)
        self.pool = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        self.stack.push_async_callback(self.pool.aclose)
        PlayingServer.current = self
        await super().start()

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


def agent_name(session: RolloutSession) -> str:
    """The seat of a rollout."""
    return session.trace.agent.name if session.trace.agent is not None else "agent"
