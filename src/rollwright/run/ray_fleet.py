"""Workers of a run as Ray actors, spread over a cluster's nodes and replaced when they die, and the connection to Ray.

Invariants:
- The store's lease decides which worker holds a rollout, not Ray. Ray notices a dead node only after a while, and an actor
  that Ray takes for dead may still act: by then others have its rollouts, and the store refuses its late reports.
- Lost actors are replaced for as long as some outlive their start. Three actors in a row that raise an error right after
  their start end the run.
- Only the store's address and the worker's settings pass through Ray; episodes pass through the store.
- A Ray connection that the program had already is used and left open; a Ray that was started here ends with the
  connection. Ray's own output stays in its log files.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollwright.errors import ConfigError
from rollwright.rollout import Activity
from rollwright.rollout.worker import WorkerSettings
from rollwright.run.fleet import SHORT_LIFE, STOP_SECONDS, Fleet, ScaleRules
from rollwright.run.worker_process import run_worker
from rollwright.store.api import Store

# Ray prints the deaths of nodes and processes with pages of its log, even with `log_to_driver=False`; the fleet logs each
# in one line. Ray reads this variable when it is imported.
os.environ.setdefault(
    "RAY_DEDUP_LOGS_SKIP_REGEX",
    "^(Raylet is terminated|The node with node id|A worker died or was killed)",
)


LOCAL = "local"
"""Address that stands for a new Ray on this machine."""
AUTO = "auto"
"""Address that stands for the cluster that this machine is a node of."""
LOOPBACK = "127.0.0.1"

CONNECT_SECONDS = 10.0
"""Seconds for an address to accept a connection; Ray itself would retry for minutes."""


class RayCluster:
    """Use it as an async context manager; inside the block, Ray can be called."""

    def __init__(self, address: str) -> None:
        """`address`: `HOST:PORT` of a cluster that this machine is a node of, `auto`, or `local`."""
        if "://" in address:
            raise ConfigError(
                f"ray: {address!r} is for programs outside of the cluster; start the run on one of its nodes, "
                "with auto or HOST:PORT"
            )
        if address not in (AUTO, LOCAL):
            _, found, port = address.rpartition(":")
            if not found or not port.isdecimal():
                raise ConfigError(f"ray: got {address!r}; accepted are {AUTO}, {LOCAL} and HOST:PORT")
        self._address = address
        self._joined = False
        """Whether this object made the connection, and has to close it."""

    @property
    def cpus(self) -> int:
        """CPUs of all current nodes."""
        return int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]

    @property
    def host(self) -> str:
        """Host by which actors reach this process; loopback if the cluster can never have another node."""
        started_here = self._joined and self._address == LOCAL
        return LOOPBACK if started_here else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        if not ray.is_initialized():
            if self._address not in (AUTO, LOCAL):
                await _check_reachable(self._address)
            await asyncio.to_thread(
                join_ray, self._address
            )  # outside of the main thread it installs no signal handlers
            self._joined = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._joined:
            await asyncio.to_thread(ray.shutdown)


async def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:  # a timeout is an OSError; a port too large, an OverflowError
        raise ConfigError(f"ray: nothing answers at {address}: {error or 'timeout'}") from None
    writer.close()


def join_ray(address: str) -> None:
    """Connects this process to a cluster, or starts one on this machine."""
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a private Ray sends no usage reports
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == LOCAL else None,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == AUTO and isinstance(error, ConnectionError):
            raise ConfigError(
                f"ray: this machine is no node of a running cluster; `ray start` makes it one, {LOCAL} needs none"
            ) from error
        raise ConfigError(f"ray: cannot join {address}: {str(error).splitlines()[0]}") from error


logger = logging.getLogger(__name__)

ACTOR_CPUS = 0.01
"""A worker mostly waits for the engine, so any number may share a core. Above 0, because a node that offers no CPU,
such as a head that is kept free, wants no workers."""
PAUSE_SECONDS = 5.0
"""Seconds before the next start after a lost actor: Ray would place it on the same dead node, not knowing of its death yet."""


@dataclass(frozen=True)
class ActorLocation:
    """Node and process of an actor."""

    node_id: str
    pid: int


class WorkerActor:
    """Code of the actor: one worker, in the actor's event loop."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()

    async def locate(self) -> ActorLocation:
        return ActorLocation(ray.get_runtime_context().get_node_id(), os.getpid())

    async def work(
        self, address: str, worker_id: str, settings: WorkerSettings, environment: Mapping[str, str]
    ) -> None:
        """Play until `drain` is called."""
        os.environ.update(environment)
        await run_worker(address, worker_id, settings, stop=self._stop)

    async def drain(self) -> None:
        self._stop.set()


@dataclass
class _Life:
    actor: Any
    """Ray's handle."""
    work: asyncio.Task[None] = field(init=False)
    """Follows the actor, and ends with it."""
    location: ActorLocation | None = None
    """`None` until Ray has started the actor."""
    began: float | None = None
    """Time of its start; `None` before."""


class RayFleet(Fleet):
    """Runs inside a `RayCluster` block."""

    kind = "ray"

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
        """`address`: of the store, reachable from every node.

        `environment`: variables for the actors, such as the store's token. They travel with a call, because
        variables that Ray is told to set can be read on its dashboard.
        """
        super().__init__(store, rules, activity)
        self._address = address
        self._settings = WorkerSettings(
            rules.envs_per_worker, heartbeat_interval=heartbeat_interval, find_capacity=find_capacity
        )
        self._environment = dict(environment or {})
        self._class = ray.remote(num_cpus=ACTOR_CPUS, scheduling_strategy="SPREAD", max_restarts=0)(
            WorkerActor
        )
        self._lives: dict[str, _Life] = {}
        self._paused_until = 0.0

    @property
    def locations(self) -> dict[str, ActorLocation]:
        """Locations of the started actors, by worker name."""
        return {name: life.location for name, life in self._lives.items() if life.location is not None}

    def _alive(self) -> Collection[str]:
        return self._lives.keys()

    def _may_start(self, now: float) -> bool:
        return now >= self._paused_until

    async def _start(self, name: str, now: float) -> None:
        life = self._lives[name] = _Life(self._class.remote())
        life.work = asyncio.create_task(self._follow(name, life), name=name)

    async def _follow(self, name: str, life: _Life) -> None:
        life.location = await life.actor.locate.remote()
        life.began = asyncio.get_running_loop().time()
        await life.actor.work.remote(self._address, name, self._settings, self._environment)

    async def _reap(self, now: float) -> None:
        for name, life in list(self._lives.items()):
            if not life.work.done():
                if life.began is not None and now - life.began >= SHORT_LIFE:
                    self._losses = 0  # the cluster can hold a worker
                continue
            del self._lives[name]
            ray.kill(life.actor)  # the worker has ended, and its process may be left
            error = life.work.exception()
            if error is not None and not isinstance(error, RayError):
                raise error
            words = _last_words(error)
            short = life.began is None or now - life.began < SHORT_LIFE
            if words is None:
                logger.warning("%s was lost: %s", name, last_line(error))
                self._count_loss(last_line(error), short=short, new_round=now >= self._paused_until)
                self._paused_until = now + PAUSE_SECONDS
            else:
                self._count_death(words, short=short)

    async def _stop(self, name: str) -> None:
        """See `Fleet._stop`; an actor that is not started yet holds no rollouts, and needs no drain."""
        life = self._lives.pop(name)
        try:
            if life.location is not None:
                async with asyncio.timeout(STOP_SECONDS):
                    await life.actor.drain.remote()
                    await asyncio.wait({life.work})
        except (TimeoutError, RayError):
            pass  # hung or dead: it is killed below, and others claim its rollouts when their leases end
        finally:
            ray.kill(life.actor)
            life.work.cancel()
            await asyncio.gather(life.work, return_exceptions=True)


def _last_words(error: BaseException | None) -> str | None:
    """Error that the actor itself raised; `None` for an actor that was lost with its node or process."""
    if isinstance(error, RayTaskError):
        return last_line(error.cause)
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return last_line(error)
    return None


def last_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
