"""A semaphore whose limit can change while it is held. First come, first served."""

import asyncio
from collections import deque
from types import TracebackType


class Gate:
    """Lets at most `limit` holders in at once; lowering the limit throws nobody out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        self._limit = value
        self._let_in()

    async def __aenter__(self) -> None:
        if self._inside < self._limit and not self._waiting:
            self._inside += 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        self._let_in()  # those before it may all have been cancelled
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        self._inside -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._inside < self._limit:
            ticket = self._waiting.popleft()
            if not ticket.done():  # a cancelled one is dropped here, where it costs nothing
                self._inside += 1
                ticket.set_result(None)
