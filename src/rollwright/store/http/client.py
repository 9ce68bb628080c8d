"""`HttpStore`: a store that is somewhere else.

Always true, beyond the contract: a call is made at most once however often its request is sent, because whatever
names it (rollout, claim, append and call ids) is chosen here before it is sent; an error is of the same class and
says the same as in the server's store; a claim whose caller was cancelled goes back. Belongs to one event loop.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rollwright.store.checks import (
    LATEST,
    check_change,
    check_claim,
    check_id,
    check_report,
    check_request,
    new_id,
)
from rollwright.store.contract import StoreError, StoreUnavailable
from rollwright.store.http import playing_calls as calls
from rollwright.store.http.looking_client import LookingClient, portions
from rollwright.store.http.messages import MAX_ITEMS, Answer, Call
from rollwright.store.http.retry import RetryRule
from rollwright.store.http.shape import MAX_VALUES
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.waiting import Deadline

MAX_WAITING_CLAIMS = 64
"""Requests that wait for work at a time. Each needs a connection, and a server has about 1,000 file handles by
default; further callers wait here for their turn."""

_PORTION_BYTES = MAX_VALUES - 1024
"""Of rollouts that are enqueued by one request."""

_WITHDRAW_SECONDS = 2.0
"""How long `close` waits for claims to be handed back; after that their leases decide."""


class HttpStore(LookingClient):
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
        """`request_timeout`: seconds for one try of one request, on top of what the call itself waits. `on_outage`: is
        told every few seconds, in a line for people, while the server cannot be reached."""
        super().__init__(
            url, token=token, retry=retry or RetryRule(), request_timeout=request_timeout, on_outage=on_outage
        )
        self._may_wait = asyncio.Semaphore(MAX_WAITING_CLAIMS)
        self._withdrawals: set[asyncio.Task[None]] = set()

    # -- asking for episodes ------------------------------------------------------------------------

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRequest]) -> list[Rollout]:
        named = [_named(request) for request in requests]  # all are checked before the first is sent
        if len(named) == 1:
            return await self._send(calls.EnqueueManyRollouts(requests=named))
        enqueued: list[Rollout] = []
        for some in _portions_by_size(named):
            there = await self._ask(calls.EnqueueManyRollouts(requests=some))
            enqueued += there
        return enqueued

    async def update_rollout(
        self,
        rollout_id: str,
        *,
        status: RolloutStatus | str | None = None,
        mode: str | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        priority: int | None = None,
        reason: str | None = None,
    ) -> Rollout:
        change = check_change(status, mode, resources_id, config, priority)
        return await self._send(
            calls.UpdateRollout(
                rollout_id=rollout_id,
                status=change.status,
                mode=mode,
                resources_id=resources_id,
                config=config,
                metadata=None if metadata is None else dict(metadata),
                priority=priority,
                reason=reason,
                call_id=new_id("call"),
            )
        )

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str) -> list[str]:
        cancelled: list[str] = []
        for ids in portions(list(rollout_ids)):
            call = calls.CancelRollouts(rollout_ids=ids, reason=reason, call_id=new_id("call"))
            gone = await self._ask(call)
            cancelled += gone
        return cancelled

    # -- playing them -------------------------------------------------------------------------------

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        check_claim(limit, worker_id, claim_id)
        call_id = new_id("call")
        call = calls.DequeueManyRollouts(
            limit=min(limit, MAX_ITEMS), worker_id=worker_id, claim_id=claim_id or call_id, call_id=call_id
        )
        try:
            # Together with what others ask in this moment; only an empty queue is worth a request of its own.
            claimed = await self._send(call)
            if claimed or timeout <= 0:
                return claimed
            return await self._wait_for_work(call, Deadline(timeout))
        except asyncio.CancelledError:
            self._withdraw(call_id)
            raise

    async def _wait_for_work(
        self, call: calls.DequeueManyRollouts, deadline: Deadline
    ) -> list[AttemptedRollout]:
        try:
            async with asyncio.timeout(deadline.left()):
                await self._may_wait.acquire()
        except TimeoutError:
            return []
        try:
            while not self._closed:
                claimed = await self._poll(call, deadline.left())
                if claimed or not deadline.left():
                    return claimed
            return []
        finally:
            self._may_wait.release()

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        check_claim(1, worker_id, claim_id)
        call_id = new_id("call")
        return await self._start(
            calls.StartAttempt(
                rollout_id=rollout_id, worker_id=worker_id, claim_id=claim_id or call_id, call_id=call_id
            ),
            call_id,
        )

    async def start_requested_rollout(
        self, request: EnqueueRequest, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        check_claim(1, worker_id, claim_id)
        call_id = new_id("call")
        return await self._start(
            calls.StartRequestedRollout(
                request=_named(request), worker_id=worker_id, claim_id=claim_id or call_id, call_id=call_id
            ),
            call_id,
        )

    async def _start(self, call: Call[Answer], call_id: str) -> Answer:
        try:
            return await self._send(call)
        except asyncio.CancelledError:
            self._withdraw(call_id)
            raise

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        *,
        status: AttemptStatus | str | None = None,
        worker_id: str | None = None,
        trajectory: bytes | None = None,
        reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Attempt:
        return await self._send(
            calls.UpdateAttempt(
                rollout_id=rollout_id,
                attempt_id=attempt_id,
                status=check_report(status, worker_id, trajectory),
                worker_id=worker_id,
                trajectory=trajectory,
                reason=reason,
                metadata=None if metadata is None else dict(metadata),
                # By the time of a repeat, another attempt may be the latest.
                call_id=new_id("call") if attempt_id == LATEST else None,
            )
        )

    async def update_worker(
        self,
        worker_id: str,
        *,
        heartbeat_stats: Mapping[str, Any] | None = None,
        attempts: Iterable[tuple[str, str]] | None = None,
    ) -> list[tuple[str, str]]:
        stats = None if heartbeat_stats is None else dict(heartbeat_stats)
        call = calls.UpdateWorker(worker_id=check_id(worker_id, "worker_id"), heartbeat_stats=stats)
        if attempts is None:
            return await self._send(call)
        lost: list[tuple[str, str]] = []
        for pairs in portions(list(attempts)):
            taken_away = await self._send(msgspec.structs.replace(call, attempts=pairs))
            lost += taken_away
        return lost

    async def wait_for_cancellations(self, worker_id: str, *, timeout: float) -> list[tuple[str, str]]:
        check_id(worker_id, "worker_id")
        deadline = Deadline(max(0.0, timeout))
        while True:
            call = calls.WaitForCancellations(worker_id=worker_id, call_id=new_id("call"))
            found = await (self._poll(call, deadline.left()) if deadline.left() else self._send(call))
            if found or self._closed or not deadline.left():
                return found

    # -- the turn journal ---------------------------------------------------------------------------

    async def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], *, append_id: str | None = None
    ) -> None:
        name = new_id("append") if append_id is None else append_id
        await self._send(
            calls.AppendJournal(
                rollout_id=rollout_id, attempt_id=attempt_id, entries=list(entries), append_id=name
            )
        )

    async def read_journal(self, rollout_id: str) -> list[bytes]:
        return await self._ask(calls.ReadJournal(rollout_id=rollout_id))

    async def clear_journal(self, rollout_id: str, attempt_id: str) -> None:
        await self._send(calls.ClearJournal(rollout_id=rollout_id, attempt_id=attempt_id))

    # -- handing back -------------------------------------------------------------------------------

    def _withdraw(self, call_id: str) -> None:
        """The caller was cancelled: what the server gave, or is about to give, goes back to the queue."""
        if not self._closed:
            task = asyncio.create_task(self._send_withdrawal(call_id))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)

    async def _send_withdrawal(self, call_id: str) -> None:
        try:
            await self._batcher.send(calls.WithdrawCall(call_id=call_id))
        except (StoreError, StoreUnavailable):
            return  # the lease ends it

    async def close(self) -> None:
        """Ends the waiting calls and closes the connections. The server's store stays open."""
        self._closed = True
        if self._withdrawals:
            await asyncio.wait(self._withdrawals, timeout=_WITHDRAW_SECONDS)
        await super().close()


def _portions_by_size(requests: Sequence[EnqueueRequest]) -> Iterator[list[EnqueueRequest]]:
    """So many at a time that no body is refused for the number of its values: it has no more of them than bytes. One
    that is larger by itself goes alone."""
    some: list[EnqueueRequest] = []
    size = 0
    for request in requests:
        length = len(msgspec.msgpack.encode(request))
        if some and (len(some) == MAX_ITEMS or size + length > _PORTION_BYTES):
            yield some
            some, size = [], 0
        some.append(request)
        size += length
    yield some


def _named(request: EnqueueRequest) -> EnqueueRequest:
    """Checked, and with an id, so that a repeat of the request enqueues nothing twice."""
    checked = check_request(request)
    return msgspec.structs.replace(request, rollout_id=checked.rollout_id, input=msgspec.Raw(checked.input))
