"""Ranking the members of complete groups by a judge.

Always true: a group is ranked when all its members are there, and before a filter of groups sees it; groups are ranked at
the same time, and nothing else waits for them. A judge that fails is asked again, and then the group is dropped with the
reason: it is never a rank. Ranks that were recorded before a restart are kept, and cost no call.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rollwright.agents import EpisodeFailure
from rollwright.rollout.groups import Group
from rollwright.rollout.scoring import EpisodeRewards
from rollwright.trajectory import Trajectory

Answer = TypeVar("Answer")

_PAUSE_SECONDS = 1.0
"""Before the second attempt; twice as long before each further one. An engine that restarts is back within some."""

RowFunction = Callable[[str, int], Mapping[str, Any]]
"""The task of a tag's level."""


@dataclass(frozen=True)
class GroupRanker:
    """Ranks groups by the group judges of their tags."""

    rewards: Mapping[str, EpisodeRewards]
    """By tag; tags without group judges are left out."""
    task_of: RowFunction

    @property
    def tags(self) -> frozenset[str]:
        return frozenset(self.rewards)

    async def rank(self, group: Group) -> list[Trajectory]:
        """The members with their ranks, in their order; raises `EpisodeFailure`."""
        return await self.rewards[group.tag].rank(self.task_of(group.tag, group.seed), group.trajectories)


class RankingTasks:
    """The rankings in progress of one stream."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ranking: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(ranking, name="rank"))
        task.add_done_callback(self._tasks.discard)

    async def retry(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Awaits a judge, again after a failure, as often as a rollout is tried."""
        for attempt in range(1, self._max_attempts):
            try:
                return await ask()
            except EpisodeFailure:
                await asyncio.sleep(_PAUSE_SECONDS * 2 ** (attempt - 1))
        return await ask()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
