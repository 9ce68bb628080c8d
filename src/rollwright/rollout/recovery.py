"""Recovery of a stream of groups after a restart, from the store's completion log.

`restore_stream` brings a group book to the state of the store, by taking the same decisions again. `CompletionReplay` is
pure: it takes the completion log in order and recovers the fates, reasons and filter catches of groups that were handed
out before the restart. Always true: the result equals the accounts of the group book at the time of the completions,
because the same rules apply: a member counts until its group is complete, a member that a filter dropped was replaced,
and later members were not needed.
"""

from collections.abc import Callable, Collection, Sequence

import msgspec

from rollwright.agents import EpisodeFailure, failed
from rollwright.errors import FormatError
from rollwright.rollout.accounting import Fate, FateReason
from rollwright.rollout.episode import read_episode
from rollwright.rollout.filters import Catches, Filter, judge, judge_group
from rollwright.rollout.groups import NOT_NEEDED
from rollwright.rollout.settling import NO_REASON, RolloutSettler
from rollwright.rollout.stream import CompletionsRead, open_rollout_ids
from rollwright.store.records import CompletionEntry, EnqueueRequest, RolloutStatus
from rollwright.trajectory import Boundary, Trajectory

RESTORED_AT_ONCE = 1000
"""Finished rollouts whose trajectories are loaded together."""

GROUPS_AT_ONCE = 500
"""Groups that are opened again before those of them that were handed out are settled."""

HANDED_OUT: FateReason = (Fate.DELIVERED, None)


class CompletionReplay:
    """Replays the completion log of one stream, completion by completion."""

    def __init__(
        self, delivered: Collection[str], size_of: Callable[[str], int], filters: Sequence[Filter]
    ) -> None:
        self._delivered = frozenset(delivered)
        self._size_of = size_of
        """Size of a delivered group."""
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
        elif completion.status is RolloutStatus.SUCCEEDED and so_far.count(HANDED_OUT) < self._size_of(
            group_id
        ):
            fate = HANDED_OUT if trajectory is None else self._judge(group_id, completion, trajectory)
        so_far.append(fate)
        if so_far.count(HANDED_OUT) == self._size_of(group_id):
            self._complete(group_id)

    def apply_group(self, group_id: str, log: Sequence[CompletionEntry]) -> bool:
        """Applies all completions of a group at once if each of them was handed out, as nearly always; `False`: one may not
        have been, and `apply` has to take them one by one."""
        whole = (
            not self._filters
            and group_id in self._delivered
            and len(log) <= self._size_of(group_id)
            and all(each.status is RolloutStatus.SUCCEEDED for each in log)
        )
        if whole and log:
            self.fates[group_id] = [HANDED_OUT] * len(log)
        return whole

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


async def restore_stream(
    settler: RolloutSettler, first: int, delivered: Collection[str], log: CompletionsRead | None = None
) -> int:
    """Brings the settler's book to the state of the store; returns the position in the completion log up to which it was read.

    `first`: index of the first group that is not forgotten; `delivered`: groups that were handed out; `log`: what was read of
    the store's completion log. It does not matter how many of the decisions were applied before the restart: enqueueing and
    cancelling are idempotent.
    """
    book, store = settler.book, settler.rollouts.store
    handed_out = frozenset(delivered)
    log = CompletionsRead() if log is None else log
    # Before the completion log: what ends meanwhile is in both.
    known = set(await open_rollout_ids(store, book.prefix, settler.rollouts.mode, log))
    of_delivered: dict[str, list[CompletionEntry]] = {}
    others: list[CompletionEntry] = []
    for each in await log.read_on(store):
        if not each.rollout_id.startswith(book.prefix):
            continue
        if (group_id := _group_of(each)) in handed_out:
            of_delivered.setdefault(group_id, []).append(each)
        else:
            others.append(each)
    # Members of groups that were handed out need not be known, because such groups are not enqueued again.
    known.update(each.rollout_id for each in others)
    # Groups are opened in the order of their indices, so the highest one in the store says how many there were.
    indices = [book.group_index(each) for each in (*known, *delivered)]
    opened = max((index for index in indices if index is not None), default=-1) + 1
    requests: list[EnqueueRequest] = []
    for start in range(first, opened, GROUPS_AT_ONCE):
        groups = [book.open_empty() for _ in range(start, min(start + GROUPS_AT_ONCE, opened))]
        await _settle_delivered(settler, [each for each in groups if each in handed_out], of_delivered)
        for group_id in groups:
            if group_id not in handed_out:
                requests += settler.rollouts.requests(book.open_members(group_id))
    # A process can end between opening a group in its book and enqueueing it: those rollouts are enqueued now.
    lost = [
        each
        for each in requests
        if each.rollout_id
        and each.rollout_id not in known
        and book.awaits(each.rollout_id)
        and not settler.recall(each.rollout_id, read_episode(each.input))
    ]
    if lost:
        await store.enqueue_many_rollouts(lost)
    for start in range(0, len(others), RESTORED_AT_ONCE):
        await settler.settle(others[start : start + RESTORED_AT_ONCE])
    book.dropped_in_a_row = 0  # between those that were dropped, others were handed out
    return log.cursor


async def _settle_delivered(
    settler: RolloutSettler, groups: Sequence[str], log: dict[str, list[CompletionEntry]]
) -> None:
    """Settles groups that were handed out, each at once: a run may have many thousands of them."""
    replay = CompletionReplay(groups, settler.book.size_of, settler.book.filters)
    rest: list[CompletionEntry] = []
    for group_id in groups:
        of_group = log.pop(group_id, [])
        if not replay.apply_group(group_id, of_group):
            rest += of_group
    await _replay_log(replay, rest, settler)
    for group_id in groups:
        settler.book.settle_as_delivered(
            group_id, replay.fates.get(group_id, ()), replay.caught.get(group_id)
        )


async def _replay_log(
    replay: CompletionReplay, log: Sequence[CompletionEntry], settler: RolloutSettler
) -> None:
    """Recovers the fates of the members of delivered groups, and what the filters caught among them."""
    for first in range(0, len(log), RESTORED_AT_ONCE):
        part = log[first : first + RESTORED_AT_ONCE]
        wanted = [each.rollout_id for each in part if replay.needs_trajectory(each)]
        encoded = await settler.load_encoded(wanted)
        for each in part:
            data = encoded.get(each.rollout_id)
            try:
                replay.apply(each, None if data is None else Trajectory.from_bytes(data))
            except FormatError as error:  # settled as a failure, too
                reason = str(failed(Boundary.SYSTEM, error, 0))
                replay.apply(msgspec.structs.replace(each, status=RolloutStatus.FAILED, reason=reason))
    replay.finish()
