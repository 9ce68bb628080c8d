"""Where a request goes.

What is true: `place` says whose connection can be used, `target` and `authority` can be put into a request as they
are, and the text of a URL read back is the same URL.
"""

import re
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
