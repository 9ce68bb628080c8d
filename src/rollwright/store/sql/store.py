"""`SqlStore`: the store on a SQL database, SQLite or PostgreSQL.

Handlers turn calls into operations, which a driver executes; the driver's notifications of changes, of this process or
another, wake waiting calls. A task sleeps until the next lease expires, so that leases expire in a store that nobody
calls. Every write may run twice, because the outcome of a commit on a lost connection is unknown: ids, claims and journal
entries have idempotency keys.
"""

import asyncio
import logging
from collections.abc import Sequence
from math import inf
from typing import Any

from rollwright.store import calls
from rollwright.store.backend import handles
from rollwright.store.checks import check_request, clean_reason, new_id, pack_mapping
from rollwright.store.errors import NotFound
from rollwright.store.records import Attempt, AttemptedRollout, CompletionEntry, Rollout
from rollwright.store.sql import attempts, claims, queries, queue, retention
from rollwright.store.sql.changes import expire
from rollwright.store.sql.driver import BatchedCall, Driver
from rollwright.store.sql.query_handlers import MOST_ROUNDS, SqlQueries
from rollwright.store.sql.transaction import Changes
from rollwright.store.sql.waiters import Claimants
from rollwright.store.transitions import FINAL_ATTEMPT, FINAL_ROLLOUT, lapsed
from rollwright.store.waiting import Deadline, Signal

_log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Interval of the checks for leases of other processes, whose claims this process is not notified of."""

_EARLIEST_WATCH = 0.001
"""Shortest sleep. Clocks round: a check at the exact end of a lease could come just before it, again and again."""

RECHECK_SECONDS = 10.0
"""How often a waiter reads statuses without a notification, to find rollouts that were deleted meanwhile."""

CLOSE_SECONDS = 2.0
"""Time limit of `close` for pending writes if the database is away; leases decide the rest."""

_NEWS = 10_000
"""Completions that a waiter reads at once; it reads again if there are more."""

BRIEF_ROWS, BRIEF_BYTES = 32, 65536
"""Limits of a brief call: SQLite takes some microseconds for each row, and as long for each page."""


class SqlStore(SqlQueries):
    """Owns the driver; `close` closes it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._claimants = Claimants(self._claim_for_each, self._requeue_abandoned)
        self._completed = Signal()
        self._taken = Signal()
        self._lease_nearer = Signal()
        self._watching_until = inf
        self._background: set[asyncio.Task[Any]] = set()
        driver.watch(self._on_change, self._has_waiters)
        self._watch = asyncio.get_running_loop().create_task(self._end_leases())

    # -- asking for episodes ------------------------------------------------------------------------

    @handles(calls.EnqueueManyRollouts)
    async def _enqueue_many_rollouts(self, call: calls.EnqueueManyRollouts) -> list[Rollout]:
        checked, size, new, free = [], 0, True, True
        for request in call.requests:
            each = check_request(request)
            checked.append(each)
            size += len(each.input)
            new = new and request.rollout_id is None
            free = free and request.resources_id is None
        brief = len(checked) <= BRIEF_ROWS and size <= BRIEF_BYTES
        if free:
            run = queue.enqueue_many if new else queue.enqueue_named
            return await self._write(BatchedCall(run, checked), brief=brief)
        return await self._write(lambda tx: queue.enqueue(tx, checked), brief=brief)

    @handles(calls.UpdateRollout)
    async def _update_rollout(self, call: calls.UpdateRollout) -> Rollout:
        reason = clean_reason(call.reason)
        return await self._write(
            lambda tx: queue.update_rollout(tx, call.rollout_id, call, call.metadata, reason)
        )

    @handles(calls.CancelRollouts)
    async def _cancel_rollouts(self, call: calls.CancelRollouts) -> list[str]:
        reason = clean_reason(call.reason)
        return await self._write(lambda tx: queue.cancel(tx, call.rollout_ids, reason))

    # -- playing them -------------------------------------------------------------------------------

    @handles(calls.DequeueManyRollouts)
    async def _dequeue_many_rollouts(self, call: calls.DequeueManyRollouts) -> list[AttemptedRollout]:
        ask = (call.limit, call.worker_id, call.claim_id or self._idempotency_key("cl"))
        if self._claimants and call.timeout > 0:
            claimed = []  # callers that wait already are served first
        else:
            claimed = await self._write(
                BatchedCall(claims.claim_many if call.claim_id is None else claims.claim_once, ask),
                durable=False,
                brief=call.limit <= BRIEF_ROWS,
                orphaned=self._requeue_abandoned,
            )
        if not claimed and call.timeout > 0:
            claimed = await self._claimants.wait(ask, call.timeout)
        return claimed

    def _idempotency_key(self, prefix: str) -> str | None:
        """A key for a call that the driver may run twice, by which the second execution finds the first."""
        return new_id(prefix) if self._driver.repeats else None

    def _requeue_abandoned(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Requeues rollouts whose caller was cancelled during the claim."""
        if claimed and not self._closed:
            task = asyncio.get_running_loop().create_task(self._give_back(claimed))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _claim_for_each(self, asked: Sequence[claims.Ask]) -> list[list[AttemptedRollout]]:
        brief = sum(limit for limit, _, _ in asked) <= BRIEF_ROWS
        return await self._write(BatchedCall(claims.serve, asked), durable=False, brief=brief)

    async def _give_back(self, claimed: Sequence[AttemptedRollout]) -> None:
        reason = "its worker stopped asking"
        await self._write(lambda tx: attempts.give_back(tx, claimed, reason), durable=False)

    @handles(calls.StartAttempt)
    async def _start_attempt(self, call: calls.StartAttempt) -> AttemptedRollout:
        claim = call.claim_id or self._idempotency_key("cl")
        return await self._write(
            lambda tx: claims.start(tx, call.rollout_id, call.worker_id, claim), durable=False
        )

    @handles(calls.StartRequestedRollout)
    async def _start_requested_rollout(self, call: calls.StartRequestedRollout) -> AttemptedRollout:
        claim, checked = call.claim_id or self._idempotency_key("cl"), check_request(call.request)
        return await self._write(lambda tx: claims.start_new(tx, checked, call.worker_id, claim))

    @handles(calls.UpdateAttempt)
    async def _update_attempt(self, call: calls.UpdateAttempt) -> Attempt:
        trajectory = call.trajectory
        report = attempts.Report(
            call.rollout_id,
            call.attempt_id,
            call.status,
            call.worker_id,
            trajectory,
            clean_reason(call.reason),
            call.metadata,
        )
        return await self._write(
            BatchedCall(attempts.report_many, report),
            durable=call.status in FINAL_ATTEMPT,
            brief=trajectory is None or len(trajectory) <= BRIEF_BYTES,
        )

    @handles(calls.FinishAndDequeue)
    async def _finish_and_dequeue(self, call: calls.FinishAndDequeue) -> list[AttemptedRollout]:
        trajectory = call.trajectory
        report = attempts.Report(
            call.rollout_id,
            call.attempt_id,
            call.status,
            call.worker_id,
            trajectory,
            clean_reason(call.reason),
            call.metadata,
        )
        ask = (1, call.worker_id, call.claim_id or self._idempotency_key("cl"))
        run = claims.finish_and_claim if call.claim_id is None else claims.finish_and_claim_once
        return await self._write(
            BatchedCall(run, (report, ask)),
            brief=trajectory is None or len(trajectory) <= BRIEF_BYTES,
            orphaned=self._requeue_abandoned,
        )

    @handles(calls.UpdateWorker)
    async def _update_worker(self, call: calls.UpdateWorker) -> list[tuple[str, str]]:
        stats, pairs = call.heartbeat_stats, call.attempts
        packed = None if stats is None else pack_mapping(stats, "heartbeat_stats")
        return await self._write(
            BatchedCall(
                attempts.record_heartbeats, (call.worker_id, packed, pairs), attempts.recall_heartbeat
            ),
            durable=False,
            brief=pairs is not None and len(pairs) <= BRIEF_ROWS,
        )

    @handles(calls.WaitForCancellations)
    async def _wait_for_cancellations(self, call: calls.WaitForCancellations) -> list[tuple[str, str]]:
        deadline = Deadline(call.timeout)
        while not self._closed:
            seen = self._taken.count
            if await self._read(queries.has_lost_attempts, call.worker_id):
                return await self._write(
                    lambda tx: attempts.take_lost_attempts(tx, call.worker_id), durable=False
                )
            left = deadline.left()
            if not left:
                break
            await self._taken.wait(left, seen)
        return []

    # -- the turn journal ---------------------------------------------------------------------------

    @handles(calls.AppendJournal)
    async def _append_journal(self, call: calls.AppendJournal) -> None:
        name, entries = call.append_id or self._idempotency_key("ap"), call.entries
        brief = len(entries) <= BRIEF_ROWS and sum(map(len, entries)) <= BRIEF_BYTES
        if name is None and len(entries) == 1:
            turn = (call.rollout_id, call.attempt_id, bytes(entries[0]))
            await self._write(BatchedCall(attempts.append_turns, turn), brief=brief)
        else:
            more = (call.rollout_id, call.attempt_id, entries, name)
            await self._write(BatchedCall(attempts.append_once, more), brief=brief)

    @handles(calls.ClearJournal)
    async def _clear_journal(self, call: calls.ClearJournal) -> None:
        await self._write(lambda tx: attempts.clear_journal(tx, call.rollout_id, call.attempt_id))

    # -- results ------------------------------------------------------------------------------------

    @handles(calls.ReadCompletions)
    async def _read_completions(self, call: calls.ReadCompletions) -> list[CompletionEntry]:
        deadline = Deadline(call.timeout)
        while True:
            seen = self._completed.count
            found = await self._read_settled(queries.read_completions, call.after, call.limit)
            left = deadline.left()
            if found or not left:
                return found
            await self._completed.wait(left, seen)
            if self._closed:
                return []

    @handles(calls.WaitForRollouts)
    async def _wait_for_rollouts(self, call: calls.WaitForRollouts) -> list[Rollout]:
        deadline = Deadline(call.timeout)
        wanted = list(dict.fromkeys(call.rollout_ids))
        seen = self._completed.count
        cursor, statuses = await self._read(queries.statuses, wanted)
        for rollout_id in wanted:
            if rollout_id not in statuses:
                raise NotFound(f"no rollout {rollout_id!r}")
        pending = {name for name, status in statuses.items() if status not in FINAL_ROLLOUT}
        while pending and (left := deadline.left()) != 0:
            await self._completed.wait(min(left, RECHECK_SECONDS), seen)
            if self._closed:
                return []
            seen = self._completed.count
            if news := await self._read(queries.read_completions, cursor, _NEWS):
                cursor = news[-1].cursor
                pending.difference_update(each.rollout_id for each in news)
            else:
                cursor, statuses = await self._read(queries.statuses, list(pending))
                pending = {name for name, status in statuses.items() if status not in FINAL_ROLLOUT}
        found = await self._read(queries.find_rollouts, wanted)
        return [found[name] for name in wanted if name in found and found[name].status in FINAL_ROLLOUT]

    # -- housekeeping -------------------------------------------------------------------------------

    @handles(calls.ReleaseTrajectories)
    async def _release_trajectories(self, call: calls.ReleaseTrajectories) -> int:
        # Not durable: a power cut that brings some copies back is harmless.
        return await self._write(
            lambda tx: retention.release_trajectories(tx, call.rollout_ids), durable=False
        )

    @handles(calls.DeleteRollouts)
    async def _delete_rollouts(self, call: calls.DeleteRollouts) -> int:
        return await self._write(lambda tx: retention.delete_rollouts(tx, call.rollout_ids))

    @handles(calls.DeleteFinished)
    async def _delete_finished(self, call: calls.DeleteFinished) -> int:
        return await self._write(lambda tx: retention.delete_finished(tx, call.older_than, call.limit))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        for signal in (self._completed, self._taken):
            signal.notify()
        self._claimants.close()
        last = asyncio.ensure_future(self._driver.write(attempts.write_stamps, durable=False))
        ending = {self._watch, last, *self._background}
        await asyncio.wait(ending, timeout=CLOSE_SECONDS)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._driver.close()

    # -- waking -------------------------------------------------------------------------------------

    def _on_change(self, changes: Changes) -> None:
        if changes.waiting:
            self._claimants.wake()
        if changes.completed:
            self._completed.notify()
        if changes.taken:
            self._taken.notify()
        if changes.lease < self._watching_until:
            self._lease_nearer.notify()

    def _has_waiters(self) -> bool:
        return bool(self._claimants or self._completed or self._taken)

    async def _end_leases(self) -> None:
        in_a_row = 0
        while True:
            seen = self._lease_nearer.count
            try:
                lease, now = await self._driver.read(queries.first_lease)
                if lapsed(lease, now) or self._driver.stamps:
                    await self._driver.write(expire, durable=False)
                in_a_row = in_a_row + 1 if lapsed(lease, now) else 0
                if 0 < in_a_row < MOST_ROUNDS:
                    continue
            except Exception as error:  # noqa: BLE001 - callers get the error from their own calls; this task continues
                _log.warning("cannot check for expired leases, will retry: %s", error)
                lease, now = None, inf
            ends_in = inf if lease is None else lease - now
            delay = min(max(ends_in, _EARLIEST_WATCH), WATCH_SECONDS)
            self._watching_until = now + delay
            await self._lease_nearer.wait(delay, seen)
