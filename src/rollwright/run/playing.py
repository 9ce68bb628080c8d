"""Plays a whole run, or the rest of one, into its folder: every batch, the validations beside them, the summary.

Invariants:
- A batch's line is in the folder before the next batch is asked for; a resumed run plays only the steps without a line.
- Validations that an earlier process has started, or should have, are played first. Validations run beside the training
  rollouts, and none is left running at the end.
- The summary is written whichever way the run ends (`summary.conclude`).
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollwright.config import RunConfig
from rollwright.engines.base import Policy
from rollwright.rollout import Batch, Ledger
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.live_snapshot import LiveSnapshots, describe_run
from rollwright.run.pruning import BatchRetention
from rollwright.run.recovery import recover
from rollwright.run.retention import Forgotten
from rollwright.run.run import Run
from rollwright.run.statistics import batch_row
from rollwright.run.summary import conclude, summarize
from rollwright.run.validations import VALIDATION, due_validations, recorded_validations

if TYPE_CHECKING:
    from rollwright.run.training import TrainingRun


@dataclass
class Progress:
    """The finished part of a run."""

    steps: int = 0
    done: set[int] = field(default_factory=set)
    """Finished steps; one may be missing in between, if its line was damaged."""
    validations: dict[int, Ledger] = field(default_factory=dict)
    """Finished validations, with the ledger of each."""
    delivered: list[str] | None = None
    """Training groups that were delivered; `None` for a new run."""
    forgotten: Forgotten = field(default_factory=Forgotten)
    """Steps that retention has removed from the folder."""

    @classmethod
    def of(cls, reader: RunReader) -> "Progress":
        """Progress that the folder of an earlier process shows."""
        rows, forgotten = reader.metrics(), reader.forgotten()
        train = [row for row in rows if row["mode"] == "train"]
        return cls(
            steps=forgotten.steps + len(train),
            done={*range(forgotten.steps), *(row["step"] for row in train)},
            validations=recorded_validations(rows),
            delivered=[*forgotten.delivered, *(group for row in train for group in row["groups"])],
            forgotten=forgotten,
        )

    def is_complete(self, config: RunConfig) -> bool:
        """Whether nothing is left to play."""
        steps = config.max_steps if config.train_env_manager else 0
        validated = config.val_env_manager is None or steps in self.validations or self.steps > steps
        return self.steps >= steps and validated and not self.due(config)

    def due(self, config: RunConfig) -> list[int]:
        """Validations between the finished batches that are not recorded."""
        if config.val_env_manager is None:
            return []
        due = due_validations(min(self.steps, config.max_steps - 1), config.eval_steps, self.validations)
        return [number for number in due if number >= self.forgotten.steps]


class RunObserver:
    """Follows a run or a training while it works. Every method does nothing until a subclass overrides it."""

    def watch_run(self, run: Run, progress: Progress) -> AbstractAsyncContextManager[object]:
        """Context that is entered when the workers have started, and left before they stop."""
        return nullcontext()

    def watch_training(self, training: "TrainingRun") -> AbstractAsyncContextManager[object]:
        """Context around a training, from loading the trainer to the exported model."""
        return nullcontext()

    def on_batch(self, mode: str, step: int, batch: Batch) -> None:
        """A batch of the mode `train` or `val` was delivered; its step counts from 0, a validation's from the base model."""


async def play_run(
    config: RunConfig,
    folder: RunFolder,
    *,
    store: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    policy: Policy | None = None,
    resume: bool = False,
    observer: RunObserver | None = None,
) -> dict[str, Any]:
    """Play all batches and validations of `config` that the folder lacks; returns the summary, which is also in the folder.

    Cancelling the call interrupts the run in good order: it returns a summary whose `interrupted` is true, and
    `resume=True` with the reopened folder plays the rest.

    Args:
        store: Address of the store; by default the one that the folder names, else a database in the folder.
        workers: Most worker processes; by default the workers are coroutines of this process.
        ray: `auto`, `local` or the address of a Ray cluster whose actors are the workers.
        policy: Policy to use instead of the configured one; only if this process plays.
        resume: Whether the folder was reopened and holds an earlier part of this run.
        observer: Follows the run, for a screen.
    """
    observer = observer or RunObserver()
    progress = Progress.of(RunReader(folder.path)) if resume else Progress()
    address = folder.store_address(store)
    retention = BatchRetention(config, folder, progress.forgotten)
    run = Run(
        config,
        policy=policy,
        store=address,
        processes=workers,
        ray=ray,
        delivered=progress.delivered,
        validated=progress.validations,
        forgotten=retention.forgotten if retention.is_on else None,
        folder=folder,
        on_finished=folder.add_trajectory,
        on_failed=folder.add_failure,
    )

    async def play() -> None:
        if resume:
            await recover(folder, address, config)
        steps = {"steps_at_start": progress.steps, "most_steps": config.max_steps}
        live = LiveSnapshots(
            folder, lambda: steps | {"stage": "rollout", "steps": progress.steps} | describe_run(run)
        )
        async with run, live, observer.watch_run(run, progress):
            await _BatchLoop(run, folder, progress, retention, observer).play()

    async def describe(seconds: float) -> dict[str, Any]:
        return {**await summarize(run, folder, seconds), "resumed": resume, "lost": len(folder.lost)}

    return await conclude(play(), folder, describe)


class _BatchLoop:
    """Collects the batches that are left, with the validations beside them."""

    def __init__(
        self,
        run: Run,
        folder: RunFolder,
        progress: Progress,
        retention: BatchRetention,
        observer: RunObserver,
    ) -> None:
        self._run = run
        self._folder = folder
        self._progress = progress
        self._retention = retention
        self._observer = observer
        self._validations: dict[int, asyncio.Task[None]] = {}
        self._unfinished: set[int] = set()
        """Validations that run, whose rollouts must not be pruned."""

    async def play(self) -> None:
        config = self._run.config
        steps = config.max_steps if config.train_env_manager else 0
        try:
            for number in sorted({*self._run.unfinished_validations, *self._progress.due(config)}):
                self._start_validation(number)
            for step in range(steps):
                if step in self._progress.done:
                    continue
                await self._collect(step)
                done = step + 1
                if config.eval_steps is not None and done % config.eval_steps == 0 and done < steps:
                    self._start_validation(done)
                await self._retention.forget(self._run, done, self._unfinished)
            self._start_validation(steps)
            await asyncio.gather(*self._validations.values())
        finally:
            for task in self._validations.values():
                task.cancel()
            await asyncio.gather(*self._validations.values(), return_exceptions=True)

    async def _collect(self, step: int) -> None:
        began = time.monotonic()
        batch = await self._run.get_batch()
        self._folder.add_metrics(batch_row("train", step, time.monotonic() - began, batch))
        self._progress.steps = step + 1
        self._observer.on_batch("train", step, batch)

    def _start_validation(self, number: int) -> None:
        known = number in self._progress.validations or number in self._validations
        if self._run.config.val_env_manager and not known:
            self._validations[number] = asyncio.create_task(self._validate(number))

    async def _validate(self, number: int) -> None:
        began = time.monotonic()
        self._unfinished.add(number)
        batch = await self._run.evaluate(number)
        self._folder.add_metrics(batch_row(VALIDATION, number, time.monotonic() - began, batch))
        self._unfinished.discard(number)
        self._observer.on_batch(VALIDATION, number, batch)
