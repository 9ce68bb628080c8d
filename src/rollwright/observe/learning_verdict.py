"""The verdict on learning: what keeps a training from learning faster, by its own figures, and what to change. Pure.

Every finding names the figures that it rests on. Thresholds are far from what chance does to a few batches; where no finding
applies, the verdict says that the batches teach.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rollwright.config import RunConfig
from rollwright.rollout.settings.strategies import TreeStrategyConfig

RECENT = 20
"""Steps that count: the policy of earlier ones was another."""
MANY_SILENT = 0.65
"""Share of groups without a gradient. Between trainings as they should be (up to 0.54) and those on levels too easy or too hard
(0.72 and more), by `bench/learning_verdicts.py`."""
FALLEN = 0.5
"""Solved share relative to earlier steps below which the policy has become worse: chance and harder draws do far less."""
ONCE_SOLVED = 0.1
"""Solved share from which a fall can be told from chance."""
RARE = 0.05
"""Solved share below which trees pay (`bench/tree_signal.py`: 2 and more times the signal at 1 %, none at 12 %)."""
COLLAPSED = 0.1
"""Entropy relative to that of the first steps below which a policy hardly tries anything else."""
SOLVED = 0.9
"""Solved share from which a low entropy is success, not collapse."""
CLIPPED = 0.3
"""Share of clipped tokens from which a step goes further than its data carries."""
LARGE_SIGNAL = 10.0
"""Signal to noise of a batch's gradient from which on a smaller batch would point the same way."""
ALL_NOISE = 0.1
"""Signal to noise below which a step is mostly a random one: its noise is three times as long as what is meant."""
MEASUREMENTS = 5
"""Least number of measured steps: one says little."""
SURE = 2.0
"""Standard errors by which the signal to noise must be on the far side of its threshold. Of ten batches of the demo the error is
0.2 to 0.5 (`bench/learning_verdicts.py`), so without it a few batches would often seem to be noise alone."""
FIRST = 3
"""Steps that the first entropy is a mean of."""


@dataclass(frozen=True)
class RecentSignal:
    """Signal of the gradient in the last measured steps: the quotient of means, because one step's quotient is mostly chance."""

    measured: int
    """Steps that it rests on."""
    ratio: float
    """Signal to noise of a batch's gradient; at most 0: no signal could be told from the noise."""
    error: float
    """Standard error of the ratio, by how much the measurements differ."""
    tokens: float
    """Trained tokens of a batch, in the mean."""

    @property
    def tokens_needed(self) -> float | None:
        """Tokens at which noise equals signal; `None`: no signal was found."""
        return self.tokens / self.ratio if self.ratio > 0 else None


def recent_signal(steps: Sequence[Mapping[str, Any]]) -> RecentSignal | None:
    """The signal by the trainer's figures of each step; `None`: it was not measured."""
    found = [row for row in steps if row.get("gradient_signal") is not None and row.get("gradient_noise")][
        -RECENT:
    ]
    if not found:
        return None
    signal, noise = (sum(row[name] for row in found) for name in ("gradient_signal", "gradient_noise"))
    spread = stdev(row["gradient_signal"] for row in found) if len(found) > 1 else math.inf
    return RecentSignal(
        measured=len(found),
        ratio=signal / noise,
        error=spread * math.sqrt(len(found)) / noise,
        tokens=mean(row.get("tokens", 0) for row in found),
    )


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
    fallen = _fall(steps, solved, config)
    return [
        *_collapse(steps, recent, solved),
        *fallen,
        # Of a policy that was better at the same levels, neither the levels nor the strategy are to blame.
        *([] if fallen else _difficulty(silent, solved, config)),
        *([] if fallen else _shape(solved, config)),
        *_rate(recent),
        *_batch(recent_signal(steps)),
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


def _fall(
    steps: Sequence[Mapping[str, Any]], solved: float | None, config: RunConfig
) -> list[LearningFinding]:
    manager = config.train_env_manager
    if solved is None or (manager is not None and (manager.curriculum or manager.task_sampler)):
        return []  # those change the levels on purpose
    known = [row["success"] for row in steps if row.get("success") is not None]
    earlier = known[:-RECENT]
    blocks = [
        known[:FIRST],
        *(earlier[end - RECENT : end] for end in range(RECENT, len(earlier) + 1, RECENT)),
    ]
    before = max(mean(block) for block in blocks)
    now = mean(known[-RECENT // 2 :])
    if before < ONCE_SOLVED or now >= FALLEN * before:
        return []
    return [
        LearningFinding(
            "success falling",
            f"{before:.0%} solved in earlier steps, {now:.0%} in the last",
            "lower training.learning_rate, and begin again from an earlier checkpoint",
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
    updated = [
        row for row in recent if row.get("updates", 1)
    ]  # a skipped step clips nothing, and says nothing
    clipped = mean(row.get("clip_share") or 0.0 for row in updated) if updated else 0.0
    gaps = [row["gap"] for row in updated if row.get("gap") is not None]
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


def _batch(found: RecentSignal | None) -> list[LearningFinding]:
    if found is None or found.measured < MEASUREMENTS:
        return []
    large, noise = (
        found.ratio - SURE * found.error >= LARGE_SIGNAL,
        found.ratio + SURE * found.error < ALL_NOISE,
    )
    if not large and not noise:
        return []
    figures = (
        f"signal to noise {found.ratio:.3g} ± {found.error:.2g} in batches of {found.tokens:,.0f} trained tokens, by the halves of "
        f"{found.measured} of them"
    )
    if large:
        return [
            LearningFinding(
                "groups too many or too large",
                figures,
                f"smaller rollout_batch_size or group_size: {found.tokens_needed:,.0f} tokens have as much signal as noise",
            )
        ]
    return [
        LearningFinding(
            "gradient mostly noise",
            figures,
            "larger rollout_batch_size, levels that teach (`task_sampler`), a running value "
            "(training.advantage.options.kappa: 2), or a lower training.learning_rate",
        )
    ]


def _share(solved: float | None) -> str:
    return "success unknown" if solved is None else f"{solved:.0%} solved"
