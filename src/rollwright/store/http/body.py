"""The body of one request, read within a limit."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rollwright.store.http.refusals import HttpRefusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_DRAINED = 4
"""A refused body is read and thrown away up to so many times the limit: a caller that is still sending would
otherwise see a broken connection instead of the reason."""


class Gone(Exception):
    """The caller has closed the connection."""


class Body:
    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._more = True
        """Whether a part is still to come. After the last one, `receive` waits for the end of the connection."""

    async def read(self) -> bytes:
        body = await self._part()
        if self._more:
            parts, size = [body], len(body)
            while self._more and size <= self._limit:
                parts.append(await self._part())
                size += len(parts[-1])
            body = b"".join(parts)
        if len(body) > self._limit:
            raise self.too_large()
        return body

    async def drain(self) -> None:
        left = self._limit * _DRAINED
        while self._more and left > 0:
            left -= len(await self._part())

    def too_large(self) -> HttpRefusal:
        return HttpRefusal(413, "too_large", f"the body is longer than {self._limit} bytes")

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Gone
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part
