"""A training run that is killed while it forgets, before a chosen one of the operations by which it does."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_training

from rollwright.run.folder import RunFolder
from rollwright.run.training import TrainingRun
from rollwright.store.sql.store import SqlStore


class Operations:
    """Everything that forgetting does to the disk, counted; before the one numbered `fatal` the process is killed."""

    def __init__(self, fatal: int | None = None) -> None:
        self.names: list[str] = []
        self._fatal = fatal
        self._forgetting = False

    def watch(self, setattr: Callable[[Any, str, Any], None]) -> None:
        for owner, name in ((os, "fsync"), (os, "replace"), (SqlStore, "delete_rollouts")):
            setattr(owner, name, self._counted(name, getattr(owner, name)))
        forget = TrainingRun._prune

        async def watched(run: TrainingRun, done: int) -> None:
            self._forgetting = True
            try:
                await forget(run, done)
            finally:
                self._forgetting = False

        setattr(TrainingRun, "_prune", watched)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if self._forgetting:
                self.names.append(name)
                if len(self.names) == self._fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted


def train_in_process(runs: Path, model: Path, more: dict[str, Any], fatal: int) -> None:
    Operations(fatal).watch(setattr)
    config = tiny_training.configuration(model, **more)
    asyncio.run(tiny_training.train(runs, config, model))


def train_and_tell(runs: Path, model: Path, more: dict[str, Any], told: Path) -> None:
    """As `train_in_process`, and every line of the record also goes to a file that forgets nothing."""
    add = RunFolder.add_metrics

    def add_and_tell(folder: RunFolder, row: Mapping[str, Any]) -> None:
        add(folder, row)
        with told.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    setattr(RunFolder, "add_metrics", add_and_tell)  # noqa: B010
    asyncio.run(tiny_training.train(runs, tiny_training.configuration(model, **more), model))
