"""The rewards of an episode that has ended, by the list of its tag.

Always true: a reward that raises, hangs or gives no number is a failure of the attempt that names the reward, never a 0.
Turns are not changed in a chain: the weighted sum is the reward of the episode. In a tree each leaf has an answer of its
own, so each leaf is judged, and its sum is added to the reward of its last turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from rollwright.agents import EpisodeFailure
from rollwright.rewards.failure import RewardFailure
from rollwright.trajectory import (
    Boundary,
    ErrorRecord,
    Outcome,
    Trajectory,
    leaves,
    turn_weights,
)

if TYPE_CHECKING:
    from rollwright.rewards import RewardResult, Rewards

NO_TASK: Mapping[str, Any] = {}
"""The task of an episode in an environment that plays no rows."""


def task_of(env: object) -> Mapping[str, Any]:
    """The task that an environment plays: its attribute `task`, where that is a mapping."""
    task = getattr(env, "task", NO_TASK)
    return task if isinstance(task, Mapping) else NO_TASK


@dataclass(frozen=True)
class EpisodeRewards:
    """The rewards of one tag."""

    rewards: "Rewards"
    success_at: float
    """Sum from which on an episode counts as solved."""
    version: str = ""
    """Equal on two machines whose rewards have the same settings and the same code."""

    async def rank(self, task: Mapping[str, Any], members: Sequence[Trajectory]) -> list[Trajectory]:
        """The members of a group with the values of its group judges; those that have them already stay as they are."""
        if all(self.rewards.group_names <= each.components.keys() for each in members):
            return list(members)
        try:
            results = await self.rewards.rank_group(task, members)
        except RewardFailure as failure:
            raise EpisodeFailure(ErrorRecord(Boundary.REWARD, failure.reward, failure.cause, 0)) from failure
        return [
            msgspec.structs.replace(
                each,
                episode_reward=each.episode_reward + result.total,
                components={**each.components, **result.components},
            )
            for each, result in zip(members, results, strict=True)
        ]

    async def score(self, task: Mapping[str, Any], trajectory: Trajectory) -> Trajectory:
        """The trajectory with its rewards, their components and its success."""
        try:
            return await self._score(task, trajectory)
        except RewardFailure as failure:
            record = ErrorRecord(Boundary.REWARD, failure.reward, failure.cause, len(trajectory.turns))
            raise EpisodeFailure(record) from failure

    async def _score(self, task: Mapping[str, Any], trajectory: Trajectory) -> Trajectory:
        ends = leaves(trajectory.turns)
        if len(ends) < 2:
            result = await self.rewards.evaluate(task, trajectory)
            scored = result.store_in(trajectory)
            if scored.success is None:
                scored.success = result.total >= self.success_at
            return scored
        turns, weights = list(trajectory.turns), turn_weights(trajectory.turns)
        components: dict[str, float] = {}
        for leaf in ends:
            result = await self.rewards.evaluate(task, trajectory, leaf)
            turns[leaf] = msgspec.structs.replace(turns[leaf], outcome=self._add(turns[leaf].outcome, result))
            for name, value in result.components.items():
                components[name] = components.get(name, 0.0) + weights[leaf] * value
        solved = {_solved(turns[leaf].outcome) for leaf in ends}
        return msgspec.structs.replace(
            trajectory,
            turns=turns,
            components=components,
            success=solved.pop() if len(solved) == 1 else None,
        )

    def _add(self, outcome: Outcome | None, result: "RewardResult") -> Outcome:
        outcome = outcome or Outcome("", 0.0)
        success = result.total >= self.success_at if outcome.success is None else outcome.success
        return msgspec.structs.replace(outcome, reward=outcome.reward + result.total, success=success)


def _solved(outcome: Outcome | None) -> bool | None:
    return None if outcome is None else outcome.success
