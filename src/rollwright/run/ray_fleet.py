"""Workers of a run as Ray actors, spread over the cluster's nodes and replaced when they die.

Always true: the store's lease decides who holds a rollout, not Ray. Ray notices a dead node only after a while, and an
actor it takes for dead may still act: by then others have the rollouts, and what the late one reports is refused.
Every life of an actor has a worker id of its own. Lost actors are replaced for as long as the run lasts; actors that
fail by their own account right after their start, one after the other, end it with their last words. Only where the store is and how to work goes through Ray; episodes
go through the store.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollwright.errors import RollwrightError
from rollwright.rollout import Activity
from rollwright.run.fleet import LOOK_SECONDS, MOST_SHORT_LIVES, SHORT_LIFE, STOP_SECONDS
from rollwright.run.worker_process import run_worker
from rollwright.store.contract import Store
from rollwright.store.records import RolloutStatus
from rollwright.workers import WorkerSettings
from rollwright.workers.autoscale import Autoscaler, ScaleRules

logger = logging.getLogger(__name__)

ACTOR_CPUS = 0.01
"""A worker mostly waits for the engine, so any number may share a core. Above 0, because a node that offers no CPU,
such as a head that is kept free, wants no workers."""
PAUSE_SECONDS = 5.0
"""Before the next start after an actor was lost: Ray would place it on the same dead node, which it does not know yet."""


@dataclass(frozen=True)
class Place:
    """Where an actor lives."""

    node_id: str
    pid: int


class WorkerActor:
    """What runs inside an actor: one worker, in the actor's own event loop."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()

    async def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), os.getpid())

    async def work(
        self, address: str, worker_id: str, settings: WorkerSettings, environment: Mapping[str, str]
    ) -> None:
        """Plays until it is told to drain."""
        os.environ.update(environment)
        await run_worker(address, worker_id, settings, stop=self._stop)

    async def drain(self) -> None:
        self._stop.set()


@dataclass
class _Life:
    actor: Any
    """Ray's handle."""
    work: asyncio.Task[None] = field(init=False)
    """Ends when the actor does."""
    place: Place | None = None
    """`None`: Ray has not started it yet."""
    began: float | None = None
    """When it was placed."""


class RayFleet:
    """The same role as `WorkerFleet`. Ray must be joined while it runs."""

    def __init__(
        self,
        store: Store,
        address: str,
        rules: ScaleRules,
        activity: Activity,
        *,
        environment: Mapping[str, str] | None = None,
        heartbeat_interval: float = 5.0,
        find_capacity: bool = True,
    ) -> None:
        """`address`: where the actors, on any node, find the store.

        `environment`: variables for the actors, such as the store's token. They travel with a call, because
        variables that Ray is told to set can be read on its dashboard.
        """
        self._store = store
        self._address = address
        self._scaler = Autoscaler(rules)
        self._settings = WorkerSettings(
            rules.envs_per_worker, heartbeat_interval=heartbeat_interval, find_capacity=find_capacity
        )
        self._activity = activity
        self._environment = dict(environment or {})
        self._prefix = f"ray-{secrets.token_hex(3)}-"
        """Of all its workers' ids, so that no other run in the same store has them too."""
        self._class = ray.remote(num_cpus=ACTOR_CPUS, scheduling_strategy="SPREAD", max_restarts=0)(
            WorkerActor
        )
        self._lives: dict[str, _Life] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._started = 0
        self._short_lives = 0
        self._paused_until = 0.0

    @property
    def places(self) -> dict[str, Place]:
        """Where the actors live that Ray has started, by the name of their worker."""
        return {name: life.place for name, life in self._lives.items() if life.place is not None}

    async def run(self) -> None:
        """Keeps the right number of actors alive until it is cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                self._bury_the_dead(clock())
                counts = await self._store.statistics()
                waiting = counts[RolloutStatus.QUEUING] + counts[RolloutStatus.REQUEUING]
                claimed = counts[RolloutStatus.PREPARING] + counts[RolloutStatus.RUNNING]
                wanted = self._scaler.wanted(waiting, claimed, len(self._lives), clock())
                while len(self._lives) < wanted and clock() >= self._paused_until:
                    self._start()
                for name in list(self._lives)[wanted:]:
                    self._let_go(name)
                await self._listen()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for name in list(self._lives):
                self._let_go(name)
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await asyncio.gather(*self._stopping, return_exceptions=True)
        with suppress(RollwrightError):  # figures only; a store that is gone has been noticed already
            await self._listen()  # what the workers told last

    def _start(self) -> None:
        name = f"{self._prefix}{self._started}"
        self._started += 1
        life = self._lives[name] = _Life(self._class.remote())
        life.work = asyncio.create_task(self._live(name, life), name=name)

    async def _live(self, name: str, life: _Life) -> None:
        life.place = await life.actor.place.remote()
        life.began = asyncio.get_running_loop().time()
        await life.actor.work.remote(self._address, name, self._settings, self._environment)

    def _bury_the_dead(self, now: float) -> None:
        for name, life in list(self._lives.items()):
            if not life.work.done():
                continue
            del self._lives[name]
            ray.kill(life.actor)  # its worker has ended; the process around it may be left
            error = life.work.exception()
            if error is not None and not isinstance(error, RayError):
                raise error
            self._activity.dead_workers += 1
            words = _last_words(error)
            if words is None:
                logger.warning("%s was lost: %s", name, _last_line(error))
                self._paused_until = now + PAUSE_SECONDS
                continue
            short = life.began is None or now - life.began < SHORT_LIFE
            self._short_lives = self._short_lives + 1 if short else 0
            if self._short_lives >= MOST_SHORT_LIVES:
                raise RollwrightError(
                    f"{self._short_lives} Ray actors in a row died at their start; the last said: {words}"
                )

    def _let_go(self, name: str) -> None:
        task = asyncio.create_task(_stop(self._lives.pop(name)))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _listen(self) -> None:
        """What the workers told the store with their heartbeats."""
        for worker in await self._store.query_workers():
            if worker.worker_id.startswith(self._prefix):
                self._activity.elsewhere[worker.worker_id] = Activity.told(
                    worker.heartbeat_stats, alive=worker.worker_id in self._lives
                )


async def _stop(life: _Life) -> None:
    """Drains the actor as long as it may take, then ends it. One that was not started yet holds nothing."""
    try:
        if life.place is not None:
            async with asyncio.timeout(STOP_SECONDS):
                await life.actor.drain.remote()
                await asyncio.wait({life.work})
    except (TimeoutError, RayError):
        pass  # hung or dead: it is ended below, and its rollouts go to others when their leases end
    finally:
        ray.kill(life.actor)
        life.work.cancel()
        await asyncio.gather(life.work, return_exceptions=True)


def _last_words(error: BaseException | None) -> str | None:
    """What ended an actor by its own account; `None` for one that was lost without a word, with its node or process."""
    if isinstance(error, RayTaskError):
        return _last_line(error.cause)
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return _last_line(error)
    return None


def _last_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
