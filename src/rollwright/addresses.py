"""Addresses of stores and engines, and the secrets that people put into them.

Always true: `redacted` never shows a password, a token or a part of one, whatever the address looks like; where it cannot
be told what is what, it shows the scheme and nothing else. `without_password` is the same address for somebody who has
the password from elsewhere. An address whose parts cannot be told apart is refused before anybody connects with it,
because the error of whoever tries would quote the wrong part.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus

from rollwright.errors import ConfigError

HIDDEN = "…"

ADVICE = "give the password by PGPASSWORD or a password file, or percent-encode @ : / ? # and % in it"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_FILES = frozenset({"sqlite", "http+unix"})
"""Schemes with a path behind them and nothing else."""

_KEYS_AS_USERS = frozenset({"http", "https"})
"""Schemes where a key often stands in the place of the user's name."""

_KEY_VALUE = re.compile(
    r"(?i)(^|[\s'])(host|hostaddr|port|dbname|user|password|passfile|sslpassword|service|sslmode)\s*="
)
"""As in libpq's other way to write a connection down."""

_NO_SCHEME = re.compile(r"(?i)((postgres(ql)?|https?)(\+\w+)?:/?(?!/)|[^/]*:.*@)", re.DOTALL)
"""An address whose scheme or slashes were forgotten; no path of a file looks like it."""

_SHOWN = frozenset(
    {
        *("host", "port", "dbname", "database", "sslmode", "sslnegotiation", "target_session_attrs"),
        *("application_name", "connect_timeout", "api-version"),
    }
)
"""Query parameters whose values are shown; any other may be a secret."""

_SECRET = re.compile(r"(?i)pass|pwd|secret|token|credential|signature|^sig$|^auth|api.?key|^key$")
_NO_SECRET = frozenset({"passfile", "sslkey", "sslcert", "token_type"})
"""Names of files, whatever their own names look like."""

_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:\[\]/%+~-]*")


class _Parts(NamedTuple):
    """An address taken apart; texts as they were written."""

    scheme: str
    user: str
    password: str | None
    hosts: str
    path: str
    query: tuple[tuple[str, str], ...]
    """Names as they are meant, values as they are written."""


def redacted(address: str) -> str:
    """For people: banners, logs and error lines."""
    if not _is_url(address):
        return address if _is_path(address) else HIDDEN
    scheme = address.partition("://")[0]
    if scheme.lower() in _FILES:
        return address
    parts = _parts(address)
    if parts is None:
        return f"{scheme}://{HIDDEN}" if _SCHEME.fullmatch(scheme) else HIDDEN
    userinfo = f"{HIDDEN}@" if parts.user or parts.password is not None else ""
    shown = [f"{name}={value if name.lower() in _SHOWN else HIDDEN}" for name, value in parts.query]
    query = f"?{'&'.join(shown)}" if shown else ""
    return f"{parts.scheme}://{userinfo}{parts.hosts}{parts.path}{query}"


def without_password(address: str) -> str:
    """For files that must lead back to the same place."""
    if not _is_url(address) or address.partition("://")[0].lower() in _FILES:
        return check_address(address)
    parts = _checked(address)
    kept = tuple((name, value) for name, value in parts.query if not _is_secret(name))
    user = "" if parts.scheme in _KEYS_AS_USERS else parts.user
    return _joined(parts._replace(user=user, password=None, query=kept))


def canonical(address: str) -> str:
    """The same address, written so that every reader takes it apart in the same way."""
    if not _is_url(address) or address.partition("://")[0].lower() in _FILES:
        return check_address(address)
    return _joined(_checked(address))


def has_password(address: str) -> bool:
    """Whether it holds a secret; an address that cannot be taken apart may."""
    if not _is_url(address):
        return not _is_path(address)
    if address.partition("://")[0].lower() in _FILES:
        return False
    parts = _parts(address)
    if parts is None or parts.password or (parts.user and parts.scheme in _KEYS_AS_USERS):
        return True
    return any(_is_secret(name) for name, _ in parts.query)


def check_address(address: str) -> str:
    """Raises a `ConfigError` that quotes nothing if its parts cannot be told apart."""
    if _is_url(address):
        if address.partition("://")[0].lower() not in _FILES:
            _checked(address)
    elif _KEY_VALUE.search(address):
        raise ConfigError(
            "a connection string of key=value pairs is not accepted; write postgresql://user@host/db"
        )
    elif not _is_path(address):
        raise ConfigError("an address without its scheme; accepted: a path, postgresql://…, http://…")
    return address


def scrubbed(text: str, address: str) -> str:
    """Somebody else's words about an address, without its secrets."""
    parts = _parts(address) if _is_url(address) else None
    if parts is None:
        return text
    secrets = [parts.password or "", *(value for name, value in parts.query if _is_secret(name))]
    for secret in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
        if secret:
            text = text.replace(secret, HIDDEN)
    return text


def _is_url(address: str) -> bool:
    return "://" in address


def _is_path(address: str) -> bool:
    return not _KEY_VALUE.search(address) and not _NO_SCHEME.match(address.strip())


def _is_secret(name: str) -> bool:
    return name.lower() not in _NO_SECRET and _SECRET.search(name) is not None


def _checked(address: str) -> _Parts:
    parts = _parts(address)
    if parts is None:
        raise ConfigError(f"{redacted(address)}: its parts cannot be told apart; {ADVICE}")
    return parts


def _parts(address: str) -> _Parts | None:
    """`None`: they cannot be told apart for sure."""
    scheme, _, rest = address.partition("://")
    if not _SCHEME.fullmatch(scheme) or "#" in rest or re.search(r"[\s\\]", rest):
        return None
    before, asked, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    if "@" in path:
        return None
    mistyped = scheme.lower() in _KEYS_AS_USERS and "@" not in rest  # no user, so no password
    if not mistyped and not all(_is_host(each) for each in hosts.split(",")):
        return None
    pairs = tuple(_pair(piece) for piece in query.split("&")) if asked and query else ()
    if any(name is None for name, _ in pairs):
        return None
    user, colon, password = userinfo.partition(":")
    return _Parts(
        scheme.lower(),
        user,
        password if at and colon else None,
        hosts,
        slash + path,
        tuple((name or "", value) for name, value in pairs),
    )


def _pair(piece: str) -> tuple[str | None, str]:
    written, equals, value = piece.partition("=")
    name = unquote_plus(written)
    if not equals or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        return None, ""
    if not _is_secret(name) and not _PLAIN_VALUE.fullmatch(value):
        return None, ""  # it may be the rest of a password with a question mark in it
    return name, value


def _is_host(text: str) -> bool:
    """With a port or without; a port that is no number is the beginning of a password."""
    return re.fullmatch(r"(\[[0-9A-Fa-f:.%]*\]|[^:@\[\]]*)(:\d{1,5})?", text) is not None


def _joined(parts: _Parts) -> str:
    userinfo = quote(unquote(parts.user), safe="")
    if parts.password is not None:
        userinfo += ":" + quote(unquote(parts.password), safe="")
    query = "&".join(f"{quote(name)}={quote(unquote_plus(value), safe='/,:')}" for name, value in parts.query)
    at = "@" if userinfo else ""
    return f"{parts.scheme}://{userinfo}{at}{parts.hosts}{parts.path}{'?' if query else ''}{query}"
