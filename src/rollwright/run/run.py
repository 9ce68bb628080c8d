"""A run: a store, workers as coroutines, processes or Ray actors, and a scheduler for each stream of groups.

Invariants:
- Whichever way the run ends, its environments and its policy are closed and nothing is left running.
- If the workers fail or end, the call that waits for a batch raises the error instead of waiting forever.
- A resumed run plays what it would have played before: settings that would change the episodes are refused.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from rollwright.aio import is_cancellation
from rollwright.config import EnvManagerConfig, RunConfig
from rollwright.config.resuming import SettingChange
from rollwright.engines.base import Capabilities, Policy
from rollwright.errors import ConfigError, RollwrightError, RunClosed
from rollwright.rollout import Activity, Batch, Fate, Ledger, RolloutScheduler
from rollwright.rollout.draws import RecordedDraws
from rollwright.rollout.filters import build_filters
from rollwright.rollout.groups import draw_in_order
from rollwright.rollout.scheduler import FOREIGN_CANCELLATION
from rollwright.rollout.stream import CompletionsRead, rollout_ids
from rollwright.rollout.worker import first_cause
from rollwright.run.build import SettingsTable, build_curriculum
from rollwright.run.build_agents import build_board
from rollwright.run.build_draws import build_draws, check_task_sampler, restore_draws
from rollwright.run.build_tasks import record_fingerprints
from rollwright.run.build_teams import build_run_policy
from rollwright.run.checks import check_tags, probe_engine
from rollwright.run.costs import CostBook
from rollwright.run.evaluation_order import apply_order
from rollwright.run.evaluation_stream import EvaluationStream
from rollwright.run.folder import RunFolder
from rollwright.run.gc_tuning import no_collections, rare_collections
from rollwright.run.hooks import RunHooks
from rollwright.run.pruning import TrajectoryReleaser, delete_forgotten
from rollwright.run.recovery import enter_finished
from rollwright.run.retention import Forgotten
from rollwright.run.validations import VALIDATION, begun_validations, stream_of
from rollwright.run.worker_settings import MODEL, leave_settings
from rollwright.run.workers import RunWorkers, managers_of
from rollwright.store.api import Store
from rollwright.store.memory import MemoryStore
from rollwright.store.opening import open_store
from rollwright.teams import TeamPolicies

Result = TypeVar("Result")


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
        self.board = build_board(config)
        """Where remote programs take rollouts, wherever these are played; `None`: no tag is played by such."""
        self.settings = SettingsTable(config, self.board)
        self.curriculum = build_curriculum(config)
        """Curriculum of the training stream; `None` without one."""
        check_task_sampler(config)
        self.draws: RecordedDraws | None = None
        """What the training groups play, if it depends on earlier ones."""
        if config.train_env_manager is not None:
            level_of = self.settings.level_of("train", config.train_env_manager.slot_tags())
            self.draws = build_draws(config, self.curriculum, level_of, self.settings.ordered_level, folder)
        for manager in managers_of(config):
            build_filters(manager)  # a wrong filter raises an error here, before anything is written
        self.policy = policy if isinstance(policy, TeamPolicies) else build_run_policy(config, policy)
        self.settings.use_policy(self.policy)
        self.workers = RunWorkers(
            config, self.settings, self.policy, board=self.board, processes=processes, ray=ray
        )
        self.costs = CostBook(
            config,
            folder,
            running=lambda: self.ledger.counts[Fate.RUNNING],
            capacity=lambda: self.workers.capacity,
        )
        """What the run has spent; the gate of its budget."""
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
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._given_store = store
        self._forget = store is None
        """Whether the store is in memory and belongs to this run, so that settled rollouts need not stay in it."""
        self._delivered = delivered
        self._forgotten = forgotten
        self._stack = AsyncExitStack()
        self._validations = max(self._validated, default=-1) + 1
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
        self.workers.stop_claiming()
        with no_collections():
            if self._forget and self._work is not None:
                # Nobody resumes what they play, so the store need not tell each episode to stop first.
                self._work.cancel()
                await asyncio.gather(self._work, return_exceptions=True)
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
        log = self._read_completions()
        if self._folder is not None and not self._forget:
            self._releaser = TrajectoryReleaser(self.store, self._folder.log)
            self._stack.push_async_callback(self._releaser.release_rest)
            if self._delivered is not None:  # an earlier process may have ended before this
                await enter_finished(self.store, self._folder, log, self.config)
                await self._releaser.release(self._folder.log.rollouts)
        if self._forgotten is not None and self._forgotten.steps:
            await delete_forgotten(
                self.store, self._forgotten, cancel=True
            )  # an earlier process may have ended before this
        if self._delivered is not None and self.config.val_env_manager is not None:
            ids = await rollout_ids(self.store, f"{self.config.name}.{VALIDATION}", VALIDATION, log)
            begun = begun_validations(self.config.name, ids)
            self.unfinished_validations = sorted(begun - self._validated.keys())
        address = given if isinstance(given, str) else None
        self._work = await self.workers.start(self.store, address, self._stack, drain=not self._forget)
        if self.draws is not None and self._folder is not None and self._delivered is not None:
            await restore_draws(self.draws, self.config, self.store, self._folder, log)
        if self.config.train_env_manager is not None:
            scheduler = self._scheduler(self.config.train_env_manager, "train", "train", self._delivered, log)
            self._training = await self._stack.enter_async_context(scheduler)

    def _read_completions(self) -> CompletionsRead:
        """What recovery has read of the store's completion log. Nothing of it counts if the rollouts were deleted since,
        because another model begins anew."""
        if self._folder is None:
            return CompletionsRead()
        log, self._folder.completions = self._folder.completions, None
        anew = any(each.key == MODEL for each in self.changes)
        return CompletionsRead() if log is None or anew else log

    async def _close_policy(self) -> None:
        try:
            await self.policy.close()
        except BaseException as error:
            if isinstance(error, Exception) or is_cancellation(error):
                raise
            raise RollwrightError(f"policy: raised {type(error).__name__} when it was closed") from error

    @property
    def activity(self) -> Activity:
        """What the workers do at the moment, and how much they have done."""
        return self.workers.activity

    async def get_batch(self, batch_size: int | None = None) -> Batch:
        """The next training batch; see `RolloutScheduler.get_batch`."""
        if self.config.train_env_manager is None:
            raise ConfigError("train_env_manager: is not set, so there are no training batches")
        self._check_open()
        assert self._training is not None
        batch = await self._unless_workers_end(self._training.get_batch(batch_size or self.config.batch_size))
        if self.draws is not None:
            self.draws.end_batch()
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
            if self._forget and number in self._validated:
                # It is played again, because a store in memory keeps nothing of it.
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
        await delete_forgotten(self.store, forgotten)

    def _scheduler(
        self,
        manager: EnvManagerConfig,
        mode: str,
        stream: str,
        delivered: Collection[str] | None,
        log: CompletionsRead | None = None,
    ) -> RolloutScheduler:
        forgotten = self._forgotten if mode == "train" else None
        evaluation = self._evaluation if mode == VALIDATION else None
        draws = self.draws if mode == "train" else None
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
            completions=log,
            draw=draws or draw_in_order(played.level_of, manager.group_size),
            observe=None if draws is None else draws.observe,
            slot_tags=played.slot_tags,
            first=0 if forgotten is None else forgotten.floor,
            forgotten=None if forgotten is None else forgotten.ledger,
            keep_accounts=forgotten is not None,
            hooks=RunHooks(
                self.costs, self._folder, self._releaser, evaluation, self._on_finished, self._on_failed
            ),
            pace=None if evaluation is None else evaluation.early_stop,
            replace_failed=evaluation is None,
            gate=self.costs if self.config.budget is not None else None,
            ranker=self.settings.ranker() if mode == "train" else None,
        )
        self.schedulers.append(scheduler)
        return scheduler

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
