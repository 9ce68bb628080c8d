"""The stream of an evaluation: which results are known already, and how many tasks are played.

Always true: tasks are looked at in the order of the stream, never in the order in which they ended, so that quick episodes
are not preferred. No task behind the next look is opened before that look.
"""

import math

from rollwright.config import RunConfig
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.rollout.episode import Episode
from rollwright.run.build_tasks import open_tag_tasks
from rollwright.run.evaluation_cache import FOLDER, EvaluationCache
from rollwright.run.folder import RunFolder
from rollwright.run.validations import VALIDATION
from rollwright.trajectory import Trajectory


class EarlyStop:
    """Ends the stream at the first look whose interval is narrow enough."""

    def __init__(self, plan: StoppingPlan) -> None:
        self._plan = plan
        self._look = 0
        self._scores: dict[int, list[float]] = {}
        """By the task's place in the stream."""
        self._share = True
        """Whether all scores are shares of solved tasks; else they are rewards."""
        self._ended = False

    def add(self, trajectory: Trajectory) -> None:
        index = int(trajectory.group_id.rpartition("-g")[2])
        share = trajectory.success_share
        self._share = self._share and share is not None
        self._scores.setdefault(index, []).append(trajectory.reward if share is None else share)

    def limit(self, lowest_open: int) -> int | None:
        """See `StreamPace`."""
        looks = self._plan.looks
        while not self._ended and self._look < len(looks) - 1 and lowest_open >= looks[self._look]:
            seen = [self._scores[each] for each in range(looks[self._look]) if each in self._scores]
            values = [math.fsum(each) / len(each) for each in seen]
            self._ended = self._plan.stops(values, share=self._share)
            self._look += 1
        return None if self._ended else looks[self._look]


class EvaluationStream:
    """Known results and early stops of one evaluation."""

    def __init__(self, config: RunConfig, folder: RunFolder | None) -> None:
        settings, manager = config.evaluation, config.val_env_manager
        assert settings is not None
        assert manager is not None
        self._folder = folder
        self._cache: EvaluationCache | None = None
        if folder is not None and settings.cache:
            place = folder.path.parent / FOLDER
            self._cache = EvaluationCache(place, config, open_tag_tasks(config))
        self._seed = config.seed
        plan = StoppingPlan.make(
            manager.num_env_groups,
            settings.half_width,
            first=settings.first_look,
            confidence=settings.confidence,
        )
        self.early_stop = EarlyStop(plan) if settings.half_width is not None else None

    def recall(self, rollout_id: str, episode: Episode) -> bytes | None:
        """The result of a rollout that an earlier process or evaluation has played; `None`: it has to be played."""
        if self._folder is not None and rollout_id in self._folder.log:
            return dict(self._folder.log.read([rollout_id])).get(rollout_id)
        return None if self._cache is None else self._cache.find(rollout_id, episode)

    def add(self, rollout_id: str, trajectory: Trajectory) -> None:
        """Take the result of a rollout: for the next look, and for later evaluations."""
        if self.early_stop is not None:
            self.early_stop.add(trajectory)
        if self._cache is not None:
            group = int(trajectory.group_id.rpartition("-g")[2])
            member = int(rollout_id.rpartition("-m")[2])
            episode = Episode(
                trajectory.tag, trajectory.seed, VALIDATION, trajectory.group_id, group, member, self._seed
            )
            self._cache.keep(episode, trajectory)
