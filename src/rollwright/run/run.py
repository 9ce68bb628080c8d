"""A run: a store, workers as coroutines, processes or Ray actors, and a scheduler for each stream of groups.

Invariants:
- Whichever way the run ends, its environments and its policy are closed and nothing is left running.
- If the workers fail or end, the call that waits for a batch raises the error instead of waiting forever.
- A resumed run plays what it would have played before: settings that would change the episodes are refused.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollwright.aio import is_cancellation
from rollwright.config import EnvManagerConfig, RunConfig
from rollwright.config.resuming import SettingChange
from rollwright.engines.base import Capabilities, Policy
from rollwright.errors import ConfigError, RollwrightError, RunClosed
from rollwright.gateway import Gateway
from rollwright.rollout import (
    Activity,
    Assignment,
    Batch,
    Fate,
    InflightLimit,
    Ledger,
    RolloutContext,
    RolloutScheduler,
)
from rollwright.rollout.concurrency import START, ConcurrencyTuner
from rollwright.rollout.episode import read_episode
from rollwright.rollout.filters import build_filters
from rollwright.rollout.resources import ResourceLimits, ResourceWatch
from rollwright.rollout.scheduler import FOREIGN_CANCELLATION, rollout_ids
from rollwright.rollout.worker import RolloutWorker, WorkerSettings, first_cause
from rollwright.run.build import SettingsTable, build_curriculum, make_env
from rollwright.run.build_tasks import record_fingerprints
from rollwright.run.build_teams import build_run_policy
from rollwright.run.checks import check_ray, check_tags, probe_engine
from rollwright.run.costs import CostBook
from rollwright.run.evaluation_order import apply_order
from rollwright.run.evaluation_stream import EvaluationStream
from rollwright.run.fleet import Fleet, ScaleRules
from rollwright.run.folder import RunFolder
from rollwright.run.gc_tuning import rare_collections
from rollwright.run.process_fleet import ProcessFleet
from rollwright.run.pruning import TrajectoryReleaser
from rollwright.run.recovery import enter_finished
from rollwright.run.retention import Forgotten
from rollwright.run.validations import VALIDATION, begun_validations, stream_of
from rollwright.run.worker_settings import DELETED_AT_ONCE, leave_settings
from rollwright.store.api import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import TOKEN_VARIABLE, open_store
from rollwright.store.records import AttemptedRollout
from rollwright.store.transitions import FINAL_ROLLOUT
from rollwright.teams import TeamPolicies
from rollwright.trajectory import Trajectory

if TYPE_CHECKING:
    from rollwright.run.ray_fleet import RayCluster, RayFleet

Result = TypeVar("Result")

EVALUATED_AT_ONCE = 1024
"""Most environments of an evaluation that does not say `max_inflight`; the episodes at once are tuned within it."""
logger = logging.getLogger(__name__)


class Run:
    """Use it as an async context manager: `async with Run(config) as run: await run.get_batch()`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: Policy | None = None,
        store: Store | str | None = None,
        processes: int | None = None,
        ray: str | None = None,
        delivered: Collection[str] | None = None,
        validated: Mapping[int, Ledger] | None = None,
        forgotten: Forgotten | None = None,
        folder: RunFolder | None = None,
        on_finished: Callable[[str, bytes], None] | None = None,
        on_failed: Callable[[str, str], None] | None = None,
    ) -> None:
        """
        Args:
            policy: Policy to use instead of the configured one; only if this process plays.
            store: An open store, or the address of one; by default a store in memory.
            processes: Most worker processes; by default the workers are coroutines of this process.
            ray: `auto`, `local` or the address of a Ray cluster whose actors are the workers, at most `processes`.
            delivered: Training groups that an earlier process has delivered; given if the run is resumed.
            validated: Ledgers of the validations that earlier processes have finished, by number.
            forgotten: Steps that were pruned before; given if the run may prune, see `forget`.
            folder: Run folder that `on_finished` writes to; trajectories on its disk are released from the store.
            on_finished: Called with the id and the encoded trajectory of every finished rollout.
            on_failed: Called with the id and the reason of every permanent failure.
        """
        if policy is not None and (processes is not None or ray is not None):
            raise ConfigError("policy: worker processes build their own from the configuration")
        check_tags(config)
        self.config = config = record_fingerprints(config)
        self.settings = SettingsTable(config)
        if self.settings.board is not None and (processes is not None or ray is not None):
            raise ConfigError(
                "agent: remote programs take their rollouts from the run's own process; leave worker processes and Ray out"
            )
        self.curriculum = build_curriculum(config)
        """Curriculum of the training stream; `None` without one."""
        for manager in self._managers():
            build_filters(manager)  # a wrong filter raises an error here, before anything is written
        self.policy = policy if isinstance(policy, TeamPolicies) else build_run_policy(config, policy)
        self.settings.use_policy(self.policy)
        self.activity = Activity()
        self.costs = CostBook(
            config, folder, running=lambda: self.ledger.counts[Fate.RUNNING], capacity=self._capacity
        )
        """What the run has spent; the gate of its budget."""
        self.inflight = InflightLimit(config.max_inflight or START)
        self.capabilities: Capabilities | None = None
        """Capabilities of the engine; `None` before the start, and for a policy without an engine."""
        self.schedulers: list[RolloutScheduler] = []
        """Scheduler of the training stream, if there is one, then those of the running validations."""
        self._evaluation = EvaluationStream(config, folder) if config.evaluation is not None else None
        self._folder = folder
        self._releaser: TrajectoryReleaser | None = None
        self._validated = dict(validated or {})
        """Ledgers of the finished validations, by number."""
        self._earlier = Ledger()
        """Sum of the ledgers of finished validations that were pruned."""
        if forgotten is not None:
            self._earlier.add(forgotten.validated)
        self.unfinished_validations: list[int] = []
        """Validations that an earlier process has started and not finished; the caller plays them again by `evaluate`."""
        self.changes: list[SettingChange] = []
        """Settings that differ from those that the run was started with."""
        self.on_finished = on_finished
        self.on_failed = on_failed
        self.fleet: Fleet | None = None
        self._given_store = store
        self._forget = store is None
        """Whether the store is in memory and belongs to this run, so that settled rollouts need not stay in it."""
        self._processes = processes
        self._ray = None if ray is None else _make_ray_cluster(ray)
        self._delivered = delivered
        self._forgotten = forgotten
        self._stack = AsyncExitStack()
        self._validations = max(self._validated, default=-1) + 1
        self._workers: list[RolloutWorker] = []
        self._work: asyncio.Task[None] | None = None
        self._training: RolloutScheduler | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await self._stack.__aexit__(kind, error, trace)

    async def _start(self) -> None:
        self._stack.enter_context(rare_collections())
        self._stack.push_async_callback(self.settings.close)
        await self.settings.check()
        self._stack.push_async_callback(self._close_policy)
        self.capabilities = await probe_engine(self.policy, self.config.policy)
        self._stack.callback(self.costs.flush)
        if self._folder is not None and self._delivered is not None:
            self.costs.restore()
        given = self._given_store
        self.store = await open_store(given) if isinstance(given, str) else given or MemoryStore()
        self._stack.push_async_callback(self.store.close)
        self.changes = await leave_settings(
            self.store,
            self.config,
            resumed=self._delivered is not None,
            handed_out=bool(self._delivered or self._validated),
        )
        if self._folder is not None and not self._forget:
            self._releaser = TrajectoryReleaser(self.store, self._folder.log)
            self._stack.push_async_callback(self._release_rest)
            if self._delivered is not None:  # an earlier process may have ended before this
                await enter_finished(self.store, self._folder, self.config)
                await self._releaser.release(self._folder.log.rollouts)
        if self._forgotten is not None and self._forgotten.steps:
            await self._delete(self._forgotten, cancel=True)  # an earlier process may have ended before this
        if self._delivered is not None:
            ids = await rollout_ids(self.store, f"{self.config.name}.", VALIDATION)
            begun = begun_validations(self.config.name, ids)
            self.unfinished_validations = sorted(begun - self._validated.keys())
        if self._ray is not None:
            self.fleet = await self._make_ray_fleet(self._ray)
        elif self._processes is not None:
            self.fleet = await self._make_fleet(self._processes)
        if self.fleet is None:
            self._work = asyncio.create_task(self._run_workers(), name="workers")
        else:
            self._work = asyncio.create_task(self.fleet.run(), name="workers")
        self._stack.push_async_callback(self._stop_workers)
        if self.config.train_env_manager is not None:
            scheduler = self._scheduler(self.config.train_env_manager, "train", "train", self._delivered)
            self._training = await self._stack.enter_async_context(scheduler)

    async def _close_policy(self) -> None:
        try:
            await self.policy.close()
        except BaseException as error:
            if isinstance(error, Exception) or is_cancellation(error):
                raise
            raise RollwrightError(f"policy: raised {type(error).__name__} when it was closed") from error

    async def _make_fleet(self, processes: int) -> ProcessFleet:
        """Fleet of worker processes, with a server for a store that they cannot open themselves."""
        given = self._given_store
        if isinstance(given, str) and given.startswith(("postgres", "http")):
            address = given
        else:
            # imported here, because only a run with processes needs a server
            from rollwright.store.http.server import StoreServer

            folder = self._stack.enter_context(TemporaryDirectory(prefix="rollwright-"))
            server = StoreServer(self.store, path=Path(folder) / "store.sock")
            address = (await self._stack.enter_async_context(server)).url
        return ProcessFleet(
            self.store,
            address,
            self._scale_rules(processes),
            self.activity,
            heartbeat_interval=self.config.limits.heartbeat_interval,
            find_capacity=self.config.max_inflight is None,
        )

    async def _make_ray_fleet(self, cluster: "RayCluster") -> "RayFleet":
        """Fleet of Ray actors, with a server for a store that other nodes cannot open."""
        # imported here, because only a run on Ray needs them
        from rollwright.run.ray_fleet import RayFleet
        from rollwright.store.http.server import StoreServer

        await self._stack.enter_async_context(cluster)
        policies = [self.config.policy, *self.config.policies.values()]
        passed_on = {TOKEN_VARIABLE, *(getattr(each, "api_key_env", None) for each in policies)}
        environment = {name: value for name, value in os.environ.items() if name in passed_on}
        given = self._given_store
        if isinstance(given, str) and given.startswith(("postgres", "http://", "https://")):
            address = given
        else:
            token = environment[TOKEN_VARIABLE] = secrets.token_urlsafe()
            server = StoreServer(self.store, host=cluster.host, token=token)
            address = (await self._stack.enter_async_context(server)).url
        limited = any(each.max_env_num_per_worker for each in self._managers())
        actors = self._processes or (len(self._shares()) if limited else max(cluster.cpus, 1))
        return RayFleet(
            self.store,
            address,
            self._scale_rules(actors),
            self.activity,
            environment=environment,
            heartbeat_interval=self.config.limits.heartbeat_interval,
            find_capacity=self.config.max_inflight is None,
        )

    def _scale_rules(self, maximum: int) -> ScaleRules:
        """Divide the environments and `max_inflight` among at most `maximum` workers."""
        envs = sum(share for _, share in self._shares())
        inflight = self.config.max_inflight or envs
        maximum = min(maximum, inflight)
        limits = [each.max_env_num_per_worker for each in self._managers() if each.max_env_num_per_worker]
        per_worker = min([-(-envs // maximum), inflight // maximum, *limits])
        return ScaleRules(envs_per_worker=max(1, per_worker), maximum=maximum)

    @property
    def most_inflight(self) -> int:
        """Current limit of concurrent episodes; worker processes tune their own limits."""
        if self._processes is None and self._ray is None:
            return self.inflight.limit
        return self.config.max_inflight or sum(share for _, share in self._shares())

    def _capacity(self) -> float:
        """How many episodes can be played at once now; worker processes that find out tell it with their heartbeats."""
        if self._processes is None and self._ray is None:
            return self.inflight.limit
        if self.config.max_inflight is not None:
            return self.config.max_inflight
        workers = 1 if self.fleet is None else self.fleet.maximum
        return max(START * workers, 1.5 * self.activity.inflight)

    async def get_batch(self, batch_size: int | None = None) -> Batch:
        """The next training batch; see `RolloutScheduler.get_batch`."""
        if self.config.train_env_manager is None:
            raise ConfigError("train_env_manager: is not set, so there are no training batches")
        self._check_open()
        assert self._training is not None
        batch = await self._unless_workers_end(self._training.get_batch(batch_size or self.config.batch_size))
        if self.curriculum is not None:
            for group in batch.groups:
                rewards = [each.reward for each in group.trajectories]
                self.curriculum.observe(group.tag, sum(rewards) / len(rewards))
        return batch

    async def evaluate(self, number: int | None = None) -> Batch:
        """Play every validation level, by default once and greedily; the levels are the same each time.

        `number` identifies the validation; by default they are counted. A level that fails permanently is missing from
        the batch, and counted in its ledger.
        """
        if number is None:
            number = self._validations
        self._validations = number + 1
        manager = self.config.val_env_manager
        if manager is None:
            raise ConfigError("val_env_manager: is not set, so there is nothing to validate on")
        known = None if self._delivered is None else ()
        self._check_open()
        scheduler = self._scheduler(manager, VALIDATION, stream_of(number), known)
        try:
            async with scheduler:
                wanted = manager.num_env_groups * manager.group_size
                return await self._unless_workers_end(scheduler.get_batch(wanted))
        finally:
            if (
                self._forget and number in self._validated
            ):  # it is played again, because a store in memory keeps nothing of it
                self._earlier.add(self._validated[number])
            self._validated[number] = scheduler.ledger
            self.schedulers.remove(scheduler)

    @property
    def ledger(self) -> Ledger:
        """Current ledger of all streams together."""
        ledger = Ledger()
        streams = (scheduler.ledger for scheduler in self.schedulers)
        for each in (*streams, *self._validated.values(), self._earlier):
            ledger.add(each)
        return ledger

    def settle_validations(self, step: int) -> Ledger:
        """Merge the ledgers of the validations before this step; returns their sum."""
        gone = Ledger()
        for number in [each for each in self._validated if each < step]:
            gone.add(self._validated.pop(number))
        self._earlier.add(gone)
        return gone

    def settle(self, needed: int | None) -> tuple[int, Ledger]:
        """Finalize all training groups before the oldest unsettled one and before the index `needed`.

        Returns the cutoff, and the ledger of the groups finalized since the last call. Only for a run that may prune.
        """
        if self._training is None:
            return 0, Ledger()
        first = self._training.first_unsettled
        floor = first if needed is None else min(first, needed)
        return floor, self._training.forget(floor)

    async def forget(self, forgotten: Forgotten) -> None:
        """Delete the rollouts of pruned steps from the store."""
        await self._delete(forgotten)

    async def _delete(self, forgotten: Forgotten, *, cancel: bool = False) -> None:
        """`cancel`: also cancel rollouts that are still open. While the run plays, the scheduler is about to cancel them,
        and the next pruning deletes them."""
        offset = 0
        while True:
            page = await self.store.query_rollouts(
                rollout_id_contains=f"{self.config.name}.", limit=DELETED_AT_ONCE, offset=offset
            )
            old = [each for each in page if forgotten.has_rollout(each.rollout_id)]
            still_open = [each.rollout_id for each in old if each.status not in FINAL_ROLLOUT]
            if cancel and still_open:
                await self.store.cancel_rollouts(still_open, "its step was pruned")
                still_open = []
            gone = [each.rollout_id for each in old if each.rollout_id not in still_open]
            if gone:
                await self.store.delete_rollouts(gone)
            offset += len(page.items) - len(gone)
            if len(page.items) < DELETED_AT_ONCE:
                return

    def _scheduler(
        self, manager: EnvManagerConfig, mode: str, stream: str, delivered: Collection[str] | None
    ) -> RolloutScheduler:
        forgotten = self._forgotten if mode == "train" else None
        evaluation = self._evaluation if mode == VALIDATION else None
        slot_tags = manager.slot_tags()
        folder = self._folder.path if evaluation is not None and self._folder is not None else None
        played = apply_order(slot_tags, self.settings.level_of(mode, slot_tags), folder)
        scheduler = RolloutScheduler(
            self.store,
            self.config,
            manager,
            lambda: self.policy.version,
            mode=mode,
            stream=stream,
            resources_id=self.config.name,
            forget=self._forget,
            delivered=delivered,
            tag_of=self.curriculum.tag if self.curriculum is not None and mode == "train" else str,
            level_of=played.level_of,
            slot_tags=played.slot_tags,
            first=0 if forgotten is None else forgotten.floor,
            forgotten=None if forgotten is None else forgotten.ledger,
            keep_accounts=forgotten is not None,
            on_finished=self._record_finished,
            on_failed=self.on_failed,
            read_kept=self._folder.log.read if self._folder is not None else lambda rollout_ids: {},
            on_settled=None if self._releaser is None else self._releaser.release_some,
            on_spent=self._count_spent,
            on_ranked=self.costs.add_ranking,
            pace=None if evaluation is None else evaluation.early_stop,
            recall=None if evaluation is None else evaluation.recall,
            on_recalled=self.costs.add_free,
            replace_failed=evaluation is None,
            gate=self.costs if self.config.budget is not None else None,
            ranker=self.settings.ranker() if mode == "train" else None,
        )
        self.schedulers.append(scheduler)
        return scheduler

    def _record_finished(self, rollout_id: str, encoded: bytes) -> None:
        if self.on_finished is not None:
            self.on_finished(rollout_id, encoded)
        if self._releaser is not None:
            self._releaser.add(rollout_id, len(encoded))

    def _count_spent(self, rollout_id: str, trajectory: Trajectory) -> None:
        self.costs.add(rollout_id, trajectory)
        if self._evaluation is not None and trajectory.stop is not None and trajectory.error is None:
            self._evaluation.add(rollout_id, trajectory)

    async def _release_rest(self) -> None:
        """Release the remaining trajectories; after an error they stay in the store and the log until the run is resumed."""
        assert self._releaser is not None
        with suppress(OSError, RollwrightError):
            await self._releaser.release_all()

    async def _assign(self, claimed: AttemptedRollout) -> Assignment:
        """Settings and policy of a claimed rollout."""
        return Assignment(self.settings(read_episode(claimed.input)), self.policy)

    async def _unless_workers_end(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Await the call; raises the workers' error if they end first."""
        assert self._work is not None
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task, self._work}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
            if self._closed:
                raise RunClosed("the run was closed while a batch was waited for")
            if task.cancelled() or self._work.cancelled():
                raise RollwrightError(f"the run was ended by {FOREIGN_CANCELLATION}")
            raise first_cause(self._work.exception() or RollwrightError("the workers have stopped"))
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise RunClosed("the run is closed")
        if self._work is None:
            raise RollwrightError("the run has not started; use it as an async context manager")

    async def _run_workers(self) -> None:
        """Run the workers of this process, as coroutines, until they fail or are cancelled."""
        context = RolloutContext(
            self.store, self._assign, make_env, self.inflight, self.activity, self._serve_gateway()
        )
        shares = self._shares()
        # One episode may always run: if memory is short, no other worker would free it, and the run would wait forever.
        resources = ResourceWatch(ResourceLimits(least=1))
        for name, envs in shares:
            settings = WorkerSettings(envs, heartbeat_interval=self.config.limits.heartbeat_interval)
            self._workers.append(RolloutWorker(context, name, settings, resources=resources))
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.run())
            if self.config.max_inflight is None:
                most = sum(envs for _, envs in shares)
                watch = ConcurrencyTuner(self.inflight, self.activity, most, lambda: self.policy.pressure)
                tasks.create_task(watch.run())

    def _serve_gateway(self) -> Gateway:
        """The gateway of the workers; it listens from the start on if remote programs are to find it."""
        board, remote = self.settings.board, self.config.remote
        if board is None:
            return Gateway()
        gateway = Gateway(host=remote.host, port=remote.port, public_url=remote.public_url)
        board.serve(gateway)
        logger.warning("remote programs reach the run at %s", board.url)
        return gateway

    def _managers(self) -> list[EnvManagerConfig]:
        both = (self.config.train_env_manager, self.config.val_env_manager)
        return [each for each in both if each is not None]

    def _shares(self) -> list[tuple[str, int]]:
        """Worker names with their numbers of environments, at most `max_env_num_per_worker` each."""
        shares: list[tuple[str, int]] = []
        for manager in self._managers():
            left = manager.num_envs
            if (
                self.config.evaluation is not None
            ):  # all tasks are queued at once, and many more than can be played at once
                left = min(left, self.config.max_inflight or EVALUATED_AT_ONCE)
            while left > 0:
                share = min(left, manager.max_env_num_per_worker or left)
                shares.append((f"coroutine-{len(shares)}", share))
                left -= share
        return shares

    async def _stop_workers(self) -> None:
        """Stop the workers and requeue their rollouts, so that a resumed run need not wait for leases to end."""
        assert self._work is not None
        if self.settings.board is not None:
            await self.settings.board.close()
        if not self._forget and not self._work.done():
            await asyncio.gather(*(worker.drain(0.0) for worker in self._workers), return_exceptions=True)
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)


def _make_ray_cluster(address: str) -> "RayCluster":
    check_ray(address)
    from rollwright.run.ray_fleet import RayCluster

    return RayCluster(address)
