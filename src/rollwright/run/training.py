"""A training run: rollouts, a trainer in a thread of its own, and new weights for the policy after every step.

Invariants:
- Killed at any moment and started again, the run trains on every delivered batch once, in the same order, to the same
  weights. The record of the batches (`training_record`) is the source of truth: a checkpoint says how many of them its
  weights contain, and the rest is trained again from recorded trajectories before any episode is played. So no episode
  resumes with older weights than it was started with.
- With `training.keep_steps`, older steps are pruned after a checkpoint, and never beyond the oldest kept checkpoint
  (`retention`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollwright.config import RunConfig
from rollwright.engines.base import Policy, UpdateMode
from rollwright.errors import ConfigError
from rollwright.rollout import Batch, Ledger
from rollwright.run.build_training import (
    AnyTrainer,
    check,
    check_adapters,
    copy_tokenizer,
    in_process,
    make_policy,
    make_trainer,
    make_training_advantage,
    training_of,
    updatable,
)
from rollwright.run.checks import probe_engine
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.live_snapshot import LiveSnapshots, describe_run
from rollwright.run.recovery import recover
from rollwright.run.retention import keep_last, lowest_index, next_cut, numbered, write_forgotten
from rollwright.run.run import Run
from rollwright.run.statistics import batch_row
from rollwright.run.training_record import (
    FIGURES,
    RecordedBatch,
    recorded_batches,
    trained_in,
    training_rows,
)
from rollwright.run.training_state import TrainingState
from rollwright.run.validations import VALIDATION, recorded_validations
from rollwright.training.advantages import Remembering
from rollwright.training.metrics import Metrics
from rollwright.training.pipeline import Cadence, Pipeline, Stages
from rollwright.training.report import StepReport
from rollwright.training.rows import build_rows
from rollwright.trajectory import Floats, TokenIds, Trajectory

CHECKPOINTS, WEIGHTS, MODEL = "checkpoints", "weights", "model"
"""Folders of a run: checkpoints of the trainer, weights for an engine to load, the trained model."""

KEPT_WEIGHTS = 2
"""Folders of weights that stay: the version that the engine uses, and the version that it loads."""

Row = Callable[[str, int, float, Batch], dict[str, Any]]
"""Makes a batch's line of `metrics.jsonl`: `(mode, step, seconds, batch)`."""
Result = TypeVar("Result")


class BatchSource(Protocol):
    """Makes batches of own groups and of groups that other peers have played."""

    async def next_batch(self, step: int, play: Callable[[], Awaitable[Batch]]) -> Batch:
        """`play` returns the next batch of own groups; groups of other peers follow them, and are recorded, too."""
        ...


class TrainingRun:
    """`await TrainingRun(config, folder).run()`; its figures may be read meanwhile."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        resume: bool = False,
        policy: Policy | None = None,
        store: str | None = None,
        ray: str | None = None,
        row: Row = batch_row,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            resume: Whether the folder was reopened and holds an earlier part of this training.
            policy: Policy to train instead of the configured one.
            store: Address of the store; by default the rollouts are kept in memory.
            ray: Address of the Ray cluster on which the trainer's other ranks run; by default they run on this machine.
            row: Makes a batch's line of `metrics.jsonl`.
            on_progress: Called after every finished rollout and every micro-batch, in any thread.
        """
        check(config)
        self.config = config
        self.training = training_of(config)
        self.folder = folder
        self.local: Run | None = None
        """Run that plays the rollouts; `None` before it starts, and if recorded batches are trained on."""
        self.state = TrainingState(config.name)
        self.report: StepReport | None = None
        """Report of the last step."""
        self.checksum: str | None = None
        """Checksum of the final weights; `None` before they are exported."""
        self._advantage = make_training_advantage(self.training)
        self._remembering = self._advantage if isinstance(self._advantage, Remembering) else None
        self._source = None if self.training.from_run is None else RunReader(Path(self.training.from_run))
        self._recorded: Iterator[RecordedBatch] = iter(())
        """Batches of `from_run` that are not trained on yet."""
        self._policy = None if self._source else policy or make_policy(config)
        if self._policy is not None:
            updatable(self._policy, config.policy.kind)
            check_adapters(self._policy, self.training)
        self._resume = resume
        self._store = store
        self._ray = ray
        self._row = row
        self._batches: BatchSource | None = None
        self._on_progress = on_progress
        self._validated: dict[int, Ledger] = {}
        """Ledgers of the validations that an earlier process has finished."""
        self._trainer: AnyTrainer | None = None
        self._steps_at_start = 0
        """Steps that earlier processes have trained."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._metrics: Metrics | None = None
        self.pipeline: Pipeline[Any] = Pipeline(self._cadence(), self._stages())

    @property
    def trainer(self) -> AnyTrainer:
        if self._trainer is None:
            raise ConfigError("trainer: is built when the training starts")
        return self._trainer

    @property
    def is_simulated(self) -> bool:
        """Whether it trains on rollouts of the simulated engine, played now or recorded."""
        return self.config.plays_simulated if self._source is None else self._source.simulated

    @property
    def trained(self) -> int | None:
        """Version of the trainer's weights; `None` before the trainer is built."""
        return None if self._trainer is None else self._trainer.version

    async def run(self, batches: BatchSource | None = None) -> None:
        """Train until `max_steps`, and export the result to `model` in the run's folder.

        `batches` mixes groups of other peers into the batches of the scheduler.
        """
        self._batches = batches
        (self.folder.path / FIGURES).mkdir(exist_ok=True)
        async with AsyncExitStack() as stack:
            stack.callback(self._close)
            stack.push_async_callback(asyncio.to_thread, self._thread.shutdown)
            stack.callback(self._interrupt)
            await stack.enter_async_context(LiveSnapshots(self.folder, self._describe_live))
            validated = await self._begin()
            self._steps_at_start = self.pipeline.done
            under_way: Collection[int] = ()
            if self.local is not None:
                await stack.enter_async_context(self.local)
                under_way = self.local.unfinished_validations
            await self.pipeline.run(validated, under_way)
            self.checksum = (await self._in_thread(self._export_result)).checksum

    def _describe_live(self) -> dict[str, Any]:
        training = {
            "stage": self.pipeline.stage,
            "steps": self.pipeline.done,
            "steps_at_start": self._steps_at_start,
            "most_steps": self.pipeline.cadence.steps,
            "staleness": {str(age): count for age, count in sorted(self.state.staleness.items())},
            "split": self.pipeline.split.row(),
        }
        return training if self.local is None else training | describe_run(self.local)

    def summary(self) -> dict[str, Any]:
        """Figures of the training so far."""
        trainer = self._trainer
        return {
            "steps": self.pipeline.done,
            "version": trainer.version if trainer else None,
            "weights": self.checksum,
            "skipped": dict(trainer.skipped) if trainer else {},
            "left_out": dict(self.state.left_out),
            "time": self.pipeline.split.row(),
            "staleness": {str(age): count for age, count in sorted(self.state.staleness.items())},
            "length_bias": self.state.bias.row(),
            "validations": self.state.validations,
        }

    def _cadence(self) -> Cadence:
        config = self.config
        return Cadence(
            steps=config.max_steps
            if self._source is None
            else min(config.max_steps, len(self._source_rows())),
            validation=config.val_env_manager is not None and self._source is None,
            eval_steps=config.eval_steps,
            checkpoint_steps=self.training.checkpoint_steps,
        )

    def _stages(self) -> Stages[Any]:
        live = self._source is None
        return Stages(
            get_batch=self._next_batch if live else self._next_recorded,
            record=self._record_batch if live else self._copy_record,
            train=lambda step, batch: self._train(step, _groups(batch)),
            update=self._update,
            evaluate=self._evaluate,
            checkpoint=self._checkpoint,
        )

    async def _begin(self) -> set[int]:
        """Give the policy the trainer's weights before the first token is sampled; returns the recorded validations."""
        policy = self._policy
        try:
            if self._resume and self._store is not None and self._source is None:
                await recover(self.folder, self._store, self.config)
            validated = await self._prepare()
            if policy is not None:
                await _check_trainable(policy)
                await self._give_weights(policy)
                self.local = self._rollouts(policy)
        except BaseException:
            if policy is not None:
                await policy.close()
            raise
        return validated

    def _rollouts(self, policy: Policy) -> Run:
        local = Run(
            self.config,
            policy=policy,
            store=self._store,
            delivered=self.state.delivered() if self._resume else None,
            validated=self._validated,
            forgotten=self.state.forgotten if self._keep is not None or self.state.forgotten.steps else None,
            folder=self.folder,
            on_finished=self._on_finished,
            on_failed=self.folder.add_failure,
        )
        if local.curriculum is not None and self.state.record.rows:
            local.curriculum.restore(self.state.record.rows[-1].get("curriculum", {}))
        return local

    @property
    def _keep(self) -> int | None:
        """Steps that are kept at least; `None`: all."""
        keep = self.training.keep_steps
        return keep if isinstance(keep, int) else None

    async def logprobs(self, sequences: Sequence[tuple[TokenIds, TokenIds]]) -> list[Floats]:
        """See `Trainer.logprobs`; waits for the current step."""
        return await self._in_thread(self.trainer.logprobs, sequences)

    async def _prepare(self) -> set[int]:
        """Build the trainer and train it up to the end of the record; returns the recorded validations."""
        self._trainer = await self._in_thread(make_trainer, self.config, self.folder.path, self._ray)
        self._trainer.on_progress = self._on_progress
        reader = RunReader(self.folder.path)
        if self._resume:
            self.state.read_record(reader)
        start = await self._in_thread(self._restore) if self._resume else 0
        self._metrics = Metrics(
            self.folder.path / FIGURES, self.training.writers, resume_at=start if self._resume else None
        )
        if self.state.forgotten.steps:
            self._metrics.forget(self.state.forgotten.steps)
        self._validated = recorded_validations(reader.metrics())
        played = {row["step"]: row for row in reader.metrics() if row["mode"] == VALIDATION}
        for done, row in played.items():
            self._add_validation(done, row, write=done >= start)
        if self._resume and self._source is None:
            self.state.read_lengths(reader)
        self.pipeline.done = start
        for batch in recorded_batches(self._source or reader, self.state.record.since(start)):
            await self._train(self.pipeline.done, batch.groups)
            self.pipeline.done += 1
            if self.pipeline.cadence.checkpoints(self.pipeline.done):
                await self._checkpoint(self.pipeline.done)
        if self._source is not None:
            self._recorded = recorded_batches(self._source, self._source_rows()[self.pipeline.done :])
        return set(played)

    def _restore(self) -> int:
        return self.state.restore(
            self.trainer, self.folder, self.folder.path / CHECKPOINTS, self._remembering
        )

    async def _next_batch(self) -> Batch:
        assert self.local is not None
        if self._batches is None:
            return await self.local.get_batch()
        batch = await self._batches.next_batch(self.pipeline.done, self.local.get_batch)
        for trajectory in batch.trajectories:
            self.folder.add_trajectory(trajectory.rollout_id, trajectory.to_bytes())
        return batch

    async def _next_recorded(self) -> RecordedBatch:
        return next(self._recorded)

    def _record_batch(self, step: int, batch: Batch, seconds: float) -> None:
        own = [each for each in batch.trajectories if self.state.is_own(each.group_id)]
        tokens = sum(each.sampled_tokens for each in own)
        row = {**self._row("train", step, seconds, batch), "own": len(own), "tokens": tokens}
        if self.local is not None and self.local.curriculum is not None:
            row["curriculum"] = self.local.curriculum.state()
        if self.local is not None and self.local.draws is not None and (shown := self.local.draws.figures()):
            row["task_sampler"] = dict(shown)
        self.folder.add_metrics(row)
        self.state.record.append(row)
        self.state.bias.add_trained(*trained_in(row))

    def _copy_record(self, step: int, batch: RecordedBatch, seconds: float) -> None:
        self.folder.add_metrics(batch.row)
        self.state.record.append(batch.row)

    async def _train(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        report = await self._in_thread(self._step, groups)
        self.report = report
        self.state.add_step(report)
        figures = report.figures()
        figures |= {f"time/{name}": seconds for name, seconds in self.pipeline.split.row().items()}
        figures |= self.state.figures()
        assert self._metrics is not None
        self._metrics.write(step, figures)

    def _step(self, groups: Sequence[Sequence[Trajectory]]) -> StepReport:
        self.state.add_left_out(groups)
        values = None if self.training.critic is None else self.trainer.values
        rows = build_rows(groups, self._advantage, view=self.training.samples, values=values)
        if self._remembering is not None:
            self._remembering.observe(groups)
        return self.trainer.step(rows)

    async def _update(self) -> None:
        policy = self._policy
        if policy is not None and policy.version != self.trainer.version:  # equal if the step was skipped
            await self._give_weights(policy)

    async def _give_weights(self, policy: Policy) -> None:
        in_memory = self.training.hand_over == "tensors"
        if self.training.hand_over == "auto":
            in_memory = in_process(self.config)
        if in_memory:
            weights = await self._in_thread(self.trainer.weights)
        else:
            place = self.folder.path / WEIGHTS / f"{self.trainer.version:06d}"
            adapter = self.training.hand_over == "adapter"
            export = self.trainer.export_adapter if adapter else self.trainer.export
            weights = await self._in_thread(export, place)
        await updatable(policy, self.config.policy.kind).update_weights(
            weights, UpdateMode(self.training.update_mode)
        )
        keep_last(self.folder.path / WEIGHTS, KEPT_WEIGHTS)

    async def _evaluate(self, done: int) -> None:
        assert self.local is not None
        clock = asyncio.get_running_loop().time
        began = clock()
        batch = await self.local.evaluate(done)
        judged = [each.success for each in batch.trajectories if each.success is not None]
        row = self._row(VALIDATION, done, clock() - began, batch)
        row.setdefault("ledger", {str(place): count for place, count in batch.ledger.counts.items()})
        row.setdefault("reasons", dict(batch.ledger.reasons))
        row["success"] = sum(judged) / len(judged) if judged else None
        self.folder.add_metrics(row)
        self._add_validation(done, row)

    def _add_validation(self, done: int, row: Mapping[str, Any], *, write: bool = True) -> None:
        figures = self.state.add_validation(done, row)
        if write and self._metrics is not None:
            self._metrics.write(done, {f"val/{name}": value for name, value in figures.items()})

    async def _checkpoint(self, done: int) -> None:
        place = self.folder.path / CHECKPOINTS
        await self._in_thread(
            self.state.save, self.trainer, self.folder, place / f"{done:06d}", done, self._remembering
        )
        keep_last(place, self.training.keep_checkpoints)
        if (
            self.local is not None or self._source is not None
        ):  # else no scheduler knows yet which groups are settled
            await self._prune(done)

    async def _prune(self, done: int) -> None:
        """Prune the steps older than `keep_steps`, if there are enough of them."""
        state, oldest = self.state, int(numbered(self.folder.path / CHECKPOINTS)[0].name)
        cut = next_cut(self._keep, forgotten=state.forgotten.steps, done=done, oldest_checkpoint=oldest)
        if cut is None:
            return
        floor, settled, validated = 0, Ledger(), Ledger()
        if self.local is not None:
            validated = self.local.settle_validations(cut)
            floor, settled = self.local.settle(lowest_index(self.config.name, state.record.since(cut)))
        forgotten = state.plan_pruning(
            cut, floor=floor, settled=settled, validated=validated, played=self._source is None
        )
        await self._in_thread(write_forgotten, self.folder.path, forgotten)
        # No reader shows these steps from here on. A process that crashes in the removal below repeats it on resume.
        state.prune(forgotten)
        self.folder.remove(await self._in_thread(self.folder.copy_kept, forgotten))
        assert self._metrics is not None
        self._metrics.forget(cut)
        if self.local is not None:
            await self.local.forget(forgotten)

    def _on_finished(self, rollout_id: str, encoded: bytes) -> None:
        self._on_progress()
        self.folder.add_trajectory(rollout_id, encoded)
        self.state.lengths.add(Trajectory.from_bytes(encoded))

    def _export_result(self) -> Any:
        place = self.folder.path / MODEL
        weights = self.trainer.export(place)
        copy_tokenizer(self.config, place)
        return weights

    def _source_rows(self) -> list[dict[str, Any]]:
        assert self._source is not None
        return training_rows(self._source)

    def _in_thread(self, call: Callable[..., Result], *arguments: Any) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _interrupt(self) -> None:
        """End a step that waits for a trainer elsewhere, so that its thread ends."""
        if self._trainer is not None:
            self._trainer.interrupt()

    def _close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
        if self._metrics is not None:
            self._metrics.close()


async def _check_trainable(policy: Policy) -> None:
    """Raise an error for an engine without token ids and log-probabilities, before anything is played."""
    can = await probe_engine(policy)
    if can is not None and not can.trainable:
        raise ConfigError(f"policy: {can.engine} is not trainable: {can.missing}")


def _groups(batch: Batch | RecordedBatch) -> Sequence[Sequence[Trajectory]]:
    if isinstance(batch, RecordedBatch):
        return batch.groups
    return [group.trajectories for group in batch.groups]
