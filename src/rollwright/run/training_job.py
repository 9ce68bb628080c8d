"""Whole trainings in a run folder: from the first step to the end or an interruption, and whether one is done."""

from pathlib import Path
from typing import Any

from rollwright.config import RunConfig
from rollwright.engines.base import Policy
from rollwright.rollout import Batch
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.playing import RunObserver
from rollwright.run.statistics import batch_row
from rollwright.run.summary import conclude, summarize
from rollwright.run.training import MODEL, TrainingRun
from rollwright.run.training_record import (
    training_rows,
)


async def train_run(
    config: RunConfig,
    folder: RunFolder,
    *,
    store: str | None = None,
    policy: Policy | None = None,
    resume: bool = False,
    ray: str | None = None,
    observer: RunObserver | None = None,
) -> dict[str, Any]:
    """Train until `max_steps`; returns the summary, which is also in the folder. The model is in the folder's `model`.

    Cancelling the call interrupts the training in good order: it returns a summary whose `interrupted` is true, and
    `resume=True` with the reopened folder trains the rest.

    Args:
        store: Address of the store; by default the one that the folder names, else a database in the folder.
        policy: Policy to train instead of the configured one.
        resume: Whether the folder was reopened and holds an earlier part of this training.
        ray: Address of the Ray cluster on which the trainer's other ranks run.
        observer: Follows the training, for a screen.
    """
    watching = observer or RunObserver()

    def row(mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
        watching.on_batch(mode, step, batch)
        return batch_row(mode, step, seconds, batch)

    address = folder.store_address(store)
    run = TrainingRun(config, folder, resume=resume, policy=policy, store=address, ray=ray, row=row)

    async def train() -> None:
        async with watching.watch_training(run):
            await run.run()

    async def describe(seconds: float) -> dict[str, Any]:
        summary: dict[str, Any] = {"name": config.name, "simulated": run.is_simulated}
        if run.local is not None:
            summary |= await summarize(run.local, folder, seconds)
        return summary | {"seconds": round(seconds, 3), "training": run.summary()}

    return await conclude(train(), folder, describe)


def is_trained(reader: RunReader, config: RunConfig) -> bool:
    """Whether the training in this folder has done all steps that these settings ask for, and has left its model."""
    if not reader.ended or not (reader.path / MODEL).is_dir():
        return False
    done = int((reader.summary() or {}).get("training", {}).get("steps") or 0)
    source = None if config.training is None else config.training.from_run
    available = config.max_steps if source is None else len(training_rows(RunReader(Path(source))))
    return done >= min(config.max_steps, available)
