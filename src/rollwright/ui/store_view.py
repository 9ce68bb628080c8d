"""Workers, leases, retries and failures of a store, for the page. Reads only.

Invariant: one look asks the store a bounded number of questions, whatever it holds.
"""

import time
from typing import Any

from rollwright.rollout.accounting import FailureCauses
from rollwright.store.api import Store
from rollwright.store.records import Attempt, Rollout, RolloutStatus, WorkerRecord, WorkerStatus
from rollwright.trajectory import Phase

OPEN = (RolloutStatus.RUNNING, RolloutStatus.PREPARING, RolloutStatus.REQUEUING)
"""Statuses of rollouts that are shown one by one; those that only queue are counted."""

SHOWN = 40
"""Rollouts that are shown, with their attempts."""

FAILURES_READ = 40

LOST, ENDED = "lost", "ended"
"""States that the store does not have, because a dead worker sends no heartbeat."""

MISSED_HEARTBEATS = 3
"""Missed heartbeats in a row before a worker counts as lost."""

USUAL_INTERVAL = 5.0
"""Seconds between heartbeats, if a worker does not report its interval."""


async def look_into(store: Store) -> dict[str, Any]:
    """Counts, workers with what their episodes wait for, held rollouts with lease and attempt, failures by cause."""
    now = time.time()
    statistics = await store.statistics()
    workers = [worker_row(each, now) for each in await store.query_workers(limit=200)]
    held = await store.query_rollouts(status=OPEN, limit=SHOWN)
    rollouts = [_rollout_row(each, await store.get_latest_attempt(each.rollout_id)) for each in held]
    return {
        "now": now,
        "counts": {str(status): statistics.get(status, 0) for status in RolloutStatus},
        "attempts": statistics.get("attempts"),
        "workers": workers,
        "held": rollouts,
        "held_total": held.total,
        "episodes": _episodes(workers),
        "failures": await _failures(store),
    }


def worker_row(worker: WorkerRecord, now: float) -> dict[str, Any]:
    stats = worker.heartbeat_stats
    return {
        "id": worker.worker_id,
        "state": worker_state(worker, now),
        "age": heartbeat_age(worker, now),
        "inflight": stats.get("inflight"),
        "turns": stats.get("turns"),
        "tokens": stats.get("tokens"),
        "waiting": {str(phase): stats[phase] for phase in Phase if stats.get(phase)},
        "held_back": stats.get("waiting") or None,
        "episodes": [each for each in stats.get("episodes", ()) if isinstance(each, dict)],
    }


def heartbeat_age(worker: WorkerRecord, now: float) -> float | None:
    """Seconds since the last heartbeat; `None` if there was none."""
    return None if worker.last_heartbeat_time is None else max(0.0, now - worker.last_heartbeat_time)


def worker_state(worker: WorkerRecord, now: float) -> str:
    """Status in the store, or ended, or lost after several missed heartbeats."""
    if worker.heartbeat_stats.get("ended") and worker.status is not WorkerStatus.BUSY:
        return ENDED
    interval = float(worker.heartbeat_stats.get("heartbeat_interval", USUAL_INTERVAL))
    age = heartbeat_age(worker, now)
    if worker.status is WorkerStatus.UNKNOWN or age is None or age > MISSED_HEARTBEATS * interval:
        return LOST
    return str(worker.status)


def _rollout_row(rollout: Rollout, attempt: Attempt | None) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "status": str(rollout.status),
        "attempt": None if attempt is None else attempt.sequence_id,
        "attempt_status": None if attempt is None else str(attempt.status),
        "worker": None if attempt is None else attempt.worker_id,
        "lease_expires": None if attempt is None else attempt.lease_expires,
        "started": None if attempt is None else attempt.start_time,
        "reason": None if attempt is None else attempt.reason,
        "most_attempts": rollout.config.max_attempts,
    }


def _episodes(workers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Episodes in flight by the workers' last heartbeats; their waits have gone on since."""
    found: dict[str, dict[str, Any]] = {}
    for worker in workers:
        if worker["state"] == "busy":
            for each in worker["episodes"]:
                row = dict(each)
                row["seconds"] = float(each.get("seconds") or 0.0) + (worker["age"] or 0.0)
                found.setdefault(str(each.get("rollout_id")), row)
    return sorted(found.values(), key=lambda each: -each["seconds"])


async def _failures(store: Store) -> list[dict[str, Any]]:
    page = await store.query_rollouts(
        status=RolloutStatus.FAILED, sort_by="end_time", sort_order="desc", limit=FAILURES_READ
    )
    causes = FailureCauses()
    for rollout in page:
        attempt = await store.get_latest_attempt(rollout.rollout_id)
        causes.add((attempt and attempt.reason) or "no reason was given", rollout.rollout_id)
    return causes.rows(20)
