"""The older batches of a run that only plays are forgotten, where `keep_steps` is set; training does it by its own rules.

Always true: as in `retention`. Nothing is forgotten that is not settled, and no validation that is under way; the ledger
goes on counting what is forgotten.
"""

import asyncio
from collections.abc import Iterable

from rollwright.config import RunConfig
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.local import LocalRun
from rollwright.run.retention import Forgotten, lowest_index, next_cut, write_forgotten
from rollwright.run.training_record import TrainingRecord, forgotten_with


class BatchRetention:
    def __init__(self, config: RunConfig, folder: RunFolder, forgotten: Forgotten) -> None:
        """`forgotten`: by earlier processes."""
        self._config = config
        self._folder = folder
        self.forgotten = forgotten if forgotten.steps else Forgotten(config.name)

    @property
    def is_on(self) -> bool:
        return self._config.keep_steps is not None or bool(self.forgotten.steps)

    async def forget(self, run: LocalRun, done: int, under_way: Iterable[int]) -> None:
        """Forgets what is older than `keep_steps`, if it is worth it. All steps before `done` are done; `under_way`:
        the validations that are not."""
        before = self.forgotten
        oldest = min([done, *under_way])
        cut = next_cut(self._config.keep_steps, forgotten=before.steps, done=done, oldest_checkpoint=oldest)
        if cut is None:
            return
        rows = [row for row in RunReader(self._folder.path).metrics() if row["mode"] == "train"]
        record = TrainingRecord(sorted(rows, key=lambda row: int(row["step"])), before.position)
        floor, settled = run.settle(lowest_index(self._config.name, record.since(cut)))
        self.forgotten = forgotten = forgotten_with(
            before,
            record,
            cut,
            floor=floor,
            settled=settled,
            generated=(),
            played=False,
            validated=run.settle_validations(cut),
        )
        await asyncio.to_thread(write_forgotten, self._folder.path, forgotten)
        # From here on it is forgotten. What follows removes it, and is done again by whoever goes on after a crash.
        self._folder.remove(await asyncio.to_thread(self._folder.copy_kept, forgotten))
        await run.forget(forgotten)
