"""What a memory store has: rollouts in all their indexes, and the logs. Rows come, are found, and leave.

Between two calls this holds: a rollout is in `ready` exactly when its status is a waiting one, has a `current`
attempt exactly when its status is a held one, and is in the completion log exactly when its status is final;
it is in `leases` exactly when its current attempt has a lease that can end.
"""

from collections.abc import Sequence

from rollwright.store.checks import LATEST, NewRollout
from rollwright.store.contract import ImpossibleChange, NotFound
from rollwright.store.memory.history import CompletionLog, EventLog
from rollwright.store.memory.index import OrderedIndex
from rollwright.store.memory.roster import Roster
from rollwright.store.memory.rows import AttemptRow, RolloutRow
from rollwright.store.records import EventKind, RolloutStatus
from rollwright.store.transitions import FINAL_ROLLOUT, check_rollout_change


class Books:
    def __init__(self, *, record_events: bool) -> None:
        self.rollouts: dict[str, RolloutRow] = {}
        self.by_status: dict[RolloutStatus, dict[str, RolloutRow]] = {status: {} for status in RolloutStatus}
        self.roster = Roster()
        self.ready: OrderedIndex[RolloutRow] = OrderedIndex()
        self.leases: OrderedIndex[RolloutRow] = OrderedIndex()
        self.claims: dict[str, list[AttemptRow]] = {}
        """What each claim id still holds."""
        self.log = CompletionLog()
        self.events = EventLog(record_events)
        self.attempts = 0
        """How many there are."""
        self.finished = False
        """Whether the completion log has grown since the owner last looked; it sets this back."""
        self._arrivals = 0

    def enqueue(self, new: NewRollout, now: float) -> RolloutRow:
        row = self.rollouts.get(new.rollout_id)
        if row is not None:
            return row
        self._arrivals += 1
        row = RolloutRow(
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

    def delete(self, rows: Sequence[RolloutRow], now: float) -> int:
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
            self.roster.forget(row)
            self.events.add(now, EventKind.DELETED, row.rollout_id)
        oldest = next(iter(self.rollouts.values()), None)
        self.events.forget_before(now if oldest is None else oldest.start_time)
        return len(rows)

    def rollout(self, rollout_id: str) -> RolloutRow:
        row = self.rollouts.get(rollout_id)
        if row is None:
            raise NotFound(f"no rollout {rollout_id!r}")
        return row

    def attempt(self, rollout_id: str, attempt_id: str) -> AttemptRow:
        attempts = self.rollout(rollout_id).attempts
        if attempt_id == LATEST and attempts:
            return attempts[-1]
        for attempt in reversed(attempts):
            if attempt.attempt_id == attempt_id:
                return attempt
        raise NotFound(f"rollout {rollout_id} has no attempt {attempt_id!r}")

    def _turn(self, row: RolloutRow, status: RolloutStatus) -> None:
        check_rollout_change(row.rollout_id, row.status, status)
        del self.by_status[row.status][row.rollout_id]
        row.status = status
        self.by_status[status][row.rollout_id] = row
