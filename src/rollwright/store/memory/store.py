"""`MemoryStore`: the store in this process's memory.

Belongs to one event loop. Every change is made between two awaits, so callers never see half of one. A waiting
`dequeue` is handed its rollout the moment there is one, in the order of asking, so no other caller can take it in
between. One timer stands at the earliest lease expiry; it does not keep the loop alive, and `close` stops it.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import inf

from rollwright.store import calls
from rollwright.store.backend import handles
from rollwright.store.checks import NewRollout, check_request, clean_reason
from rollwright.store.errors import NotFound
from rollwright.store.memory.queries import MemoryQueries
from rollwright.store.memory.rows import StoredAttempt
from rollwright.store.memory.waiters import Waiter, Waiters
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    CompletionEntry,
    EnqueueRequest,
    Rollout,
    RolloutStatus,
)
from rollwright.store.transitions import FINAL_ROLLOUT
from rollwright.store.waiting import Countdown, Deadline, Signal, resolve, wait_until

_TIMER_SLACK = 0.001
"""Clocks round: a timer set to the exact expiry of a lease could fire just before it and have to fire again."""


class MemoryStore(MemoryQueries):
    """`clock` returns the time in seconds; by default it is the wall clock at first use, advanced by the event loop's
    own clock, so that neither a jump of the system's time nor a simulated loop confuses the leases. `record_events`
    keeps the event log, about 200 bytes an event."""

    instant = True

    def __init__(self, *, clock: Callable[[], float] | None = None, record_events: bool = True) -> None:
        super().__init__(clock=clock, record_events=record_events)
        self._waiters = Waiters()
        self._completed = Signal()
        self._countdowns: set[Countdown] = set()
        self._cancellations: dict[str, Signal] = {}
        """By worker id, for the workers that wait for cancellations."""
        self._timer: asyncio.TimerHandle | None = None

    # -- asking for episodes ------------------------------------------------------------------------

    @handles(calls.EnqueueManyRollouts)
    async def _enqueue_many_rollouts(self, call: calls.EnqueueManyRollouts) -> list[Rollout]:
        checked = self._check_requests(call.requests)
        now = self._begin()
        rows = [self._state.enqueue(request, now) for request in checked]
        records = [row.record() for row in rows]
        self._settle()
        return records

    def _check_requests(self, requests: Sequence[EnqueueRequest]) -> list[NewRollout]:
        for request in requests:
            if request.resources_id is not None:
                self._require_resources(request.resources_id)
        return [check_request(request) for request in requests]

    def _require_resources(self, resources_id: str) -> None:
        if resources_id not in self._resources:
            raise NotFound(f"no resources {resources_id!r}")

    @handles(calls.UpdateRollout)
    async def _update_rollout(self, call: calls.UpdateRollout) -> Rollout:
        if call.resources_id is not None:
            self._require_resources(call.resources_id)
        record = self._state.update_rollout(call, self._begin()).record()
        self._settle()
        return record

    @handles(calls.CancelRollouts)
    async def _cancel_rollouts(self, call: calls.CancelRollouts) -> list[str]:
        now = self._begin()
        rows = [self._state.rollout(rollout_id) for rollout_id in dict.fromkeys(call.rollout_ids)]
        open_rows = [row for row in rows if row.status not in FINAL_ROLLOUT]
        for row in open_rows:
            self._state.withdraw(row, RolloutStatus.CANCELLED, clean_reason(call.reason), now)
        self._settle()
        return [row.rollout_id for row in open_rows]

    # -- playing them -------------------------------------------------------------------------------

    @handles(calls.DequeueManyRollouts)
    async def _dequeue_many_rollouts(self, call: calls.DequeueManyRollouts) -> list[AttemptedRollout]:
        # Workers that never wait for anything else take turns here; else the first would take all.
        await asyncio.sleep(0)
        attempts = self._state.claim(call.limit, call.worker_id, call.claim_id, self._begin())
        self._settle()
        if not attempts and call.timeout > 0:
            attempts = await self._wait_for_claim(call)
        return [attempt.rollout.attempted(attempt) for attempt in attempts]

    async def _wait_for_claim(self, call: calls.DequeueManyRollouts) -> list[StoredAttempt]:
        future = asyncio.get_running_loop().create_future()
        waiter = Waiter(call.limit, call.worker_id, call.claim_id, future)
        self._waiters.join(waiter)
        try:
            await wait_until(waiter.future, call.timeout)
        except asyncio.CancelledError:
            # Nobody will read the attempts that were handed over in the same moment: they go back into the queue.
            self._state.give_back(waiter.attempts, "its worker stopped asking", self._clock())
            self._settle()
            raise
        finally:
            self._waiters.leave(waiter)
        return waiter.attempts

    @handles(calls.StartAttempt)
    async def _start_attempt(self, call: calls.StartAttempt) -> AttemptedRollout:
        attempt = self._state.start(call.rollout_id, call.worker_id, call.claim_id, self._begin())
        self._settle()
        return attempt.rollout.attempted(attempt)

    @handles(calls.StartRequestedRollout)
    async def _start_requested_rollout(self, call: calls.StartRequestedRollout) -> AttemptedRollout:
        [checked] = self._check_requests([call.request])
        now = self._begin()
        row = self._state.enqueue(checked, now)
        attempt = self._state.start(row.rollout_id, call.worker_id, call.claim_id, now)
        self._settle()
        return row.attempted(attempt)

    @handles(calls.UpdateAttempt)
    async def _update_attempt(self, call: calls.UpdateAttempt) -> Attempt:
        attempt = self._state.report(call, self._begin())
        self._settle()
        return attempt.record()

    @handles(calls.FinishAndDequeue)
    async def _finish_and_dequeue(self, call: calls.FinishAndDequeue) -> list[AttemptedRollout]:
        await asyncio.sleep(0)  # as in `_dequeue_many_rollouts`
        now = self._begin()
        self._state.report(call, now)
        attempts = self._state.claim(1, call.worker_id, call.claim_id, now)
        self._settle()
        return [attempt.rollout.attempted(attempt) for attempt in attempts]

    @handles(calls.UpdateWorker)
    async def _update_worker(self, call: calls.UpdateWorker) -> list[tuple[str, str]]:
        lost = self._state.heartbeat(call.worker_id, call.heartbeat_stats, call.attempts, self._begin())
        self._settle()
        return lost

    @handles(calls.WaitForCancellations)
    async def _wait_for_cancellations(self, call: calls.WaitForCancellations) -> list[tuple[str, str]]:
        deadline = Deadline(call.timeout)
        while True:
            self._begin()
            taken = self._state.workers.take_notifications(call.worker_id)
            left = deadline.left()
            if taken or not left:
                return taken
            signal = self._cancellations.setdefault(call.worker_id, Signal())
            try:
                await signal.wait(left)
            finally:
                if not signal:
                    self._cancellations.pop(call.worker_id, None)
            if self._closed:
                return []

    # -- the turn journal ---------------------------------------------------------------------------

    @handles(calls.AppendJournal)
    async def _append_journal(self, call: calls.AppendJournal) -> None:
        self._state.append_journal(
            call.rollout_id, call.attempt_id, call.entries, call.append_id, self._begin()
        )
        self._settle()

    @handles(calls.ClearJournal)
    async def _clear_journal(self, call: calls.ClearJournal) -> None:
        self._state.clear_journal(call.rollout_id, call.attempt_id, self._begin())
        self._settle()

    # -- results ------------------------------------------------------------------------------------

    @handles(calls.ReadCompletions)
    async def _read_completions(self, call: calls.ReadCompletions) -> list[CompletionEntry]:
        deadline = Deadline(call.timeout)
        while True:
            self._begin()
            found = self._state.log.after(call.after, call.limit)
            left = deadline.left()
            if found or not left:
                return found
            await self._completed.wait(left)
            if self._closed:
                return []

    @handles(calls.WaitForRollouts)
    async def _wait_for_rollouts(self, call: calls.WaitForRollouts) -> list[Rollout]:
        self._begin()
        rows = [self._state.rollout(rollout_id) for rollout_id in dict.fromkeys(call.rollout_ids)]
        pending = [row for row in rows if row.status not in FINAL_ROLLOUT]
        if pending:
            countdown = Countdown(len(pending))
            self._countdowns.add(countdown)
            for row in pending:
                row.watchers = [*(row.watchers or ()), countdown]
            try:
                await wait_until(countdown.future, call.timeout)
            finally:
                self._countdowns.discard(countdown)
                for row in pending:
                    if row.watchers is not None:
                        row.watchers = [each for each in row.watchers if each is not countdown]
        return [row.record() for row in rows if row.status in FINAL_ROLLOUT]

    # -- housekeeping ---------------------------------------------------------------------------------

    @handles(calls.ReleaseTrajectories)
    async def _release_trajectories(self, call: calls.ReleaseTrajectories) -> int:
        self._begin()
        found = [self._state.rollouts.get(each) for each in dict.fromkeys(call.rollout_ids)]
        kept = [row for row in found if row is not None and row.status is RolloutStatus.SUCCEEDED]
        released = [row for row in kept if row.trajectory is not None]
        for row in released:
            row.trajectory = None
        return len(released)

    @handles(calls.DeleteRollouts)
    async def _delete_rollouts(self, call: calls.DeleteRollouts) -> int:
        now = self._begin()
        rows = self._state.rollouts
        wanted = dict.fromkeys(call.rollout_ids)
        return self._state.delete([rows[each] for each in wanted if each in rows], now)

    @handles(calls.DeleteFinished)
    async def _delete_finished(self, call: calls.DeleteFinished) -> int:
        now = self._begin()
        return self._state.delete(self._state.log.ended_before(now - call.older_than, call.limit), now)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._waiters.release_all()
        for countdown in self._countdowns:
            resolve(countdown.future)
        for signal in [self._completed, *self._cancellations.values()]:
            signal.notify()

    # -- waking -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        state = self._state
        if self._waiters.waiting:
            self._serve_waiters()
        if state.finished:
            state.finished = False
            self._completed.notify()
        if state.workers.to_notify:
            for worker_id in state.workers.to_notify:
                if worker_id in self._cancellations:
                    self._cancellations[worker_id].notify()
            state.workers.to_notify.clear()
        if state.leases.bound < self._timer_at and not self._closed:
            self._set_timer()

    def _serve_waiters(self) -> None:
        state = self._state
        while len(state.ready) and (waiter := self._waiters.next()) is not None:
            waiter.attempts = state.claim(waiter.limit, waiter.worker_id, waiter.claim_id, self._clock())
            resolve(waiter.future)

    def _set_timer(self) -> None:
        first = self._state.leases.first()
        if first is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = first[0][0]
        delay = max(0.0, self._timer_at - self._clock()) + _TIMER_SLACK
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = inf
        self._state.expire(self._clock())
        self._settle()
