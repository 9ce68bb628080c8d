"""`HttpStore`: a store behind a server.

Always true, beyond the invariants of every store: a call is executed at most once however often its request is sent,
because every id that names its effects is chosen before it is sent (`StoreCall.repeatable`); an error has the same
class and message as in the server's store; a claim whose caller was cancelled goes back. Belongs to one event loop.

Nothing here knows a particular call: a record says how it is cut into requests (`StoreCall.parts`), whether it waits,
and whether it shares a request with others.
"""

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

from rollwright.store.api import Store
from rollwright.store.call_kinds import MAX_WAIT_SECONDS, ClaimCall, Result, StoreCall
from rollwright.store.errors import StoreError, StoreUnavailable
from rollwright.store.http.batcher import CallBatcher, decode, encode
from rollwright.store.http.connection import ServerConnection
from rollwright.store.http.protocol import WithdrawCall
from rollwright.store.http.retry import RetryRule
from rollwright.store.waiting import Deadline

MAX_WAITING_CLAIMS = 64
"""Requests that wait for work at a time. Each needs a connection, and a server has about 1,000 file handles by
default; further callers wait here for their turn."""

_WITHDRAW_SECONDS = 2.0
"""How long `close` waits for claims to be handed back; after that their leases decide."""


class HttpStore(Store):
    """The store behind a server: `http://host:port`, `https://…`, or `http+unix:///path/of/socket`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        retry: RetryRule | None = None,
        request_timeout: float = 60.0,
        on_outage: Callable[[str], None] | None = None,
    ) -> None:
        """`request_timeout`: seconds for one try of one request, on top of the call's own timeout. `on_outage` gets a
        line for people every few seconds while the server cannot be reached."""
        self._connection = ServerConnection(url, token, retry or RetryRule(), request_timeout, on_outage)
        self._batcher = CallBatcher(self._connection)
        self._polls: set[asyncio.Task[bytes]] = set()
        self._waiting_claims = asyncio.Semaphore(MAX_WAITING_CLAIMS)
        self._withdrawals: set[asyncio.Task[None]] = set()
        self._closed = False

    async def execute(self, call: StoreCall[Result]) -> Result:
        call = call.repeatable()
        deadline = Deadline(call.timeout) if call.waits() else None  # type: ignore[attr-defined]
        result: Result
        if call.fits():
            result = await self._request(call, deadline)
            return result
        parts = call.parts()
        try:
            part = next(parts)
            while True:
                part = parts.send(await self._request(part, deadline))
        except StopIteration as end:
            result = end.value
            return result

    # The next two return a coroutine instead of awaiting it: most calls of a client pass through both.

    def _request(self, call: StoreCall[Any], deadline: Deadline | None) -> Coroutine[Any, Any, Any]:
        if isinstance(call, ClaimCall):
            return self._claim(call, deadline)
        if deadline is not None and call.waits():
            return self._wait(call, deadline)
        return self._send(call)

    def _send(self, call: StoreCall[Result]) -> Coroutine[Any, Any, Result]:
        """Without waiting at the server."""
        if self._closed:
            raise StoreError("the store is closed")
        call = call.waiting(0.0)
        return self._send_alone(call) if call.is_bulky() else self._batcher.send(call)

    async def _send_alone(self, call: StoreCall[Result]) -> Result:
        return decode(call, await self._connection.post(call.name, encode(call)))

    async def _wait(self, call: StoreCall[list[Any]], deadline: Deadline) -> list[Any]:
        """Repeats the request until the call has what it waits for: one request waits `MAX_WAIT_SECONDS` at most."""
        while True:
            found = await self._poll(call, min(deadline.left(), MAX_WAIT_SECONDS))
            if call.is_satisfied(found) or self._closed or not deadline.left():
                return found

    async def _poll(self, call: StoreCall[list[Any]], seconds: float) -> list[Any]:
        """One request that waits at the server; empty when the store is closed meanwhile."""
        if self._closed:
            raise StoreError("the store is closed")
        poll = asyncio.create_task(self._connection.post(call.name, encode(call.waiting(seconds)), seconds))
        self._polls.add(poll)
        try:
            await asyncio.wait({poll})
            return [] if poll.cancelled() else decode(call, poll.result())
        finally:
            self._polls.discard(poll)
            poll.cancel()

    # -- claims -------------------------------------------------------------------------------------

    async def _claim(self, call: ClaimCall[Any], deadline: Deadline | None) -> Any:
        try:
            # First in a batch with other callers' calls; only an empty queue is worth a request of its own.
            claimed = await self._send(call)
            if deadline is None or call.is_satisfied(claimed):
                return claimed
            return await self._wait_for_work(call, deadline)
        except asyncio.CancelledError:
            self._withdraw(call)
            raise

    async def _wait_for_work(self, call: ClaimCall[Any], deadline: Deadline) -> list[Any]:
        try:
            left = deadline.left()
            async with asyncio.timeout(None if left == inf else left):
                await self._waiting_claims.acquire()
        except TimeoutError:
            return []
        try:
            return [] if self._closed else await self._wait(call, deadline)
        finally:
            self._waiting_claims.release()

    def _withdraw(self, call: ClaimCall[Any]) -> None:
        """The caller was cancelled: attempts that the server gave out, or is about to, go back to the queue."""
        if not self._closed and call.call_id is not None:
            task = asyncio.create_task(self._send_withdrawal(call.call_id))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)

    async def _send_withdrawal(self, call_id: str) -> None:
        try:
            await self._batcher.send(WithdrawCall(call_id))
        except (StoreError, StoreUnavailable):
            return  # the lease ends it

    async def close(self) -> None:
        """Ends the waiting calls and closes the connections. The server's store stays open."""
        self._closed = True
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=_WITHDRAW_SECONDS)
        polls = list(self._polls)
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        await self._batcher.close()
        await self._connection.close()
