"""The calls that ask for episodes and play them."""

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from rollwright.store.contract import Store
from rollwright.store.http.messages import MAX_ITEMS, Call, Id, Ids, Once, Pair, Wait
from rollwright.store.records import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRequest,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)

Claimed = TypeVar("Claimed", AttemptedRollout, list[AttemptedRollout])


class EnqueueManyRollouts(Call[list[Rollout]], frozen=True):
    name = "enqueue_many_rollouts"
    answer = list[Rollout]

    requests: Annotated[list[EnqueueRequest], msgspec.Meta(max_length=MAX_ITEMS)]

    async def make(self, store: Store) -> list[Rollout]:
        return await store.enqueue_many_rollouts(self.requests)


class UpdateRollout(Once[Rollout], frozen=True):
    name = "update_rollout"
    answer = Rollout

    rollout_id: Id
    status: RolloutStatus | None = None
    mode: Id | None = None
    resources_id: Id | None = None
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    reason: str | None = None

    async def make(self, store: Store) -> Rollout:
        return await store.update_rollout(
            self.rollout_id,
            status=self.status,
            mode=self.mode,
            resources_id=self.resources_id,
            config=self.config,
            metadata=self.metadata,
            priority=self.priority,
            reason=self.reason,
        )


class CancelRollouts(Once[list[str]], frozen=True):
    name = "cancel_rollouts"
    answer = list[str]

    rollout_ids: Ids
    reason: str

    async def make(self, store: Store) -> list[str]:
        return await store.cancel_rollouts(self.rollout_ids, self.reason)


class Claiming(Call[Claimed], Generic[Claimed], frozen=True, kw_only=True):
    """A call that gives out attempts."""

    worker_id: Id | None = None
    claim_id: Id | None = None
    """A repeat with the same one gets the same attempts."""
    call_id: Id | None = None
    """Whoever stops waiting for the answer names it in `withdraw_call`."""


class DequeueManyRollouts(Claiming[list[AttemptedRollout]], frozen=True):
    name = "dequeue_many_rollouts"
    answer = list[AttemptedRollout]

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)] = 1
    timeout: Wait = 0.0

    async def make(self, store: Store) -> list[AttemptedRollout]:
        return await store.dequeue_many_rollouts(
            self.limit, self.worker_id, timeout=self.timeout, claim_id=self.claim_id
        )


class StartAttempt(Claiming[AttemptedRollout], frozen=True):
    name = "start_attempt"
    answer = AttemptedRollout

    rollout_id: Id

    async def make(self, store: Store) -> AttemptedRollout:
        return await store.start_attempt(self.rollout_id, self.worker_id, claim_id=self.claim_id)


class StartRequestedRollout(Claiming[AttemptedRollout], frozen=True):
    name = "start_requested_rollout"
    answer = AttemptedRollout

    request: EnqueueRequest

    async def make(self, store: Store) -> AttemptedRollout:
        return await store.start_requested_rollout(self.request, self.worker_id, claim_id=self.claim_id)


class WithdrawCall(Call[None], frozen=True):
    """Nobody waits any more for the answer of a claiming call: what it gave out goes back."""

    name = "withdraw_call"
    answer = None

    call_id: Id


class UpdateAttempt(Once[Attempt], frozen=True):
    name = "update_attempt"
    answer = Attempt

    rollout_id: Id
    attempt_id: Id
    status: AttemptStatus | None = None
    worker_id: Id | None = None
    trajectory: bytes | None = None
    reason: str | None = None
    metadata: dict[str, Any] | None = None

    async def make(self, store: Store) -> Attempt:
        return await store.update_attempt(
            self.rollout_id,
            self.attempt_id,
            status=self.status,
            worker_id=self.worker_id,
            trajectory=self.trajectory,
            reason=self.reason,
            metadata=self.metadata,
        )


class UpdateWorker(Call[list[tuple[str, str]]], frozen=True):
    name = "update_worker"
    answer = list[tuple[str, str]]

    worker_id: Id
    heartbeat_stats: dict[str, Any] | None = None
    attempts: Annotated[list[Pair], msgspec.Meta(max_length=MAX_ITEMS)] | None = None

    async def make(self, store: Store) -> list[tuple[str, str]]:
        return await store.update_worker(
            self.worker_id, heartbeat_stats=self.heartbeat_stats, attempts=self.attempts
        )


class WaitForCancellations(Once[list[tuple[str, str]]], frozen=True):
    name = "wait_for_cancellations"
    answer = list[tuple[str, str]]

    worker_id: Id
    timeout: Wait = 0.0

    async def make(self, store: Store) -> list[tuple[str, str]]:
        return await store.wait_for_cancellations(self.worker_id, timeout=self.timeout)


class AppendJournal(Call[None], frozen=True):
    name = "append_journal"
    answer = None

    rollout_id: Id
    attempt_id: Id
    entries: list[bytes]
    append_id: Id | None = None

    async def make(self, store: Store) -> None:
        await store.append_journal(self.rollout_id, self.attempt_id, self.entries, append_id=self.append_id)


class ReadJournal(Call[list[bytes]], frozen=True):
    name = "read_journal"
    answer = list[bytes]

    rollout_id: Id

    async def make(self, store: Store) -> list[bytes]:
        return await store.read_journal(self.rollout_id)


class ClearJournal(Call[None], frozen=True):
    name = "clear_journal"
    answer = None

    rollout_id: Id
    attempt_id: Id

    async def make(self, store: Store) -> None:
        await store.clear_journal(self.rollout_id, self.attempt_id)
