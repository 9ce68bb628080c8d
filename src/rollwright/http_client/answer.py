"""What a server answered."""

from collections.abc import Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    status: int
    reason: str
    """The words beside the status; may be empty."""
    headers: Sequence[tuple[bytes, bytes]]
    """As they came."""
    body: bytes

    def header(self, name: str) -> str | None:
        """The value of the first header with this name, whatever the case of its letters."""
        wanted = name.lower().encode()
        for each, value in self.headers:
            if each.lower() == wanted:
                return value.decode("latin-1").strip()
        return None
