"""The stream of an evaluation: which results are known already, and how many tasks are played.

Always true: tasks are looked at in the order of the stream, never in the order in which they ended, so that quick episodes
are not preferred. No task behind the next look is opened before that look. A look sees what the report would say of the
tasks before it, weights of strata included.
"""

from rollwright.config import RunConfig
from rollwright.evaluation.intervals import TaskValues, task_values
from rollwright.evaluation.sequential import StoppingPlan
from rollwright.evaluation.strata import TaskOrder
from rollwright.rollout.episode import Episode
from rollwright.run.build_tasks import open_tag_tasks
from rollwright.run.evaluation_cache import FOLDER, EvaluationCache
from rollwright.run.evaluation_order import read_order
from rollwright.run.folder import RunFolder
from rollwright.run.validations import VALIDATION
from rollwright.trajectory import Trajectory


class EarlyStop:
    """Ends the stream at the first look whose interval is narrow enough."""

    def __init__(self, plan: StoppingPlan, order: TaskOrder | None = None) -> None:
        self._plan = plan
        self._order = order
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
            self._ended = self._plan.stops(self._played(looks[self._look]), share=self._share)
            self._look += 1
        return None if self._ended else looks[self._look]

    def _played(self, tasks: int) -> TaskValues:
        """Results of the first tasks."""
        places = [each for each in range(tasks) if each in self._scores]
        return task_values(
            [self._scores[each] for each in places],
            [0 if self._order is None else self._order.strata[each] for each in places],
            None if self._order is None else self._order.totals(),
            share=self._share,
        )


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
        order = None if folder is None else read_order(folder.path)
        self.early_stop = EarlyStop(plan, order) if settings.half_width is not None else None

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
