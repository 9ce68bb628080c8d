"""The verdict on learning: what keeps a training from learning faster, by its own figures, and what to change. Pure.

Every finding names the figures that it rests on. Thresholds are far from what chance does to a few batches; where no finding
applies, the verdict says that the batches teach.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rollwright.config import RunConfig
from rollwright.rollout.settings.strategies import TreeStrategyConfig

RECENT = 20
"""Steps that count: the policy of earlier ones was another."""
MANY_SILENT = 0.5
"""Share of groups without a gradient from which half of the sampled tokens teach nothing."""
RARE = 0.05
"""Solved share below which trees pay (`bench/tree_signal.py`: 2 and more times the signal at 1 %, none at 12 %)."""
COLLAPSED = 0.1
"""Entropy relative to that of the first steps below which a policy hardly tries anything else."""
SOLVED = 0.9
"""Solved share from which a low entropy is success, not collapse."""
CLIPPED = 0.3
"""Share of clipped tokens from which a step goes further than its data carries."""
FIRST = 3
"""Steps that the first entropy is a mean of."""


@dataclass(frozen=True)
class LearningFinding:
    """One obstacle, with its figures and the advice against it."""

    what: str
    because: str
    advice: str


def judge_learning(steps: Sequence[Mapping[str, Any]], config: RunConfig) -> list[LearningFinding]:
    """Findings by falling weight; empty if nothing is in the way. `steps`: the trainer's figures of each step."""
    recent = [row for row in steps if "silent_groups" in row][-RECENT:]
    if not recent:
        return []
    silent = mean(row["silent_groups"] for row in recent)
    known = [row["success"] for row in recent if row.get("success") is not None]
    solved = mean(known) if known else None
    return [
        *_collapse(steps, recent, solved),
        *_difficulty(silent, solved, config),
        *_shape(solved, config),
        *_rate(recent),
    ]


def _collapse(
    steps: Sequence[Mapping[str, Any]], recent: Sequence[Mapping[str, Any]], solved: float | None
) -> list[LearningFinding]:
    measured = [row["entropy"] for row in steps if row.get("entropy")]
    last = [row["entropy"] for row in recent if row.get("entropy")]
    if len(measured) < 2 * FIRST or not last or (solved is not None and solved >= SOLVED):
        return []
    first, now = mean(measured[:FIRST]), mean(last[-FIRST:])
    if now >= COLLAPSED * first:
        return []
    return [
        LearningFinding(
            "entropy collapsing",
            f"{first:.3g} nats in the first steps, {now:.3g} now, {_share(solved)}",
            "lower training.learning_rate, set training.loss.entropy_coefficient, or begin again from an earlier checkpoint",
        )
    ]


def _difficulty(silent: float, solved: float | None, config: RunConfig) -> list[LearningFinding]:
    if silent < MANY_SILENT:
        return []
    easy = solved is not None and solved > 0.5
    advice = (
        "play harder levels (`curriculum`), those that teach (`task_sampler`), smaller groups, or stop: what is left to learn is "
        "little"
        if easy
        else "play easier levels first (`curriculum`), those that teach (`task_sampler`), larger groups, or trees that keep "
        "branches alive (strategy.branch: keep_alive)"
    )
    if config.training is not None and not config.training.advantage.options.get("kappa"):
        advice += "; a running value (training.advantage.options.kappa: 2) gives such groups a gradient"
    return [
        LearningFinding(
            "groups too easy" if easy else "groups too hard",
            f"{silent:.0%} of the groups had no gradient in the last steps, {_share(solved)}",
            advice,
        )
    ]


def _shape(solved: float | None, config: RunConfig) -> list[LearningFinding]:
    trees = isinstance(config.strategy, TreeStrategyConfig)
    if solved is None or trees == (solved < RARE):
        return []
    if trees:
        return [
            LearningFinding(
                "chains would do",
                f"{_share(solved)}; trees pay where success is rare, below {RARE:.0%}",
                "strategy: {kind: chain}, which costs fewer tokens for the same signal",
            )
        ]
    return [
        LearningFinding(
            "success is rare",
            f"{_share(solved)}; where mistakes end an episode, trees have 2 and more times the signal for a token",
            "strategy: {kind: tree, width: 16, depth: 20, branch: {kind: keep_alive, alive: 8}} with "
            "training.advantage: {name: tree, options: {kappa: 2}}",
        )
    ]


def _rate(recent: Sequence[Mapping[str, Any]]) -> list[LearningFinding]:
    clipped = mean(row.get("clip_share") or 0.0 for row in recent)
    gaps = [row["gap"] for row in recent if row.get("gap") is not None]
    if clipped < CLIPPED:
        return []
    return [
        LearningFinding(
            "learning rate too high for the gap",
            f"{clipped:.0%} of the tokens were clipped; the engine's and the trainer's log-probabilities are "
            f"{mean(gaps) if gaps else 0.0:.3g} nats apart before a step",
            "lower training.learning_rate or training.epochs, or async_generation_ratio",
        )
    ]


def _share(solved: float | None) -> str:
    return "success unknown" if solved is None else f"{solved:.0%} solved"
