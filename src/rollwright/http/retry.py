"""The retry policy of requests, as pure code: whether a failed request is sent again, and after how long.

Always true: a request is sent at most `max_retries` + 1 times; a refusal is final; a wait is never shorter than the server
asked for, up to `longest`; the caller draws the random part, so equal calls wait equally long.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from rollwright.errors import ConfigError

_RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Request timeout, conflict, too early, too many requests: the only client errors that are transient."""

_SECONDS = re.compile(r"\s*\d+(\.\d+)?\s*", re.ASCII)
"""HTTP defines whole seconds; some servers send fractions."""


class FaultCause(StrEnum):
    """Why a request has no usable response."""

    RATE_LIMITED = "rate_limited"
    """Status 429."""
    SERVER_ERROR = "server_error"
    """Status 5xx, or one of the few transient 4xx."""
    TIMEOUT = "timeout"
    """No whole response within the time limit."""
    BROKEN_BODY = "broken_body"
    """Status 200, but cut off, not JSON, or without the fields of a completion."""
    CONNECTION = "connection"
    """The server is unreachable, or the connection broke."""
    REFUSED = "refused"
    """Any other status: the same request would be refused again."""


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential back-off with jitter."""

    max_retries: int
    first: float = 0.5
    """Seconds of the first back-off; each one after it is `factor` times as long."""
    factor: float = 2.0
    longest: float = 60.0
    """Seconds; caps both the back-off and the wait that a server asks for."""

    def __post_init__(self) -> None:
        if self.max_retries < 0:
            raise ConfigError(f"max_retries: {self.max_retries} is negative; accepted: 0 or more")
        if not (0 <= self.first <= self.longest and self.factor >= 1):
            raise ConfigError(
                f"back-off from {self.first} s to {self.longest} s by factor {self.factor}: accepted are "
                "0 <= first <= longest and a factor of 1 or more"
            )

    def delay(
        self, try_number: int, cause: FaultCause, retry_after: float | None, draw: float
    ) -> float | None:
        """Seconds to wait after try `try_number` (from 1) failed; `None`: give up. `draw` is in [0, 1).

        Half of the back-off is random, so that calls which failed together do not retry together. Where the server sent
        `Retry-After`, the random half is added to it.
        """
        if cause is FaultCause.REFUSED or try_number > self.max_retries:
            return None
        half = self._back_off(try_number) / 2
        least = half if retry_after is None else min(retry_after, self.longest)
        return least + draw * half

    def _back_off(self, try_number: int) -> float:
        try:
            return min(self.longest, self.first * self.factor ** (try_number - 1))
        except OverflowError:
            return self.longest


def status_cause(status: int) -> FaultCause:
    """The cause for a status other than 200."""
    if status == 429:
        return FaultCause.RATE_LIMITED
    if status >= 500 or status in _RETRIED_STATUSES:
        return FaultCause.SERVER_ERROR
    return FaultCause.REFUSED


def retry_after_seconds(header: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a `Retry-After` header (seconds or an HTTP date) asks for; `None`: absent or unreadable."""
    if header is None:
        return None
    if _SECONDS.fullmatch(header):
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
