"""Registry of open rollouts and their API keys.

Always true: a key opens one rollout and nothing else; keys are compared in constant time; once a rollout is closed its
key is invalid, and later callers are told that the rollout has ended.
"""

import hmac
import secrets
from typing import NamedTuple

from rollwright.errors import ConfigError
from rollwright.gateway.recorder import OVER, RolloutRecorder
from rollwright.store.http.errors import HttpRefusal

_REMEMBERED = 10_000
"""Number of closed rollouts whose late callers are told so; keys of older ones are unknown."""


class _Entry(NamedTuple):
    key: bytes
    rollout: RolloutRecorder


class RolloutRegistry:
    def __init__(self) -> None:
        self._open: dict[str, _Entry] = {}
        self._closed: dict[tuple[str, bytes], None] = {}

    def __len__(self) -> int:
        """Number of open rollouts."""
        return len(self._open)

    def add(self, rollout: RolloutRecorder) -> str:
        """Creates a key for the rollout. An earlier attempt at it is closed."""
        rollout_id = rollout.session.trajectory.rollout_id
        self.remove(rollout_id)
        key = f"rw-{secrets.token_urlsafe(32)}"
        self._open[rollout_id] = _Entry(key.encode(), rollout)
        return key

    def remove(self, rollout_id: str, rollout: RolloutRecorder | None = None) -> None:
        """Closes a rollout; with `rollout`, only if it is that attempt."""
        entry = self._open.get(rollout_id)
        if entry is None or rollout not in (None, entry.rollout):
            return
        del self._open[rollout_id]
        self._closed[rollout_id, entry.key] = None
        if len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]

    def find(self, rollout_id: str, key: bytes | None) -> RolloutRecorder:
        entry = self._open.get(rollout_id)
        if entry is not None and key is not None and hmac.compare_digest(entry.key, key):
            return entry.rollout
        if key is not None and (rollout_id, key) in self._closed:
            raise HttpRefusal(410, "sealed", OVER)
        raise unauthorized("send the rollout's own as api_key")


def unauthorized(advice: str) -> HttpRefusal:
    return HttpRefusal(401, "unauthorized", f"the key is missing or wrong: {advice}")


def check_key(name: str, key: str) -> str:
    """Checks that a key can be sent in a header."""
    if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ConfigError(f"{name}: is empty or holds a character that no HTTP header can carry")
    return key
