"""Addresses of stores and engines, and the secrets that users put into them.

Always true: `redacted` never shows a password, a token or a part of one; of an ambiguous address it shows the scheme alone.
`without_password` gives an address that leads to the same place for a process that has the password from elsewhere. An
ambiguous address is refused before any connection, because a driver's error message would quote the wrong part.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote, unquote_plus

from rollwright.errors import ConfigError

HIDDEN = "…"

ADVICE = "give the password by PGPASSWORD or a password file, or percent-encode @ : / ? # and % in it"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_FILES = frozenset({"sqlite", "http+unix"})
"""Schemes followed by a path alone."""

_KEYS_AS_USERS = frozenset({"http", "https"})
"""Schemes where users often write a key in place of the user name."""

_KEY_VALUE = re.compile(
    r"(?i)(^|[\s'])(host|hostaddr|port|dbname|user|password|passfile|sslpassword|service|sslmode)\s*="
)
"""libpq's connection string of key=value pairs."""

_NO_SCHEME = re.compile(r"(?i)((postgres(ql)?|https?)(\+\w+)?:/?(?!/)|[^/]*:.*@)", re.DOTALL)
"""An address without its scheme or slashes; no file path looks like it."""

_SHOWN = frozenset(
    {
        *("host", "port", "dbname", "database", "sslmode", "sslnegotiation", "target_session_attrs"),
        *("application_name", "connect_timeout", "api-version"),
    }
)
"""Query parameters whose values are shown; the value of any other may be a secret."""

_SECRET = re.compile(r"(?i)pass|pwd|secret|token|credential|signature|^sig$|^auth|api.?key|^key$")
_NO_SECRET = frozenset({"passfile", "sslkey", "sslcert", "token_type"})
"""Parameters that match `_SECRET` but hold file names or types."""

_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:\[\]/%+~-]*")


class _Parts(NamedTuple):
    """The parts of an address, as written."""

    scheme: str
    user: str
    password: str | None
    hosts: str
    path: str
    query: tuple[tuple[str, str], ...]
    """Unquoted names with values as written."""


def redacted(address: str) -> str:
    """The address without secrets, for banners, logs and error messages."""
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
    """The address without its password and tokens, for files that must lead to the same place."""
    if not _is_url(address) or address.partition("://")[0].lower() in _FILES:
        return check_address(address)
    parts = _checked(address)
    kept = tuple((name, value) for name, value in parts.query if not _is_secret(name))
    user = "" if parts.scheme in _KEYS_AS_USERS else parts.user
    return _joined(parts._replace(user=user, password=None, query=kept))


def canonical(address: str) -> str:
    """The same address, quoted such that every parser splits it in the same way."""
    if not _is_url(address) or address.partition("://")[0].lower() in _FILES:
        return check_address(address)
    return _joined(_checked(address))


def has_password(address: str) -> bool:
    """Whether the address holds a secret; an ambiguous one counts as holding one."""
    if not _is_url(address):
        return not _is_path(address)
    if address.partition("://")[0].lower() in _FILES:
        return False
    parts = _parts(address)
    if parts is None or parts.password or (parts.user and parts.scheme in _KEYS_AS_USERS):
        return True
    return any(_is_secret(name) for name, _ in parts.query)


def check_address(address: str) -> str:
    """Return the address; raise a `ConfigError` without quoting it if it is ambiguous."""
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
    """A message about an address, such as a driver's error, without the address's secrets."""
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
        raise ConfigError(f"{redacted(address)}: the address is ambiguous; {ADVICE}")
    return parts


def _parts(address: str) -> _Parts | None:
    """Split an address; `None`: it is ambiguous."""
    scheme, _, rest = address.partition("://")
    if not _SCHEME.fullmatch(scheme) or "#" in rest or re.search(r"[\s\\]", rest):
        return None
    before, asked, query = rest.partition("?")
    authority, slash, path = before.partition("/")
    userinfo, at, hosts = authority.rpartition("@")
    if "@" in path:
        return None
    # Without an @ there is no user and no password, so a malformed host reveals nothing.
    harmless = scheme.lower() in _KEYS_AS_USERS and "@" not in rest
    if not harmless and not all(_is_host(each) for each in hosts.split(",")):
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
        return None, ""  # it may be the rest of a password that contains a question mark
    return name, value


def _is_host(text: str) -> bool:
    """Whether this is a host with or without a port; a port that is no number may be the start of a password."""
    return re.fullmatch(r"(\[[0-9A-Fa-f:.%]*\]|[^:@\[\]]*)(:\d{1,5})?", text) is not None


def _joined(parts: _Parts) -> str:
    userinfo = quote(unquote(parts.user), safe="")
    if parts.password is not None:
        userinfo += ":" + quote(unquote(parts.password), safe="")
    query = "&".join(f"{quote(name)}={quote(unquote_plus(value), safe='/,:')}" for name, value in parts.query)
    at = "@" if userinfo else ""
    return f"{parts.scheme}://{userinfo}{at}{parts.hosts}{parts.path}{'?' if query else ''}{query}"
