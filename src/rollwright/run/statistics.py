"""Figures of batches and runs, computed from trajectories: results by tag, staleness, row sizes, tree metrics. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollwright.rollout import Activity, Batch, Ledger
from rollwright.run.folder import TREE_PREFIX
from rollwright.run.reference_scores import EPISODES, Baseline
from rollwright.trajectory import Trajectory


@dataclass
class TagStatistics:
    """Results of one tag."""

    episodes: int = 0
    judged: int = 0
    """Episodes whose environment says whether the task was solved."""
    solved: float = 0
    """Episodes solved; of a tree, the share of its leaves."""
    reward: float = 0.0
    penalty: float = 0.0
    turns: int = 0
    tokens: int = 0
    stops: Counter[str] = field(default_factory=Counter)
    counters: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of the episodes' own metrics, such as discarded calls and truncated context."""
    components: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums of the named rewards."""
    component_counts: Counter[str] = field(default_factory=Counter)
    """Episodes that have each of them."""
    levels: set[int] = field(default_factory=set)
    """Seeds of the levels. Only the smallest are kept if there are many, because a baseline plays the smallest seeds."""

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        share = trajectory.success_share
        self.judged += share is not None
        self.solved += share or 0.0
        self.reward += trajectory.reward
        self.penalty += trajectory.penalty
        self.turns += len(trajectory.turns)
        self.tokens += trajectory.sampled_tokens
        self.stops[str(trajectory.stop)] += 1
        for name, value in trajectory.metrics.items():
            self.counters[name] += value
        for name, value in trajectory.components.items():
            self.components[name] += value
            self.component_counts[name] += 1
        self.levels.add(trajectory.seed)
        if len(self.levels) > 2 * EPISODES:
            self.levels = set(sorted(self.levels)[:EPISODES])

    @property
    def success(self) -> float | None:
        return self.solved / self.judged if self.judged else None

    def row(self) -> dict[str, Any]:
        count = max(self.episodes, 1)
        return {
            "episodes": self.episodes,
            "success": self.success,
            "reward": self.reward / count,
            "penalty": self.penalty / count,
            "turns": self.turns / count,
            "tokens": self.tokens / count,
            "stops": dict(self.stops),
            "counters": dict(sorted(self.counters.items())),
            "components": {
                name: self.components[name] / self.component_counts[name] for name in self.components
            },
        }


class RunStatistics:
    """Sums over a run's trajectories, by mode and tag."""

    def __init__(self) -> None:
        self.tags: dict[tuple[str, str], TagStatistics] = defaultdict(TagStatistics)

    def add(self, mode: str, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            self.tags[mode, trajectory.tag].add(trajectory)

    def rows(self, baselines: Mapping[tuple[str, str], Baseline]) -> list[dict[str, Any]]:
        """One row for each mode and tag, with the success of random and perfect play."""
        rows = []
        for (mode, tag), statistics in self.tags.items():
            beside = baselines.get((mode, tag))
            rows.append(
                {
                    "mode": mode,
                    "tag": tag,
                    **statistics.row(),
                    "random_success": beside.random if beside else None,
                    "oracle_success": beside.oracle if beside else None,
                }
            )
        return rows


def batch_row(mode: str, step: int, seconds: float, batch: Batch) -> dict[str, Any]:
    """Line of `metrics.jsonl` for one batch."""
    trajectories, ledger = batch.trajectories, batch.ledger
    statistics = RunStatistics()
    statistics.add(mode, trajectories)
    return {
        "mode": mode,
        "step": step,
        "seconds": round(seconds, 3),
        "version": batch.version,
        "trajectories": len(trajectories),
        "groups": [group.group_id for group in batch.groups],
        "reward": mean([trajectory.reward for trajectory in trajectories]),
        "staleness": staleness(trajectories, batch.version),
        "tags": {tag: each.row() for (_, tag), each in statistics.tags.items()},
        "ledger": ledger_row(ledger),
        "reasons": dict(ledger.reasons),
    }


def ledger_row(ledger: Ledger) -> dict[str, int]:
    """Rollouts by fate, beside all that were opened."""
    return {"opened": ledger.opened, **{str(fate): count for fate, count in ledger.counts.items()}}


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, int]:
    """Sampled tokens by their age at hand-over, in policy versions."""
    ages: Counter[int] = Counter()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            for run in turn.versions:
                ages[version - run.version] += run.count
    return {str(age): ages[age] for age in sorted(ages)}


def activity_row(activity: Activity) -> dict[str, Any]:
    """Counters of the workers, for the summary."""
    activity = activity.total()
    return {
        "turns": activity.turns,
        "tokens": activity.tokens,
        "prompt_tokens": activity.prompt_tokens,
        "episodes": activity.finished,
        "withdrawn": activity.withdrawn,
        "commit_seconds": round(activity.commit_seconds, 3),
        "replayed_turns": activity.replayed_turns,
        "replays_differed": activity.replays_differed,
        "stale": activity.stale,
        "refused": activity.refused,
        "failed_attempts": dict(activity.failures),
        "failed_attempt_causes": activity.causes.rows(),
        "abandoned_envs": activity.abandoned_envs,
        "slots_restarted": activity.slots_restarted,
        "dead_workers": activity.dead_workers,
    }


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass
class ViewSize:
    """Rows of one view of the training samples, before filters remove any."""

    rows: int = 0
    tokens: int = 0
    """Tokens of all rows, prompts included: the tokens that a trainer computes."""
    longest: int = 0
    """Tokens of the longest row, which has to fit into memory."""

    def add(self, length: int) -> None:
        self.rows += 1
        self.tokens += length
        self.longest = max(self.longest, length)


@dataclass
class ViewSizes:
    """Row sizes of both sample views of the same trajectories: the price of one row for each turn."""

    paths: ViewSize = field(default_factory=ViewSize)
    """One row for each token sequence."""
    turns: ViewSize = field(default_factory=ViewSize)
    """One row for each turn, with its whole prompt."""

    def add(self, trajectory: Trajectory) -> None:
        """Count the rows of a trainable trajectory; others are ignored."""
        if trajectory.not_trainable is not None:
            return
        continued = {turn.extends for turn in trajectory.turns}
        lengths: list[int] = []
        for turn in trajectory.turns:
            before = 0 if turn.extends is None else lengths[turn.extends]
            lengths.append(before + len(turn.prompt_ids) + len(turn.sampled_ids))
            self.turns.add(lengths[-1])
            if turn.id not in continued:
                self.paths.add(lengths[-1])

    def row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class TreeSums:
    """Sums of the tree metrics over a run's training rollouts."""

    sums: Counter[str] = field(default_factory=Counter)
    """By metric name without `TREE_PREFIX`; empty if no tree was played."""

    def add(self, trajectory: Trajectory) -> None:
        for name, value in trajectory.metrics.items():
            if name.startswith(TREE_PREFIX):
                self.sums[name.removeprefix(TREE_PREFIX)] += int(value)

    def row(self) -> dict[str, int]:
        return dict(self.sums)
