"""`MemoryStore`: the ledger behind the store's contract, with waiting calls and a timer.

Belongs to one event loop. Every change is made between two awaits, so callers never see half of one. A
waiting `dequeue` is handed its rollout the moment there is one, in the order of asking, so nobody else can take
it in between. One timer stands at the earliest end of a lease; it does not keep the loop alive, and `close`
stops it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from rollwright.store.checks import (
    NewRollout,
    check_change,
    check_claim,
    check_id,
    check_report,
    check_request,
    clean_reason,
)
from rollwright.store.contract import NotFound
from rollwright.store.memory.line import Claimant, Line
from rollwright.store.memory.looking import LookingStore
from rollwright.store.memory.rows import AttemptRow
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Completion,
    EnqueueRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.transitions import FINAL_ROLLOUT
from rollwright.store.waiting import Countdown, Deadline, Signal, resolve, wait_until

_TIMER_SLACK = 0.001
"""Clocks round: a timer set to the exact end of a lease could fire just before it and have to fire again."""


class MemoryStore(LookingStore):
    """`clock` gives the time in seconds; without one it is the wall clock at first use, moved on by the event
    loop's own clock, so that neither a jump of the system's time nor a simulated loop confuses the leases.
    `record_events` keeps the history of everything that happened, about 200 bytes an event."""

    instant = True

    def __init__(self, *, clock: Callable[[], float] | None = None, record_events: bool = True) -> None:
        super().__init__(clock=clock, record_events=record_events)
        self._line = Line()
        self._completed = Signal()
        self._countdowns: set[Countdown] = set()
        self._stops: dict[str, Signal] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        """When the timer fires, by the store's clock; never later than the first end of a lease."""

    # -- asking for episodes ------------------------------------------------------------------------

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRequest]) -> list[Rollout]:
        checked = self._known_resources(requests)
        now = self._begin()
        rows = [self._ledger.enqueue(request, now) for request in checked]
        records = [row.record() for row in rows]
        self._settle()
        return records

    def _known_resources(self, requests: Sequence[EnqueueRequest]) -> list[NewRollout]:
        for request in requests:
            if request.resources_id is not None and request.resources_id not in self._resources:
                raise NotFound(f"no resources {request.resources_id!r}")
        return [check_request(request) for request in requests]

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
        if resources_id is not None and resources_id not in self._resources:
            raise NotFound(f"no resources {resources_id!r}")
        row = self._ledger.update_rollout(rollout_id, self._begin(), change, metadata, clean_reason(reason))
        record = row.record()
        self._settle()
        return record

    async def cancel_rollouts(self, rollout_ids: Iterable[str], reason: str) -> list[str]:
        now = self._begin()
        rows = [self._ledger.rollout(rollout_id) for rollout_id in dict.fromkeys(rollout_ids)]
        open_rows = [row for row in rows if row.status not in FINAL_ROLLOUT]
        for row in open_rows:
            self._ledger.withdraw(row, RolloutStatus.CANCELLED, clean_reason(reason), now)
        self._settle()
        return [row.rollout_id for row in open_rows]

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
        # Workers that never wait for anything else take turns here; else the first would take all.
        await asyncio.sleep(0)
        attempts = self._ledger.claim(limit, worker_id, claim_id, self._begin())
        self._settle()
        if not attempts and timeout > 0:
            attempts = await self._wait_for_claim(limit, worker_id, claim_id, timeout)
        return [attempt.rollout.attempted(attempt) for attempt in attempts]

    async def _wait_for_claim(
        self, limit: int, worker_id: str | None, claim_id: str | None, timeout: float
    ) -> list[AttemptRow]:
        claimant = Claimant(limit, worker_id, claim_id, asyncio.get_running_loop().create_future())
        self._line.join(claimant)
        try:
            await wait_until(claimant.future, timeout)
        except asyncio.CancelledError:
            # Nobody will read what was handed over in the same moment: back into the queue with it.
            self._ledger.give_back(claimant.attempts, "its worker stopped asking", self._clock())
            self._settle()
            raise
        finally:
            self._line.leave(claimant)
        return claimant.attempts

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        check_claim(1, worker_id, claim_id)
        attempt = self._ledger.start(rollout_id, worker_id, claim_id, self._begin())
        self._settle()
        return attempt.rollout.attempted(attempt)

    async def start_requested_rollout(
        self, request: EnqueueRequest, worker_id: str | None = None, *, claim_id: str | None = None
    ) -> AttemptedRollout:
        check_claim(1, worker_id, claim_id)
        [checked] = self._known_resources([request])
        now = self._begin()
        row = self._ledger.enqueue(checked, now)
        attempt = self._ledger.start(row.rollout_id, worker_id, claim_id, now)
        self._settle()
        return row.attempted(attempt)

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
        parsed = check_report(status, worker_id, trajectory)
        now = self._begin()
        attempt = self._ledger.report(
            rollout_id,
            attempt_id,
            now,
            status=parsed,
            worker_id=worker_id,
            trajectory=trajectory,
            reason=clean_reason(reason),
            metadata=metadata,
        )
        self._settle()
        return attempt.record()

    async def update_worker(
        self,
        worker_id: str,
        *,
        heartbeat_stats: Mapping[str, Any] | None = None,
        attempts: Iterable[tuple[str, str]] | None = None,
    ) -> list[tuple[str, str]]:
        check_id(worker_id, "worker_id")
        lost = self._ledger.heartbeat(worker_id, heartbeat_stats, attempts, self._begin())
        self._settle()
        return lost

    async def wait_for_cancellations(self, worker_id: str, *, timeout: float) -> list[tuple[str, str]]:
        check_id(worker_id, "worker_id")
        deadline = Deadline(timeout)
        while True:
            self._begin()
            taken = self._ledger.roster.tell(worker_id)
            left = deadline.left()
            if taken or not left:
                return taken
            signal = self._stops.setdefault(worker_id, Signal())
            try:
                await signal.wait(left)
            finally:
                if not signal:
                    self._stops.pop(worker_id, None)
            if self._closed:
                return []

    # -- the turn journal ---------------------------------------------------------------------------

    async def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], *, append_id: str | None = None
    ) -> None:
        self._ledger.append_journal(rollout_id, attempt_id, entries, append_id, self._begin())
        self._settle()

    async def clear_journal(self, rollout_id: str, attempt_id: str) -> None:
        self._ledger.clear_journal(rollout_id, attempt_id, self._begin())
        self._settle()

    # -- results ------------------------------------------------------------------------------------

    async def read_completions(
        self, after: int = 0, *, limit: int = 1000, timeout: float = 0.0
    ) -> list[Completion]:
        deadline = Deadline(timeout)
        while True:
            self._begin()
            found = self._ledger.log.after(after, limit)
            left = deadline.left()
            if found or not left:
                return found
            await self._completed.wait(left)
            if self._closed:
                return []

    async def wait_for_rollouts(
        self, rollout_ids: Iterable[str], *, timeout: float | None = None
    ) -> list[Rollout]:
        self._begin()
        rows = [self._ledger.rollout(rollout_id) for rollout_id in dict.fromkeys(rollout_ids)]
        pending = [row for row in rows if row.status not in FINAL_ROLLOUT]
        if pending:
            countdown = Countdown(len(pending))
            self._countdowns.add(countdown)
            for row in pending:
                row.watchers = [*(row.watchers or ()), countdown]
            try:
                await wait_until(countdown.future, timeout)
            finally:
                self._countdowns.discard(countdown)
                for row in pending:
                    if row.watchers is not None:
                        row.watchers = [each for each in row.watchers if each is not countdown]
        return [row.record() for row in rows if row.status in FINAL_ROLLOUT]

    # -- housekeeping ---------------------------------------------------------------------------------

    async def release_trajectories(self, rollout_ids: Iterable[str]) -> int:
        self._begin()
        found = [self._ledger.rollouts.get(each) for each in dict.fromkeys(rollout_ids)]
        kept = [row for row in found if row is not None and row.status is RolloutStatus.SUCCEEDED]
        released = [row for row in kept if row.trajectory is not None]
        for row in released:
            row.trajectory = None
        return len(released)

    async def delete_rollouts(self, rollout_ids: Iterable[str]) -> int:
        now = self._begin()
        rows = self._ledger.rollouts
        return self._ledger.delete([rows[each] for each in dict.fromkeys(rollout_ids) if each in rows], now)

    async def delete_finished(self, *, older_than: float, limit: int = 10_000) -> int:
        now = self._begin()
        return self._ledger.delete(self._ledger.log.ended_before(now - older_than, limit), now)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._line.dissolve()
        for countdown in self._countdowns:
            resolve(countdown.future)
        for signal in [self._completed, *self._stops.values()]:
            signal.notify()

    # -- waking -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        ledger = self._ledger
        while len(ledger.ready) and (claimant := self._line.next()) is not None:
            claimant.attempts = ledger.claim(
                claimant.limit, claimant.worker_id, claimant.claim_id, self._clock()
            )
            resolve(claimant.future)
        if ledger.finished:
            ledger.finished = False
            self._completed.notify()
        if ledger.roster.told:
            for worker_id in ledger.roster.told:
                if worker_id in self._stops:
                    self._stops[worker_id].notify()
            ledger.roster.told.clear()
        if ledger.leases.bound < self._timer_at and not self._closed:
            self._set_timer()

    def _set_timer(self) -> None:
        first = self._ledger.leases.first()
        if first is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = first[0][0]
        delay = max(0.0, self._timer_at - self._clock()) + _TIMER_SLACK
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = inf
        self._ledger.expire(self._clock())
        self._settle()
