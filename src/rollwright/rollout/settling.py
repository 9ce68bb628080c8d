"""Settling rollouts that have ended: into the book of groups, the store, and the records of the run.

Always true: every completion is applied once, in the order of the store's completion log, because the decision on one
rollout (a replacement, say) may concern the next. What the `GroupBook` decides is applied to the store before the next
completion is read. Only the ranking of a complete group runs beside, and no other group waits for it.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from rollwright.agents import EpisodeFailure, entries, failed
from rollwright.aio import shielded
from rollwright.errors import FormatError
from rollwright.rollout.accounting import FailureCauses
from rollwright.rollout.env_manager import STALE, USED
from rollwright.rollout.episode import Episode, read_episode
from rollwright.rollout.groups import Decision, Group, GroupBook
from rollwright.rollout.ranking import GroupRanker, RankingTasks
from rollwright.rollout.stream import StreamHooks, StreamRollouts
from rollwright.store.errors import NotFound
from rollwright.store.records import CompletionEntry, RolloutStatus
from rollwright.store.transitions import FINAL_ROLLOUT
from rollwright.trajectory import Boundary, OutsideCall, Trajectory, check_rewards
from rollwright.trajectory.usage import collect_calls, sum_calls

NO_REASON = "no reason given"

CANCELLED_AT_ONCE = 1_000
"""Rollouts that are cancelled together: at the end of a run, all that still wait in the queue, perhaps a million."""

ASKED_ONE_BY_ONE = 16
"""Up to so many rollouts, their journals are read without asking first which of them have begun."""

BEGUN = [each for each in RolloutStatus if each not in FINAL_ROLLOUT and each is not RolloutStatus.QUEUING]


class RolloutSettler:
    """Applies the completions of one stream; `progress` is called whenever there may be more to hand out or to open."""

    def __init__(
        self,
        book: GroupBook,
        rollouts: StreamRollouts,
        hooks: StreamHooks,
        progress: Callable[[], None],
        ranker: GroupRanker | None = None,
    ) -> None:
        self.book = book
        self.rollouts = rollouts
        self.causes = FailureCauses()
        """Why rollouts failed for good."""
        self._hooks = hooks
        self._progress = progress
        self._ranker = ranker
        self._ranking = RankingTasks(rollouts.limits.max_attempts)

    async def close(self) -> None:
        await self._ranking.close()

    async def settle(self, completions: Iterable[CompletionEntry]) -> None:
        mine = [each for each in completions if self.book.concerns(each.rollout_id)]
        done = [each.rollout_id for each in mine if each.status is RolloutStatus.SUCCEEDED]
        encoded = await self.load_encoded(done)
        for each in mine:
            if self.book.awaits(each.rollout_id):
                await self.apply(await self._decide(each, encoded.get(each.rollout_id)))
        await self.rollouts.release([each.rollout_id for each in mine])
        if done:
            await self._hooks.settled()
        self._progress()

    async def load_encoded(self, wanted: Sequence[str]) -> dict[str, bytes]:
        """Loads encoded trajectories, from the run's own log or else from the store; without those that neither has."""
        if not wanted:
            return {}
        encoded = dict(self._hooks.read_kept(wanted))
        if missing := [each for each in wanted if each not in encoded]:
            encoded |= await self.rollouts.store.get_trajectories(missing)
        return encoded

    def recall(self, rollout_id: str, episode: Episode) -> bool:
        """Takes over the result of a rollout that need not be played; `False`: it is not known."""
        encoded = self._hooks.recall(rollout_id, episode)
        if encoded is None:
            return False
        self._take_over(rollout_id, encoded, paid=False)
        return True

    async def finish(self, decision: Decision) -> None:
        """Applies the last decision, which cancels all that runs. A store that is about to be forgotten is not told: with tens
        of thousands of episodes in flight that would take longer than to stop them."""
        if not self.rollouts.forget:
            await self.apply(decision)
            return
        for first in range(0, len(decision.cancel), CANCELLED_AT_ONCE):
            await self._count_cancelled(decision.cancel[first : first + CANCELLED_AT_ONCE])

    async def apply(self, decision: Decision) -> None:
        """Applies a decision of the book to the store."""
        if decision.enqueue:
            await self.rollouts.enqueue(decision)
        if decision.cancel:
            for first in range(0, len(decision.cancel), CANCELLED_AT_ONCE):
                part = decision.cancel[first : first + CANCELLED_AT_ONCE]
                await self._count_cancelled(part)
                await self.rollouts.cancel(part, decision.why)
        if decision.dropped is not None:
            self._record_unranked(decision.dropped)
        if decision.rank is not None and self._ranker is not None:
            self._ranking.start(self._rank(self._ranker, decision.rank))

    async def _decide(self, completion: CompletionEntry, encoded: bytes | None) -> Decision:
        rollout_id = completion.rollout_id
        if completion.status is RolloutStatus.SUCCEEDED:
            return self._take_over(rollout_id, encoded)
        if completion.status is RolloutStatus.FAILED:
            await self._count_failed(rollout_id)
            return self._give_up(rollout_id, completion.reason or NO_REASON)
        if completion.reason == STALE:
            await self._count_stale(rollout_id)
            return self.book.grow_stale(rollout_id)
        return self.book.fail(rollout_id, "cancelled from outside")

    def _take_over(self, rollout_id: str, data: bytes | None, *, paid: bool = True) -> Decision:
        """Takes a committed trajectory into the book. A worker of others may commit anything: bytes that are no trajectory
        with finite rewards are a failure."""
        try:
            if data is None:
                raise FormatError("the store does not have its trajectory")
            trajectory = check_rewards(Trajectory.from_bytes(data))
        except FormatError as error:
            return self._give_up(rollout_id, str(failed(Boundary.SYSTEM, error, 0)))
        decision = self.book.finish(rollout_id, trajectory)
        if not paid:
            self._hooks.recalled(rollout_id)
        if not self._awaits_rank(trajectory):
            self._hooks.finished(rollout_id, data)
        self._hooks.spent(rollout_id, trajectory)
        return decision

    def _give_up(self, rollout_id: str, reason: str) -> Decision:
        self.causes.add(reason, rollout_id)
        decision = self.book.fail(rollout_id, EpisodeFailure.cause(reason))
        self._hooks.failed(rollout_id, reason)
        return decision

    async def _rank(self, ranker: GroupRanker, group: Group) -> None:
        """Ranks the members of a group, and completes or drops it."""
        try:
            with collect_calls() as calls:
                members = await self._ranking.retry(lambda: ranker.rank(group))
        except EpisodeFailure as failure:
            reason = str(failure)
            for each in group.trajectories:
                self.causes.add(reason, each.rollout_id)
                self._hooks.failed(each.rollout_id, reason)
            decision = self.book.fail_ranking(group.group_id, EpisodeFailure.cause(reason))
        else:
            for each in members:
                self._hooks.finished(each.rollout_id, each.to_bytes())
            decision = self.book.rank(group.group_id, members)
        finally:
            if calls:
                self._hooks.ranked(group, sum_calls(calls))
        await shielded(self.apply(decision))
        self._progress()

    def _awaits_rank(self, trajectory: Trajectory) -> bool:
        """Whether it is recorded later, with its rank: until then the store keeps it."""
        return self._ranker is not None and trajectory.tag in self._ranker.tags

    def _record_unranked(self, group: Group) -> None:
        """Records the members of a group that was dropped before it was ranked."""
        for each in group.trajectories:
            if self._awaits_rank(each):
                self._hooks.finished(each.rollout_id, each.to_bytes())

    async def _count_failed(self, rollout_id: str) -> None:
        """Reports the turns of a failed rollout, which its last attempt has left: they were paid for all the same."""
        left = await self.rollouts.store.get_trajectories([rollout_id], failed=True)
        for data in left.values():
            with suppress(FormatError):
                self._hooks.spent(rollout_id, Trajectory.from_bytes(data))

    async def _count_stale(self, rollout_id: str) -> None:
        """Reports what a rollout that became too old has used, as its worker has noted it with the attempt."""
        attempts = await self.rollouts.store.query_attempts(rollout_id)
        noted = [each.metadata[USED] for each in attempts if USED in each.metadata]
        if noted:
            with suppress(msgspec.ValidationError):
                left = Trajectory(rollout_id, "", rollout_id.rpartition("-m")[0], str(noted[-1]["tag"]), 0)
                left.judged = tuple(msgspec.convert(noted[-1]["calls"], list[OutsideCall]))
                self._hooks.spent(rollout_id, left)

    async def _count_cancelled(self, rollout_ids: Sequence[str]) -> None:
        """Reports the turns of rollouts that are about to be cancelled, from their journals."""
        store = self.rollouts.store
        for rollout_id in await self._begun(rollout_ids):
            with suppress(FormatError, NotFound):
                journalled = entries(await store.read_journal(rollout_id))
                if journalled:
                    turns = [each.turn for each in journalled.values()]
                    rollout = await store.get_rollout_by_id(rollout_id)
                    tag = "" if rollout is None else read_episode(rollout.input).tag
                    group_id = rollout_id.rpartition("-m")[0]
                    self._hooks.spent(rollout_id, Trajectory(rollout_id, "", group_id, tag, 0, turns=turns))

    async def _begun(self, rollout_ids: Sequence[str]) -> Sequence[str]:
        """Those of the rollouts that may have a journal: no worker has had any that still waits for its first attempt."""
        if len(rollout_ids) <= ASKED_ONE_BY_ONE:
            return rollout_ids
        found = await self.rollouts.store.query_rollouts(
            status=BEGUN, rollout_ids=rollout_ids, limit=len(rollout_ids)
        )
        return [each.rollout_id for each in found]
