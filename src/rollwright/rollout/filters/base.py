"""What a filter is: it looks at finished play and says what it catches; an action says what follows from that.

Always true: a filter looks at one turn, one trajectory or one complete group and at nothing else, so the same play is
always judged the same. What a filter catches is counted under its name, whatever the action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from rollwright.trajectory import Trajectory, Turn


class Action(StrEnum):
    """What happens to what a filter catches."""

    COUNT = "count"
    """Nothing but counting."""
    MASK = "mask"
    """It stays where it is, but its tokens do not enter the loss."""
    DROP = "drop"
    """It is left out: a trajectory gets a replacement, a group is refilled by another."""
    STOP = "stop"
    """The episode ends with the turn that was caught, and all its tokens stay out of the loss. In a tree that goes for
    the path: turns that other paths share go on counting."""
    PENALISE = "penalise"
    """It costs the penalty that the filter works out, kept apart from the reward."""


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
    """Says in words why it catches a group."""

    def reason(self, group: Sequence[Trajectory]) -> str | None: ...


@runtime_checkable
class MemberTest(Protocol):
    """Catches members of a complete group, seen beside the others."""

    @property
    def name(self) -> str: ...

    def caught_members(self, group: Sequence[Trajectory]) -> list[int]: ...


@runtime_checkable
class Penalty(Protocol):
    """Works out what a caught trajectory costs."""

    def penalties(self, trajectory: Trajectory) -> Mapping[int, float]:
        """Below zero, for each path that costs something, by its last turn."""
        ...


Test = TurnTest | TrajectoryTest | GroupTest | MemberTest


@dataclass(frozen=True)
class Filter:
    """A test and what follows from it."""

    test: Test
    action: Action
    baseline: bool = True
    """Whether a masked trajectory still counts in its group's baseline."""

    @property
    def name(self) -> str:
        return self.test.name


@dataclass
class Catch:
    """What one filter caught so far."""

    count: int = 0
    """Turns, trajectories or groups, as the filter looks at one or the other."""
    example: str = ""
    """The first rollout, or group, that it caught."""


@dataclass
class Catches:
    """What all filters of a stream caught, by name."""

    by_filter: dict[str, Catch] = field(default_factory=dict)

    def add(self, name: str, example: str, count: int = 1) -> None:
        catch = self.by_filter.setdefault(name, Catch(0, example))
        catch.count += count

    def add_all(self, other: "Catches") -> None:
        """What stands in another one, on top."""
        for name, catch in other.by_filter.items():
            self.add(name, catch.example, catch.count)
