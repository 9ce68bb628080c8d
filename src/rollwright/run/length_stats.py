"""Lengths of what a training run has generated, each rollout counted once however often it is told of.

Always true: `bias` counts all of them; by rollout only those are remembered whose group is not forgotten, because no
other can be told of again.
"""

from rollwright.run.retention import own_index
from rollwright.training.pipeline import LengthBias
from rollwright.trajectory import Trajectory


class OwnLengths:
    def __init__(self, name: str) -> None:
        """`name`: of the run."""
        self.bias = LengthBias()
        self._name = name
        self._tokens: dict[str, int] = {}
        """Sampled tokens by rollout."""

    def __len__(self) -> int:
        """Rollouts that are remembered."""
        return len(self._tokens)

    def add_generated(self, trajectory: Trajectory) -> None:
        """Only what is of the run's own training stream is counted."""
        rollout_id = trajectory.rollout_id
        if own_index(self._name, trajectory.group_id) is not None and rollout_id not in self._tokens:
            self._tokens[rollout_id] = trajectory.sampled_tokens
            self.bias.add_generated(trajectory.sampled_tokens)

    def forget(self, floor: int) -> list[int]:
        """Forgets the rollouts of groups below `floor`; gives their lengths. What was counted stays counted."""
        old = [each for each in self._tokens if self._index(each) < floor]
        return [self._tokens.pop(each) for each in old]

    def _index(self, rollout_id: str) -> int:
        index = own_index(self._name, rollout_id.rpartition("-m")[0])
        assert index is not None, "others were not added"
        return index
