"""The workers of a run: as many as there is work for, replaced when they die.

`Autoscaler` is pure: it takes the rollouts that wait (queuing and requeuing; claimed ones have their worker already) and
returns a number of workers, up to a maximum. It grows at once, because waiting costs; it shrinks only after a while
without need, because starting does.

Always true: a worker that dies takes nothing with it but its generations in flight, because the store gives its
rollouts to another when their lease ends. Every life of a worker has an id of its own, which no other run in the same
store has. Workers that keep dying or being lost right after their start end the run with what is known of the last one,
instead of being started for ever.
"""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from rollwright.errors import RollwrightError
from rollwright.rollout import Activity
from rollwright.store.api import Store
from rollwright.store.records import RolloutStatus

LOOK_SECONDS = 0.5
"""Seconds between two checks of the workers and the queue."""
STOP_SECONDS = 45.0
"""What a worker gets to drain before it is killed; its own limit for that is shorter."""
SHORT_LIFE = 5.0
"""A worker that dies sooner than this after its start is likely to die again."""
MOST_SHORT_LIVES = 3
MOST_LOSSES = 10
"""Rounds of starts in a row of which every worker was lost without a word. Each round takes some seconds, so this is
well beyond the time in which a cluster still places workers on a node that is dead."""


@dataclass(frozen=True)
class ScaleRules:
    envs_per_worker: int
    """Rollouts that one worker plays at the same time."""
    maximum: int
    minimum: int = 1
    cool_down: float = 30.0
    """Seconds for which fewer must have been enough before the number goes down."""


class Autoscaler:
    def __init__(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._enough_since: float | None = None
        """Since when fewer would have been enough."""

    def wanted(self, waiting: int, claimed: int, workers: int, now: float) -> int:
        """The number of workers to have, given the rollouts that wait, those being played, and the workers there are."""
        rules = self._rules
        needed = -(-(waiting + claimed) // rules.envs_per_worker)
        needed = min(rules.maximum, max(rules.minimum, needed))
        if needed >= workers:
            self._enough_since = None
            return needed
        if self._enough_since is None:
            self._enough_since = now
        if now - self._enough_since < rules.cool_down:
            return workers
        self._enough_since = None
        return needed


class Fleet(ABC):
    """Decides how many workers there are; a subclass knows how one is started, looked after and stopped."""

    kind: str
    """What its workers are, in a word."""

    def __init__(self, store: Store, rules: ScaleRules, activity: Activity) -> None:
        """`activity` gets the figures that the workers report with their heartbeats."""
        self._store = store
        self._rules = rules
        self._activity = activity
        self._scaler = Autoscaler(rules)
        self._prefix = f"{self.kind}-{secrets.token_hex(3)}-"
        self._stopping: set[asyncio.Task[None]] = set()
        self._started = 0
        self._short_lives = 0
        self._losses = 0

    async def run(self) -> None:
        """Keeps the right number of workers alive until it is cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._reap(clock())
                counts = await self._store.statistics()
                waiting = counts[RolloutStatus.QUEUING] + counts[RolloutStatus.REQUEUING]
                claimed = counts[RolloutStatus.PREPARING] + counts[RolloutStatus.RUNNING]
                wanted = self._scaler.wanted(waiting, claimed, len(self._alive()), clock())
                while len(self._alive()) < wanted and self._may_start(clock()):
                    await self._start(f"{self._prefix}{self._started}", clock())
                    self._started += 1
                for name in list(self._alive())[wanted:]:
                    self._start_stopping(name)
                await self._read_heartbeats()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for name in list(self._alive()):
                self._start_stopping(name)
            await asyncio.shield(self._wait_for_stops())

    @abstractmethod
    def _alive(self) -> Collection[str]:
        """The workers there are, oldest first."""

    @abstractmethod
    async def _start(self, name: str, now: float) -> None: ...

    @abstractmethod
    async def _stop(self, name: str) -> None:
        """Takes the worker off the list at once, drains it as long as it may take, then ends it."""

    @abstractmethod
    async def _reap(self, now: float) -> None:
        """Takes workers that ended off the list, and counts each death with `_count_death`."""

    def _may_start(self, now: float) -> bool:
        return True

    def _count_death(self, last_words: str, *, short: bool) -> None:
        self._activity.dead_workers += 1
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives >= MOST_SHORT_LIVES:
            raise RollwrightError(
                f"{self._short_lives} {self.kind} workers in a row died at their start; the last said: {last_words}"
            )

    def _count_loss(self, what_happened: str, *, short: bool, new_round: bool) -> None:
        """Counts a worker that ended without an error of its own, as it does with its machine; those of one round count once."""
        self._activity.dead_workers += 1
        self._losses = self._losses + new_round if short else 0
        if self._losses >= MOST_LOSSES:
            raise RollwrightError(
                f"{self.kind} workers were lost at their start {self._losses} times in a row; "
                f"the last time: {what_happened}"
            )

    def _start_stopping(self, name: str) -> None:
        task = asyncio.ensure_future(self._stop(name))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _read_heartbeats(self) -> None:
        """Adds the figures of the workers' heartbeats to the activity."""
        alive = self._alive()
        for worker in await self._store.query_workers():
            if worker.worker_id.startswith(self._prefix):
                told = Activity.told(worker.heartbeat_stats, alive=worker.worker_id in alive)
                self._activity.elsewhere[worker.worker_id] = told

    async def _wait_for_stops(self) -> None:
        await asyncio.gather(*self._stopping, return_exceptions=True)
        with suppress(RollwrightError):  # figures only; a store that is gone has been noticed already
            await self._read_heartbeats()  # the workers' last figures
