"""The workers of a run: coroutines of this process, worker processes, or Ray actors.

Invariants:
- The environments and `max_inflight` of a run are divided among its workers, whichever kind they are.
- Workers that cannot open the run's store themselves reach it through a server that lives as long as they do.
- Workers that stop give their rollouts back, so that a resumed run need not wait for leases to end.
"""

import asyncio
import logging
import os
import secrets
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rollwright.config import EnvManagerConfig, RunConfig
from rollwright.engines.base import Policy
from rollwright.gateway import Gateway
from rollwright.rollout import Activity, Assignment, InflightLimit, RolloutContext
from rollwright.rollout.concurrency import START, ConcurrencyTuner
from rollwright.rollout.episode import read_episode
from rollwright.rollout.resources import ResourceLimits, ResourceWatch
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.run.build import SettingsTable, make_env
from rollwright.run.build_agents import LOOPBACK
from rollwright.run.checks import check_ray
from rollwright.run.fleet import Fleet, ScaleRules
from rollwright.run.process_fleet import ProcessFleet
from rollwright.run.worker_settings import leave_door, worker_urls
from rollwright.store.api import Store
from rollwright.store.opening import TOKEN_VARIABLE, sqlite_path
from rollwright.store.records import AttemptedRollout

if TYPE_CHECKING:
    from rollwright.rollout.remote_workers import RunBoard
    from rollwright.run.ray_fleet import RayCluster, RayFleet

EVALUATED_AT_ONCE = 1024
"""Most environments of an evaluation that does not say `max_inflight`; the episodes at once are tuned within it."""
logger = logging.getLogger(__name__)


def managers_of(config: RunConfig) -> list[EnvManagerConfig]:
    """The environment managers that a run has, for training and for validation."""
    both = (config.train_env_manager, config.val_env_manager)
    return [each for each in both if each is not None]


class RunWorkers:
    """Plays the rollouts of one run, from `start` until the exit stack of the run closes."""

    def __init__(
        self,
        config: RunConfig,
        settings: SettingsTable,
        policy: Policy,
        *,
        board: "RunBoard | None" = None,
        processes: int | None = None,
        ray: str | None = None,
    ) -> None:
        """`board`, `processes`, `ray`: see `Run`."""
        self.elsewhere = processes is not None or ray is not None
        """Whether the workers are not in this process."""
        self.activity = Activity()
        self.inflight = InflightLimit(config.max_inflight or START)
        self.fleet: Fleet | None = None
        self._config = config
        self._settings = settings
        self._policy = policy
        self._board = board
        self._gateway = Gateway()
        """Of the workers in this process, and of remote programs."""
        self._processes = processes
        self._ray = None if ray is None else _make_ray_cluster(ray)
        self._coroutines: list[RolloutWorker] = []

    @property
    def most_inflight(self) -> int:
        """Current limit of concurrent episodes; worker processes tune their own limits."""
        if not self.elsewhere:
            return self.inflight.limit
        return self._config.max_inflight or sum(share for _, share in self._shares())

    @property
    def capacity(self) -> float:
        """How many episodes can be played at once now; workers elsewhere that find out tell it with their heartbeats."""
        if not self.elsewhere or self._config.max_inflight is not None:
            return self.most_inflight
        workers = 1 if self.fleet is None else self.fleet.maximum
        return max(START * workers, 1.5 * self.activity.inflight)

    async def start(
        self, store: Store, address: str | None, stack: AsyncExitStack, *, drain: bool
    ) -> asyncio.Task[None]:
        """Start the workers; the task ends when they fail, or when the stack closes.

        `address`: of the store, as the user gave it; `drain`: whether rollouts in progress are given back at the end.
        """
        if self._ray is not None:
            await stack.enter_async_context(self._ray)
        if self._board is not None:
            await self._open_door(self._board, store, stack)
        if self._ray is not None:
            self.fleet = await self._make_ray_fleet(self._ray, store, address, stack)
        elif self._processes is not None:
            self.fleet = await self._make_process_fleet(self._processes, store, address, stack)
        work = self._run_coroutines(store) if self.fleet is None else self.fleet.run()
        task = asyncio.create_task(work, name="workers")
        stack.push_async_callback(self._stop, task, drain=drain)
        return task

    def stop_claiming(self) -> None:
        """Has the workers of this process begin no further rollout: the run ends, and the rest of its queue, perhaps a million
        rollouts, is about to be cancelled."""
        for worker in self._coroutines:
            worker.stop_claiming()

    async def _make_process_fleet(
        self, processes: int, store: Store, given: str | None, stack: AsyncExitStack
    ) -> ProcessFleet:
        """Fleet of worker processes, with a server for a store that they cannot open themselves.

        They open a SQLite file themselves: through a server, this process would take as much processor time for a rollout as
        they do, and a second worker would gain little."""
        file = None if given is None else sqlite_path(given)
        if given is not None and given.startswith(("postgres", "http")):
            address = given
        elif file is not None:
            address = str(file.absolute())
        else:
            # imported here, because only a run with processes needs a server
            from rollwright.store.http.server import StoreServer

            folder = stack.enter_context(TemporaryDirectory(prefix="rollwright-"))
            server = StoreServer(store, path=Path(folder) / "store.sock")
            address = (await stack.enter_async_context(server)).url
        return ProcessFleet(
            store,
            address,
            self._scale_rules(processes),
            self.activity,
            heartbeat_interval=self._config.limits.heartbeat_interval,
            find_capacity=self._config.max_inflight is None,
        )

    async def _make_ray_fleet(
        self, cluster: "RayCluster", store: Store, given: str | None, stack: AsyncExitStack
    ) -> "RayFleet":
        """Fleet of Ray actors, with a server for a store that other nodes cannot open."""
        # imported here, because only a run on Ray needs them
        from rollwright.run.ray_fleet import RayFleet
        from rollwright.store.http.server import StoreServer

        config = self._config
        policies = [config.policy, *config.policies.values()]
        passed_on = {TOKEN_VARIABLE, *(getattr(each, "api_key_env", None) for each in policies)}
        environment = {name: value for name, value in os.environ.items() if name in passed_on}
        if given is not None and given.startswith(("postgres", "http://", "https://")):
            address = given
        else:
            token = environment[TOKEN_VARIABLE] = secrets.token_urlsafe()
            server = StoreServer(store, host=cluster.host, token=token)
            address = (await stack.enter_async_context(server)).url
        limited = any(each.max_env_num_per_worker for each in managers_of(config))
        actors = self._processes or (len(self._shares()) if limited else max(cluster.cpus, 1))
        return RayFleet(
            store,
            address,
            self._scale_rules(actors),
            self.activity,
            environment=environment,
            heartbeat_interval=config.limits.heartbeat_interval,
            find_capacity=config.max_inflight is None,
        )

    async def _run_coroutines(self, store: Store) -> None:
        """Run the workers of this process, as coroutines, until they fail or are cancelled."""
        context = RolloutContext(store, self._assign, make_env, self.inflight, self.activity, self._gateway)
        shares = self._shares()
        # One episode may always run: if memory is short, no other worker would free it, and the run would wait forever.
        resources = ResourceWatch(ResourceLimits(least=1))
        for name, envs in shares:
            settings = WorkerSettings(envs, heartbeat_interval=self._config.limits.heartbeat_interval)
            self._coroutines.append(RolloutWorker(context, name, settings, resources=resources))
        async with asyncio.TaskGroup() as tasks:
            for worker in self._coroutines:
                tasks.create_task(worker.run())
            if self._config.max_inflight is None:
                most = sum(envs for _, envs in shares)
                tuner = ConcurrencyTuner(self.inflight, self.activity, most, lambda: self._policy.pressure)
                tasks.create_task(tuner.run())

    async def _assign(self, claimed: AttemptedRollout) -> Assignment:
        """Settings and policy of a claimed rollout."""
        return Assignment(self._settings(read_episode(claimed.input)), self._policy)

    async def _open_door(self, board: "RunBoard", store: Store, stack: AsyncExitStack) -> None:
        """Listen for remote programs, and leave the address in the store for workers in other processes."""
        remote, ray = self._config.remote, self._ray
        reached = remote.host not in LOOPBACK or ray is None or ray.host in LOOPBACK
        self._gateway = Gateway(
            host=remote.host,
            port=remote.port,
            public_url=remote.public_url,
            more_hosts=() if reached or ray is None else (ray.host,),
        )
        board.serve(self._gateway)
        stack.push_async_callback(self._gateway.close)
        logger.warning("remote programs reach the run at %s", board.url)
        hosts = [] if ray is None else [ray.host]
        urls = worker_urls(self._gateway.urls, [*hosts, socket.gethostname()], remote.public_url)
        await leave_door(store, self._config, urls, board.worker_key)

    async def _stop(self, work: asyncio.Task[None], *, drain: bool) -> None:
        if self._board is not None:
            await self._board.close()
        if drain and not work.done():
            await asyncio.gather(*(worker.drain(0.0) for worker in self._coroutines), return_exceptions=True)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    def _scale_rules(self, maximum: int) -> ScaleRules:
        """Divide the environments and `max_inflight` among at most `maximum` workers."""
        envs = sum(share for _, share in self._shares())
        inflight = self._config.max_inflight or envs
        maximum = min(maximum, inflight)
        managers = managers_of(self._config)
        limits = [each.max_env_num_per_worker for each in managers if each.max_env_num_per_worker]
        per_worker = min([-(-envs // maximum), inflight // maximum, *limits])
        return ScaleRules(envs_per_worker=max(1, per_worker), maximum=maximum)

    def _shares(self) -> list[tuple[str, int]]:
        """Worker names with their numbers of environments, at most `max_env_num_per_worker` each."""
        shares: list[tuple[str, int]] = []
        for manager in managers_of(self._config):
            left = manager.num_envs
            if self._config.evaluation is not None:
                # All tasks are queued at once, and many more than can be played at once.
                left = min(left, self._config.max_inflight or EVALUATED_AT_ONCE)
            while left > 0:
                share = min(left, manager.max_env_num_per_worker or left)
                shares.append((f"coroutine-{len(shares)}", share))
                left -= share
        return shares


def _make_ray_cluster(address: str) -> "RayCluster":
    check_ray(address)
    from rollwright.run.ray_fleet import RayCluster

    return RayCluster(address)
