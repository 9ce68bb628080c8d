"""What became of groups that were handed out before a restart, out of the store's completion log. Pure.

Always true: told the completions in the order of the log, it comes to the same places, reasons and catches as the book
came to when they happened: a member counts until its group is complete, one that a filter dropped was replaced, and what
came later was not needed.
"""

from collections.abc import Collection, Sequence

from rollwright.agents import EpisodeFailure
from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.rollout.groups import NOT_NEEDED
from rollwright.rollout.ledger import Fate, Place
from rollwright.store.records import CompletionEntry, RolloutStatus
from rollwright.trajectory import Trajectory

NO_REASON = "no reason given"
HANDED_OUT: Fate = (Place.DELIVERED, None)


class Retelling:
    """Takes the log of one stream, completion by completion."""

    def __init__(self, delivered: Collection[str], group_size: int, filters: Sequence[Filter]) -> None:
        self._delivered = frozenset(delivered)
        self._group_size = group_size
        self._filters = filters
        self._members: dict[str, dict[int, Trajectory]] = {}
        """Of groups that are not complete yet."""
        self.fates: dict[str, list[Fate]] = {}
        """By group, in the order of the log."""
        self.caught: dict[str, Catches] = {}
        """By group: what the filters caught in it."""

    def asks_for(self, completion: CompletionEntry) -> bool:
        """Whether the trajectory is needed: filters look at it again."""
        return (
            bool(self._filters)
            and completion.status is RolloutStatus.SUCCEEDED
            and _group_of(completion) in self._delivered
        )

    def tell(self, completion: CompletionEntry, trajectory: Trajectory | None = None) -> None:
        """`None`: the store does not have it, or nobody asked for it."""
        group_id = _group_of(completion)
        if group_id not in self._delivered:
            return
        so_far = self.fates.setdefault(group_id, [])
        fate: Fate = Place.CANCELLED, completion.reason or NOT_NEEDED
        if completion.status is RolloutStatus.FAILED:
            fate = Place.FAILED, EpisodeFailure.cause(completion.reason or NO_REASON)
        elif completion.status is RolloutStatus.SUCCEEDED and so_far.count(HANDED_OUT) < self._group_size:
            fate = HANDED_OUT if trajectory is None else self._judged(group_id, completion, trajectory)
        so_far.append(fate)
        if so_far.count(HANDED_OUT) == self._group_size:
            self._complete(group_id)

    def end(self) -> None:
        """The log is told: what is left was handed out with fewer members."""
        for group_id in tuple(self._members):
            self._complete(group_id)

    def _judged(self, group_id: str, completion: CompletionEntry, trajectory: Trajectory) -> Fate:
        judged = judge(self._filters, trajectory, self._catches(group_id))
        if judged.dropped is not None:
            return Place.FILTERED, judged.dropped
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
