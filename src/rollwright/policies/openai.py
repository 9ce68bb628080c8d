"""Any OpenAI-compatible inference engine over HTTP: vLLM, SGLang, llama.cpp, a hosted API.

What is true: a call ends with a whole completion or with one `EngineError` that says where, after how many
tries and why. In between, what may pass by itself (429, 5xx, time limits, broken bodies, broken connections)
is retried as the `RetryPolicy` says, on asyncio's clock, and counted by cause. A cancelled call leaves no
connection behind. Each event loop has a session of its own; waiting for a free connection is not counted
against a request's time limit.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from yarl import URL

from rollwright.draws import uniform
from rollwright.errors import ConfigError, FormatError
from rollwright.policies.base import EngineError, Generation, Prompt, RateLimited, Renderer, Sampling
from rollwright.policies.openai_api import Api, ChatApi, CompletionsApi, one_line, server_message
from rollwright.policies.retry import Cause, RetryPolicy, retry_after_seconds, status_cause

CONNECT_SECONDS = 10.0
"""A host that does not answer a connection attempt for so long is not busy but gone."""

KEEP_ALIVE_SECONDS = 4.0
"""vLLM and SGLang (uvicorn) close idle connections after 5 s; letting go first avoids posting into a closing
one."""

_SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")
"""An engine needs none of them, and unpacking a compressed answer would cost more than it saves."""


@dataclass
class Counters:
    """What happened so far."""

    requests: int = 0
    """Calls of `generate`, not tries."""
    retries: Counter[Cause] = field(default_factory=Counter)
    failures: Counter[Cause] = field(default_factory=Counter)
    """Calls that ended with an error, by its last cause."""
    prompt_tokens: int = 0
    """As the engine counted them."""
    completion_tokens: int = 0


@dataclass(frozen=True)
class _Fault:
    """Why one try brought no completion."""

    cause: Cause
    detail: str
    retry_after: float | None = None


@dataclass(frozen=True)
class _Link:
    """One event loop's way to the engine."""

    session: aiohttp.ClientSession
    free: asyncio.Semaphore


class OpenAIPolicy:
    """See the module's docstring for what always holds."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api: Literal["chat", "completions"] = "chat",
        api_key: str | None = None,
        api_key_env: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        request_timeout: float = 120.0,
        retry: RetryPolicy | None = None,
        max_connections: int = 4096,
        version: int = 0,
    ) -> None:
        """`base_url` is what comes before `/chat/completions`, for example `http://127.0.0.1:8000/v1`.

        `api_key_env` names an environment variable that holds the key. `request_timeout` is the time of one
        try, in seconds. `extra_body` is added to every request.
        """
        if request_timeout <= 0:
            raise ConfigError(f"request_timeout: {request_timeout} is not a time; accepted: more than 0 s")
        if max_connections < 1:
            raise ConfigError(f"max_connections: {max_connections} is too few; accepted: 1 or more")
        self.version = version
        self.counters = Counters()
        self._api = _api(api, model, extra_body or {})
        self._url = _endpoint(base_url, self._api.path)
        self._headers = {"Content-Type": "application/json"}
        if (key := _key(api_key, api_key_env)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._retry = retry or RetryPolicy()
        self._request_timeout = request_timeout
        self._max_connections = max_connections
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}

    @property
    def renderer(self) -> Renderer | None:
        return self._api.renderer

    @property
    def pressure(self) -> int:
        counted = self.counters.retries + self.counters.failures
        return counted[Cause.RATE_LIMITED] + counted[Cause.TIMEOUT]

    def set_version(self, version: int) -> None:
        """To be called when the engine has new weights."""
        self.version = version

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        counters = self.counters
        counters.requests += 1
        body = self._api.request(prompt, sampling)
        tries = 1
        while isinstance(made := await self._try(body), _Fault):
            draw = uniform(*prompt.key, "retry", tries)
            delay = self._retry.delay(tries, made.cause, made.retry_after, draw)
            if delay is None:
                counters.failures[made.cause] += 1
                raise self._error(made, tries)
            counters.retries[made.cause] += 1
            await asyncio.sleep(delay)
            tries += 1
        counters.prompt_tokens += made.prompt_tokens
        counters.completion_tokens += made.completion_tokens
        return made

    async def close(self) -> None:
        """Closes this event loop's connections, when no call is under way. A later call opens new ones."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.session.close()
        await self._drop_dead_links()

    async def _try(self, body: bytes) -> Generation | _Fault:
        link = self._links.get(asyncio.get_running_loop())
        if link is None:
            link = self._open_link()
            await self._drop_dead_links()
        try:
            async with link.free, link.session.post(self._url, data=body, allow_redirects=False) as response:
                raw = await response.read()
        except TimeoutError as error:
            limit = self._request_timeout
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                limit = min(limit, CONNECT_SECONDS)
            return _Fault(Cause.TIMEOUT, f"no answer within {limit:g} s")
        except (aiohttp.ClientPayloadError, aiohttp.ClientResponseError) as error:
            return _Fault(Cause.BROKEN_BODY, one_line(f"broken HTTP response: {error}"))
        except (aiohttp.ClientError, OSError) as error:
            return _Fault(Cause.CONNECTION, one_line(str(error) or type(error).__name__))
        if response.status != 200:
            wait = retry_after_seconds(response.headers.get("Retry-After"))
            detail = f"HTTP {response.status}: {server_message(raw) or response.reason}"
            return _Fault(status_cause(response.status), detail, wait)
        try:
            return self._api.response(raw)
        except FormatError as error:
            return _Fault(Cause.BROKEN_BODY, f"not a completion: {error}")

    def _error(self, fault: _Fault, tries: int) -> EngineError:
        message = f"{self._url}: {fault.detail} (after {tries} {'try' if tries == 1 else 'tries'})"
        if fault.cause is Cause.RATE_LIMITED:
            return RateLimited(message, fault.retry_after)
        return EngineError(message)

    def _open_link(self) -> _Link:
        link = _Link(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=_SKIPPED_HEADERS,
                timeout=aiohttp.ClientTimeout(total=self._request_timeout, sock_connect=CONNECT_SECONDS),
            ),
            asyncio.Semaphore(self._max_connections),
        )
        self._links[asyncio.get_running_loop()] = link
        return link

    async def _drop_dead_links(self) -> None:
        """Sessions whose event loop has ended without `close`; their sockets ended with it."""
        for loop in [loop for loop in self._links if loop.is_closed()]:
            await self._links.pop(loop).session.close()


def _api(kind: str, model: str, extra_body: Mapping[str, Any]) -> Api:
    if kind == "chat":
        return ChatApi(model, extra_body)
    if kind == "completions":
        return CompletionsApi(model, extra_body)
    raise ConfigError(f"api: {kind!r} is unknown; accepted: chat, completions")


def _endpoint(base_url: str, path: str) -> URL:
    try:
        url = URL(base_url.rstrip("/") + path)
    except ValueError as error:
        raise ConfigError(f"base_url: {base_url!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url: {base_url!r} is not a URL like http://127.0.0.1:8000/v1")
    if url.user is not None:
        raise ConfigError("base_url: holds a user name or password; give the key in api_key or api_key_env")
    return url


def _key(api_key: str | None, api_key_env: str | None) -> str | None:
    if api_key is not None and api_key_env is not None:
        raise ConfigError("api_key and api_key_env: give one of them, not both")
    key = api_key
    if api_key_env is not None and not (key := os.environ.get(api_key_env, "").strip()):
        raise ConfigError(f"api_key_env: the environment variable {api_key_env} is not set")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key: holds a character that no HTTP header can carry")
    return key
