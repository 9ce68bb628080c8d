"""Requests to an inference engine over HTTP: one pool of connections, one back-off, one set of counters.

Always true: a request returns the body of a response with status 200 or raises a `CallFault` with the cause. A policy owns
its retry loop: it catches the fault and calls `back_off`, which counts the fault by cause and waits on asyncio's clock as the
`RetryPolicy` says, or raises one `EngineError` with the URL, the number of tries and the cause. Every request limits the size
of its response. A cancelled call leaves no connection behind. Each event loop has its own client; the wait for a free
connection does not count against the time limit of a request.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollwright.addresses import has_password, redacted
from rollwright.engines.base import EngineError, RateLimited
from rollwright.engines.openai_api import one_line, server_message
from rollwright.engines.settings import HttpApiConfig
from rollwright.errors import ConfigError
from rollwright.http import BrokenResponse, HttpClient, HttpResponse, TimedOut, Unreachable, Url
from rollwright.http.retry import FaultCause, RetryPolicy, retry_after_seconds, status_cause
from rollwright.rng import KeyPart, uniform

KEEP_ALIVE_SECONDS = 4.0
"""vLLM and SGLang (uvicorn) close idle connections after 5 s; closing earlier avoids a request on a closing connection."""

MAX_CONTROL_ANSWER = 16 * 1024 * 1024
"""Bytes of a response without a generation: a list of models, an engine's settings."""


@dataclass
class CallCounters:
    """Totals of one client."""

    requests: int = 0
    """Calls of `generate`; tries are not counted."""
    retries: Counter[FaultCause] = field(default_factory=Counter)
    failures: Counter[FaultCause] = field(default_factory=Counter)
    """Calls that ended with an error, by its last cause."""
    prompt_tokens: int = 0
    """As the engine counted them."""
    completion_tokens: int = 0

    @property
    def pressure(self) -> int:
        """Count of requests that the engine refused for load or did not answer in time."""
        causes = (FaultCause.RATE_LIMITED, FaultCause.TIMEOUT)
        return sum(self.retries[cause] + self.failures[cause] for cause in causes)


class CallFault(Exception):
    """One request has no usable response; another try may have."""

    def __init__(self, cause: FaultCause, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.retry_after = retry_after
        """Seconds that the server asked to wait; `None`: it did not say."""


class Requests(Protocol):
    """An HTTP client: sends a request and returns its response, or raises an `HttpFault`."""

    async def request(
        self, method: str, url: Url, body: bytes | None, seconds: float, *, max_answer: int | None = None
    ) -> HttpResponse: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class _Link:
    """The client of one event loop, and its limit of connections."""

    client: Requests
    free: asyncio.Semaphore


class HttpCalls:
    """See the module's docstring for its guarantees."""

    def __init__(
        self,
        settings: HttpApiConfig,
        *,
        api_key: str | None = None,
        retry: RetryPolicy | None = None,
        proxy: str | None = None,
        compress: bool = False,
        on_response: Callable[[HttpResponse], None] | None = None,
    ) -> None:
        """`api_key`: the key itself, in place of `api_key_env`. `retry`: in place of `max_retries`. `proxy`: URL of the proxy of
        all requests; `None`: connect directly, whatever the environment says. `compress`: ask for compressed responses.
        `on_response`: gets every response, whatever its status."""
        self.counters = CallCounters()
        self._headers = {"Content-Type": "application/json"}
        if (key := _key(api_key, settings.api_key_env)) is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.retry = retry or RetryPolicy(settings.max_retries)
        self._request_timeout = settings.request_timeout
        self._max_connections = settings.max_connections
        self._proxy = proxy
        self._compress = compress
        self._on_response = on_response
        self._links: dict[asyncio.AbstractEventLoop, _Link] = {}

    async def post(self, url: Url, body: bytes, max_answer: int) -> bytes:
        """Send one POST as soon as a connection is free; return the body of a 200 response of at most `max_answer` bytes."""
        link = await self._link()
        async with link.free:
            return await self._send(link, "POST", url, body, self._request_timeout, max_answer)

    async def send_control(
        self, method: str, url: Url, body: bytes | None, seconds: float, *, max_answer: int
    ) -> bytes:
        """Send one request without waiting for a free connection: it may be the one that ends the others."""
        return await self._send(await self._link(), method, url, body, seconds, max_answer)

    async def back_off(self, fault: CallFault, tries: int, key: tuple[KeyPart, ...], where: Url | str) -> int:
        """Wait before the next try and return its number; raise when the retry policy gives up.

        `tries`: tries so far. `key`: of the random part of the wait, so equal calls wait equally long.
        """
        delay = self.retry.delay(tries, fault.cause, fault.retry_after, uniform(*key, "retry", tries))
        if delay is None:
            self.counters.failures[fault.cause] += 1
            raise engine_error(fault, tries, where)
        self.counters.retries[fault.cause] += 1
        await asyncio.sleep(delay)
        return tries + 1

    async def close(self) -> None:
        """Close this event loop's connections while no call is under way. A later call opens new ones."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.client.close()
        await self._drop_dead_links()

    async def _send(
        self, link: _Link, method: str, url: Url, body: bytes | None, seconds: float, max_answer: int
    ) -> bytes:
        try:
            answer = await link.client.request(method, url, body, seconds, max_answer=max_answer)
        except TimedOut as fault:
            raise CallFault(FaultCause.TIMEOUT, str(fault)) from fault
        except BrokenResponse as fault:
            raise CallFault(FaultCause.BROKEN_BODY, one_line(f"broken HTTP response: {fault}")) from fault
        except Unreachable as fault:
            raise CallFault(FaultCause.CONNECTION, one_line(str(fault))) from fault
        if self._on_response is not None:
            self._on_response(answer)
        if answer.status != 200:
            wait = retry_after_seconds(answer.header("Retry-After"))
            detail = f"HTTP {answer.status}: {server_message(answer.body) or answer.reason}"
            raise CallFault(status_cause(answer.status), detail, wait)
        return answer.body

    async def _link(self) -> _Link:
        loop = asyncio.get_running_loop()
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = _Link(self._client(), asyncio.Semaphore(self._max_connections))
            await self._drop_dead_links()
        return link

    def _client(self) -> Requests:
        if self._proxy is None and not self._compress:
            return HttpClient(self._headers, keep_alive=KEEP_ALIVE_SECONDS)
        from rollwright.http.proxy import ProxiedClient

        return ProxiedClient(self._headers, self._proxy, keep_alive=KEEP_ALIVE_SECONDS)

    async def _drop_dead_links(self) -> None:
        """Drop clients whose event loop ended without `close`; their sockets were closed with it."""
        for loop in [loop for loop in self._links if loop.is_closed()]:
            await self._links.pop(loop).client.close()


def engine_error(fault: CallFault, tries: int, where: Url | str) -> EngineError:
    message = f"{where}: {fault.detail} (after {tries} {'try' if tries == 1 else 'tries'})"
    if fault.cause is FaultCause.RATE_LIMITED:
        return RateLimited(message, fault.retry_after)
    return EngineError(message)


def endpoint(base_url: str, path: str, name: str = "base_url") -> Url:
    """The URL of `path` below `base_url`; raise a `ConfigError` that names the setting."""
    if has_password(base_url):
        raise ConfigError(f"{name}: holds a user name or password; give the key in api_key or api_key_env")
    try:
        return Url.parse(base_url.rstrip("/") + path)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {redacted(base_url)!r} is not a URL like http://127.0.0.1:8000/v1: {error}"
        ) from None


def _key(api_key: str | None, api_key_env: str | None) -> str | None:
    if api_key is not None and api_key_env is not None:
        raise ConfigError("api_key and api_key_env: give one of them, not both")
    key = api_key
    if api_key_env is not None and not (key := os.environ.get(api_key_env, "").strip()):
        raise ConfigError(f"api_key_env: the environment variable {api_key_env} is not set")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("api_key: holds a character that no HTTP header can carry")
    return key
