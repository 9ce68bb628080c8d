"""What all advantages share: who counts, what a turn gets, and the two ways to compare with others.

True of every advantage here: a trajectory that may not be trained on, and a second copy of one that was seen
already, enter no statistics and get zeros; who has nobody to be compared with gets 0; a format penalty is
added after everything else, on the turn that earned it, so that no normalising can blow it up.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from rollwright.trajectory import Trajectory, leaves

Groups: TypeAlias = Sequence[Sequence[Trajectory]]

TurnAdvantages: TypeAlias = list[list[list[float]]]
"""By group, trajectory and turn."""

STD_FLOOR = 1e-6
"""Added to a standard deviation, as GRPO's implementations do; far below any difference of rewards that matters."""

DUPLICATE = "the same rollout a second time"


class Advantage(Protocol):
    """Gives every turn of a batch its advantage; small frozen objects."""

    def __call__(self, groups: Groups) -> TurnAdvantages: ...


def _reasons(groups: Groups) -> list[list[str | None]]:
    """Why each trajectory does not count; `None` where it does."""
    seen: set[str] = set()
    found: list[list[str | None]] = []
    for group in groups:
        found.append([])
        for trajectory in group:
            why = trajectory.not_trainable
            if why is None and not trajectory.in_baseline:
                why = f"filter {trajectory.filtered}"
            if why is None and trajectory.rollout_id in seen:
                why = DUPLICATE
            if why is None:
                seen.add(trajectory.rollout_id)
            found[-1].append(why)
    return found


def admitted(groups: Groups) -> list[list[bool]]:
    """Which trajectories enter statistics and loss."""
    return [[reason is None for reason in group] for group in _reasons(groups)]


def left_out(groups: Groups) -> dict[str, int]:
    """How many trajectories enter neither statistics nor loss, by reason."""
    return dict(Counter(reason for group in _reasons(groups) for reason in group if reason is not None))


def with_penalties(trajectory: Trajectory, values: Sequence[float]) -> list[float]:
    """One value for each turn, plus the penalty that the turn earned."""
    return [
        value + (turn.outcome.penalty if turn.outcome else 0.0)
        for turn, value in zip(trajectory.turns, values, strict=True)
    ]


def nothing(trajectory: Trajectory) -> list[float]:
    """What the turns of a trajectory that is left out get."""
    return [0.0] * len(trajectory.turns)


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Each turn's reward; the reward of the episode as a whole comes with every last turn."""
    rewards = [turn.outcome.reward if turn.outcome else 0.0 for turn in trajectory.turns]
    for leaf in leaves(trajectory.turns):
        rewards[leaf] += trajectory.episode_reward
    return rewards


def centred(values: Sequence[float], counts: Sequence[int] | None = None, *, std: bool) -> list[float]:
    """Minus the mean, and with `std` over the sample standard deviation; zeros where nothing differs. `counts`: how
    many equal ones each stands for."""
    counts = [1] * len(values) if counts is None else counts
    if sum(counts) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    differences = [value - mean for value in values]
    if not std:
        return differences
    squares = math.fsum(each * each * count for each, count in zip(differences, counts, strict=True))
    spread = math.sqrt(squares / (sum(counts) - 1)) + STD_FLOOR
    return [each / spread for each in differences]


def leave_one_out(values: Sequence[float], counts: Sequence[int] | None = None) -> list[float]:
    """Each minus the mean of the others; zeros where nothing differs. `counts`: how many equal ones each stands for."""
    counts = [1] * len(values) if counts is None else counts
    others = sum(counts) - 1
    if others < 1 or min(values) == max(values):
        return [0.0] * len(values)
    total = math.fsum(value * count for value, count in zip(values, counts, strict=True))
    return [value - (total - value) / others for value in values]
