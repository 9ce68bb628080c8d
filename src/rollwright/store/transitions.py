"""The status transitions, retry rules and lease times of the store, as pure functions.

Every backend calls them before it changes a status, so all backends decide alike:
- A final status never changes, neither a rollout's nor an attempt's.
- The final status of an attempt and the rollout's retry rules alone decide the rollout's next status.
- A lease expires at the earlier of two times: the last heartbeat plus `unresponsive_seconds`, the start plus
  `timeout_seconds`. At that very moment it has expired.
"""

from collections.abc import Mapping

from rollwright.store.errors import ImpossibleChange
from rollwright.store.records import AttemptStatus, RolloutConfig, RolloutStatus, WorkerStatus

_R = RolloutStatus
_A = AttemptStatus

ROLLOUT_CHANGES: Mapping[RolloutStatus, frozenset[RolloutStatus]] = {
    _R.QUEUING: frozenset({_R.PREPARING, _R.FAILED, _R.CANCELLED}),
    _R.PREPARING: frozenset({_R.RUNNING, _R.REQUEUING, _R.SUCCEEDED, _R.FAILED, _R.CANCELLED}),
    _R.RUNNING: frozenset({_R.REQUEUING, _R.SUCCEEDED, _R.FAILED, _R.CANCELLED}),
    _R.REQUEUING: frozenset({_R.PREPARING, _R.FAILED, _R.CANCELLED}),
    _R.SUCCEEDED: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}

ATTEMPT_CHANGES: Mapping[AttemptStatus, frozenset[AttemptStatus]] = {
    _A.PREPARING: frozenset(set(_A) - {_A.PREPARING}),
    _A.RUNNING: frozenset(set(_A) - {_A.PREPARING, _A.RUNNING}),
    _A.SUCCEEDED: frozenset(),
    _A.FAILED: frozenset(),
    _A.TIMEOUT: frozenset(),
    _A.UNRESPONSIVE: frozenset(),
    _A.CANCELLED: frozenset(),
}

FINAL_ROLLOUT = frozenset(status for status, after in ROLLOUT_CHANGES.items() if not after)
FINAL_ATTEMPT = frozenset(status for status, after in ATTEMPT_CHANGES.items() if not after)
WAITING = frozenset({_R.QUEUING, _R.REQUEUING})
"""The backlog: rollouts that a worker can claim."""
HELD = frozenset({_R.PREPARING, _R.RUNNING})
"""Rollouts that have a current attempt."""

CHANGES_BY_CALLER = frozenset({_R.REQUEUING, _R.FAILED, _R.CANCELLED})
"""Statuses that `update_rollout` accepts. The others belong to the attempt that holds the rollout."""

WORKER_SILENCE_SECONDS = 60.0
"""A worker without a heartbeat for so long is `unknown`; the default lease, so that both end together."""

SAME_MOMENT = 0.01
"""Fraction of `unresponsive_seconds`: heartbeats this close together may count as one. A worker sends several per lease,
so it never loses one by so little."""


def check_rollout_change(rollout_id: str, old: RolloutStatus, new: RolloutStatus) -> None:
    if new not in ROLLOUT_CHANGES[old]:
        raise ImpossibleChange(
            f"rollout {rollout_id} is {old} and cannot become {new}{_accepted(ROLLOUT_CHANGES[old])}"
        )


def check_caller_change(rollout_id: str, old: RolloutStatus, new: RolloutStatus) -> None:
    """Rejects a status that `update_rollout` cannot set."""
    possible = ROLLOUT_CHANGES[old] & CHANGES_BY_CALLER
    if new not in possible:
        raise ImpossibleChange(
            f"rollout {rollout_id} is {old} and cannot be set to {new}{_accepted(possible)}"
        )


def unchanged(old: RolloutStatus, new: RolloutStatus) -> bool:
    """Whether the rollout already has the status `new`; a waiting rollout is already requeued."""
    return old is new or (old in WAITING and new is _R.REQUEUING)


def check_attempt_change(attempt_id: str, old: AttemptStatus, new: AttemptStatus) -> None:
    if new not in ATTEMPT_CHANGES[old]:
        raise ImpossibleChange(
            f"attempt {attempt_id} is {old} and cannot become {new}{_accepted(ATTEMPT_CHANGES[old])}"
        )


def _accepted(statuses: frozenset[RolloutStatus] | frozenset[AttemptStatus]) -> str:
    return f"; it can become {', '.join(sorted(statuses))}" if statuses else "; that status is final"


def rollout_after(ended: AttemptStatus, config: RolloutConfig, tries: int) -> RolloutStatus:
    """The rollout's next status when its attempt ends; `tries` counts the attempts so far, this one included.

    An attempt that was given back is not a try: its rollout is requeued whatever the rules are.
    """
    if ended is _A.SUCCEEDED:
        return _R.SUCCEEDED
    if ended is _A.CANCELLED:
        return _R.REQUEUING
    if ended in config.retry_condition and tries < config.max_attempts:
        return _R.REQUEUING
    return _R.FAILED


def lease_end(config: RolloutConfig, start_time: float, heartbeat_time: float) -> float | None:
    """When the lease expires without a further heartbeat; `None`: never."""
    timeout, silence = config.timeout_seconds, config.unresponsive_seconds
    if timeout is None:
        return None if silence is None else heartbeat_time + silence
    latest = start_time + timeout
    return latest if silence is None else min(latest, heartbeat_time + silence)


def is_news(config: RolloutConfig, last_heartbeat_time: float, now: float) -> bool:
    """Whether a heartbeat is worth a write, or the previous one was a moment ago."""
    silence = config.unresponsive_seconds
    return silence is None or now - last_heartbeat_time >= silence * SAME_MOMENT


def lapsed(lease_expires: float | None, now: float) -> bool:
    return lease_expires is not None and lease_expires <= now


def lapsed_as(config: RolloutConfig, start_time: float, lease_expires: float) -> tuple[AttemptStatus, str]:
    """The final status of an attempt with an expired lease, and the reason in words."""
    limit = config.timeout_seconds
    if limit is not None and start_time + limit <= lease_expires:
        return _A.TIMEOUT, f"took longer than timeout_seconds={limit:g}"
    return _A.UNRESPONSIVE, "its lease ran out: no heartbeat for unresponsive_seconds"


def worker_status(held: int, last_heard: float | None, now: float) -> WorkerStatus:
    if last_heard is None or last_heard + WORKER_SILENCE_SECONDS <= now:
        return WorkerStatus.UNKNOWN
    return WorkerStatus.BUSY if held else WorkerStatus.IDLE
