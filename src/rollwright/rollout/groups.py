"""The book of groups: a pure state machine that assembles rollouts to groups. No clock, no task, no store.

Always true, after every call: each rollout that was ever opened has exactly one fate, so
`opened == delivered + waiting + filtered + stale + cancelled + failed + running`. A group is handed out whole,
at most once, in the order in which groups became complete. A failed rollout is never in a group.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollwright.errors import ConfigError
from rollwright.rollout.accounting import Fate, FateReason, Ledger
from rollwright.rollout.episode import Episode, level_seed
from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.trajectory import Trajectory


@dataclass(frozen=True)
class GroupRules:
    """Size of a group, and when it is complete or too stale."""

    group_size: int
    redundancy: int = 0
    min_group_size: int | None = None
    """`None`: `group_size`."""
    max_staleness: int | None = 0
    """Limit of policy versions between a group's oldest token and the version at hand-over. `None`: no limit."""
    filters: tuple[Filter, ...] = ()
    replace_failed: bool = True
    """Whether members that failed for good are replaced by others."""
    ranked: frozenset[str] = frozenset()
    """Tags whose groups a judge ranks before they are complete."""

    def fewest(self, size: int) -> int:
        """Members that a group of `size` needs at least."""
        return min(self.min_group_size or size, size)

    def replacements(self, size: int) -> int:
        """Limit of replacements for members that failed for good: as many as the group has members."""
        return size if self.replace_failed else 0


class Draw(NamedTuple):
    """What a group plays."""

    tag: str
    level: int
    members: int
    """Trajectories of the complete group."""


@dataclass
class Group:
    """One group from its opening until it is handed out or dropped."""

    group_id: str
    index: int
    tag: str
    seed: int
    size: int
    """Trajectories of the complete group."""
    members: int = 0
    """Rollouts opened in it so far."""
    running: set[str] = field(default_factory=set)
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By member, so that the order does not depend on which rollout was faster."""
    failures: list[str] = field(default_factory=list)
    account: Ledger = field(default_factory=Ledger, repr=False)
    """Ledger of its rollouts alone."""
    ranking: bool = False
    """Whether all its members are there, and a judge ranks them."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [self.finished[member] for member in sorted(self.finished)]


@dataclass(frozen=True)
class Decision:
    """Operations on the store that follow from a change."""

    enqueue: Sequence[tuple[str, Episode]] = ()
    cancel: Sequence[str] = ()
    """Rollouts that are not needed any more."""
    why: str = ""
    """The reason of the cancellation."""
    rank: Group | None = None
    """A group that is to be ranked; `rank` or `fail_ranking` takes the result."""
    dropped: Group | None = None
    """A group that was dropped."""


NOTHING = Decision()

LevelFunction = Callable[[str, int], int]
"""The level of a group by its slot's tag and its index in the stream; the same in every process and after a restart."""

DrawFunction = Callable[[str, int], Draw]
"""What a group plays, by its slot's tag and its index in the stream; the same again after a restart."""


def draw_in_order(level_of: LevelFunction, group_size: int) -> DrawFunction:
    """Groups of one size, whose level follows from their index."""
    return lambda slot_tag, index: Draw(slot_tag, level_of(slot_tag, index), group_size)


class GroupBook:
    def __init__(
        self,
        rules: GroupRules,
        slot_tags: Sequence[str],
        *,
        run_seed: int,
        mode: str,
        prefix: str,
        levels: int | None = None,
        draw: DrawFunction | None = None,
        observe: Callable[[Group], None] | None = None,
        first: int = 0,
        forgotten: Ledger | None = None,
        keep_accounts: bool = False,
    ) -> None:
        """`draw`: what a group plays, asked when it is opened; `None`: `level_seed`. `observe`: gets each group once it has all
        members that it will get, before filters judge it, or when it is dropped. `levels`: groups in the stream; one that is dropped is then not replaced by another. `None`:
        no end.

        `first`: index of the first group, `forgotten`: ledger of the groups before it. With
        `keep_accounts`, groups can be forgotten, see `forget`."""
        self.ledger = Ledger()
        if forgotten is not None:
            self.ledger.add(forgotten)
        self.dropped_in_a_row = 0
        """Groups dropped since the latest complete one."""
        self._rules = rules
        self._slot_tags = slot_tags
        self._run_seed = run_seed
        self._mode = mode
        self._prefix = prefix
        self._levels = levels
        self._draw = draw or draw_in_order(
            lambda tag, index: level_seed(run_seed, mode, index), rules.group_size
        )
        self._observe = observe
        self._swept = 0
        """Policy version of the latest sweep of stale groups."""
        self._next_index = first
        self._open: dict[str, Group] = {}
        """Groups that are not complete, by id."""
        self._expected = 0
        """Sum of their sizes; kept, because it is asked for with each group that is opened."""
        self._home: dict[str, tuple[Group, int]] = {}
        """Group and member of each running rollout."""
        self._complete: deque[Group] = deque()
        self._ready = 0
        self._accounts: dict[int, Ledger] | None = {} if keep_accounts else None
        """Of the groups that are settled and not forgotten, by index."""

    @property
    def prefix(self) -> str:
        """Prefix of the ids of its rollouts."""
        return f"{self._prefix}-g"

    @property
    def filters(self) -> Sequence[Filter]:
        return self._rules.filters

    @property
    def open_groups(self) -> int:
        return len(self._open)

    @property
    def ready(self) -> int:
        """Trajectories in complete groups."""
        return self._ready

    @property
    def supply(self) -> int:
        """Trajectories that can be handed out now, or once the open groups are complete."""
        return self._ready + self._expected

    @property
    def next_index(self) -> int:
        """Index of the group that would be opened next."""
        return self._next_index

    @property
    def lowest_open(self) -> int:
        """Index of the first group that is still played; of the next one if none is."""
        return min((each.index for each in self._open.values()), default=self._next_index)

    def end_stream(self) -> None:
        """Opens no further group: the stream ends with those that there are."""
        self._levels = self._next_index

    @property
    def all_opened(self) -> bool:
        """Whether the stream is finite and all its groups were opened."""
        return self._levels is not None and self._next_index >= self._levels

    @property
    def first_unsettled(self) -> int:
        """The lowest index of a group that is open, or complete and not handed out; of the next one if there is none."""
        return min((each.index for each in (*self._open.values(), *self._complete)), default=self._next_index)

    def forget(self, index: int) -> Ledger:
        """Forgets the groups before `index`, which must be settled; returns their ledger. The totals keep counting them."""
        assert self._accounts is not None, "accounts are kept if groups are to be forgotten"
        assert index <= self.first_unsettled, "what is not settled must not be forgotten"
        gone = Ledger()
        for each in [each for each in self._accounts if each < index]:
            gone.add(self._accounts.pop(each))
        for name, catch in gone.catches.by_filter.items():  # the first that the filter ever caught
            catch.example = self.ledger.catches.by_filter[name].example
        return gone

    def concerns(self, rollout_id: str) -> bool:
        """Whether the rollout belongs to a group that is open."""
        return rollout_id.rpartition("-m")[0] in self._open

    def awaits(self, rollout_id: str) -> bool:
        """Whether the rollout is one of this book's, and still running."""
        return rollout_id in self._home

    def open_group(self) -> Decision:
        """Opens the next group of the stream."""
        return self.open_members(self.open_empty())

    def open_empty(self) -> str:
        """Opens the next group of the stream without members; returns its id. `open_members` or `settle_as_delivered` follows."""
        index = self._next_index
        self._next_index += 1
        draw = self._draw(self._slot_tags[index % len(self._slot_tags)], index)
        group = Group(f"{self._prefix}-g{index}", index, draw.tag, draw.level, draw.members)
        self._open[group.group_id] = group
        self._expected += group.size
        return group.group_id

    def open_members(self, group_id: str) -> Decision:
        """Opens the members of a group without any."""
        group = self._open[group_id]
        return Decision(enqueue=[self._open_member(group) for _ in range(self._first_members(group))])

    def _first_members(self, group: Group) -> int:
        """Rollouts that are opened with the group."""
        return group.size + self._rules.redundancy

    def finish(self, rollout_id: str, trajectory: Trajectory) -> Decision:
        """Takes the result of a rollout."""
        if rollout_id not in self._home:
            return NOTHING
        group, member = self._leave(rollout_id)
        catches = Catches()
        trajectory, dropped = judge(self._rules.filters, trajectory, catches)
        self._caught(group, catches)
        if dropped is not None:
            self._move(group, Fate.RUNNING, Fate.FILTERED, dropped)
            return self._replace(group, f"filter {dropped}")
        self._move(group, Fate.RUNNING, Fate.WAITING)
        group.finished[member] = trajectory
        # The last of a group whose other members failed without replacement completes it, too.
        if len(group.finished) == group.size or not group.running:
            return self._settle(group)
        return NOTHING

    def rank(self, group_id: str, members: Sequence[Trajectory]) -> Decision:
        """Takes the members of a group that was ranked, in their order, and completes it."""
        group = self._open.get(group_id)
        if group is None or not group.ranking:
            return NOTHING
        group.finished = dict(zip(sorted(group.finished), members, strict=True))
        return self._settle(group)

    def fail_ranking(self, group_id: str, reason: str) -> Decision:
        """Drops a group that could not be ranked."""
        group = self._open.get(group_id)
        if group is None or not group.ranking:
            return NOTHING
        return self._drop(group, Fate.FAILED, reason)

    def fail(self, rollout_id: str, reason: str) -> Decision:
        """Takes the final failure of a rollout, and replaces it while the group may still have a replacement."""
        if rollout_id not in self._home:
            return NOTHING
        group, _ = self._leave(rollout_id)
        self._move(group, Fate.RUNNING, Fate.FAILED, reason)
        return self._replace(group, reason)

    def _replace(self, group: Group, reason: str) -> Decision:
        """Replaces a member that is gone for good, or settles or drops its group."""
        group.failures.append(reason)
        rules = self._rules
        missing = group.size - len(group.finished) - len(group.running)
        spare = group.size + rules.redundancy + rules.replacements(group.size) - group.members
        if missing > 0 and spare > 0:
            return Decision(enqueue=[self._open_member(group)])
        if len(group.finished) + len(group.running) < rules.fewest(group.size):
            why = f"{len(group.failures)} members failed or were filtered, last: {reason}"
            return self._drop(group, Fate.FILTERED, f"{BELOW_MIN_GROUP_SIZE} ({why})")
        return self._settle(group) if not group.running else NOTHING

    def grow_stale(self, rollout_id: str) -> Decision:
        """Takes a rollout that was given up because it became too old; its group is dropped."""
        if rollout_id not in self._home:
            return NOTHING
        group, _ = self._leave(rollout_id)
        self._move(group, Fate.RUNNING, Fate.STALE, _TOO_OLD)
        return self._drop(group, Fate.STALE, _TOO_OLD)

    def take(self, batch_size: int, version: int) -> list[Group] | None:
        """Complete groups with at least `batch_size` trajectories; `None` while there are not enough.

        Groups that are too old at this moment are dropped first, and counted. A stream that has come to its end hands
        out what there is.
        """
        self._drop_stale(version)
        if self.all_opened and not self._open:
            batch_size = min(batch_size, self._ready)
        if self._ready < batch_size:
            return None
        taken: list[Group] = []
        count = 0
        while count < batch_size:
            group = self._complete.popleft()
            count += len(group.finished)
            taken.append(group)
            self._move(group, Fate.WAITING, Fate.DELIVERED, count=len(group.finished))
            self._close(group)
        self._ready -= count
        return taken

    def settle_as_delivered(
        self, group_id: str, fates: Sequence[FateReason] = (), caught: Catches | None = None
    ) -> None:
        """Counts a group as delivered that was handed out before a restart. `fates`: of its members, as far as they are known;
        without any, as many members as its size count as delivered. `caught`: by filters, in it."""
        group = self._open[group_id]
        self._remove(group)
        for rollout_id in tuple(group.running):
            self._leave(rollout_id)
        # More fates than first members: some had taken the places of members that failed. Members are counted and not
        # opened, because a resumed run may have a million of them.
        opened = max(self._first_members(group), group.members, len(fates))
        self.ledger.open(opened - group.members)
        group.account.open(opened - group.members)
        known = Counter(fates) if fates else Counter({(Fate.DELIVERED, None): min(group.size, opened)})
        for (fate, reason), count in known.items():
            self._move(group, Fate.RUNNING, fate, reason, count)
        if rest := opened - known.total():
            self._move(group, Fate.RUNNING, Fate.CANCELLED, "settled before the restart", rest)
        if caught is not None:
            self._caught(group, caught)
        self._close(group)

    def size_of(self, group_id: str) -> int:
        """Size of an open group."""
        return self._open[group_id].size

    def group_index(self, rollout_id: str) -> int | None:
        """The index of the group that a rollout's id names; `None` for a rollout of another stream."""
        start = self.prefix
        number = rollout_id.removeprefix(start).partition("-m")[0]
        return int(number) if rollout_id.startswith(start) and number.isdigit() else None

    def abandon(self, reason: str) -> Decision:
        """Cancels every running rollout: the run ends."""
        cancel: list[str] = []
        for group in list(self._open.values()):
            cancel += self._cancel_running(group, reason)
        return Decision(cancel=cancel, why=reason)

    def _open_member(self, group: Group) -> tuple[str, Episode]:
        member = group.members
        group.members += 1
        rollout_id = f"{group.group_id}-m{member}"
        group.running.add(rollout_id)
        self._home[rollout_id] = (group, member)
        self.ledger.open()
        group.account.open()
        episode = Episode(
            tag=group.tag,
            seed=group.seed,
            mode=self._mode,
            group_id=group.group_id,
            group=group.index,
            member=member,
            run_seed=self._run_seed,
        )
        return rollout_id, episode

    def _leave(self, rollout_id: str) -> tuple[Group, int]:
        group, member = self._home.pop(rollout_id)
        group.running.discard(rollout_id)
        return group, member

    def _settle(self, group: Group) -> Decision:
        """Completes a group that has all members it will get, unless a filter drops it."""
        if self._too_old(group, self._swept):
            return self._drop(group, Fate.STALE, _TOO_OLD)
        if group.tag in self._rules.ranked and not group.ranking:
            group.ranking = True
            return Decision(cancel=self._cancel_running(group, NOT_NEEDED), why=NOT_NEEDED, rank=group)
        if self._observe is not None:
            self._observe(group)
        catches = Catches()
        members, dropped = judge_group(self._rules.filters, group.trajectories, catches)
        self._caught(group, catches)
        if dropped is not None:
            return self._drop(group, Fate.FILTERED, dropped)
        group.finished = dict(zip(sorted(group.finished), members, strict=True))
        cancel = self._cancel_running(group, NOT_NEEDED)
        self._remove(group)
        self._complete.append(group)
        self._ready += len(group.finished)
        self.dropped_in_a_row = 0
        return Decision(cancel=cancel, why=NOT_NEEDED)

    def _drop_stale(self, version: int) -> None:
        if version == self._swept:
            return
        self._swept = version
        fresh: deque[Group] = deque()
        for group in self._complete:
            if not self._too_old(group, version):
                fresh.append(group)
                continue
            count = len(group.finished)
            self._ready -= count
            self._move(group, Fate.WAITING, Fate.STALE, _TOO_OLD, count=count)
            self._close(group)
        self._complete = fresh

    def _too_old(self, group: Group, version: int) -> bool:
        bound = self._rules.max_staleness
        if bound is None:
            return False
        ages = (version - v for t in group.trajectories if (v := t.oldest_version) is not None)
        return max(ages, default=0) > bound

    def _drop(self, group: Group, fate: Fate, reason: str) -> Decision:
        if self._observe is not None:
            self._observe(group)
        self._move(group, Fate.WAITING, fate, reason, count=len(group.finished))
        why = f"its group was dropped: {reason}"
        cancel = self._cancel_running(group, why)
        self._remove(group)
        self._close(group)
        self.dropped_in_a_row += 1
        return Decision(cancel=cancel, why=why, dropped=group)

    def _cancel_running(self, group: Group, reason: str) -> list[str]:
        cancel = sorted(group.running)
        for rollout_id in cancel:
            self._leave(rollout_id)
            self._move(group, Fate.RUNNING, Fate.CANCELLED, reason)
        return cancel

    def _move(self, group: Group, old: Fate, new: Fate, reason: str | None = None, count: int = 1) -> None:
        self.ledger.move(old, new, reason, count)
        group.account.move(old, new, reason, count)

    def _remove(self, group: Group) -> None:
        """Takes a group out of those that are not complete."""
        del self._open[group.group_id]
        self._expected -= group.size

    def _caught(self, group: Group, catches: Catches) -> None:
        self.ledger.catches.add_all(catches)
        group.account.catches.add_all(catches)

    def _close(self, group: Group) -> None:
        """Closes the account of a settled group: the fates of its rollouts are final."""
        if self._accounts is not None:
            self._accounts[group.index] = group.account


_TOO_OLD = "too old"
BELOW_MIN_GROUP_SIZE = "below min_group_size"
NOT_NEEDED = "the group was complete without it"


def check_batch_size(batch_size: int, group_size: int) -> None:
    """Batches are made of whole groups."""
    if batch_size < 1 or batch_size % group_size:
        raise ConfigError(
            f"batch_size: {batch_size} is not a positive multiple of group_size, which is {group_size}"
        )


Version = Callable[[], int]
"""Returns the policy version with which the next token would be sampled."""
