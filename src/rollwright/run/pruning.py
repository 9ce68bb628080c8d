"""Pruning while a run plays: batches older than `keep_steps`, and the store's copies of finished trajectories.

Invariants:
- `retention.Forgotten` is on the disk before a step is pruned. No unsettled group and no running validation is pruned; the
  ledger still counts pruned rollouts.
- A trajectory is released from the store only after the run's log was synced to the disk with it. At every moment, through
  kills and power cuts, it is whole in the store or in the log. A bounded number is in both for a while, so that one sync
  serves many of them, and no rollout waits for it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rollwright.config import RunConfig
from rollwright.errors import RollwrightError
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.retention import Forgotten, lowest_index, next_cut, write_forgotten
from rollwright.run.training_record import TrainingRecord, forgotten_with
from rollwright.run.trajectory_log import TrajectoryLog
from rollwright.run.worker_settings import DELETED_AT_ONCE
from rollwright.store.api import Store
from rollwright.store.transitions import FINAL_ROLLOUT

if TYPE_CHECKING:
    from rollwright.run.run import Run


class BatchRetention:
    """Removes the batches of a run that are older than `keep_steps`."""

    def __init__(self, config: RunConfig, folder: RunFolder, forgotten: Forgotten) -> None:
        """`forgotten`: steps that earlier processes have pruned."""
        self._config = config
        self._folder = folder
        self.forgotten = forgotten if forgotten.steps else Forgotten(config.name)

    @property
    def is_on(self) -> bool:
        return self._config.keep_steps is not None or bool(self.forgotten.steps)

    async def forget(self, run: "Run", done: int, under_way: Iterable[int]) -> None:
        """Prune the batches older than `keep_steps`, if there are enough of them.

        All steps before `done` are done; `under_way` are the running validations.
        """
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
        # No reader shows these steps from here on. A process that crashes in the removal below repeats it on resume.
        self._folder.remove(await asyncio.to_thread(self._folder.copy_kept, forgotten))
        await run.forget(forgotten)


async def delete_forgotten(store: Store, forgotten: Forgotten, *, cancel: bool = False) -> None:
    """Delete the rollouts of pruned steps from the store.

    `cancel`: also cancel rollouts that are still open. While the run plays, the scheduler is about to cancel them, and the
    next pruning deletes them.
    """
    offset = 0
    while True:
        page = await store.query_rollouts(
            rollout_id_contains=f"{forgotten.name}.", limit=DELETED_AT_ONCE, offset=offset
        )
        old = [each for each in page if forgotten.has_rollout(each.rollout_id)]
        still_open = [each.rollout_id for each in old if each.status not in FINAL_ROLLOUT]
        if cancel and still_open:
            await store.cancel_rollouts(still_open, "its step was pruned")
            still_open = []
        gone = [each.rollout_id for each in old if each.rollout_id not in still_open]
        if gone:
            await store.delete_rollouts(gone)
        offset += len(page.items) - len(gone)
        if len(page.items) < DELETED_AT_ONCE:
            return


RELEASED_AT_ONCE = 256
"""Trajectories per sync: small enough to keep the store small, large enough to make its cost negligible."""
RELEASED_BYTES = 4 * 2**20
"""Bytes per sync, so that long episodes do not accumulate in the store."""


class TrajectoryReleaser:
    """Releases finished trajectories of one run from its store; used in the run's event loop only."""

    def __init__(self, store: Store, log: TrajectoryLog) -> None:
        self._store = store
        self._log = log
        self._due: list[str] = []
        self._bytes = 0

    def add(self, rollout_id: str, size: int) -> None:
        """Register a trajectory that was appended to the log."""
        self._due.append(rollout_id)
        self._bytes += size

    async def release_some(self) -> None:
        """Release the registered trajectories if there are enough of them."""
        if len(self._due) >= RELEASED_AT_ONCE or self._bytes >= RELEASED_BYTES:
            await self.release_all()

    async def release_rest(self) -> None:
        """Release all; after an error they stay in the store and the log until the run is resumed."""
        with suppress(OSError, RollwrightError):
            await self.release_all()

    async def release_all(self) -> None:
        due, self._due, self._bytes = self._due, [], 0
        await self.release(due)

    async def release(self, rollout_ids: Sequence[str]) -> None:
        """Sync the log, and release these rollouts as far as the log has them."""
        kept = [each for each in rollout_ids if each in self._log]
        if not kept:
            return
        await asyncio.to_thread(self._log.sync())
        for first in range(0, len(kept), RELEASED_AT_ONCE):
            await self._store.release_trajectories(kept[first : first + RELEASED_AT_ONCE])
