"""What each group plays: its tag, its level and its size, drawn when the group is opened.

Always true: a group is drawn once. `RecordedDraws` writes every draw before the group's rollouts are enqueued, and every
outcome that a later draw may depend on, each in its order. So a resumed run has the same groups, and a sampler that has
read the record is in the state in which the earlier process left it.

Outcomes reach the sampler only when a batch is handed out, in the order of the groups: draws of a synchronous run do not
depend on which rollout was faster.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, NamedTuple, Protocol

from rollwright import rng
from rollwright.rollout.groups import Draw, Group

Row = Mapping[str, Any]


class GroupOutcome(NamedTuple):
    """What the members of a group achieved."""

    solved: float
    """Mean share of solved episodes; where the environment does not tell, the mean reward, bounded to 0…1."""
    members: int
    tokens: int
    """Sampled by all of them."""

    @classmethod
    def of(cls, group: Group) -> "GroupOutcome | None":
        """`None` if no member has finished."""
        members = group.trajectories
        if not members:
            return None
        shares = [
            min(max(each.reward, 0.0), 1.0) if (share := each.success_share) is None else share
            for each in members
        ]
        return cls(sum(shares) / len(members), len(members), sum(each.sampled_tokens for each in members))


class TaskChoice(NamedTuple):
    """What a task sampler wants the next group of a tag to play."""

    level: int | None = None
    """A level that was played before; `None`: the next one in the order of the tag."""
    members: int | None = None
    """Size of the group; `None`: `group_size`."""


class TaskSampler(Protocol):
    """Chooses levels and rows by what was learned from earlier groups. Made as `sampler(settings, group_size, **options)`.

    Its state may depend on the calls of `choose`, `observe` and `release` alone: a resumed run repeats them in their order."""

    def choose(self, tag: str, chance: Random) -> TaskChoice:
        """The next group of `tag`; `chance` is a generator of its own for each group."""
        ...

    def observe(self, tag: str, level: int, outcome: GroupOutcome) -> None:
        """A group that played `level` has this outcome."""
        ...

    def release(self, tag: str, level: int) -> None:
        """A group that was to play `level` has none."""
        ...

    def figures(self) -> Mapping[str, float]:
        """For the run's metrics, by name."""
        ...


OrderedLevel = Callable[[str, int], int]
"""The level of the n-th group of a tag that takes levels in their order."""


class RecordedDraws:
    """Draws of a run whose groups depend on earlier ones: by a curriculum, a task sampler, or both."""

    def __init__(
        self,
        run_seed: int,
        group_size: int,
        level_of: Callable[[str, int], int],
        *,
        tag_of: Callable[[str], str] = str,
        sampler: TaskSampler | None = None,
        ordered: OrderedLevel | None = None,
        write: Callable[[Row], None] | None = None,
    ) -> None:
        """
        Args:
            level_of: Level of a group by its slot's tag and its index; used without a sampler.
            tag_of: The tag that is played for a slot's tag, see `Curriculum`.
            ordered: See `OrderedLevel`; needed with a sampler.
            write: Appends a row to the record.
        """
        self._run_seed = run_seed
        self._group_size = group_size
        self._level_of = level_of
        self._tag_of = tag_of
        self._sampler = sampler
        self._ordered = ordered
        self._write = write
        self._drawn: dict[int, Draw] = {}
        """Of the groups that are not observed, and of all that an earlier process has drawn."""
        self._in_order: dict[str, int] = {}
        """How many groups of each slot's tag have taken the next level in its order."""
        self._observed: set[int] = set()
        self._waiting: dict[int, tuple[Draw, GroupOutcome | None]] = {}
        """Outcomes since the last batch."""

    def __call__(self, slot_tag: str, index: int) -> Draw:
        """Draws the group at `index`, unless it was drawn before."""
        known = self._drawn.get(index)
        if known is not None:
            return known
        tag = self._tag_of(slot_tag)
        choice = self._choose(tag, index)
        level = self._next_level(slot_tag, index) if choice.level is None else choice.level
        draw = self._drawn[index] = Draw(tag, level, choice.members or self._group_size)
        if self._write is not None:
            in_order = choice.level is None
            self._write({"group": index, "slot": slot_tag, **draw._asdict(), "in_order": in_order})
        return draw

    def _choose(self, tag: str, index: int) -> TaskChoice:
        if self._sampler is None:
            return TaskChoice()
        return self._sampler.choose(tag, rng.generator("task sampler", self._run_seed, index))

    def _next_level(self, slot_tag: str, index: int) -> int:
        if self._ordered is None:
            return self._level_of(slot_tag, index)
        place = self._in_order.get(slot_tag, 0)
        self._in_order[slot_tag] = place + 1
        return self._ordered(slot_tag, place)

    def observe(self, group: Group) -> None:
        """Takes a group that has all members it will get, before filters judge it; the first report counts."""
        draw = self._drawn.get(group.index)
        if self._sampler is None:
            self._drawn.pop(group.index, None)
        elif draw is not None and group.index not in self._observed:
            self._waiting.setdefault(group.index, (draw, GroupOutcome.of(group)))

    def end_batch(self) -> None:
        """Lets the sampler learn from the groups that were observed since the last batch."""
        for index in sorted(self._waiting):
            draw, outcome = self._waiting[index]
            row = {"group": index} if outcome is None else {"group": index, **outcome._asdict()}
            self._learn(index, draw, outcome)
            self._drawn.pop(index, None)
            if self._write is not None:
                self._write(row)
        self._waiting.clear()

    def restore(self, rows: Iterable[Row]) -> None:
        """Repeats what an earlier process has recorded."""
        for row in rows:
            index = row["group"]
            if "slot" in row:
                self._repeat(row)
            elif index in self._drawn:
                outcome = (
                    GroupOutcome(row["solved"], row["members"], row["tokens"]) if "solved" in row else None
                )
                self._learn(index, self._drawn[index], outcome)

    def knows(self, index: int) -> bool:
        """Whether the group at `index` was drawn."""
        return index in self._drawn or index in self._observed

    def add(self, index: int, draw: Draw) -> None:
        """Enters a group that was drawn before, and is not in the record."""
        self._drawn[index] = draw

    def figures(self) -> Mapping[str, float]:
        """Of the sampler."""
        return {} if self._sampler is None else self._sampler.figures()

    def _repeat(self, row: Row) -> None:
        draw = Draw(row["tag"], row["level"], row["members"])
        self._choose(draw.tag, row["group"])
        if row["in_order"]:
            self._in_order[row["slot"]] = self._in_order.get(row["slot"], 0) + 1
        self._drawn[row["group"]] = draw

    def _learn(self, index: int, draw: Draw, outcome: GroupOutcome | None) -> None:
        self._observed.add(index)
        if self._sampler is None:
            return
        if outcome is None:
            self._sampler.release(draw.tag, draw.level)
        else:
            self._sampler.observe(draw.tag, draw.level, outcome)
