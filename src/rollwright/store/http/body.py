"""Request bodies are read within limits: of one body, and of all bodies that are held at the same time.

Always true: a body is read only after its sender's token was checked; all held bodies together never take more than
their memory limit plus one body, and the body that began first can always be read to its end, so that two never
deadlock.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rollwright.store.http.errors import HttpRefusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MAX_MEMORY = 256 * 1024 * 1024
"""For bodies that are being read, plus one: several of the largest at a time, and a small part of a server's memory."""

MEMORY_SECONDS = 30.0
"""How long a body waits for memory before its sender gets a 503."""


class Gone(Exception):
    """The caller has closed the connection."""


class BodyMemory:
    """Memory accounting for the bodies of one server. Belongs to one event loop."""

    def __init__(self, limit: int = MAX_MEMORY, patience: float = MEMORY_SECONDS) -> None:
        self._limit = limit
        self._patience = patience
        self._held: OrderedDict[Body, int] = OrderedDict()
        """In the order in which they began."""
        self.used = 0
        self._freed = asyncio.Event()

    async def take(self, body: "Body", size: int) -> None:
        self._held.setdefault(body, 0)
        if not self._fits(body, size):
            try:
                async with asyncio.timeout(self._patience):
                    while not self._fits(body, size):
                        self._freed.clear()
                        await self._freed.wait()
            except TimeoutError:
                raise HttpRefusal(
                    503, "busy", "the server holds as many large requests as it can; try again"
                ) from None
        self._held[body] += size
        self.used += size

    def _fits(self, body: "Body", size: int) -> bool:
        return self.used + size <= self._limit or next(iter(self._held)) is body

    def give_back(self, body: "Body") -> None:
        self.used -= self._held.pop(body, 0)
        self._freed.set()


class Body:
    """One body; a `with` block around its use returns its memory."""

    def __init__(self, receive: Receive, limit: int, memory: BodyMemory) -> None:
        self._receive = receive
        self._limit = limit
        self._memory = memory
        self._more = True
        """Whether a part is still to come. After the last one, `receive` waits for the end of the connection."""
        self._counted = False

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted:
            self._memory.give_back(self)

    @property
    def unread(self) -> bool:
        """Whether it was not read to its end, so that its connection cannot be reused."""
        return self._more

    async def read(self) -> bytes:
        body = await self._part()
        if self._more:  # a body in one piece is small, and in memory already
            self._counted = True
            await self._memory.take(self, len(body))
            parts, size = [body], len(body)
            while self._more and size <= self._limit:
                parts.append(await self._part())
                size += len(parts[-1])
                await self._memory.take(self, len(parts[-1]))
            if size <= self._limit:
                body = b"".join(parts)
            else:
                raise self.too_large()
        if len(body) > self._limit:
            raise self.too_large()
        return body

    def too_large(self) -> HttpRefusal:
        return HttpRefusal(413, "too_large", f"the body is longer than {self._limit} bytes")

    async def _part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Gone
        self._more = message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part
