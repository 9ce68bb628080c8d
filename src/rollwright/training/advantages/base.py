"""Shared parts of all advantage estimators: which trajectories are admitted, and the two baselines.

Always true of every estimator: a trajectory that is not trainable, and a duplicate of one that is already in the batch,
enter no statistics and get zeros. A trajectory without another one to compare it with gets 0. A format penalty is added
last, on the turn that caused it, so that normalisation cannot scale it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from rollwright.training.settings import ADVANTAGES
from rollwright.trajectory import Trajectory, leaves

Groups: TypeAlias = Sequence[Sequence[Trajectory]]

TurnAdvantages: TypeAlias = list[list[list[float]]]
"""One number for each turn, by group and trajectory."""

TokenAdvantages: TypeAlias = list[list[list[list[float]]]]
"""One number for each sampled token, by group, trajectory and turn."""

STD_FLOOR = 1e-6
"""Added to a standard deviation to avoid division by zero, as in GRPO; far below any relevant difference of rewards."""

DUPLICATE = "the same rollout a second time"


class Advantage(Protocol):
    """Computes the advantage of every turn of a batch, or of every token; implementations are frozen dataclasses or
    functions."""

    def __call__(self, groups: Groups) -> TurnAdvantages | TokenAdvantages: ...


@runtime_checkable
class Remembering(Protocol):
    """An advantage with a memory of earlier batches. The trainer calls `observe` once for each batch, after its advantages
    were computed, and keeps `state` in the checkpoints."""

    def observe(self, groups: Groups) -> None: ...

    def state(self) -> dict[str, Any]:
        """The whole memory as plain data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replaces the memory by a recorded one."""
        ...


def _reasons(groups: Groups) -> list[list[str | None]]:
    """The reason why each trajectory is left out; `None` where it is admitted."""
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
    """Whether each trajectory enters statistics and loss."""
    return [[reason is None for reason in group] for group in _reasons(groups)]


def left_out(groups: Groups) -> dict[str, int]:
    """Number of trajectories that enter neither statistics nor loss, by reason."""
    return dict(Counter(reason for group in _reasons(groups) for reason in group if reason is not None))


def with_penalties(trajectory: Trajectory, values: Sequence[float]) -> list[float]:
    """Adds to the value of each turn its format penalty."""
    return [
        value + (turn.outcome.penalty if turn.outcome else 0.0)
        for turn, value in zip(trajectory.turns, values, strict=True)
    ]


def zeros(trajectory: Trajectory) -> list[float]:
    """The advantages of a trajectory that is left out."""
    return [0.0] * len(trajectory.turns)


def turn_rewards(trajectory: Trajectory) -> list[float]:
    """Reward of each turn. The episode reward is added to every leaf."""
    rewards = [turn.outcome.reward if turn.outcome else 0.0 for turn in trajectory.turns]
    for leaf in leaves(trajectory.turns):
        rewards[leaf] += trajectory.episode_reward
    return rewards


def centred(values: Sequence[float], counts: Sequence[int] | None = None, *, std: bool) -> list[float]:
    """Each value minus the mean, divided by the sample standard deviation if `std`; zeros if all values are equal.

    `counts`: multiplicity of each value.
    """
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


def leave_one_out(
    values: Sequence[float],
    counts: Sequence[int] | None = None,
    *,
    kappa: float = 0.0,
    prior: float | None = None,
) -> list[float]:
    """Each value minus its baseline: the mean of the others, in which `prior` counts as `kappa` more of them.

    `counts`: multiplicity of each value. Without a prior: zeros if all values are equal, or if there is only one.
    """
    counts = [1] * len(values) if counts is None else counts
    others = sum(counts) - 1
    if prior is None or not kappa:
        if others < 1 or min(values) == max(values):
            return [0.0] * len(values)
        total = math.fsum(value * count for value, count in zip(values, counts, strict=True))
        return [value - (total - value) / others for value in values]
    total = math.fsum(value * count for value, count in zip(values, counts, strict=True))
    return [value - (total - value + kappa * prior) / (others + kappa) for value in values]


class NamedAdvantage:
    """A user-defined advantage: an exception in it, or a result of the wrong shape, is one line that names it."""

    def __init__(self, name: str, advantage: Advantage) -> None:
        self._name, self._advantage = name, advantage

    def __call__(self, groups: Groups) -> TurnAdvantages | TokenAdvantages:
        with ADVANTAGES.blame(self._name):
            found = [
                [[_numbers(turn) for turn in turns] for turns in group] for group in self._advantage(groups)
            ]
            wanted = [[len(each.turns) for each in group] for group in groups]
            if [[len(turns) for turns in group] for group in found] != wanted or not _of_tokens(
                groups, found
            ):
                raise ValueError(
                    "gives no number for each turn of each trajectory of each group, nor for each token"
                )
            return cast(TurnAdvantages | TokenAdvantages, found)


def _numbers(turn: Any) -> float | list[float]:
    return list(map(float, turn)) if isinstance(turn, Sequence) else float(turn)


def _of_tokens(groups: Groups, found: Sequence[Sequence[Sequence[float | list[float]]]]) -> bool:
    """Whether every turn has one number, or one for each of its tokens."""
    return all(
        not isinstance(value, list) or len(value) == len(turn.sampled_ids)
        for group, values in zip(groups, found, strict=True)
        for trajectory, own in zip(group, values, strict=True)
        for turn, value in zip(trajectory.turns, own, strict=True)
    )


def turn_means(values: Sequence[float] | Sequence[Sequence[float]]) -> list[float]:
    """Advantage of each turn of a trajectory; the mean over its tokens, if they have advantages of their own."""
    return [
        float(each) if isinstance(each, float | int) else math.fsum(each) / max(len(each), 1)
        for each in values
    ]


class NamedRemembering(NamedAdvantage):
    """A user-defined advantage with a memory."""

    def __init__(self, name: str, advantage: Advantage, memory: Remembering) -> None:
        super().__init__(name, advantage)
        self._memory = memory

    def observe(self, groups: Groups) -> None:
        with ADVANTAGES.blame(self._name):
            self._memory.observe(groups)

    def state(self) -> dict[str, Any]:
        with ADVANTAGES.blame(self._name):
            return self._memory.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        with ADVANTAGES.blame(self._name):
            self._memory.restore(state)


class NamedValueBased(NamedAdvantage):
    """A user-defined advantage that uses a critic's values."""

    def estimate(self, groups: Groups, values: Any) -> Any:
        with ADVANTAGES.blame(self._name):
            found = cast(Any, self._advantage).estimate(groups, values)
            for each in (found.advantages, found.returns):
                if not _of_tokens(groups, each):
                    raise ValueError("gives no number for each token of each turn")
            return found


def make_advantage(name: str, **options: Any) -> Advantage:
    """The advantage that a configuration names, with its options."""
    found = cast(Advantage, ADVANTAGES.function(name, **options))
    if ADVANTAGES.is_built_in(name):
        return found
    if hasattr(found, "estimate"):
        return NamedValueBased(name, found)
    return (
        NamedRemembering(name, found, found)
        if isinstance(found, Remembering)
        else NamedAdvantage(name, found)
    )
