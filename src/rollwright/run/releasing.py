"""The store's copies of finished trajectories are given up, once the run's own log has them on the disk.

Always true: a trajectory is released after the log was flushed to the disk with it, never before; so at every moment,
through kills and power cuts, it is whole in the store or in the log. Both have it for a while, a bounded amount at a time:
one flush serves them all, and nobody who plays waits for it.
"""

import asyncio
from collections.abc import Sequence

from rollwright.run.trajectory_log import TrajectoryLog
from rollwright.store.api import Store

RELEASED_AT_ONCE = 256
"""Trajectories that share a flush: often enough to keep the store small, seldom enough to cost a rollout nothing."""
RELEASED_BYTES = 4 * 2**20
"""Or so much of them, so that long episodes do not pile up in the store."""


class Releasing:
    """Of one run; belongs to its event loop."""

    def __init__(self, store: Store, log: TrajectoryLog) -> None:
        self._store = store
        self._log = log
        self._due: list[str] = []
        self._bytes = 0

    def add(self, rollout_id: str, size: int) -> None:
        """One that the log was given."""
        self._due.append(rollout_id)
        self._bytes += size

    async def release_some(self) -> None:
        """If there are enough of them."""
        if len(self._due) >= RELEASED_AT_ONCE or self._bytes >= RELEASED_BYTES:
            await self.release_all()

    async def release_all(self) -> None:
        due, self._due, self._bytes = self._due, [], 0
        await self.release(due)

    async def release(self, rollout_ids: Sequence[str]) -> None:
        """Those of them that the log has."""
        kept = [each for each in rollout_ids if each in self._log]
        if not kept:
            return
        await asyncio.to_thread(self._log.sync())
        for first in range(0, len(kept), RELEASED_AT_ONCE):
            await self._store.release_trajectories(kept[first : first + RELEASED_AT_ONCE])
