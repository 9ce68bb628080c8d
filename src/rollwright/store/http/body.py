"""The bodies of requests, read within limits: of one body, and of all that are held at the same time.

Always true: a body is asked for only by whoever has checked its sender's key; bodies that are held together never take
more than the memory for them and one body beyond it, and the one that began first can always be read to its end, so
that no two wait for each other.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rollwright.store.http.errors import HttpRefusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

MAX_MEMORY = 256 * 1024 * 1024
"""For bodies under way, beside one: several of the largest at a time, and a small part of a server's memory."""

MEMORY_SECONDS = 30.0
"""How long a body waits for memory before its sender is told to come again."""


class Gone(Exception):
    """The caller has closed the connection."""


class BodyMemory:
    """What the bodies of one server take. Belongs to one event loop."""

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
    """One body; a `with` block around all that is done with it gives its memory back."""

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
        """Whether it was not read to its end, so that nothing can follow it on its connection."""
        return self._more

    async def read(self) -> bytes:
        body = await self._part()
        if self._more:  # one that came in one piece is small, and in memory already
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
