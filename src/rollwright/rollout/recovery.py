"""Recovery after a restart: the turn journal of an attempt, and the completion log of a stream of groups.

`StoreJournal` keeps one attempt's turns in the store, for the next attempt at the same rollout. `CompletionReplay` is
pure: it takes the store's completion log in order and recovers the fates, reasons and filter catches of groups that
were handed out before the restart. Always true: the result equals the accounts of the group book at the time of the
completions, because the same rules apply: a member counts until its group is complete, a member that a filter dropped was
replaced, and later members were not needed.
"""

from collections.abc import Collection, Sequence

from rollwright.agents import EpisodeFailure, JournalEntry, Superseded, entries
from rollwright.errors import FormatError
from rollwright.rollout.accounting import Fate, FateReason
from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.rollout.groups import NOT_NEEDED
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import CompletionEntry, RolloutStatus
from rollwright.trajectory import Trajectory

NO_REASON = "no reason given"
HANDED_OUT: FateReason = (Fate.DELIVERED, None)


class CompletionReplay:
    """Replays the completion log of one stream, completion by completion."""

    def __init__(self, delivered: Collection[str], group_size: int, filters: Sequence[Filter]) -> None:
        self._delivered = frozenset(delivered)
        self._group_size = group_size
        self._filters = filters
        self._members: dict[str, dict[int, Trajectory]] = {}
        """Of groups that are not complete yet."""
        self.fates: dict[str, list[FateReason]] = {}
        """By group, in the order of the log."""
        self.caught: dict[str, Catches] = {}
        """Filter catches by group."""

    def needs_trajectory(self, completion: CompletionEntry) -> bool:
        """Whether the completion's trajectory must be given too: filters judge it again."""
        return (
            bool(self._filters)
            and completion.status is RolloutStatus.SUCCEEDED
            and _group_of(completion) in self._delivered
        )

    def apply(self, completion: CompletionEntry, trajectory: Trajectory | None = None) -> None:
        """Applies the next completion. `trajectory`: `None` if the store does not have it, or it is not needed."""
        group_id = _group_of(completion)
        if group_id not in self._delivered:
            return
        so_far = self.fates.setdefault(group_id, [])
        fate: FateReason = Fate.CANCELLED, completion.reason or NOT_NEEDED
        if completion.status is RolloutStatus.FAILED:
            fate = Fate.FAILED, EpisodeFailure.cause(completion.reason or NO_REASON)
        elif completion.status is RolloutStatus.SUCCEEDED and so_far.count(HANDED_OUT) < self._group_size:
            fate = HANDED_OUT if trajectory is None else self._judge(group_id, completion, trajectory)
        so_far.append(fate)
        if so_far.count(HANDED_OUT) == self._group_size:
            self._complete(group_id)

    def finish(self) -> None:
        """Ends the replay: the remaining groups were handed out with fewer members."""
        for group_id in tuple(self._members):
            self._complete(group_id)

    def _judge(self, group_id: str, completion: CompletionEntry, trajectory: Trajectory) -> FateReason:
        judged = judge(self._filters, trajectory, self._catches(group_id))
        if judged.dropped is not None:
            return Fate.FILTERED, judged.dropped
        member = int(completion.rollout_id.rpartition("-m")[2])
        self._members.setdefault(group_id, {})[member] = judged.trajectory
        return HANDED_OUT

    def _complete(self, group_id: str) -> None:
        members = self._members.pop(group_id, None)
        if members:
            in_order = [members[member] for member in sorted(members)]
            judge_group(self._filters, in_order, self._catches(group_id))

    def _catches(self, group_id: str) -> Catches:
        return self.caught.setdefault(group_id, Catches())


def _group_of(completion: CompletionEntry) -> str:
    return completion.rollout_id.rpartition("-m")[0]


class StoreJournal:
    """The turn journal of one attempt, kept in the store."""

    def __init__(self, store: Store, rollout_id: str, attempt_id: str) -> None:
        self.recorded: dict[int, JournalEntry] = {}
        self._store = store
        self._held = (rollout_id, attempt_id)

    async def load(self) -> bool:
        """Reads the turns that earlier attempts recorded; `False`: they are damaged."""
        encoded = await self._store.read_journal(self._held[0])
        try:
            self.recorded = entries(encoded)
        except FormatError:
            return False
        return True

    async def append(self, entry: JournalEntry) -> None:
        """Makes a turn durable; raises `Superseded` if the attempt has lost its rollout."""
        try:
            await self._store.append_journal(*self._held, [entry.to_bytes()])
        except (AttemptRefused, NotFound) as error:
            raise Superseded(str(error)) from error

    async def clear(self) -> None:
        """Deletes the recorded turns, here and in the store."""
        self.recorded.clear()
        await self._store.clear_journal(*self._held)
