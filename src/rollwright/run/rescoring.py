"""Rewards of a run, computed again from its stored trajectories.

Always true: no engine is asked: a judge's verdict is the stored one. The log of trajectories is not changed; the new
rewards stand in a file beside it, which is complete or not there. Trajectories are judged against the rows that they were
played with: other rows are refused.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from rollwright.config import RunConfig
from rollwright.errors import ConfigError
from rollwright.rewards import RewardFailure, Rewards, WeightedReward
from rollwright.rewards.failure import NoReward
from rollwright.rewards.scored import ScoredAttempt
from rollwright.rewards.settings import AnyReward, GroupJudgeReward, JudgeSettings, default_name
from rollwright.rollout.scoring import NO_TASK
from rollwright.run.build_rewards import rewards_of
from rollwright.run.build_tasks import TagTasks, open_tag_tasks
from rollwright.run.folder import RunReader
from rollwright.run.validations import VALIDATION
from rollwright.trajectory import Trajectory, leaves, turn_weights

RESCORED = "rescored.jsonl"
"""File in the run folder."""

_AT_ONCE = 64
"""Trajectories that are judged together: enough to keep sandboxes busy, few in memory."""


@dataclass(frozen=True)
class Rescored:
    """Old and new rewards of one rollout."""

    rollout_id: str
    tag: str
    mode: str
    before: float
    components_before: dict[str, float]
    after: float | None = None
    """`None`: a reward failed, and `error` says which and why."""
    components_after: dict[str, float] | None = None
    error: str | None = None


class StoredVerdict:
    """In place of a judge: the value that it gave when the episode was played."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def evaluate(self, attempt: ScoredAttempt) -> float:
        stored = attempt.trajectory.components
        if self._name not in stored:
            raise NoReward("asks a model, which rescoring does not, and no value of it is stored")
        return stored[self._name]

    async def close(self) -> None:
        """Holds nothing."""


class Rescorer:
    """Judges the trajectories of a run by the rewards of `config`, which may be others than it was played with."""

    def __init__(self, reader: RunReader, config: RunConfig) -> None:
        self._reader = reader
        self._name = config.name
        self._tasks = open_tag_tasks(config)
        wanted = {tag: rewards_of(custom) for tag, custom in config.custom_envs.items()}
        self._rewards = {
            tag: _build(each, f"custom_envs.{tag}.rewards") for tag, each in wanted.items() if each
        }
        self._validated = {
            tag: _build(alone, f"custom_envs.{tag}.rewards")
            for tag, each in wanted.items()
            if len(alone := [one for one in each if not isinstance(one, GroupJudgeReward)]) < len(each)
        }
        """Of tags with group judges, the rewards of a validation: it plays each level once, so there is no group to rank."""
        if not self._rewards:
            raise ConfigError(
                f"{reader.path}: no tag of this run has `rewards`, so there is nothing to compute"
            )

    async def rescore(self) -> AsyncIterator[Rescored]:
        """Each trajectory whose tag has rewards, in the order of the log. Writes the file when all are done."""
        place = self._reader.path / RESCORED
        partial = place.with_suffix(".partial")
        judged = (each for each in self._reader.trajectories() if each.tag in self._rewards)
        with partial.open("wb") as file:
            while some := list(islice(judged, _AT_ONCE)):
                for done in await asyncio.gather(*map(self._judge, some)):
                    file.write(msgspec.json.encode(done) + b"\n")
                    yield done
        partial.replace(place)

    async def close(self) -> None:
        for each in (*self._rewards.values(), *self._validated.values()):
            await each.close()

    async def _judge(self, trajectory: Trajectory) -> Rescored:
        mode = "train" if trajectory.group_id.startswith(f"{self._name}.train-") else VALIDATION
        rewards, tasks = self._rewards[trajectory.tag], self._tasks.get(trajectory.tag)
        if mode == VALIDATION:
            rewards = self._validated.get(trajectory.tag, rewards)
        told: dict[str, Any] = {
            "rollout_id": trajectory.rollout_id,
            "tag": trajectory.tag,
            "mode": mode,
            "before": trajectory.reward,
            "components_before": trajectory.components,
        }
        task = NO_TASK if tasks is None else tasks.source(mode).row(trajectory.seed)
        try:
            total, components = await _evaluate(rewards, task, trajectory)
        except RewardFailure as failure:
            return Rescored(**told, error=str(failure))
        return Rescored(**told, after=_own_reward(trajectory, tasks) + total, components_after=components)


async def _evaluate(rewards: Rewards, task: Any, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
    """The sum and the components; of a tree, the means over its leaves by their weights."""
    ends = leaves(trajectory.turns)
    if len(ends) < 2:
        result = await rewards.evaluate(task, trajectory)
        return result.total, result.components
    weights = turn_weights(trajectory.turns)
    total, components = 0.0, dict[str, float]()
    for leaf in ends:
        result = await rewards.evaluate(task, trajectory, leaf)
        total += weights[leaf] * result.total
        for name, value in result.components.items():
            components[name] = components.get(name, 0.0) + weights[leaf] * value
    return total, components


def _own_reward(trajectory: Trajectory, tasks: TagTasks | None) -> float:
    """The part of the reward that the environment gave, which stays."""
    if tasks is not None:
        return 0.0  # rows give none
    if len(leaves(trajectory.turns)) > 1:
        raise ConfigError(
            f"{trajectory.rollout_id}: is a tree in an environment with rewards of its own, whose part is not stored apart"
        )
    return trajectory.reward - trajectory.episode_reward


def _build(settings: Iterable[AnyReward], where: str) -> Rewards:
    """The rewards, with stored verdicts in place of judges."""
    built: list[WeightedReward] = []
    try:
        for each in settings:
            if isinstance(each, JudgeSettings):
                name = default_name(each)
                built.append(WeightedReward(name, each.weight, StoredVerdict(name), each.time_limit))
            else:
                built += Rewards.build(each).rewards
        return Rewards(built)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
