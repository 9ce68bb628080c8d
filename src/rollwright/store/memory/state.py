"""The memory store's whole state and every change to it, without an event loop: time comes in as an argument.

Between two calls this holds: a rollout is in `ready` exactly when its status is a waiting one, has a `current` attempt
exactly when its status is a held one, and is in the completion log exactly when its status is final; it is in `leases`
exactly when its current attempt has a lease that can expire.

A call that is rejected changes nothing. Callers run `expire(now)` first, so an expired lease is never honoured.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from rollwright.store.calls import FinishAndDequeue, UpdateAttempt, UpdateRollout
from rollwright.store.checks import LATEST, NewRollout, clean_reason, merged, new_id, pack_mapping
from rollwright.store.errors import AttemptRefused, ImpossibleChange, NotFound
from rollwright.store.memory.index import OrderedIndex
from rollwright.store.memory.logs import CompletionLog, EventLog
from rollwright.store.memory.rows import StoredAttempt, StoredRollout, StoredWorker, WorkerTable
from rollwright.store.records import AttemptStatus, EventKind, RolloutStatus
from rollwright.store.transitions import (
    FINAL_ATTEMPT,
    FINAL_ROLLOUT,
    WAITING,
    check_attempt_change,
    check_caller_change,
    check_rollout_change,
    lapsed_as,
    lease_end,
    rollout_after,
    unchanged,
)


class StoreState:
    def __init__(self, *, record_events: bool) -> None:
        self.rollouts: dict[str, StoredRollout] = {}
        self.by_status: dict[RolloutStatus, dict[str, StoredRollout]] = {
            status: {} for status in RolloutStatus
        }
        self.workers = WorkerTable()
        self.ready: OrderedIndex[StoredRollout] = OrderedIndex()
        self.leases: OrderedIndex[StoredRollout] = OrderedIndex()
        self.claims: dict[str, list[StoredAttempt]] = {}
        """The attempts that each claim id still holds."""
        self.log = CompletionLog()
        self.events = EventLog(record_events)
        self.attempts = 0
        """Number of attempts."""
        self.finished = False
        """Whether the completion log has grown since the owner last looked; the owner resets it."""
        self._arrivals = 0

    def enqueue(self, new: NewRollout, now: float) -> StoredRollout:
        row = self.rollouts.get(new.rollout_id)
        if row is not None:
            return row
        self._arrivals += 1
        row = StoredRollout(
            new.rollout_id,
            self._arrivals,
            new.input,
            now,
            new.mode,
            new.resources_id,
            new.config,
            new.metadata,
            new.priority,
        )
        self.rollouts[row.rollout_id] = row
        self.by_status[row.status][row.rollout_id] = row
        self.ready.set(row, (-row.priority, row.place))
        self.events.add(now, EventKind.ENQUEUED, row.rollout_id)
        return row

    def delete(self, rows: Sequence[StoredRollout], now: float) -> int:
        for row in rows:
            if row.status not in FINAL_ROLLOUT:
                raise ImpossibleChange(
                    f"rollout {row.rollout_id} is {row.status}; only a final one can be deleted"
                )
        for row in sorted(rows, key=lambda row: row.place):
            del self.rollouts[row.rollout_id]
            del self.by_status[row.status][row.rollout_id]
            self.attempts -= len(row.attempts)
            self.log.remove(row.cursor)
            self.workers.forget(row)
            self.events.add(now, EventKind.DELETED, row.rollout_id)
        oldest = next(iter(self.rollouts.values()), None)
        self.events.forget_before(now if oldest is None else oldest.start_time)
        return len(rows)

    def rollout(self, rollout_id: str) -> StoredRollout:
        row = self.rollouts.get(rollout_id)
        if row is None:
            raise NotFound(f"no rollout {rollout_id!r}")
        return row

    def attempt(self, rollout_id: str, attempt_id: str) -> StoredAttempt:
        attempts = self.rollout(rollout_id).attempts
        if attempt_id == LATEST and attempts:
            return attempts[-1]
        for attempt in reversed(attempts):
            if attempt.attempt_id == attempt_id:
                return attempt
        raise NotFound(f"rollout {rollout_id} has no attempt {attempt_id!r}")

    def _set_status(self, row: StoredRollout, status: RolloutStatus) -> None:
        check_rollout_change(row.rollout_id, row.status, status)
        del self.by_status[row.status][row.rollout_id]
        row.status = status
        self.by_status[status][row.rollout_id] = row

    # -- claims ----------------------------------------------------------------------------------

    def claim(
        self, limit: int, worker_id: str | None, claim_id: str | None, now: float
    ) -> list[StoredAttempt]:
        held = self.claims.get(claim_id) if claim_id is not None else None
        if held:
            return list(held)
        worker = self.workers.mark_alive(worker_id, now)
        if worker is not None:
            worker.last_dequeue_time = now
        attempts: list[StoredAttempt] = []
        while len(attempts) < limit and (row := self.ready.pop()) is not None:
            attempts.append(self._begin_attempt(row, worker, claim_id, now))
        return attempts

    def start(
        self, rollout_id: str, worker_id: str | None, claim_id: str | None, now: float
    ) -> StoredAttempt:
        row = self.rollout(rollout_id)
        held = self.claims.get(claim_id) if claim_id is not None else None
        for attempt in held or ():
            if attempt.rollout is row:
                return attempt
        if row.status not in WAITING:
            raise ImpossibleChange(f"rollout {rollout_id} is {row.status}; only a waiting one can be claimed")
        self.ready.discard(row)
        return self._begin_attempt(row, self.workers.mark_alive(worker_id, now), claim_id, now)

    def _begin_attempt(
        self, row: StoredRollout, worker: StoredWorker | None, claim_id: str | None, now: float
    ) -> StoredAttempt:
        row.tries += 1
        self.attempts += 1
        attempt = StoredAttempt(
            row,
            new_id("at"),
            len(row.attempts) + 1,
            now,
            worker.worker_id if worker is not None else None,
            claim_id,
            now,
            lease_end(row.config, now, now),
        )
        row.attempts.append(attempt)
        row.current = attempt
        self._set_status(row, RolloutStatus.PREPARING)
        self._index_lease(attempt)
        if worker is not None:
            self.workers.hold(worker, attempt, now)
        if claim_id is not None:
            self.claims.setdefault(claim_id, []).append(attempt)
        self._event(EventKind.CLAIMED, attempt, now)
        return attempt

    def give_back(self, attempts: Iterable[StoredAttempt], reason: str, now: float) -> None:
        for attempt in attempts:
            if attempt.rollout.current is attempt:
                self._end(attempt, AttemptStatus.CANCELLED, reason, now)

    # -- reports -------------------------------------------------------------------------------------

    def report(self, call: UpdateAttempt | FinishAndDequeue, now: float) -> StoredAttempt:
        attempt, status = self.attempt(call.rollout_id, call.attempt_id), call.status
        if attempt.status is status and status in FINAL_ATTEMPT:
            return attempt
        self._require_held(attempt, call.worker_id, status, now)
        if status is not None and status is not attempt.status:
            check_attempt_change(attempt.attempt_id, attempt.status, status)
        attempt.metadata = merged(attempt.metadata, call.metadata, "metadata")
        if status is not None and status in FINAL_ATTEMPT:
            self._mark_alive(attempt, call.worker_id, now)
            self._end(attempt, status, clean_reason(call.reason), now, trajectory=call.trajectory)
        else:
            self._heartbeat(attempt, call.worker_id, now)
            if status is AttemptStatus.RUNNING:
                self._mark_running(attempt)
        return attempt

    def heartbeat(
        self,
        worker_id: str,
        stats: Mapping[str, Any] | None,
        pairs: Iterable[tuple[str, str]] | None,
        now: float,
    ) -> list[tuple[str, str]]:
        packed = None if stats is None else pack_mapping(stats, "heartbeat_stats")
        worker = self.workers.mark_alive(worker_id, now)
        assert worker is not None
        if packed is not None:
            worker.heartbeat_stats = packed
        if pairs is None:
            pairs = [(held.rollout.rollout_id, held.attempt_id) for held in worker.held.values()]
        lost = []
        for rollout_id, attempt_id in pairs:
            row = self.rollouts.get(rollout_id)
            attempt = row.current if row is not None else None
            if (
                attempt is None
                or attempt.attempt_id != attempt_id
                or attempt.worker_id not in (worker_id, None)
            ):
                lost.append((rollout_id, attempt_id))
            elif attempt.worker_id is None:
                self._heartbeat(attempt, worker_id, now)
            else:
                self._extend_lease(attempt, now)
        return lost

    def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], append_id: str | None, now: float
    ) -> None:
        attempt = self._held_attempt(rollout_id, attempt_id, now)
        if append_id is not None and append_id == attempt.last_append_id:
            return
        attempt.last_append_id = append_id
        row = attempt.rollout
        if row.journal is None:
            row.journal = []
        row.journal.extend(bytes(entry) for entry in entries)
        self._heartbeat(attempt, None, now)
        self._mark_running(attempt)

    def clear_journal(self, rollout_id: str, attempt_id: str, now: float) -> None:
        attempt = self._held_attempt(rollout_id, attempt_id, now)
        attempt.rollout.journal = None
        self._heartbeat(attempt, None, now)

    def _held_attempt(self, rollout_id: str, attempt_id: str, now: float) -> StoredAttempt:
        attempt = self.attempt(rollout_id, attempt_id)
        self._require_held(attempt, None, None, now)
        return attempt

    def _require_held(
        self, attempt: StoredAttempt, worker_id: str | None, status: AttemptStatus | None, now: float
    ) -> None:
        if attempt.rollout.current is not attempt:
            why = f": {attempt.reason}" if attempt.reason else ""
            self._reject(attempt, status, f"it is {attempt.status}{why}", now)
        if worker_id is not None and attempt.worker_id not in (worker_id, None):
            self._reject(attempt, status, f"worker {attempt.worker_id} holds it, not {worker_id}", now)

    def _reject(self, attempt: StoredAttempt, status: AttemptStatus | None, why: str, now: float) -> NoReturn:
        self._event(EventKind.REFUSED, attempt, now, status)
        raise AttemptRefused(f"attempt {attempt.attempt_id} of rollout {attempt.rollout.rollout_id}: {why}")

    # -- changes from outside ------------------------------------------------------------------------

    def update_rollout(self, call: UpdateRollout, now: float) -> StoredRollout:
        row = self.rollout(call.rollout_id)
        status = call.status
        if status is not None and not unchanged(row.status, status):
            check_caller_change(row.rollout_id, row.status, status)
        else:
            status = None
        row.metadata = merged(row.metadata, call.metadata, "metadata")
        row.mode = row.mode if call.mode is None else call.mode
        row.resources_id = row.resources_id if call.resources_id is None else call.resources_id
        row.config = row.config if call.config is None else call.config
        if call.priority is not None:
            row.priority = call.priority
            if row.status in WAITING:
                self.ready.set(row, (-row.priority, row.place))
        if status is not None:
            self.withdraw(row, status, clean_reason(call.reason) or f"set to {status} by a caller", now)
        return row

    def withdraw(self, row: StoredRollout, status: RolloutStatus, reason: str | None, now: float) -> None:
        """Ends the current attempt, if there is one, and sets another status."""
        if row.current is not None:
            self._end(row.current, AttemptStatus.CANCELLED, reason, now, becomes=status, taken=True)
        else:
            self.ready.discard(row)
            self.events.add(now, EventKind.ENDED, row.rollout_id, becomes=status)
            self._finish(row, None, status, reason, now)

    def expire(self, now: float) -> bool:
        """Ends the attempts with an expired lease; returns whether there were any."""
        found = False
        while (first := self.leases.first()) is not None and first[0][0] <= now:
            attempt = first[1].current
            assert attempt is not None
            assert attempt.lease_expires is not None
            status, reason = lapsed_as(attempt.rollout.config, attempt.start_time, attempt.lease_expires)
            self._end(attempt, status, reason, now, taken=True)
            found = True
        return found

    # -- single changes ----------------------------------------------------------------------

    def _mark_running(self, attempt: StoredAttempt) -> None:
        if attempt.status is AttemptStatus.PREPARING:
            attempt.status = AttemptStatus.RUNNING
            self._set_status(attempt.rollout, RolloutStatus.RUNNING)

    def _heartbeat(self, attempt: StoredAttempt, worker_id: str | None, now: float) -> None:
        self._extend_lease(attempt, now)
        self._mark_alive(attempt, worker_id, now)

    def _extend_lease(self, attempt: StoredAttempt, now: float) -> None:
        attempt.last_heartbeat_time = now
        attempt.lease_expires = lease_end(attempt.rollout.config, attempt.start_time, now)
        self._index_lease(attempt)

    def _mark_alive(self, attempt: StoredAttempt, worker_id: str | None, now: float) -> None:
        attempt.last_heartbeat_time = now
        worker = self.workers.mark_alive(worker_id if attempt.worker_id is None else attempt.worker_id, now)
        if worker is not None and attempt.worker_id is None:
            self.workers.hold(worker, attempt, now)

    def _index_lease(self, attempt: StoredAttempt) -> None:
        if attempt.lease_expires is None:
            self.leases.discard(attempt.rollout)
        else:
            self.leases.set(attempt.rollout, (attempt.lease_expires, attempt.rollout.place))

    def _end(
        self,
        attempt: StoredAttempt,
        status: AttemptStatus,
        reason: str | None,
        now: float,
        *,
        becomes: RolloutStatus | None = None,
        taken: bool = False,
        trajectory: bytes | None = None,
    ) -> None:
        """`becomes`: status set by a caller instead of the retry rules. `taken`: its worker must be notified."""
        row = attempt.rollout
        if status is AttemptStatus.CANCELLED:
            row.tries -= 1
        attempt.status, attempt.reason, attempt.end_time = status, reason, now
        row.current = None
        self.leases.discard(row)
        if attempt.claim_id is not None:
            held = self.claims[attempt.claim_id]
            held.remove(attempt)
            if not held:
                del self.claims[attempt.claim_id]
        self.workers.release(attempt, now, taken=taken)
        after = becomes or rollout_after(status, row.config, row.tries)
        self._event(EventKind.ENDED, attempt, now, status, after)
        if after is RolloutStatus.REQUEUING:
            self._set_status(row, after)
            self.ready.set(row, (-row.priority, row.place))
        else:
            row.trajectory = trajectory
            self._finish(row, attempt, after, reason, now)

    def _finish(
        self,
        row: StoredRollout,
        attempt: StoredAttempt | None,
        status: RolloutStatus,
        reason: str | None,
        now: float,
    ) -> None:
        self._set_status(row, status)
        row.end_time = now
        row.journal = None
        attempt_id = attempt.attempt_id if attempt is not None else None
        row.cursor = self.log.add(row, attempt_id, reason)
        self.finished = True
        for countdown in row.watchers or ():
            countdown.count()
        row.watchers = None

    def _event(
        self,
        kind: EventKind,
        attempt: StoredAttempt,
        now: float,
        status: AttemptStatus | None = None,
        becomes: RolloutStatus | None = None,
    ) -> None:
        self.events.add(
            now,
            kind,
            attempt.rollout.rollout_id,
            attempt.attempt_id,
            attempt.worker_id,
            status,
            attempt.lease_expires,
            becomes,
        )
