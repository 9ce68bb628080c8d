"""Requests through a proxy: the choice of the proxy by environment variables, and a client that uses it.

Always true of the choice: `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy` count in lower and upper case, lower case
first; requests to this machine use no proxy; `no_proxy` lists hosts, domains, networks, or `*`.

Always true of `ProxiedClient`: it has the responses and faults of `HttpClient`. The size limit of a response also holds
after decompression and is checked while decompressing, so a small response cannot unpack to a huge one. Redirects are not
followed and cookies are not kept.
"""

import asyncio
import ssl
import urllib.request
import zlib
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rollwright.errors import ConfigError
from rollwright.http.client import CONNECT_SECONDS, MAX_ANSWER
from rollwright.http.connection import BrokenResponse, HttpResponse, TimedOut, Unreachable
from rollwright.http.url import Url

if TYPE_CHECKING:
    import aiohttp


def proxy_for(url: Url) -> str | None:
    """The URL of the proxy for a request; `None`: connect directly."""
    if _is_this_machine(url.host):
        return None
    variables = urllib.request.getproxies_environment()
    scheme = url.scheme if variables.get(url.scheme) else "all"
    proxy = variables.get(scheme)
    if not proxy or _is_excepted(url, variables):
        return None
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = f"{parts.scheme}://{parts.hostname or ''}"
        raise ConfigError(
            f"{scheme}_proxy: {shown!r} is not a usable proxy; accepted: http:// or https:// and a host"
        )
    return proxy


def _is_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _is_excepted(url: Url, variables: dict[str, str]) -> bool:
    if urllib.request.proxy_bypass_environment(f"{url.host}:{url.port}", variables):  # type: ignore[attr-defined]
        return True
    try:
        address = ip_address(url.host)
    except ValueError:
        return False
    for each in variables.get("no", "").split(","):
        try:
            if address in ip_network(each.strip(), strict=False):
                return True
        except ValueError:
            continue
    return False


_GZIP = 16 + zlib.MAX_WBITS
"""zlib's window size for gzip, the only compression that requests allow: every server knows it."""


class ProxiedClient:
    """An HTTP client behind a proxy, made of aiohttp. Belongs to the event loop of its first request."""

    def __init__(self, headers: Mapping[str, str], proxy: str | None, *, keep_alive: float) -> None:
        """`headers`: sent with every request. `proxy`: its URL, with user and password if it needs them; `None`: connect
        directly."""
        self._headers = {**headers, "Accept-Encoding": "gzip"}
        self._proxy = proxy
        self._keep_alive = keep_alive
        self._library = load_library()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self, method: str, url: Url, body: bytes | None, seconds: float, *, max_answer: int | None = None
    ) -> HttpResponse:
        """Send a request. `seconds`: for the whole request, connecting included. `max_answer`: bytes of the unpacked body."""
        library = self._library
        limit = library.ClientTimeout(total=seconds, sock_connect=min(seconds, CONNECT_SECONDS))
        try:
            async with self._open_session().request(
                method, str(url), data=body, proxy=self._proxy, timeout=limit, allow_redirects=False
            ) as response:
                content = await _read(response, MAX_ANSWER if max_answer is None else max_answer)
                return HttpResponse(response.status, response.reason or "", response.raw_headers, content)
        except TimeoutError:
            raise TimedOut(seconds) from None
        except library.ClientProxyConnectionError as error:
            where = f"{error.host}:{error.port}"
            raise Unreachable(f"Cannot connect to the proxy {where}: {error.os_error.strerror}") from None
        except library.ClientHttpProxyError as error:
            raise Unreachable(f"the proxy answered HTTP {error.status}: {error.message}") from None
        except (library.ClientPayloadError, library.ClientResponseError, zlib.error) as error:
            raise BrokenResponse(" ".join(str(error).split())) from None
        except (library.ClientError, OSError) as error:
            raise Unreachable(" ".join(str(error).split()) or type(error).__name__) from None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if self._loop is asyncio.get_running_loop():
            await session.close()
            await asyncio.sleep(0)
        else:
            session.detach()  # its sockets were closed with their loop

    def _open_session(self) -> "aiohttp.ClientSession":
        if self._session is None:
            library = self._library
            self._loop = asyncio.get_running_loop()
            self._session = library.ClientSession(
                connector=library.TCPConnector(
                    limit=0, keepalive_timeout=self._keep_alive, ssl=ssl.create_default_context()
                ),
                cookie_jar=library.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
            )
        return self._session


def load_library() -> Any:
    """Import aiohttp, which only proxied requests need; raise one clear line if it is missing."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError(
            "the environment names a proxy for this address, and requests through proxies need aiohttp: "
            "install rollwright[hosted], or name the host in no_proxy"
        ) from None
    return aiohttp


async def _read(response: "aiohttp.ClientResponse", limit: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise BrokenResponse(f"the body is compressed ({encoding}), which the request did not allow")
    unpacker = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
    parts: list[bytes] = []
    came = size = 0
    async for chunk in response.content.iter_any():
        came += len(chunk)  # bytes behind the end of a compressed body count, too
        while chunk and max(came, size) <= limit:
            part = chunk if unpacker is None else unpacker.decompress(chunk, limit + 1)
            parts.append(part)
            size += len(part)
            chunk = b"" if unpacker is None else unpacker.unconsumed_tail
        if max(came, size) > limit:
            raise BrokenResponse(f"the answer is longer than {limit} bytes")
    if unpacker is not None and came and not unpacker.eof:
        raise BrokenResponse("the compressed body ended in the middle")
    return b"".join(parts)
