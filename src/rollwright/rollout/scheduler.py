"""The scheduler: opens groups, collects their completed rollouts, and answers `get_batch()`.

Always true: a batch is handed out as soon as enough complete groups exist anywhere, and never waits for one particular
group. Groups are opened only as far as there is demand: the batch that a caller waits for, and `async_generation_ratio`
batches ahead. So a synchronous run opens exactly what a batch needs, and an asynchronous one is paced by its trainer
instead of throwing work away.

All decisions are the `GroupBook`'s, which is pure; this shell applies them to the store. It has two tasks: `_open_on_demand`
enqueues the rollouts of new groups, `_collect` follows the store's completion log and settles rollouts. Both notify a
waiting `get_batch` by an event.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

from rollwright.agents import EpisodeFailure, entries, failed
from rollwright.errors import FormatError, RollwrightError, RunClosed
from rollwright.rollout.accounting import FailureCauses, Fate, Ledger
from rollwright.rollout.env_manager import STALE, USED
from rollwright.rollout.episode import Episode, read_episode
from rollwright.rollout.filters import build_filters
from rollwright.rollout.groups import (
    BELOW_MIN_GROUP_SIZE,
    Decision,
    Group,
    GroupBook,
    GroupRules,
    LevelFunction,
    Version,
    check_batch_size,
)
from rollwright.rollout.ranking import GroupRanker, RankingTasks
from rollwright.rollout.recovery import NO_REASON, CompletionReplay
from rollwright.rollout.settings import EnvManagerConfig, StreamSettings
from rollwright.store.api import Store
from rollwright.store.errors import NotFound
from rollwright.store.records import (
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.trajectory import Boundary, OutsideCall, Trajectory, check_rewards
from rollwright.trajectory.usage import collect_calls, sum_calls

IDS_AT_ONCE = 10_000
"""Page size of queries for rollout ids; each page costs a scan of all of them."""

RESTORED_AT_ONCE = 1000
"""Finished rollouts whose trajectories are loaded together when a stream is resumed."""

FOREIGN_CANCELLATION = (
    "code that it plays: does an environment, agent, tool or filter cancel tasks that are not its own?"
)

COMPLETIONS_SECONDS = 60.0
"""Seconds for which one call waits for finished rollouts; only limits the effect of a lost wake-up."""


GATE_SECONDS = 1.0
"""Seconds after which a gate is asked again without news."""


@dataclass(frozen=True)
class Batch:
    """Complete groups, with all their trajectories."""

    groups: list[Group]
    version: int
    """Policy version at the moment of hand-over."""
    ledger: Ledger
    """Ledger of the stream of this batch; it keeps changing."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class OpeningGate(Protocol):
    """Decides before every group whether it may be opened now; asked again whenever rollouts have ended."""

    def admits(self, rollouts: int) -> bool:
        """Whether so many more rollouts may be opened beside those in flight."""
        ...

    def refusal(self, rollouts: int) -> RollwrightError | None:
        """Why so many cannot be opened although nothing is in flight; `None`: they can, or something is."""
        ...


class StreamPace(Protocol):
    """Decides how far a finite stream is opened, and when it ends before its last group."""

    def limit(self, lowest_open: int) -> int | None:
        """The number of groups that may be opened by now, if all groups before `lowest_open` have ended; `None`: the
        stream ends here."""
        ...


Recall = Callable[[str, Episode], bytes | None]
"""Returns the encoded trajectory of a rollout that need not be played, because its result is known."""


class TooManyRefills(RollwrightError):
    """Groups are dropped again and again: the batch would never be full."""


async def rollout_ids(store: Store, prefix: str, mode: str | None = None) -> list[str]:
    """Ids in a store with this prefix, queried page by page, so that other tasks run in between."""
    found: list[str] = []
    while True:
        page = await store.query_rollouts(
            rollout_id_contains=prefix, mode=mode, limit=IDS_AT_ONCE, offset=len(found)
        )
        found += [each.rollout_id for each in page]
        if not page.items or len(found) >= page.total:
            return [each for each in found if each.startswith(prefix)]


class RolloutScheduler:
    """One stream of groups; an async context manager, which ends its tasks."""

    def __init__(
        self,
        store: Store,
        config: StreamSettings,
        manager: EnvManagerConfig,
        version: Version,
        *,
        mode: str,
        stream: str | None = None,
        resources_id: str | None = None,
        forget: bool = False,
        delivered: Collection[str] | None = None,
        tag_of: Callable[[str], str] = str,
        level_of: LevelFunction | None = None,
        slot_tags: Sequence[str] | None = None,
        first: int = 0,
        forgotten: Ledger | None = None,
        keep_accounts: bool = False,
        on_finished: Callable[[str, bytes], None] | None = None,
        on_failed: Callable[[str, str], None] | None = None,
        read_kept: Callable[[Sequence[str]], Mapping[str, bytes]] = lambda rollout_ids: {},
        on_settled: Callable[[], Awaitable[None]] | None = None,
        on_spent: Callable[[str, Trajectory], None] | None = None,
        on_ranked: Callable[[str, str, Sequence[OutsideCall]], None] | None = None,
        gate: OpeningGate | None = None,
        pace: StreamPace | None = None,
        recall: Recall | None = None,
        on_recalled: Callable[[str], None] | None = None,
        replace_failed: bool = True,
        ranker: GroupRanker | None = None,
    ) -> None:
        """`stream`: name of this stream in the ids of its rollouts; levels depend on `mode` alone.

        `resources_id`: where workers in other processes find the run's settings. `delivered`: groups that were handed out
        before; given to resume a stream that is in the store already. `tag_of`: tag and level for a slot's tag, see
        `Curriculum`. `level_of`: level of a group. `slot_tags`: tags of the groups in turn, by default the manager's. `first`, `forgotten`, `keep_accounts`: see `GroupBook`; with a `first`, the store need not have the
        groups before it. `forget`: rollouts that the book has taken over are deleted from the store, so that a store in
        memory does not grow.
        `on_finished` gets the id and the encoded trajectory of every rollout that succeeded, the ones that are filtered later too; `on_failed` the id of
        a rollout that failed for good, and the reason. `read_kept` gives the encoded trajectories that are kept
        elsewhere, so that the store need not have them any more; `on_settled` is awaited after some were finished. `ranker`
        ranks the members of complete groups, which `on_finished` then gets with their ranks.
        `on_spent` gets every rollout that has ended, with the turns that were paid for; of one without a result, nothing else.
        `on_ranked` gets the id and the tag of a group, and the calls that its judges have made.
        `gate`, `pace`: decide when groups are opened; `recall`: gives results that are known without playing;
        `on_recalled` gets their ids, before all else.
        `replace_failed`: see `GroupRules`.
        """
        self._store = store
        self._version = version
        self._mode = mode
        self._synchronous = config.async_generation_ratio == 0
        self._group_size = manager.group_size
        self._opened_at_once = manager.group_size + manager.group_size_redundancy
        self._max_open = manager.num_env_groups
        self._max_refills = config.limits.max_refills
        self._ahead = config.async_generation_ratio * config.batch_size if mode == "train" else 0.0
        self._retries = RolloutConfig(
            unresponsive_seconds=config.limits.lease_seconds,
            max_attempts=config.limits.max_attempts,
            retry_condition=(AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE),
        )
        rules = GroupRules(
            group_size=manager.group_size,
            redundancy=manager.group_size_redundancy,
            min_group_size=manager.min_group_size,
            max_staleness=math.ceil(config.async_generation_ratio) if mode == "train" else None,
            filters=build_filters(manager),
            replace_failed=replace_failed,
            ranked=frozenset() if ranker is None else ranker.tags,
        )
        self._book = GroupBook(
            rules,
            manager.slot_tags() if slot_tags is None else slot_tags,
            run_seed=config.seed,
            mode=mode,
            prefix=f"{config.name}.{stream or mode}",
            levels=None if mode == "train" else manager.num_env_groups,
            tag_of=tag_of,
            level_of=level_of,
            first=first,
            forgotten=forgotten,
            keep_accounts=keep_accounts,
        )
        self.causes = FailureCauses()
        """Why rollouts failed for good, since this scheduler began or was restored."""
        self._first = first
        self._forget = forget
        self._resources_id = resources_id
        self._delivered = delivered
        self._on_finished = on_finished
        self._on_failed = on_failed
        self._read_kept = read_kept
        self._on_settled = on_settled
        self._on_spent = on_spent
        self._on_ranked = on_ranked
        self._gate = gate
        self._pace = pace
        self._recall = recall
        self._on_recalled = on_recalled
        self._ranker = ranker
        self._ranking = RankingTasks(config.limits.max_attempts)
        self._wanted = 0
        """Trajectories that callers of `get_batch` wait for."""
        self._turn = asyncio.Lock()
        """Serialises callers in their order."""
        self._news = asyncio.Event()
        """Set when there may be more to hand out."""
        self._demand = asyncio.Event()
        """Set when there may be more to open."""
        self._cursor = 0
        """Position up to which the store's completion log was read."""
        self._background: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def ledger(self) -> Ledger:
        return self._book.ledger

    @property
    def first_unsettled(self) -> int:
        """See `GroupBook.first_unsettled`."""
        return self._book.first_unsettled

    def forget(self, index: int) -> Ledger:
        """Forgets the groups before `index`, all settled; returns their ledger. The store is not changed."""
        return self._book.forget(index)

    def group_index(self, rollout_id: str) -> int | None:
        """See `GroupBook.group_index`."""
        return self._book.group_index(rollout_id)

    async def __aenter__(self) -> Self:
        if self._delivered is not None:
            await self._restore(self._delivered)
        self._demand.set()
        self._background = [
            asyncio.create_task(self._collect(), name=f"collect-{self._mode}"),
            asyncio.create_task(self._open_on_demand(), name=f"open-{self._mode}"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._ranking.close()
        if kind is None:  # otherwise rollouts in progress may be resumed
            await self._apply(self._book.abandon("the run ended"))

    async def get_batch(self, batch_size: int) -> Batch:
        """Waits until complete groups have this number of trajectories, and hands them out.

        The groups come in the order in which they became complete; in a synchronous run, in the order of the
        stream, so that the same seed gives the same batch.
        """
        check_batch_size(batch_size, self._group_size)
        async with self._turn:
            self._wanted = batch_size
            try:
                while True:
                    version = self._version()
                    # Cleared before the book is asked: news that come in between then end the wait at once.
                    self._news.clear()
                    if (groups := self._book.take(batch_size, version)) is not None:
                        break
                    self._check_progress()
                    self._demand.set()
                    await self._wait_for_news()
            finally:
                self._wanted = 0
        # No await from here on: a cancellation would lose groups that the book has counted as delivered.
        if self._synchronous:
            groups.sort(key=lambda group: group.index)
        self._demand.set()
        return Batch(groups, version, self.ledger)

    async def _wait_for_news(self) -> None:
        if self._gate is None:
            await self._news.wait()
            return
        with suppress(
            TimeoutError
        ):  # a gate may also open or close with time, or with the rollouts of another stream
            async with asyncio.timeout(GATE_SECONDS):
                await self._news.wait()

    def _check_progress(self) -> None:
        if self._closed:
            raise RunClosed("the run was closed while a batch was waited for")
        for task in self._background:
            if task.done():
                if not task.cancelled():
                    task.result()
                raise RollwrightError(f"{task.get_name()}: was ended by {FOREIGN_CANCELLATION}")
        if self._book.dropped_in_a_row > self._max_refills:
            raise TooManyRefills(self._explain_drops())
        idle = self._gate is not None and not self._book.open_groups
        if idle and self._gate is not None and (why := self._gate.refusal(self._opened_at_once)) is not None:
            raise why

    def _explain_drops(self) -> str:
        """Why groups were dropped. Failed members are named by the cause of their failure, not by the fate of their groups."""
        dropped = f"{self._book.dropped_in_a_row} groups in a row were dropped"
        reasons = {
            reason: count
            for reason, count in self.ledger.reasons.items()
            if not reason.startswith((f"{Fate.FAILED}:", f"{Fate.CANCELLED}:"))
            and BELOW_MIN_GROUP_SIZE not in reason
        }
        most = max(reasons, key=reasons.__getitem__, default=None)
        worst = next(iter(self.causes.most_common(1)), None)
        if worst is not None and (most is None or self.causes.total >= reasons[most]):
            return f"{dropped}; {worst.count} rollouts failed, most often: {worst}; see limits.max_refills"
        return f"{dropped}, most often `{most}`; see filters, group_filter and limits.max_refills"

    async def _open_on_demand(self) -> None:
        """Opens groups while there is demand; never in a caller's task, which may be cancelled in between."""
        try:
            while True:
                await self._demand.wait()
                self._demand.clear()
                enqueue: list[EnqueueRequest] = []
                while self._wants_group():
                    enqueue += self._enqueue_requests(self._recalled(self._book.open_group()))
                if enqueue:
                    await self._shielded(self._store.enqueue_many_rollouts(enqueue))
                if (
                    not self._book.open_groups
                ):  # nothing in flight will bring news: all came from `recall`, or none may open
                    self._news.set()
        finally:
            # Also when this task fails: a waiting `get_batch` then finds that out in `_check_progress`.
            self._news.set()

    def _wants_group(self) -> bool:
        # The first condition fills what a caller waits for, even if a group is larger than the rest that is missing; the
        # second opens ahead only whole groups, so that a ratio below one group opens nothing.
        supply = self._book.supply
        wanted = supply < self._wanted or supply + self._group_size <= self._wanted + self._ahead
        if not wanted or self._book.open_groups >= self._max_open or self._book.all_opened:
            return False
        return self._keeps_pace() and (self._gate is None or self._gate.admits(self._opened_at_once))

    def _keeps_pace(self) -> bool:
        if self._pace is None:
            return True
        limit = self._pace.limit(self._book.lowest_open)
        if limit is None:
            self._book.end_stream()
            self._news.set()
            return False
        return self._book.next_index < limit

    def _recalled(self, decision: Decision) -> Decision:
        """Takes over the results that are known; returns what is left to play."""
        if self._recall is None:
            return decision
        left = []
        for rollout_id, episode in decision.enqueue:
            encoded = self._recall(rollout_id, episode)
            if encoded is None:
                left.append((rollout_id, episode))
            else:
                self._take_over(rollout_id, encoded, paid=False)
        return Decision(enqueue=left)

    async def _shielded(self, call: Awaitable[object]) -> None:
        """Awaits a call to its end, also when this task is cancelled meanwhile: book and store would differ."""
        inner = asyncio.ensure_future(call)
        try:
            await asyncio.shield(inner)
        except asyncio.CancelledError:
            await asyncio.gather(inner, return_exceptions=True)
            raise

    async def _restore(self, delivered: Collection[str]) -> None:
        """Brings the book to the state of the store: takes the same decisions again, from the completion log.

        Enqueueing and cancelling are idempotent, so it does not matter how many of them were applied before the restart.
        """
        known = await self._query_rollout_ids()
        # Groups are opened in the order of their indices, so the highest one in the store says how many there were.
        indices = [self._book.group_index(each) for each in (*known, *delivered)]
        opened = max((index for index in indices if index is not None), default=-1) + 1
        requests = [
            each
            for _ in range(self._first, opened)
            for each in self._enqueue_requests(self._book.open_group())
        ]
        log: list[CompletionEntry] = []
        while completions := await self._store.read_completions(self._cursor):
            self._cursor = completions[-1].cursor
            log += completions
        replayed = await self._replay_completions(log, delivered)
        for group_id in delivered:
            self._book.settle_as_delivered(
                group_id, replayed.fates.get(group_id, ()), replayed.caught.get(group_id)
            )
        # A process can end between opening a group in its book and enqueueing it: those rollouts are enqueued now.
        lost = [
            each
            for each in requests
            if each.rollout_id
            and each.rollout_id not in known
            and self._book.awaits(each.rollout_id)
            and not self._recalls(each)
        ]
        if lost:
            await self._store.enqueue_many_rollouts(lost)
        for first in range(0, len(log), RESTORED_AT_ONCE):
            await self._settle(log[first : first + RESTORED_AT_ONCE])
        self._book.dropped_in_a_row = 0  # between those that were dropped, others were handed out

    def _recalls(self, request: EnqueueRequest) -> bool:
        """Takes over the result of a rollout that was opened before the restart, if it is known without playing."""
        assert request.rollout_id is not None
        encoded = (
            None if self._recall is None else self._recall(request.rollout_id, read_episode(request.input))
        )
        if encoded is not None:
            self._take_over(request.rollout_id, encoded, paid=False)
        return encoded is not None

    async def _query_rollout_ids(self) -> set[str]:
        """Ids of the rollouts of this stream that the store has."""
        return set(await rollout_ids(self._store, self._book.prefix, self._mode))

    async def _replay_completions(
        self, log: Sequence[CompletionEntry], delivered: Collection[str]
    ) -> CompletionReplay:
        """Recovers the fates of the members of delivered groups, and what the filters caught among them."""
        replay = CompletionReplay(delivered, self._group_size, self._book.filters)
        for first in range(0, len(log), RESTORED_AT_ONCE):
            part = log[first : first + RESTORED_AT_ONCE]
            wanted = [each.rollout_id for each in part if replay.needs_trajectory(each)]
            encoded = await self._load_encoded(wanted)
            for each in part:
                data = encoded.get(each.rollout_id)
                try:
                    replay.apply(each, None if data is None else Trajectory.from_bytes(data))
                except FormatError as error:  # as when it was taken over, see `_take_over`
                    reason = str(failed(Boundary.SYSTEM, error, 0))
                    replay.apply(msgspec.structs.replace(each, status=RolloutStatus.FAILED, reason=reason))
        replay.finish()
        return replay

    async def _load_encoded(self, wanted: Sequence[str]) -> dict[str, bytes]:
        """Loads encoded trajectories, from the run's own log or else from the store; without those that neither has."""
        if not wanted:
            return {}
        encoded = dict(self._read_kept(wanted))
        if missing := [each for each in wanted if each not in encoded]:
            encoded |= await self._store.get_trajectories(missing)
        return encoded

    async def _collect(self) -> None:
        """Follows the store's completion log from the cursor on."""
        try:
            while True:
                completions = await self._store.read_completions(self._cursor, timeout=COMPLETIONS_SECONDS)
                if completions:
                    self._cursor = completions[-1].cursor
                    await self._shielded(self._settle(completions))
        finally:
            self._news.set()

    async def _settle(self, completions: Iterable[CompletionEntry]) -> None:
        """Applies completions one after the other: the decision on one (a replacement, say) may concern the next."""
        mine = [each for each in completions if self._book.concerns(each.rollout_id)]
        done = [each.rollout_id for each in mine if each.status is RolloutStatus.SUCCEEDED]
        encoded = await self._load_encoded(done)
        for each in mine:
            if not self._book.awaits(each.rollout_id):
                continue
            if each.status is RolloutStatus.FAILED:
                await self._count_failed(each.rollout_id)
            elif each.reason == STALE:
                await self._count_stale(each.rollout_id)
            if each.status is RolloutStatus.SUCCEEDED:
                decision = self._take_over(each.rollout_id, encoded.get(each.rollout_id))
            elif each.status is RolloutStatus.FAILED:
                decision = self._give_up(each.rollout_id, each.reason or NO_REASON)
            elif each.reason == STALE:
                decision = self._book.grow_stale(each.rollout_id)
            else:
                decision = self._book.fail(each.rollout_id, "cancelled from outside")
            await self._apply(decision)
        if self._forget:
            await self._store.delete_rollouts([each.rollout_id for each in mine])
        if done and self._on_settled is not None:
            await self._on_settled()
        self._demand.set()
        self._news.set()

    def _take_over(self, rollout_id: str, data: bytes | None, *, paid: bool = True) -> Decision:
        """Takes a committed trajectory into the book. A worker of others may commit anything: bytes that are no trajectory
        with finite rewards are a failure."""
        try:
            if data is None:
                raise FormatError("the store does not have its trajectory")
            trajectory = check_rewards(Trajectory.from_bytes(data))
        except FormatError as error:
            return self._give_up(rollout_id, str(failed(Boundary.SYSTEM, error, 0)))
        decision = self._book.finish(rollout_id, trajectory)
        if not paid and self._on_recalled is not None:
            self._on_recalled(rollout_id)
        if self._on_finished is not None and not self._awaits_rank(trajectory):
            self._on_finished(rollout_id, data)
        if self._on_spent is not None:
            self._on_spent(rollout_id, trajectory)
        return decision

    def _awaits_rank(self, trajectory: Trajectory) -> bool:
        """Whether it is recorded later, with its rank: until then the store keeps it."""
        return self._ranker is not None and trajectory.tag in self._ranker.tags

    def _give_up(self, rollout_id: str, reason: str) -> Decision:
        self.causes.add(reason, rollout_id)
        decision = self._book.fail(rollout_id, EpisodeFailure.cause(reason))
        if self._on_failed is not None:
            self._on_failed(rollout_id, reason)
        return decision

    async def _apply(self, decision: Decision) -> None:
        if decision.enqueue:
            await self._store.enqueue_many_rollouts(self._enqueue_requests(decision))
        if decision.cancel:
            await self._count_cancelled(decision.cancel)
            await self._store.cancel_rollouts(decision.cancel, decision.why)
            if self._forget:
                await self._store.delete_rollouts(decision.cancel)
        if decision.dropped is not None:
            self._record_unranked(decision.dropped)
        if decision.rank is not None and self._ranker is not None:
            self._ranking.start(self._rank(self._ranker, decision.rank))

    async def _rank(self, ranker: GroupRanker, group: Group) -> None:
        """Ranks the members of a group, and completes or drops it. No other group waits for it."""
        try:
            with collect_calls() as calls:
                members = await self._ranking.retry(lambda: ranker.rank(group))
        except EpisodeFailure as failure:
            reason = str(failure)
            for each in group.trajectories:
                self.causes.add(reason, each.rollout_id)
                if self._on_failed is not None:
                    self._on_failed(each.rollout_id, reason)
            decision = self._book.fail_ranking(group.group_id, EpisodeFailure.cause(reason))
        else:
            for each in members if self._on_finished is not None else ():
                self._on_finished(each.rollout_id, each.to_bytes())  # type: ignore[misc]
            decision = self._book.rank(group.group_id, members)
        finally:
            if self._on_ranked is not None and calls:
                self._on_ranked(group.group_id, group.tag, sum_calls(calls))
        await self._shielded(self._apply(decision))
        self._demand.set()
        self._news.set()

    def _record_unranked(self, group: Group) -> None:
        """Records the members of a group that was dropped before it was ranked."""
        for each in group.trajectories if self._on_finished is not None else ():
            if self._awaits_rank(each):
                self._on_finished(each.rollout_id, each.to_bytes())  # type: ignore[misc]

    async def _count_failed(self, rollout_id: str) -> None:
        """Reports the turns of a failed rollout, which its last attempt has left: they were paid for all the same."""
        if self._on_spent is None:
            return
        for data in (await self._store.get_trajectories([rollout_id], failed=True)).values():
            with suppress(FormatError):
                self._on_spent(rollout_id, Trajectory.from_bytes(data))

    async def _count_stale(self, rollout_id: str) -> None:
        """Reports what a rollout that became too old has used, as its worker has noted it with the attempt."""
        attempts = await self._store.query_attempts(rollout_id) if self._on_spent is not None else ()
        noted = [each.metadata[USED] for each in attempts if USED in each.metadata]
        if noted and self._on_spent is not None:
            with suppress(msgspec.ValidationError):
                left = Trajectory(rollout_id, "", rollout_id.rpartition("-m")[0], str(noted[-1]["tag"]), 0)
                left.judged = tuple(msgspec.convert(noted[-1]["calls"], list[OutsideCall]))
                self._on_spent(rollout_id, left)

    async def _count_cancelled(self, rollout_ids: Sequence[str]) -> None:
        """Reports the turns of rollouts that are about to be cancelled, from their journals."""
        if self._on_spent is None:
            return
        for rollout_id in rollout_ids:
            with suppress(FormatError, NotFound):
                journalled = entries(await self._store.read_journal(rollout_id))
                if journalled:
                    turns = [each.turn for each in journalled.values()]
                    rollout = await self._store.get_rollout_by_id(rollout_id)
                    tag = "" if rollout is None else read_episode(rollout.input).tag
                    group_id = rollout_id.rpartition("-m")[0]
                    self._on_spent(rollout_id, Trajectory(rollout_id, "", group_id, tag, 0, turns=turns))

    def _enqueue_requests(self, decision: Decision) -> list[EnqueueRequest]:
        return [
            EnqueueRequest(
                input=msgspec.to_builtins(episode),
                rollout_id=rollout_id,
                mode=self._mode,
                resources_id=self._resources_id,
                config=self._retries,
            )
            for rollout_id, episode in decision.enqueue
        ]
