"""A worker: many environment managers side by side, one heartbeat for all of them.

Always true: an attempt that the store takes away (cancelled, or its lease lost) is stopped here as soon as the store
says so, and the other episodes do not notice. A worker that is told to drain claims nothing more, finishes what it can
within the time it has, and hands the rest back, so that another can go on from the journal at once. Only the worker
ends its own slots: one that is cancelled by anybody else says so, fails the attempt it held, and plays on.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollwright.errors import ConfigError
from rollwright.rollout.capacity_watch import CapacityWatch
from rollwright.rollout.env_manager import EnvManager, RolloutContext
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import AttemptedRollout, AttemptStatus
from rollwright.workers.resources import USUAL_LIMITS, ResourceLimits, ResourceWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker works."""

    max_env_num_per_worker: int
    """Episodes that it plays at the same time."""
    max_rollouts: int | None = None
    """Rollouts after which it ends. `None`: it goes on."""
    poll_interval: float = 30.0
    """Seconds that one call to the store waits for a rollout; a store wakes its callers at once all the same."""
    heartbeat_interval: float = 5.0
    """Seconds between heartbeats; must be shorter than the lease of the rollouts."""
    drain_seconds: float = 30.0
    """Time to finish episodes after it is told to stop, before they are handed back."""
    find_capacity: bool = False
    """Whether it looks for the number of episodes that the engine can serve, instead of playing as many as it may."""
    resources: ResourceLimits | None = USUAL_LIMITS
    """When to stop opening episodes, for want of memory or file handles. `None`: never."""


INTERFERENCE = "an environment, agent, tool or policy has cancelled tasks that are not its own"


class Quota:
    """How many rollouts may still be claimed."""

    def __init__(self, most: int | None) -> None:
        self._left = most
        self.closed = False

    def reserve(self) -> bool:
        if self.closed or self._left == 0:
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def give_back(self) -> None:
        if self._left is not None:
            self._left += 1


class WatchedManager(EnvManager):
    """Gives its place up when an episode has ended: the next one may have to wait at the gate first."""

    def __init__(self, context: RolloutContext, worker_id: str, resources: ResourceWatch | None) -> None:
        super().__init__(context, worker_id)
        self._resources = resources

    async def run_rollout(self, claimed: AttemptedRollout) -> None:
        try:
            await super().run_rollout(claimed)
        finally:
            if self._resources is not None:
                self._resources.leave(self)


class Worker:
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
        """`pressure`: how often the engine has refused load so far. `on_claim` hears of every rollout it takes.
        `resources`: a watch that several workers of a process share, in place of one that its settings make."""
        self.worker_id = worker_id
        self._context = context
        self._settings = settings
        self._pressure = pressure
        self._on_claim = on_claim
        self._quota = Quota(settings.max_rollouts)
        self._resources = resources or (ResourceWatch(settings.resources) if settings.resources else None)
        self._managers = [
            WatchedManager(context, worker_id, self._resources)
            for _ in range(settings.max_env_num_per_worker)
        ]
        self._loops: dict[EnvManager, asyncio.Task[None]] = {}
        self._live = 0
        """Slots that have not ended."""
        self._over = asyncio.Event()
        """Set when the last slot has ended, or when something failed."""
        self._failure: BaseException | None = None
        self._ending = False
        """Whether the worker itself cancels its tasks now."""
        self._draining = False

    @property
    def _store(self) -> Store:
        return self._context.store

    async def run(self) -> None:
        """Plays rollouts until it is cancelled, drained, or has played `max_rollouts`.

        Ends with the error of the store, or of the settings, that makes it impossible to go on.
        """
        helpers: list[asyncio.Task[None]] = []
        try:
            for name, work in self._duties().items():
                helpers.append(self._started(name, self._kept_up(name, work), self._helper_ended))
            self._live = len(self._managers)
            for number, manager in enumerate(self._managers):
                name = f"env-{number}"
                self._loops[manager] = self._started(name, self._play(name, manager), self._slot_ended)
            await self._over.wait()
        finally:
            await self._end([*helpers, *self._loops.values()])
        if self._failure is not None:
            raise self._failure
        await self._beat(ended=True)  # so that the store has the last figures

    def _duties(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What the worker does beside playing, by name."""
        duties = {"heartbeat": self._heartbeat, "cancellations": self._listen}
        if self._settings.find_capacity:
            gate, activity = self._context.gate, self._context.activity
            duties["capacity"] = CapacityWatch(gate, activity, len(self._managers), self._pressure).run
        if self._resources is not None:
            duties["resources"] = self._resources.run
        return duties

    def _started(
        self, name: str, work: Coroutine[Any, Any, None], ended: Callable[["asyncio.Task[None]"], None]
    ) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name=f"{self.worker_id}-{name}")
        task.add_done_callback(ended)
        return task

    def _helper_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._over.set()

    def _slot_ended(self, task: "asyncio.Task[None]") -> None:
        self._helper_ended(task)
        self._live -= 1
        if not self._live:
            self._over.set()

    async def _end(self, tasks: Sequence["asyncio.Task[None]"]) -> None:
        self._ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.gateway.rest()

    async def drain(self, seconds: float | None = None) -> int:
        """Ends the worker, within these seconds or as its settings say; returns how many episodes were handed back."""
        self._draining = True
        self._quota.closed = True
        for manager, loop in self._loops.items():
            if manager.holds is None:
                loop.cancel()
        busy = [self._loops[manager] for manager in self._managers if manager.holds is not None]
        if busy:
            await asyncio.wait(busy, timeout=self._settings.drain_seconds if seconds is None else seconds)
        left = [(manager, manager.holds) for manager in self._managers if manager.holds is not None]
        for manager, _ in left:
            self._loops[manager].cancel()
        await asyncio.gather(*(self._hand_back(*held) for _, held in left))
        return len(left)

    async def _hand_back(self, rollout_id: str, attempt_id: str) -> None:
        try:
            await self._store.update_attempt(
                rollout_id, attempt_id, status=AttemptStatus.CANCELLED, reason="the worker was told to stop"
            )
        except (AttemptRefused, NotFound):
            logger.info("%s is not held any more: nothing to hand back", rollout_id)

    async def _play(self, name: str, manager: EnvManager) -> None:
        """One slot. It ends when there is nothing more to claim, or when the worker ends it."""
        claim = partial(self._claim, manager)
        try:
            await self._play_on(name, manager, claim)
        finally:
            if self._resources is not None:
                self._resources.leave(manager)

    async def _play_on(
        self,
        name: str,
        manager: EnvManager,
        claim: Callable[[], Coroutine[Any, Any, AttemptedRollout | None]],
    ) -> None:
        while True:
            try:
                await manager.run_rollout_loop(claim)
                return
            except asyncio.CancelledError:
                if self._draining:
                    return
                if self._ending:
                    raise
                self._note_interference(name)
            if (left := manager.left_behind) is not None:
                manager.left_behind = None
                await self._fail(*left)

    async def _kept_up(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except asyncio.CancelledError:
                if self._ending:
                    raise
                self._note_interference(name)

    def _note_interference(self, name: str) -> None:
        """A task of the worker was cancelled by somebody else, and goes on."""
        self._context.activity.slots_restarted += 1
        logger.warning("%s: %s was cancelled by code that it plays; it goes on", self.worker_id, name)
        task = asyncio.current_task()
        while task is not None and task.uncancel():
            pass

    async def _fail(self, rollout_id: str, attempt_id: str) -> None:
        reason = f"system: CancelledError: {INTERFERENCE}"
        try:
            await self._store.update_attempt(
                rollout_id, attempt_id, status=AttemptStatus.FAILED, reason=reason
            )
        except (AttemptRefused, NotFound):
            logger.info("%s is not held any more: nothing to report", rollout_id)

    async def _claim(self, manager: EnvManager) -> AttemptedRollout | None:
        """The next rollout, as far as quota and machine allow; `None` when there are to be no more."""
        while self._quota.reserve():
            if self._resources is not None:
                await self._resources.enter(manager)
            claimed = await self._store.dequeue_rollout(self.worker_id, timeout=self._settings.poll_interval)
            if claimed is not None:
                self._check_lease(claimed)
                if self._on_claim is not None:
                    self._on_claim(claimed)
                return claimed
            self._quota.give_back()
        return None

    def _check_lease(self, claimed: AttemptedRollout) -> None:
        lease = claimed.config.unresponsive_seconds
        if lease is not None and self._settings.heartbeat_interval >= lease:
            raise ConfigError(
                f"heartbeat_interval: {self._settings.heartbeat_interval:g} s is not shorter than the lease of "
                f"rollout {claimed.rollout_id}, which is {lease:g} s"
            )

    async def _heartbeat(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(self._settings.heartbeat_interval)

    async def _beat(self, *, ended: bool = False) -> None:
        held = [holds for manager in self._managers if (holds := manager.holds) is not None]
        stats = {
            **self._context.activity.heartbeat_stats(),
            "waiting": self.waiting_for(),
            "heartbeat_interval": self._settings.heartbeat_interval,
            "ended": ended,
        }
        lost = await self._store.update_worker(self.worker_id, heartbeat_stats=stats, attempts=held)
        self._withdraw(lost)

    def waiting_for(self) -> str:
        """Why no further episode is opened now, or nothing."""
        return self._resources.waits_for if self._resources is not None else ""

    async def _listen(self) -> None:
        while True:
            timeout = self._settings.poll_interval
            self._withdraw(await self._store.wait_for_cancellations(self.worker_id, timeout=timeout))

    def _withdraw(self, lost: list[tuple[str, str]]) -> None:
        gone = set(lost)
        for manager in self._managers if gone else ():
            if manager.holds in gone:
                manager.withdraw()


def first_cause(error: BaseException) -> BaseException:
    """The error that brought the others down, out of what a task group made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
