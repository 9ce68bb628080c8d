"""The environment manager: claims one rollout after the other, plays it, and commits its result.

Always true: it waits only for its own engine call, its own environment and the store. Whatever goes wrong in an episode
is reported to the store as the end of that attempt, and the loop continues with a fresh environment. A withdrawn
attempt stops at once and commits nothing.

The end of an attempt and the claim of the next rollout are one call, where the slot may keep its place: one transaction and
one flush instead of two. A rollout that was claimed this way while the worker began to drain is given back unplayed.

An attempt runs in a task of its own, which only its environment manager cancels. So code of an agent, environment or
policy that raises `CancelledError`, or cancels the task it runs in, ends its attempt as a failure, and not the loop.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec

from rollwright.agents import TIMEOUT, EpisodeFailure, Phase, Superseded
from rollwright.aio import ending
from rollwright.errors import ConfigError
from rollwright.rollout.attempt import EnvSlot, PlayedAttempt, RolloutAttempt, RolloutContext
from rollwright.rollout.resources import ResourceWatch
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import AttemptedRollout, AttemptStatus
from rollwright.trajectory import Boundary, ErrorRecord, StopReason

DEQUEUE_SECONDS = 60.0
"""Seconds for which one call waits for a rollout; only limits the effect of a lost wake-up."""

STALE = "stale"
"""Reason under which a worker cancels a rollout that became too old."""

USED = "used"
"""Key of the attempt's metadata under which the calls of such a rollout are noted: they were paid for."""


class RolloutClaims:
    """Claims rollouts for the managers of one worker, within its quota and the machine's resources."""

    def __init__(
        self,
        store: Store,
        worker_id: str,
        *,
        poll_interval: float = DEQUEUE_SECONDS,
        max_rollouts: int | None = None,
        heartbeat_interval: float = 0.0,
        resources: ResourceWatch | None = None,
        on_claim: Callable[[AttemptedRollout], None] | None = None,
    ) -> None:
        """`max_rollouts`: claims in all; `None`: no limit. `heartbeat_interval`: must be shorter than the lease of every
        rollout. `resources`: asked before each claim."""
        self.closed = False
        """Whether claiming has ended."""
        self._store = store
        self._worker_id = worker_id
        self._poll_interval = poll_interval
        self._left = max_rollouts
        self._heartbeat_interval = heartbeat_interval
        self._resources = resources
        self._on_claim = on_claim

    async def claim_rollout(self, manager: "EnvManager") -> AttemptedRollout | None:
        """Waits for the next rollout; `None`: claiming has ended."""
        while not self.closed and self._left != 0:
            # Counted before the wait, because other managers claim meanwhile.
            if self._left is not None:
                self._left -= 1
            if self._resources is not None:
                await self._resources.enter(manager)
            claimed = await self._store.dequeue_rollout(self._worker_id, timeout=self._poll_interval)
            if claimed is not None:
                self.take(claimed)
                return claimed
            self.give_up()
        return None

    def reserve(self, manager: "EnvManager") -> bool:
        """Whether the manager may claim its next rollout with the end of the current one, instead of queueing up again for
        a place. Counts the claim; `take` or `give_up` follows."""
        if self.closed or self._left == 0:
            return False
        if self._resources is not None and not self._resources.may_stay(manager):
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def take(self, claimed: AttemptedRollout) -> None:
        """Takes a claimed rollout over for a manager."""
        self._check_lease(claimed)
        if self._on_claim is not None:
            self._on_claim(claimed)

    def give_up(self) -> None:
        """Nothing was claimed."""
        if self._left is not None:
            self._left += 1

    def release(self, manager: "EnvManager") -> None:
        """Releases the manager's share of the machine's resources; the next episode may have to wait for it."""
        if self._resources is not None:
            self._resources.leave(manager)

    def _check_lease(self, claimed: AttemptedRollout) -> None:
        lease = claimed.config.unresponsive_seconds
        if lease is not None and self._heartbeat_interval >= lease:
            raise ConfigError(
                f"heartbeat_interval: {self._heartbeat_interval:g} s is not shorter than the lease of "
                f"rollout {claimed.rollout_id}, which is {lease:g} s"
            )


class EnvManager:
    """Plays one rollout at a time, with one environment."""

    def __init__(self, context: RolloutContext, worker_id: str, claims: RolloutClaims | None = None) -> None:
        """`claims`: shared by the managers of a worker; without it, everything in the store's queue is played."""
        self._context = context
        self._worker_id = worker_id
        self._claims = claims or RolloutClaims(context.store, worker_id)
        self._slot = EnvSlot(context)
        self._playing: asyncio.Task[PlayedAttempt | ErrorRecord] | None = None
        self._holds: tuple[str, str] | None = None
        self.unreported: tuple[str, str] | None = None
        """Rollout and attempt whose end was not reported, because the loop itself was cancelled meanwhile."""
        self._withdrawn = False

    @property
    def holds(self) -> tuple[str, str] | None:
        """Rollout and attempt being played now."""
        return self._holds

    def withdraw(self) -> None:
        """Stops the current episode; the loop continues."""
        if self._playing is not None and not self._withdrawn:
            self._withdrawn = True
            self._playing.cancel()

    async def run_rollout_loop(self) -> None:
        """Claims and plays rollouts until there are no more to claim."""
        try:
            while True:
                async with self._context.inflight:
                    try:
                        claimed = await self._claims.claim_rollout(self)
                        if claimed is None:
                            return
                        while claimed is not None:
                            claimed = await self.run_rollout(claimed)
                    finally:
                        self._claims.release(self)
        finally:
            await self._slot.discard()

    async def run_rollout(self, claimed: AttemptedRollout) -> AttemptedRollout | None:
        """Plays one attempt and commits its result; returns the rollout that was claimed with its end, if any."""
        activity = self._context.activity
        attempt = RolloutAttempt(self._context, claimed, self._slot, self._worker_id)
        self._holds = (claimed.rollout_id, claimed.attempt.attempt_id)
        activity.claimed += 1
        following: AttemptedRollout | None = None
        try:
            result = await self._play_attempt(attempt)
            if result is None:
                activity.withdrawn += 1
                await self._slot.discard()
            else:
                with attempt.stopwatch.waiting(Phase.STORE, "commit"):
                    following = await self._commit(attempt, result)
                activity.commit_seconds += attempt.stopwatch.waits[-1].seconds
        except (AttemptRefused, NotFound, Superseded):  # cancelled, given to another worker, or deleted
            activity.refused += 1
        except asyncio.CancelledError:
            self.unreported = self._holds
            raise
        finally:
            activity.sessions.pop(claimed.rollout_id, None)
            self._holds = None
            self._withdrawn = False
        return following

    async def _play_attempt(self, attempt: RolloutAttempt) -> PlayedAttempt | ErrorRecord | None:
        """Plays the attempt in a task of its own. `None`: it was withdrawn, even if its code ignored that."""
        task = self._playing = asyncio.create_task(attempt.play(), name=attempt.claimed.rollout_id)
        try:
            # Not `await task`: that would raise a cancellation by the episode's own code here, and end the loop.
            await ending(task)
        except asyncio.CancelledError:
            task.cancel()
            await ending(task)
            if not task.cancelled():
                task.exception()  # nobody else asks for it
            raise
        finally:
            self._playing = None
        if self._withdrawn:
            return None
        if not task.cancelled():
            return task.result()
        await self._slot.discard()
        message = "its code cancelled the attempt; nobody else had"
        return ErrorRecord(Boundary.SYSTEM, asyncio.CancelledError.__name__, message, 0)

    async def _commit(
        self, attempt: RolloutAttempt, result: PlayedAttempt | ErrorRecord
    ) -> AttemptedRollout | None:
        """Reports the end of the attempt to the store, which refuses an attempt that has lost its rollout; returns the next
        rollout, if it was claimed with the report."""
        claimed = attempt.claimed
        activity, store = self._context.activity, self._context.store
        held = claimed.rollout_id, claimed.attempt.attempt_id
        if isinstance(result, ErrorRecord):
            activity.fail(result, claimed.rollout_id)
            status = AttemptStatus.TIMEOUT if result.kind == TIMEOUT else AttemptStatus.FAILED
            following = await self._finish(
                held, status, reason=str(EpisodeFailure(result)), trajectory=attempt.paid(result)
            )
            if self._context.on_failed is not None:
                self._context.on_failed(claimed, result)
            return following
        if result.trajectory.stop is StopReason.STALE:
            activity.stale += 1
            used = msgspec.to_builtins(attempt.used_calls())
            await store.update_attempt(*held, metadata={USED: {"tag": result.trajectory.tag, "calls": used}})
            await store.cancel_rollouts([claimed.rollout_id], STALE)
            return None
        following = await self._finish(held, AttemptStatus.SUCCEEDED, trajectory=result.encoded)
        activity.finish(result.trajectory)
        return following

    async def _finish(
        self,
        held: tuple[str, str],
        status: AttemptStatus,
        *,
        reason: str | None = None,
        trajectory: bytes | None = None,
    ) -> AttemptedRollout | None:
        """Ends the attempt, and claims the next rollout in the same call if the slot may keep its place."""
        store = self._context.store
        if not (self._context.inflight.may_stay() and self._claims.reserve(self)):
            await store.update_attempt(*held, status=status, reason=reason, trajectory=trajectory)
            return None
        following: list[AttemptedRollout] = []
        try:
            following = await store.finish_and_dequeue(
                *held, status=status, worker_id=self._worker_id, reason=reason, trajectory=trajectory
            )
        finally:
            if not following:
                self._claims.give_up()
        if not following:
            return None
        if self._claims.closed:
            [given_back] = following
            self._claims.give_up()
            with suppress(AttemptRefused, NotFound):  # cancelled meanwhile: as good
                await store.update_attempt(
                    given_back.rollout_id,
                    given_back.attempt.attempt_id,
                    status=AttemptStatus.CANCELLED,
                    reason="the worker was told to stop",
                )
            return None
        self._claims.take(following[0])
        return following[0]
