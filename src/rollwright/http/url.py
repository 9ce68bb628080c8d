"""Where a request goes.

What is true: `place` says whose connection can be used, `target` and `authority` can be put into a request as they
are, and the text of a URL read back is the same URL.

Addresses of hosts.

What is true: however many connections are opened at once, a name is looked up once, and again after a while; a look-up
that fails is not remembered; who gives up waiting for one leaves it to the others.
"""

import asyncio
import re
import socket
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}

_KEPT = "/:@!$&'()*+,;=~%"
"""Marks that a path may hold as they are, beside letters, digits and `-._`; escapes that are there stay."""

_LONE_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class HoldsPassword(ValueError):
    """The URL holds a user name or password, which would show up wherever it is shown."""


@dataclass(frozen=True, slots=True)
class Url:
    scheme: str
    authority: str
    """Host and, unless it is the usual one, port: the `Host` header."""
    target: str
    """Path and query, all ASCII."""
    host: str
    """Without the brackets of an IPv6 address."""
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises a `ValueError` that says what is wrong. A fragment is left out: servers never see it."""
        if not text.isprintable() or text != text.strip():
            raise ValueError("it holds a space or a character that cannot be seen")
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
        raise ValueError(f"no host can be called {host!r}") from error
    if not re.fullmatch(r"[a-z0-9._~!$&'()*+,;=:%-]+", ascii_host):
        raise ValueError(f"no host can be called {host!r}")
    return ascii_host


def _quoted(text: str, also_kept: str) -> str:
    return quote(_LONE_PERCENT.sub("%25", text), safe=_KEPT + also_kept)


_KEPT_SECONDS = 10.0
"""Long enough for thousands of connections that are opened at once; a name that moves is followed soon."""


class Names:
    def __init__(self) -> None:
        self._looking: dict[str, asyncio.Task[list[str]]] = {}
        """Also those that have found something, for as long as it is kept."""

    async def addresses(self, host: str, port: int) -> list[str]:
        """At least one, in the order in which the system would try them."""
        if _is_address(host):
            return [host]
        task = self._looking.get(host)
        if task is None:
            task = self._looking[host] = asyncio.create_task(self._look_up(host, port))
        return await asyncio.shield(task)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        kept = 0.0
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            kept = _KEPT_SECONDS
            return list(dict.fromkeys(str(address[0]) for *_, address in found))
        finally:
            loop.call_later(kept, self._looking.pop, host, None)


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False
