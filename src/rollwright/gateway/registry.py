"""Which rollouts can be called, and with which key.

Always true: a key opens one rollout and nothing else; keys are compared in constant time; once a rollout is closed its
key opens nothing, and whoever still uses it is told that the rollout is over.
"""

import hmac
import secrets
from typing import NamedTuple

from rollwright.errors import ConfigError
from rollwright.gateway.recorder import OVER, RolloutRecorder
from rollwright.store.http.errors import HttpRefusal

_REMEMBERED = 10_000
"""Closed rollouts whose late callers are told so; older ones have an unknown key."""


class _Entry(NamedTuple):
    key: bytes
    rollout: RolloutRecorder


class OpenRollouts:
    def __init__(self) -> None:
        self._open: dict[str, _Entry] = {}
        self._closed: dict[tuple[str, bytes], None] = {}

    def __len__(self) -> int:
        """Rollouts that are open."""
        return len(self._open)

    def add(self, rollout: RolloutRecorder) -> str:
        """Makes a key for it. An earlier attempt at the same rollout is closed."""
        rollout_id = rollout.session.trajectory.rollout_id
        self.remove(rollout_id)
        key = f"rw-{secrets.token_urlsafe(32)}"
        self._open[rollout_id] = _Entry(key.encode(), rollout)
        return key

    def remove(self, rollout_id: str, rollout: RolloutRecorder | None = None) -> None:
        """Closes it; with `rollout`, only if it is that attempt."""
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
    """A key that a header can carry."""
    if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ConfigError(f"{name}: is empty or holds a character that no HTTP header can carry")
    return key
