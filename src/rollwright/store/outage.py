"""Status lines about a store that cannot be reached."""

from collections.abc import Callable

TELL_SECONDS = 5.0
"""Seconds between two lines about the same server."""


class Outage:
    """Reports a server that does not answer: soon, then every few seconds, and when it answers again."""

    def __init__(self, url: str, say: Callable[[str], None] | None) -> None:
        self._url = url
        self._say = say
        self._told: float | None = None
        """Time of the last line; `None` while the server is not known to be down."""

    def lasts(self, why: str, now: float, left: float) -> None:
        if self._say is not None and (self._told is None or now - self._told >= TELL_SECONDS):
            self._told = now
            self._say(f"{self._url}: {why}; trying for {left:.0f} more seconds")

    def is_over(self) -> None:
        if self._say is not None and self._told is not None:
            self._told = None
            self._say(f"{self._url} answers again")
