"""Keeps secrets out of the page: every answer of the server passes through `Redaction`.

Invariants: a value of a setting whose name says that it is a secret is never shown; an address is shown without user and
password, wherever it stands in a text; the values of the process's own secret environment variables, and everything that
looks like a key of a known provider, are never part of an answer.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollwright.addresses import HIDDEN, redacted

_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(token|password|passwd|passphrase|pwd|secret|credentials?|api_?key|access_?key|private_?key|key|"
    r"auth|authorization|bearer|cookie|signature)s?$"
)
_SECRET_VARIABLE = re.compile(r"(?i)(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_?KEY|CREDENTIALS?)$")

_USERINFO = re.compile(rb'(?<=://)[^\s/@"\\<>]{1,256}@')
"""User and password in an address."""

_KEY = re.compile(
    rb"\b(?:sk|pk|rk|xai|gsk|hf|ghp|gho|ghs|github_pat|glpat|xox[abpr])[-_][A-Za-z0-9_-]{16,}"
    rb"|\bAKIA[0-9A-Z]{16}\b|(?<=[Bb]earer )[A-Za-z0-9._~+/-]{16,}=*"
)
"""Keys of providers, and what follows `Bearer`."""

SHORTEST = 6
"""Characters of a secret that is searched for: shorter ones would hide ordinary words."""


class Redaction:
    """Removes the secrets of this process from answers."""

    def __init__(self, secrets: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """`secrets`: further ones, such as the server's own token."""
        environment = os.environ if environment is None else environment
        known = {
            value
            for name, value in environment.items()
            if _SECRET_VARIABLE.search(name) and not value.isdigit() and not os.path.exists(value)
        }
        known |= set(secrets)
        self._known = sorted(
            {each.encode() for each in known if len(each) >= SHORTEST}, key=len, reverse=True
        )

    def clean(self, answer: bytes) -> bytes:
        """The answer without secrets."""
        for secret in self._known:
            if secret in answer:
                answer = answer.replace(secret, HIDDEN.encode())
        if b"://" in answer:
            answer = _USERINFO.sub(HIDDEN.encode() + b"@", answer)
        return _KEY.sub(HIDDEN.encode(), answer)


def without_secrets(settings: Any, name: str = "") -> Any:
    """Settings as plain data, with values of secret settings hidden."""
    if isinstance(settings, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_secrets(each, name) for each in settings]
    if isinstance(settings, str) and settings:
        if _SECRET_NAME.search(name):
            return HIDDEN
        return redacted(settings) if "://" in settings else settings
    return settings
