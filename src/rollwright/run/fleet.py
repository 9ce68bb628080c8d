"""Worker fleets: as many workers as there is work for, replaced when they die.

`Autoscaler` is pure: it takes the waiting rollouts (queuing and requeuing; claimed rollouts have a worker already) and
returns the number of workers, up to a maximum. It scales up at once, because waiting rollouts cost time, and scales down
only after a cool-down, because starting a worker costs time, too.

Invariants:
- A worker that dies loses only its generations in flight: the store gives its rollouts to others when their lease ends.
- Every worker process has an id of its own, which no other run in the same store uses.
- Workers that keep dying or being lost right after their start end the run with the last one's error, instead of being
  restarted forever.
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
"""Seconds for a worker to drain before it is killed; its own limit is shorter."""
SHORT_LIFE = 5.0
"""Seconds after its start within which a death counts against the run: the next worker is likely to die, too."""
MOST_SHORT_LIVES = 3
MOST_LOSSES = 10
"""Rounds of starts in a row in which every worker was lost without an error. A round takes some seconds, so this is well
beyond the time for which a cluster still places workers on a dead node."""


@dataclass(frozen=True)
class ScaleRules:
    envs_per_worker: int
    """Rollouts that one worker plays at the same time."""
    maximum: int
    minimum: int = 1
    cool_down: float = 30.0
    """Seconds for which fewer workers must have sufficed before the number is reduced."""


class Autoscaler:
    def __init__(self, rules: ScaleRules) -> None:
        self._rules = rules
        self._enough_since: float | None = None
        """Time since which fewer workers would have sufficed."""

    def wanted(self, waiting: int, claimed: int, workers: int, now: float) -> int:
        """Number of workers for this many waiting and claimed rollouts, given the current number."""
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
    """Keeps the right number of workers; a subclass starts, watches and stops a single worker."""

    kind: str
    """Kind of its workers, for their names and for messages."""

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

    @property
    def maximum(self) -> int:
        """Most workers at once."""
        return self._rules.maximum

    async def run(self) -> None:
        """Keep the right number of workers alive until cancelled; stops all of them at the end."""
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
        """Names of the current workers, oldest first."""

    @abstractmethod
    async def _start(self, name: str, now: float) -> None: ...

    @abstractmethod
    async def _stop(self, name: str) -> None:
        """Remove the worker from `_alive` at once, drain it for up to `STOP_SECONDS`, then kill it."""

    @abstractmethod
    async def _reap(self, now: float) -> None:
        """Remove workers that ended from `_alive`, and count each death with `_count_death`."""

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
        """Count a worker that ended without an error of its own, for example with its machine; one round counts once."""
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
        """Add the counters of the workers' heartbeats to the activity."""
        alive = self._alive()
        for worker in await self._store.query_workers():
            if worker.worker_id.startswith(self._prefix):
                told = Activity.told(worker.heartbeat_stats, alive=worker.worker_id in alive)
                self._activity.elsewhere[worker.worker_id] = told

    async def _wait_for_stops(self) -> None:
        await asyncio.gather(*self._stopping, return_exceptions=True)
        with suppress(RollwrightError):  # counters only; an unreachable store was reported already
            await self._read_heartbeats()  # the workers' last counters
