"""Every change to a memory store's state, without an event loop: time comes in as an argument.

A call that is refused changes nothing. Callers run `expire(now)` first, so a lease that is over is never
honoured.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from rollwright.store.checks import RolloutChange, merged, new_id, pack_mapping
from rollwright.store.contract import AttemptRefused, ImpossibleChange
from rollwright.store.memory.books import Books
from rollwright.store.memory.rows import AttemptRow, RolloutRow, WorkerRow
from rollwright.store.records import (
    AttemptStatus,
    EventKind,
    RolloutStatus,
)
from rollwright.store.transitions import (
    FINAL_ATTEMPT,
    WAITING,
    check_attempt_change,
    check_caller_change,
    lapsed_as,
    lease_end,
    rollout_after,
    unchanged,
)


class Ledger(Books):
    # -- giving out ----------------------------------------------------------------------------------

    def claim(self, limit: int, worker_id: str | None, claim_id: str | None, now: float) -> list[AttemptRow]:
        held = self.claims.get(claim_id) if claim_id is not None else None
        if held:
            return list(held)
        worker = self.roster.heard(worker_id, now)
        if worker is not None:
            worker.last_dequeue_time = now
        attempts: list[AttemptRow] = []
        while len(attempts) < limit and (row := self.ready.pop()) is not None:
            attempts.append(self._give(row, worker, claim_id, now))
        return attempts

    def start(self, rollout_id: str, worker_id: str | None, claim_id: str | None, now: float) -> AttemptRow:
        row = self.rollout(rollout_id)
        held = self.claims.get(claim_id) if claim_id is not None else None
        for attempt in held or ():
            if attempt.rollout is row:
                return attempt
        if row.status not in WAITING:
            raise ImpossibleChange(f"rollout {rollout_id} is {row.status}; only a waiting one can be claimed")
        self.ready.discard(row)
        return self._give(row, self.roster.heard(worker_id, now), claim_id, now)

    def _give(
        self, row: RolloutRow, worker: WorkerRow | None, claim_id: str | None, now: float
    ) -> AttemptRow:
        row.tries += 1
        self.attempts += 1
        attempt = AttemptRow(
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
        self._turn(row, RolloutStatus.PREPARING)
        self._lease(attempt)
        if worker is not None:
            self.roster.hold(worker, attempt, now)
        if claim_id is not None:
            self.claims.setdefault(claim_id, []).append(attempt)
        self._event(EventKind.CLAIMED, attempt, now)
        return attempt

    def give_back(self, attempts: Iterable[AttemptRow], reason: str, now: float) -> None:
        for attempt in attempts:
            if attempt.rollout.current is attempt:
                self._end(attempt, AttemptStatus.CANCELLED, reason, now)

    # -- reports -------------------------------------------------------------------------------------

    def report(
        self,
        rollout_id: str,
        attempt_id: str,
        now: float,
        *,
        status: AttemptStatus | None = None,
        worker_id: str | None = None,
        trajectory: bytes | None = None,
        reason: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AttemptRow:
        attempt = self.attempt(rollout_id, attempt_id)
        if attempt.status is status and status in FINAL_ATTEMPT:
            return attempt
        self._require_held(attempt, worker_id, status, now)
        if status is not None and status is not attempt.status:
            check_attempt_change(attempt.attempt_id, attempt.status, status)
        attempt.metadata = merged(attempt.metadata, metadata, "metadata")
        if status is not None and status in FINAL_ATTEMPT:
            self._sign_of_life(attempt, worker_id, now)
            self._end(attempt, status, reason, now, trajectory=trajectory)
        else:
            self._heard(attempt, worker_id, now)
            if status is AttemptStatus.RUNNING:
                self._run(attempt)
        return attempt

    def heartbeat(
        self,
        worker_id: str,
        stats: Mapping[str, Any] | None,
        pairs: Iterable[tuple[str, str]] | None,
        now: float,
    ) -> list[tuple[str, str]]:
        packed = None if stats is None else pack_mapping(stats, "heartbeat_stats")
        worker = self.roster.heard(worker_id, now)
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
                self._heard(attempt, worker_id, now)
            else:
                self._extend(attempt, now)
        return lost

    def append_journal(
        self, rollout_id: str, attempt_id: str, entries: Sequence[bytes], append_id: str | None, now: float
    ) -> None:
        attempt = self._holding(rollout_id, attempt_id, now)
        if append_id is not None and append_id == attempt.last_append_id:
            return
        attempt.last_append_id = append_id
        row = attempt.rollout
        if row.journal is None:
            row.journal = []
        row.journal.extend(bytes(entry) for entry in entries)
        self._heard(attempt, None, now)
        self._run(attempt)

    def clear_journal(self, rollout_id: str, attempt_id: str, now: float) -> None:
        attempt = self._holding(rollout_id, attempt_id, now)
        attempt.rollout.journal = None
        self._heard(attempt, None, now)

    def _holding(self, rollout_id: str, attempt_id: str, now: float) -> AttemptRow:
        attempt = self.attempt(rollout_id, attempt_id)
        self._require_held(attempt, None, None, now)
        return attempt

    def _require_held(
        self, attempt: AttemptRow, worker_id: str | None, status: AttemptStatus | None, now: float
    ) -> None:
        if attempt.rollout.current is not attempt:
            why = f": {attempt.reason}" if attempt.reason else ""
            self._refuse(attempt, status, f"it is {attempt.status}{why}", now)
        if worker_id is not None and attempt.worker_id not in (worker_id, None):
            self._refuse(attempt, status, f"worker {attempt.worker_id} holds it, not {worker_id}", now)

    def _refuse(self, attempt: AttemptRow, status: AttemptStatus | None, why: str, now: float) -> NoReturn:
        self._event(EventKind.REFUSED, attempt, now, status)
        raise AttemptRefused(f"attempt {attempt.attempt_id} of rollout {attempt.rollout.rollout_id}: {why}")

    # -- changes from outside ------------------------------------------------------------------------

    def update_rollout(
        self,
        rollout_id: str,
        now: float,
        change: RolloutChange,
        metadata: Mapping[str, Any] | None,
        reason: str | None,
    ) -> RolloutRow:
        row = self.rollout(rollout_id)
        status = change.status
        if status is not None and not unchanged(row.status, status):
            check_caller_change(rollout_id, row.status, status)
        else:
            status = None
        row.metadata = merged(row.metadata, metadata, "metadata")
        row.mode = row.mode if change.mode is None else change.mode
        row.resources_id = row.resources_id if change.resources_id is None else change.resources_id
        row.config = row.config if change.config is None else change.config
        if change.priority is not None:
            row.priority = change.priority
            if row.status in WAITING:
                self.ready.set(row, (-row.priority, row.place))
        if status is not None:
            self.withdraw(row, status, reason or f"set to {status} by a caller", now)
        return row

    def withdraw(self, row: RolloutRow, status: RolloutStatus, reason: str | None, now: float) -> None:
        """Takes the rollout from its worker, if it has one, and gives it another status."""
        if row.current is not None:
            self._end(row.current, AttemptStatus.CANCELLED, reason, now, becomes=status, taken=True)
        else:
            self.ready.discard(row)
            self.events.add(now, EventKind.ENDED, row.rollout_id, becomes=status)
            self._finish(row, None, status, reason, now)

    def expire(self, now: float) -> bool:
        """Ends the attempts whose lease is over; returns whether there were any."""
        found = False
        while (first := self.leases.first()) is not None and first[0][0] <= now:
            attempt = first[1].current
            assert attempt is not None
            assert attempt.lease_expires is not None
            status, reason = lapsed_as(attempt.rollout.config, attempt.start_time, attempt.lease_expires)
            self._end(attempt, status, reason, now, taken=True)
            found = True
        return found

    # -- the changes themselves ----------------------------------------------------------------------

    def _run(self, attempt: AttemptRow) -> None:
        if attempt.status is AttemptStatus.PREPARING:
            attempt.status = AttemptStatus.RUNNING
            self._turn(attempt.rollout, RolloutStatus.RUNNING)

    def _heard(self, attempt: AttemptRow, worker_id: str | None, now: float) -> None:
        self._extend(attempt, now)
        self._sign_of_life(attempt, worker_id, now)

    def _extend(self, attempt: AttemptRow, now: float) -> None:
        attempt.last_heartbeat_time = now
        attempt.lease_expires = lease_end(attempt.rollout.config, attempt.start_time, now)
        self._lease(attempt)

    def _sign_of_life(self, attempt: AttemptRow, worker_id: str | None, now: float) -> None:
        attempt.last_heartbeat_time = now
        worker = self.roster.heard(worker_id if attempt.worker_id is None else attempt.worker_id, now)
        if worker is not None and attempt.worker_id is None:
            self.roster.hold(worker, attempt, now)

    def _lease(self, attempt: AttemptRow) -> None:
        if attempt.lease_expires is None:
            self.leases.discard(attempt.rollout)
        else:
            self.leases.set(attempt.rollout, (attempt.lease_expires, attempt.rollout.place))

    def _end(
        self,
        attempt: AttemptRow,
        status: AttemptStatus,
        reason: str | None,
        now: float,
        *,
        becomes: RolloutStatus | None = None,
        taken: bool = False,
        trajectory: bytes | None = None,
    ) -> None:
        """`becomes`: decided by a caller instead of the retry rules. `taken`: its worker does not know yet."""
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
        self.roster.release(attempt, now, taken=taken)
        after = becomes or rollout_after(status, row.config, row.tries)
        self._event(EventKind.ENDED, attempt, now, status, after)
        if after is RolloutStatus.REQUEUING:
            self._turn(row, after)
            self.ready.set(row, (-row.priority, row.place))
        else:
            row.trajectory = trajectory
            self._finish(row, attempt, after, reason, now)

    def _finish(
        self,
        row: RolloutRow,
        attempt: AttemptRow | None,
        status: RolloutStatus,
        reason: str | None,
        now: float,
    ) -> None:
        self._turn(row, status)
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
        attempt: AttemptRow,
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
