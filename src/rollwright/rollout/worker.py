"""A worker: many environment managers side by side, one heartbeat for all of them.

Always true: an attempt that the store takes away (cancelled, or its lease lost) is stopped here as soon as the store
says so, without an effect on other episodes. A draining worker claims nothing more, finishes the episodes that it can
within its time limit, and releases the others, so that another worker can resume from the journal at once. Only the worker
ends its own slots: a slot that is cancelled by other code logs this, fails the attempt that it held, and continues.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.rollout.attempt import RolloutContext
from rollwright.rollout.concurrency import ConcurrencyTuner
from rollwright.rollout.env_manager import EnvManager, RolloutClaims
from rollwright.rollout.resources import USUAL_LIMITS, ResourceLimits, ResourceWatch
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import AttemptedRollout, AttemptStatus

logger = logging.getLogger(__name__)

INTERFERENCE = "an environment, agent, tool or policy has cancelled tasks that are not its own"


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker."""

    max_env_num_per_worker: int
    """Concurrent episodes."""
    max_rollouts: int | None = None
    """Number of rollouts after which it ends. `None`: no limit."""
    poll_interval: float = 30.0
    """Seconds for which one call to the store waits for a rollout; a new rollout wakes it at once."""
    heartbeat_interval: float = 5.0
    """Seconds between heartbeats; must be shorter than the lease of the rollouts."""
    drain_seconds: float = 30.0
    """Seconds for finishing episodes when draining, before they are released."""
    find_capacity: bool = False
    """Whether it searches for the number of episodes that the engine can serve, instead of using its maximum."""
    resources: ResourceLimits | None = USUAL_LIMITS
    """Memory and file handles that must stay free for opening episodes. `None`: no limit."""


class RolloutWorker:
    """Plays rollouts of a store in `max_env_num_per_worker` slots, each an `EnvManager` in a task of its own."""

    def __init__(
        self,
        context: RolloutContext,
        worker_id: str,
        settings: WorkerSettings,
        *,
        pressure: Callable[[], int] = lambda: 0,
        on_claim: Callable[[AttemptedRollout], None] | None = None,
        resources: ResourceWatch | None = None,
    ) -> None:
        """`pressure`: how often the engine has refused load so far. `on_claim`: observer of claimed rollouts.
        `resources`: a watch that several workers of a process share, in place of one made from the settings."""
        self.worker_id = worker_id
        self._context = context
        self._settings = settings
        self._pressure = pressure
        self._resources = resources or (ResourceWatch(settings.resources) if settings.resources else None)
        self._claims = RolloutClaims(
            context.store,
            worker_id,
            poll_interval=settings.poll_interval,
            max_rollouts=settings.max_rollouts,
            heartbeat_interval=settings.heartbeat_interval,
            resources=self._resources,
            on_claim=on_claim,
        )
        self._managers = [
            EnvManager(context, worker_id, self._claims) for _ in range(settings.max_env_num_per_worker)
        ]
        self._slots: dict[EnvManager, asyncio.Task[None]] = {}
        self._live = 0
        """Slots that have not ended."""
        self._over = asyncio.Event()
        """Set when the last slot has ended, or when something failed."""
        self._failure: BaseException | None = None
        self._stopping = False
        """Whether the worker itself cancels its tasks now."""
        self._draining = False

    @property
    def _store(self) -> Store:
        return self._context.store

    async def run(self) -> None:
        """Plays rollouts until it is cancelled, drained, or has played `max_rollouts`.

        Raises an error of the store or the settings that is not transient.
        """
        helpers: list[asyncio.Task[None]] = []
        try:
            for name, work in self._helpers().items():
                helpers.append(self._start(name, self._keep_running(name, work), self._note_end))
            self._live = len(self._managers)
            for number, manager in enumerate(self._managers):
                name = f"env-{number}"
                self._slots[manager] = self._start(name, self._run_slot(name, manager), self._note_slot_end)
            await self._over.wait()
        finally:
            await self._stop([*helpers, *self._slots.values()])
        if self._failure is not None:
            raise self._failure
        await self._send_heartbeat(ended=True)  # so that the store has the last figures

    def stop_claiming(self) -> None:
        """Begins no further rollout; those in progress are played on."""
        self._claims.closed = True

    async def drain(self, seconds: float | None = None) -> int:
        """Ends the worker, within these seconds or as its settings say; returns how many episodes were handed back."""
        self._draining = True
        self._claims.closed = True
        for manager, slot in self._slots.items():
            if manager.holds is None:
                slot.cancel()
        busy = [self._slots[manager] for manager in self._managers if manager.holds is not None]
        if busy:
            await asyncio.wait(busy, timeout=self._settings.drain_seconds if seconds is None else seconds)
        left = [(manager, manager.holds) for manager in self._managers if manager.holds is not None]
        for manager, _ in left:
            self._slots[manager].cancel()
        reason = "the worker was told to stop"
        await asyncio.gather(*(self._end_attempt(*held, AttemptStatus.CANCELLED, reason) for _, held in left))
        return len(left)

    def waiting_for(self) -> str:
        """Why no further episode is opened now; empty: no reason."""
        return self._resources.waits_for if self._resources is not None else ""

    async def _run_slot(self, name: str, manager: EnvManager) -> None:
        """Runs one manager's loop until there is nothing more to claim, or the worker stops it."""
        while True:
            try:
                return await manager.run_rollout_loop()
            except asyncio.CancelledError:
                if self._draining:
                    return None
                if self._stopping:
                    raise
                self._note_interference(name)
            # Other code cancelled the loop: nobody has reported the attempt that it held.
            if (held := manager.unreported) is not None:
                manager.unreported = None
                reason = f"system: CancelledError: {INTERFERENCE}"
                await self._end_attempt(*held, AttemptStatus.FAILED, reason)

    def _helpers(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """The worker's tasks beside its slots, by name."""
        helpers = {"heartbeat": self._send_heartbeats, "cancellations": self._follow_cancellations}
        if self._settings.find_capacity:
            context = self._context
            tuner = ConcurrencyTuner(context.inflight, context.activity, len(self._managers), self._pressure)
            helpers["capacity"] = tuner.run
        if self._resources is not None:
            helpers["resources"] = self._resources.run
        return helpers

    async def _keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except asyncio.CancelledError:
                if self._stopping:
                    raise
                self._note_interference(name)

    def _start(
        self, name: str, work: Coroutine[Any, Any, None], ended: Callable[["asyncio.Task[None]"], None]
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"{self.worker_id}-{name}")
        task.add_done_callback(ended)
        return task

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._over.set()

    def _note_slot_end(self, task: "asyncio.Task[None]") -> None:
        self._note_end(task)
        self._live -= 1
        if not self._live:
            self._over.set()

    def _note_interference(self, name: str) -> None:
        """Counts that a task of the worker was cancelled by other code, and lets the task continue."""
        self._context.activity.slots_restarted += 1
        logger.warning("%s: %s was cancelled by code that it plays; it goes on", self.worker_id, name)
        task = asyncio.current_task()
        # Without this, the next `asyncio.timeout` or task group in this task would take the old request for its own.
        while task is not None and task.uncancel():
            pass

    async def _stop(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        self._stopping = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.gateway.rest()
        await self._context.boxes.rest()

    async def _end_attempt(
        self, rollout_id: str, attempt_id: str, status: AttemptStatus, reason: str
    ) -> None:
        """Reports the end of an attempt that its manager does not report."""
        try:
            await self._store.update_attempt(rollout_id, attempt_id, status=status, reason=reason)
        except (AttemptRefused, NotFound):
            logger.info("%s is not held any more: nothing to report", rollout_id)

    async def _send_heartbeats(self) -> None:
        while True:
            await self._send_heartbeat()
            await asyncio.sleep(self._settings.heartbeat_interval)

    async def _send_heartbeat(self, *, ended: bool = False) -> None:
        """Renews the leases of all attempts held, and stops those that the store says are lost."""
        held = [holds for manager in self._managers if (holds := manager.holds) is not None]
        stats = {
            **self._context.activity.heartbeat_stats(),
            "waiting": self.waiting_for(),
            "heartbeat_interval": self._settings.heartbeat_interval,
            "ended": ended,
        }
        lost = await self._store.update_worker(self.worker_id, heartbeat_stats=stats, attempts=held)
        self._withdraw(lost)

    async def _follow_cancellations(self) -> None:
        while True:
            timeout = self._settings.poll_interval
            self._withdraw(await self._store.wait_for_cancellations(self.worker_id, timeout=timeout))

    def _withdraw(self, lost: list[tuple[str, str]]) -> None:
        gone = set(lost)
        for manager in self._managers if gone else ():
            if manager.holds in gone:
                manager.withdraw()


def first_cause(error: BaseException) -> BaseException:
    """The first error in the exception group of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
