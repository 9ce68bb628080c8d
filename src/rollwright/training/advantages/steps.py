"""Advantages for each turn: from a value estimate (GAE), or by comparing turns taken in the same state (GiGPO).

Both follow the links `after`. If a turn has several children, the mean over them takes the place of the next turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollwright.errors import ConfigError
from rollwright.training.advantages.base import (
    Groups,
    TurnAdvantages,
    admitted,
    centred,
    turn_rewards,
    with_penalties,
    zeros,
)
from rollwright.training.advantages.episodes import GRPO
from rollwright.trajectory import Trajectory, Turn


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation over turns."""

    values: Callable[[Trajectory], Sequence[float]]
    """Value function: for each turn of a trajectory, the expected return of the state in which it was taken."""
    discount: float = 1.0
    decay: float = 0.95
    """GAE's lambda: 1 uses the observed returns, 0 the value estimates."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        return [
            [
                with_penalties(trajectory, self._advantages(trajectory)) if counts else zeros(trajectory)
                for trajectory, counts in zip(group, kept, strict=True)
            ]
            for group, kept in zip(groups, admitted(groups), strict=True)
        ]

    def _advantages(self, trajectory: Trajectory) -> list[float]:
        values = list(self.values(trajectory))
        if len(values) != len(trajectory.turns):
            raise ConfigError(
                f"GAE: {len(values)} values for the {len(trajectory.turns)} turns of {trajectory.rollout_id}; "
                "one for each turn is needed"
            )
        found = turn_rewards(trajectory)
        below = _Below(len(found))
        for turn in reversed(trajectory.turns):
            place = turn.id
            found[place] += below.mean(place) - values[place]
            below.add(turn, self.discount * (values[place] + self.decay * found[place]))
        return found


@dataclass(frozen=True)
class GiGPO:
    """The episode's advantage in its group, plus the turn's advantage among turns of the group taken in the same state."""

    std: bool = False
    """Whether both are divided by their standard deviation."""
    step_weight: float = 1.0
    """Weight of the second term."""
    discount: float = 0.95
    """Discount factor of later rewards in the return of a turn."""

    def __call__(self, groups: Groups) -> TurnAdvantages:
        found = GRPO(std=self.std)(groups)
        for group, kept, own in zip(groups, admitted(groups), found, strict=True):
            for members in self._anchors(group, kept).values():
                steps = centred([taken.value for taken in members], std=self.std)
                for taken, advantage in zip(members, steps, strict=True):
                    own[taken.trajectory][taken.turn] += self.step_weight * advantage
        return found

    def _anchors(self, group: Sequence[Trajectory], kept: Sequence[bool]) -> "dict[str, list[_Taken]]":
        """Anchor groups: the turns of a group by the observation that preceded them, compared as exact text."""
        found: dict[str, list[_Taken]] = {}
        for place, (trajectory, counts) in enumerate(zip(group, kept, strict=True)):
            if not counts:
                continue
            returns = discounted_returns(trajectory, self.discount)
            for turn in trajectory.turns:
                anchor = _observation_before(trajectory, turn.after)
                if anchor is not None:
                    found.setdefault(anchor, []).append(_Taken(place, turn.id, returns[turn.id]))
        return found


@dataclass(frozen=True)
class _Taken:
    """One turn as a member of an anchor group."""

    trajectory: int
    turn: int
    value: float


def discounted_returns(trajectory: Trajectory, discount: float) -> list[float]:
    """Discounted return of each turn."""
    found = turn_rewards(trajectory)
    below = _Below(len(found))
    for turn in reversed(trajectory.turns):
        found[turn.id] += below.mean(turn.id)
        below.add(turn, discount * found[turn.id])
    return found


def _observation_before(trajectory: Trajectory, after: int | None) -> str | None:
    """The observation before a turn; `None` if the environment had not answered the turn before."""
    if after is None:
        return trajectory.observation
    outcome = trajectory.turns[after].outcome
    return outcome.observation if outcome else None


@dataclass
class _Below:
    """Mean over the children of each turn, accumulated from the last turn to the first."""

    size: int
    sums: list[float] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = [0.0] * self.size
        self.counts = [0] * self.size

    def add(self, child: Turn, value: float) -> None:
        if child.after is not None:
            self.sums[child.after] += value * child.count
            self.counts[child.after] += child.count

    def mean(self, turn: int) -> float:
        return self.sums[turn] / self.counts[turn] if self.counts[turn] else 0.0
