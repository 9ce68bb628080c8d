"""Records of a run's rollouts as they end: its log, its costs, the results that later evaluations reuse."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollwright.rollout.episode import Episode
from rollwright.rollout.groups import Group
from rollwright.rollout.stream import StreamHooks
from rollwright.run.costs import CostBook
from rollwright.run.evaluation_stream import EvaluationStream
from rollwright.run.folder import RunFolder
from rollwright.run.pruning import TrajectoryReleaser
from rollwright.trajectory import OutsideCall, Trajectory


@dataclass(frozen=True)
class RunHooks(StreamHooks):
    """Hooks of a run into one of its streams."""

    costs: CostBook
    folder: RunFolder | None
    """Folder whose log has trajectories that the store need not have any more."""
    releaser: TrajectoryReleaser | None
    """Releases trajectories from the store once they are in the log."""
    evaluation: EvaluationStream | None
    """Only in the stream of an evaluation."""
    on_finished: Callable[[str, bytes], None] | None
    on_failed: Callable[[str, str], None] | None

    async def opened(self) -> None:
        if self.folder is not None:
            await asyncio.to_thread(self.folder.flush_draws)

    def finished(self, rollout_id: str, encoded: bytes) -> None:
        if self.on_finished is not None:
            self.on_finished(rollout_id, encoded)
        if self.releaser is not None:
            self.releaser.add(rollout_id, len(encoded))

    def failed(self, rollout_id: str, reason: str) -> None:
        if self.on_failed is not None:
            self.on_failed(rollout_id, reason)

    def spent(self, rollout_id: str, trajectory: Trajectory) -> None:
        self.costs.add(rollout_id, trajectory)
        if self.evaluation is not None and trajectory.stop is not None and trajectory.error is None:
            self.evaluation.add(rollout_id, trajectory)

    def ranked(self, group: Group, calls: Sequence[OutsideCall]) -> None:
        self.costs.add_ranking(group.group_id, group.tag, calls)

    def recalled(self, rollout_id: str) -> None:
        self.costs.add_free(rollout_id)

    async def settled(self) -> None:
        if self.releaser is not None:
            await self.releaser.release_some()

    def read_kept(self, rollout_ids: Sequence[str]) -> Mapping[str, bytes]:
        return {} if self.folder is None else self.folder.log.read(rollout_ids)

    def recall(self, rollout_id: str, episode: Episode) -> bytes | None:
        return None if self.evaluation is None else self.evaluation.recall(rollout_id, episode)
