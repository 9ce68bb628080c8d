"""The client's connections to the server: a request is sent until it is answered.

Always true: `post` returns the body of a 200, raises the error that the server's store raised, or raises
`StoreUnavailable` after the retry rule's time. Requests that are retried (broken connections, timeouts, 5xx) were made
repeatable by the caller. Belongs to one event loop; the connections are opened at first use.
"""

import asyncio
import os
from collections.abc import Callable
from math import ceil
from urllib.parse import unquote

import msgspec

from rollwright.addresses import has_password, redacted
from rollwright.errors import ConfigError
from rollwright.http import HttpClient, HttpFault, Url
from rollwright.rng import uniform
from rollwright.store.checks import new_id
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.errors import ErrorBody, error_of
from rollwright.store.http.retry import RetryRule
from rollwright.store.opening import TOKEN_VARIABLE
from rollwright.store.outage import Outage

KEEP_ALIVE_SECONDS = 60.0
"""Shorter than the server keeps an idle connection: see `rollwright.http.server`."""

MEDIA_TYPE = "application/msgpack"

_UNIX = "http+unix"

_RETRIED = frozenset({408, 429})
"""The only client errors worth a retry; a proxy sends them."""

_error_body = msgspec.msgpack.Decoder(ErrorBody)


class ServerConnection:
    def __init__(
        self,
        url: str,
        token: str | None,
        retry: RetryRule,
        request_timeout: float,
        on_outage: Callable[[str], None] | None = None,
    ) -> None:
        """`on_outage` gets a line for people while the server cannot be reached."""
        self.url = redacted(url)
        self._base, socket_path = _parse(url)
        headers = {"Content-Type": MEDIA_TYPE}
        if token is not None:
            if not (token.isascii() and token.isprintable()):
                raise ConfigError("token: holds a character that no HTTP header can carry")
            headers["Authorization"] = f"Bearer {token}"
        self._retry = retry
        self._request_timeout = request_timeout
        self._client = HttpClient(headers, keep_alive=KEEP_ALIVE_SECONDS, socket_path=socket_path)
        self._outage = Outage(self.url, on_outage)
        self._urls: dict[str, Url] = {}
        self._name = new_id("client")
        self._retries = 0

    async def post(self, call: str, body: bytes, wait: float = 0.0) -> bytes:
        """`wait`: the call's own timeout at the server."""
        url = self._urls.get(call)
        if url is None:
            url = self._urls[call] = Url.parse(f"{self._base}/v1/{call}")
        clock = asyncio.get_running_loop().time
        failing_since, tries = None, 1
        while True:
            answer = await self._try(url, body, wait)
            if isinstance(answer, bytes):
                self._outage.is_over()
                return answer
            self._retries += 1
            failing_since = clock() if failing_since is None else failing_since
            draw = uniform(self._name, "retry", self._retries)
            delay = self._retry.delay(tries, clock() - failing_since, draw)
            if delay is None:
                seconds = f" in {clock() - failing_since:.0f} s" if tries > 1 else ""
                counted = "1 try" if tries == 1 else f"{tries} tries"
                raise StoreUnavailable(f"{self.url}: {answer} (after {counted}{seconds})")
            if tries > 1:  # a single broken connection is repaired by the first retry
                left = self._retry.give_up_after - (clock() - failing_since)
                self._outage.lasts(answer, clock(), left)
            await asyncio.sleep(delay)
            tries += 1

    async def close(self) -> None:
        await self._client.close()

    async def _try(self, url: Url, body: bytes, wait: float) -> bytes | str:
        """The reply's body, or the reason why there is none."""
        try:
            # Whole seconds, so that waits of nearly the same length share one timer.
            answer = await self._client.request("POST", url, body, self._request_timeout + ceil(wait))
        except HttpFault as fault:
            return " ".join(str(fault).splitlines())
        if answer.status == 200:
            return answer.body
        if answer.status >= 500 or answer.status in _RETRIED:
            return f"HTTP {answer.status}: {_message(answer.body)}"
        raise self._refused(answer.status, answer.body)

    def _refused(self, status: int, raw: bytes) -> Exception:
        if status == 401:
            return StoreError(
                f"{self.url}: the token is missing or wrong: {TOKEN_VARIABLE} must hold the one of the server"
            )
        try:
            return error_of(_error_body.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return StoreError(f"{self.url}: HTTP {status}: {_message(raw)}")


def _message(raw: bytes) -> str:
    """The message of a reply that is not 200, in one short line."""
    try:
        return _error_body.decode(raw).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(raw[:200].decode("utf-8", "replace").split()) or "an empty answer"


def _parse(text: str) -> tuple[str, str | None]:
    """The base URL of the calls, and the Unix socket to connect to."""
    scheme, separator, rest = text.partition("://")
    if scheme == _UNIX and separator:
        path = unquote(rest)
        if not os.path.isabs(path):
            raise ConfigError(
                f"store: {redacted(text)!r} is not a socket's address like http+unix:///run/store.sock"
            )
        return "http://store", path
    if has_password(text):
        raise ConfigError(
            f"store: the URL holds a user name, password or token; leave it out: {TOKEN_VARIABLE} holds the token"
        )
    if "?" in text or "#" in text:
        raise ConfigError(f"store: {redacted(text)}: takes no ?; {TOKEN_VARIABLE} holds the token")
    base = f"{scheme.lower()}{separator}{rest.rstrip('/')}"
    try:
        Url.parse(base)
    except ValueError as error:
        raise ConfigError(
            f"store: {redacted(text)!r} is not a URL like http://127.0.0.1:8700: {error}"
        ) from None
    return base, None
