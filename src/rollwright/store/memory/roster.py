"""The workers of a memory store: what each holds, when it was heard of, and what was taken from it."""

from rollwright.store.memory.rows import AttemptRow, RolloutRow, WorkerRow


class Roster:
    def __init__(self) -> None:
        self.workers: dict[str, WorkerRow] = {}
        self.told: set[str] = set()
        """Workers with new entries in `taken` since the owner last looked; it empties the set."""

    def heard(self, worker_id: str | None, now: float) -> WorkerRow | None:
        """The worker's row, marked as alive; made at the first sign of it."""
        if worker_id is None:
            return None
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = WorkerRow(worker_id, now, last_idle_time=now)
        worker.last_heartbeat_time = now
        return worker

    def hold(self, worker: WorkerRow, attempt: AttemptRow, now: float) -> None:
        attempt.worker_id = worker.worker_id
        worker.held[attempt.attempt_id] = attempt
        worker.last_busy_time = now

    def release(self, attempt: AttemptRow, now: float, *, taken: bool) -> None:
        """`taken`: the worker did not give it up itself, and is to be told."""
        worker = self.workers.get(attempt.worker_id) if attempt.worker_id is not None else None
        if worker is None:
            return
        del worker.held[attempt.attempt_id]
        if not worker.held:
            worker.last_idle_time = now
        if taken:
            worker.taken[attempt.rollout.rollout_id, attempt.attempt_id] = None
            self.told.add(worker.worker_id)

    def forget(self, row: RolloutRow) -> None:
        """What was taken with a rollout that is deleted is nobody's business any more."""
        for attempt in row.attempts:
            worker = self.workers.get(attempt.worker_id or "")
            if worker is not None:
                worker.taken.pop((row.rollout_id, attempt.attempt_id), None)

    def tell(self, worker_id: str) -> list[tuple[str, str]]:
        """What was taken from the worker since it was last told."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return []
        taken, worker.taken = worker.taken, {}
        return list(taken)
