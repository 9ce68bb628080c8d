"""Filters: a test that catches turns, trajectories or groups, and the action that follows.

Always true: a test depends on one turn, one trajectory or one complete group alone, so its result is reproducible. Catches
are counted under the name of the filter, whatever the action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from rollwright.trajectory import Trajectory, Turn


class Action(StrEnum):
    """The consequence of a catch."""

    COUNT = "count"
    """Only counted."""
    MASK = "mask"
    """Kept, but its tokens are masked out of the loss."""
    DROP = "drop"
    """Left out: a trajectory or a group is replaced by another."""
    STOP = "stop"
    """The episode ends with the caught turn, and all its tokens are masked. In a tree this applies to the path: turns that
    other paths share still count."""
    PENALISE = "penalise"
    """Gets the penalty that the filter computes, separate from the reward."""


@runtime_checkable
class TurnTest(Protocol):
    """Catches single turns."""

    @property
    def name(self) -> str: ...

    def catches_turn(self, turn: Turn) -> bool: ...


@runtime_checkable
class TrajectoryTest(Protocol):
    """Catches whole trajectories."""

    @property
    def name(self) -> str: ...

    def catches(self, trajectory: Trajectory) -> bool: ...


@runtime_checkable
class GroupTest(Protocol):
    """Catches complete groups."""

    @property
    def name(self) -> str: ...

    def catches_group(self, group: Sequence[Trajectory]) -> bool: ...


@runtime_checkable
class Reasoned(Protocol):
    """Gives a reason for catching a group."""

    def reason(self, group: Sequence[Trajectory]) -> str | None: ...


@runtime_checkable
class MemberTest(Protocol):
    """Catches members of a complete group by comparing them."""

    @property
    def name(self) -> str: ...

    def caught_members(self, group: Sequence[Trajectory]) -> list[int]: ...


@runtime_checkable
class Penalty(Protocol):
    """Computes the penalty of a caught trajectory."""

    def penalties(self, trajectory: Trajectory) -> Mapping[int, float]:
        """Negative penalties by the last turn of each penalised path."""
        ...


Test = TurnTest | TrajectoryTest | GroupTest | MemberTest


@dataclass(frozen=True)
class Filter:
    """A test and its action."""

    test: Test
    action: Action
    baseline: bool = True
    """Whether a masked trajectory still counts in its group's baseline."""

    @property
    def name(self) -> str:
        return self.test.name


@dataclass
class Catch:
    """Catches of one filter so far."""

    count: int = 0
    """Number of caught turns, trajectories or groups."""
    example: str = ""
    """The first rollout, or group, that it caught."""


@dataclass
class Catches:
    """Catches of all filters of a stream, by name."""

    by_filter: dict[str, Catch] = field(default_factory=dict)

    def add(self, name: str, example: str, count: int = 1) -> None:
        catch = self.by_filter.setdefault(name, Catch(0, example))
        catch.count += count

    def add_all(self, other: "Catches") -> None:
        """Adds the catches of another stream."""
        for name, catch in other.by_filter.items():
            self.add(name, catch.example, catch.count)
