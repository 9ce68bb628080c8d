"""A training run that is killed while it forgets, before a chosen one of the operations by which it does."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_training

from rollwright.run.training_run import TrainingRun
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
        forget = TrainingRun._forget

        async def watched(run: TrainingRun, done: int) -> None:
            self._forgetting = True
            try:
                await forget(run, done)
            finally:
                self._forgetting = False

        setattr(TrainingRun, "_forget", watched)

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
