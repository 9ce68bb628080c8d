"""The client's way to the server: one request, sent until it is answered.

Always true: `post` ends with the body of a 200, with the error that the server's store raised, or with
`StoreUnavailable` after the retry rule's time. What is retried (broken connections, time limits, 5xx) was made
repeatable by the caller. Belongs to one event loop; the connections are opened at first use.
"""

import asyncio
import os
from urllib.parse import unquote

import aiohttp
import msgspec
from yarl import URL

from rollwright.draws import uniform
from rollwright.errors import ConfigError
from rollwright.store.checks import new_id
from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.http.messages import Refusal
from rollwright.store.http.refusals import error_of
from rollwright.store.http.retry import RetryRule
from rollwright.store.opening import TOKEN_VARIABLE

CONNECT_SECONDS = 10.0
"""A host that does not answer a connection attempt for so long is not busy but gone."""

KEEP_ALIVE_SECONDS = 60.0
"""Shorter than the server keeps an idle connection: see `rollwright.listening`."""

MEDIA_TYPE = "application/msgpack"

_UNIX = "http+unix"
_SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")
"""The server needs none of them, and packing answers on loopback would cost more than it saves."""

_RETRIED = frozenset({408, 429})
"""The only client errors that pass by themselves; a proxy sends them."""

_refusal = msgspec.msgpack.Decoder(Refusal)


class Connection:
    def __init__(self, url: str, token: str | None, retry: RetryRule, request_timeout: float) -> None:
        self.url = url
        self._base, self._socket_path = _parse(url)
        self._headers = {"Content-Type": MEDIA_TYPE}
        if token is not None:
            if not (token.isascii() and token.isprintable()):
                raise ConfigError("token: holds a character that no HTTP header can carry")
            self._headers["Authorization"] = f"Bearer {token}"
        self._retry = retry
        self._request_timeout = request_timeout
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, URL] = {}
        self._name = new_id("client")
        self._retries = 0

    async def post(self, call: str, body: bytes, wait: float = 0.0) -> bytes:
        """`wait`: how long the call itself may wait at the server."""
        url = self._urls.get(call)
        if url is None:
            url = self._urls[call] = self._base / "v1" / call
        clock = asyncio.get_running_loop().time
        failing_since, tries = None, 1
        while True:
            answer = await self._try(url, body, wait)
            if isinstance(answer, bytes):
                return answer
            self._retries += 1
            failing_since = clock() if failing_since is None else failing_since
            draw = uniform(self._name, "retry", self._retries)
            delay = self._retry.delay(tries, clock() - failing_since, draw)
            if delay is None:
                counted = "1 try" if tries == 1 else f"{tries} tries"
                raise StoreUnavailable(f"{self.url}: {answer} (after {counted})")
            await asyncio.sleep(delay)
            tries += 1

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _try(self, url: URL, body: bytes, wait: float) -> bytes | str:
        """The answer's body, or why there is none."""
        session = self._session or self._open()
        limit = aiohttp.ClientTimeout(total=self._request_timeout + wait, sock_connect=CONNECT_SECONDS)
        try:
            async with session.post(url, data=body, timeout=limit, allow_redirects=False) as response:
                raw = await response.read()
        except TimeoutError:
            return f"no answer within {self._request_timeout + wait:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return " ".join(str(error).splitlines()) or type(error).__name__
        if response.status == 200:
            return raw
        if response.status >= 500 or response.status in _RETRIED:
            return f"HTTP {response.status}: {_message(raw)}"
        raise self._refused(response.status, raw)

    def _refused(self, status: int, raw: bytes) -> Exception:
        if status == 401:
            return StoreError(
                f"{self.url}: the token is missing or wrong: {TOKEN_VARIABLE} must hold the one of the server"
            )
        try:
            return error_of(_refusal.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return StoreError(f"{self.url}: HTTP {status}: {_message(raw)}")

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(
                self._socket_path, limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS
            )
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            skip_auto_headers=_SKIPPED_HEADERS,
        )
        return self._session


def _message(raw: bytes) -> str:
    """What an answer that is not 200 says, in one short line."""
    try:
        return _refusal.decode(raw).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(raw[:200].decode("utf-8", "replace").split()) or "an empty answer"


def _parse(text: str) -> tuple[URL, str | None]:
    """Where requests go, and the Unix socket they go through."""
    scheme, separator, rest = text.partition("://")
    if scheme == _UNIX and separator:
        path = unquote(rest)
        if not os.path.isabs(path):
            raise ConfigError(f"store: {text!r} is not a socket's address like http+unix:///run/store.sock")
        return URL("http://store"), path
    try:
        url = URL(text.rstrip("/"))
    except ValueError as error:
        raise ConfigError(f"store: {text!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"store: {text!r} is not a URL like http://127.0.0.1:8700")
    if url.user is not None:
        raise ConfigError("store: the URL holds a user name or password; give the token apart from it")
    return url, None
