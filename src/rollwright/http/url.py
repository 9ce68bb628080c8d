"""URLs of requests, and the addresses of their hosts.

Always true of a `Url`: requests with equal `place` can share a connection; `target` and `authority` go into a request
unchanged; parsing the text of a URL gives the same URL.

Always true of the `Resolver`: however many connections open at once, a host is looked up once and its addresses are cached
for a short time; a failed lookup is not cached; a caller that is cancelled does not cancel the lookup for the others.
"""

import asyncio
import re
import socket
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}

_KEPT = "/:@!$&'()*+,;=~%"
"""Characters that stay unquoted in a path, beside letters, digits and `-._`; existing escapes stay."""

_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class HoldsPassword(ValueError):
    """The URL holds a user name or password, which would show up wherever it is shown."""


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL, ready to be written into a request."""

    scheme: str
    authority: str
    """The `Host` header: the host, and the port unless it is the scheme's default."""
    target: str
    """Path and query, all ASCII."""
    host: str
    """Without the brackets of an IPv6 address."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a URL; raise a `ValueError` that says what is wrong. The fragment is dropped: servers never see it."""
        if not text.isprintable() or text != text.strip():
            raise ValueError("it holds a space or an invisible character")
        parts = urlsplit(text)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("it does not begin with http:// or https:// and a host")
        if parts.username is not None or parts.password is not None:
            raise HoldsPassword("it holds a user name or password")
        usual = _PORTS[parts.scheme]
        port = usual if parts.port is None else parts.port
        host = _ascii_host(parts.hostname)
        shown = f"[{host}]" if ":" in host else host
        return cls(
            parts.scheme,
            shown if port == usual else f"{shown}:{port}",
            _quoted(parts.path or "/", "") + (f"?{_quoted(parts.query, '?')}" if parts.query else ""),
            host,
            port,
        )

    @property
    def place(self) -> tuple[str, str]:
        """Requests to the same place can share a connection."""
        return self.scheme, self.authority

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def _ascii_host(host: str) -> str:
    try:
        ascii_host = host.encode("ascii" if host.isascii() else "idna").decode()
    except UnicodeError as error:
        raise ValueError(f"{host!r} is not a valid host name") from error
    if not re.fullmatch(r"[a-z0-9._~!$&'()*+,;=:%-]+", ascii_host):
        raise ValueError(f"{host!r} is not a valid host name")
    return ascii_host


def _quoted(text: str, also_kept: str) -> str:
    return quote(_LONE_PERCENT.sub("%25", text), safe=_KEPT + also_kept)


_CACHE_SECONDS = 10.0
"""Long enough for thousands of connections that open at once, short enough to follow a host that moves."""


class Resolver:
    """Looks up host names once for all connections."""

    def __init__(self) -> None:
        self._lookups: dict[str, asyncio.Task[list[str]]] = {}
        """Running lookups, and finished ones while they are cached."""

    async def addresses(self, host: str, port: int) -> list[str]:
        """The addresses of a host, at least one, in the system's order of preference."""
        if _is_address(host):
            return [host]
        task = self._lookups.get(host)
        if task is None:
            task = self._lookups[host] = asyncio.create_task(self._look_up(host, port))
        return await asyncio.shield(task)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        cached = 0.0
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            cached = _CACHE_SECONDS
            return list(dict.fromkeys(str(address[0]) for *_, address in found))
        finally:
            loop.call_later(cached, self._lookups.pop, host, None)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False
