"""The scheduler: opens groups, collects their completed rollouts, and answers `get_batch()`.

Always true: a batch is handed out as soon as enough complete groups exist anywhere, and never waits for one particular
group. Groups are opened only as far as there is demand: the batch that a caller waits for, and `async_generation_ratio`
batches ahead. So a synchronous run opens exactly what a batch needs, and an asynchronous one is paced by its trainer
instead of throwing work away.

All decisions are the `GroupBook`'s, which is pure. The scheduler has two tasks: `_open_on_demand` enqueues the rollouts of
new groups, `_collect` follows the store's completion log and lets the `RolloutSettler` apply it. Both notify a waiting
`get_batch` by an event.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rollwright.aio import shielded
from rollwright.errors import RollwrightError, RunClosed
from rollwright.rollout.accounting import FailureCauses, Fate, Ledger
from rollwright.rollout.episode import Episode
from rollwright.rollout.filters import build_filters
from rollwright.rollout.groups import (
    BELOW_MIN_GROUP_SIZE,
    Decision,
    DrawFunction,
    Group,
    GroupBook,
    GroupRules,
    Version,
    check_batch_size,
)
from rollwright.rollout.ranking import GroupRanker
from rollwright.rollout.recovery import restore_stream
from rollwright.rollout.settings import EnvManagerConfig, StreamSettings
from rollwright.rollout.settling import RolloutSettler
from rollwright.rollout.stream import CompletionsRead, OpeningGate, StreamHooks, StreamPace, StreamRollouts
from rollwright.store.api import Store
from rollwright.trajectory import Trajectory

FOREIGN_CANCELLATION = (
    "code that it plays: does an environment, agent, tool or filter cancel tasks that are not its own?"
)

COMPLETIONS_SECONDS = 60.0
"""Seconds for which one call waits for finished rollouts; only limits the effect of a lost wake-up."""

OPENED_AT_ONCE = 1_000
"""Rollouts that are enqueued together: workers play the first ones while others are opened, perhaps a million."""

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


class TooManyRefills(RollwrightError):
    """Groups are dropped again and again: the batch would never be full."""


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
        completions: CompletionsRead | None = None,
        draw: DrawFunction | None = None,
        observe: Callable[[Group], None] | None = None,
        slot_tags: Sequence[str] | None = None,
        first: int = 0,
        forgotten: Ledger | None = None,
        keep_accounts: bool = False,
        hooks: StreamHooks | None = None,
        gate: OpeningGate | None = None,
        pace: StreamPace | None = None,
        replace_failed: bool = True,
        ranker: GroupRanker | None = None,
    ) -> None:
        """
        Args:
            stream: Name of this stream in the ids of its rollouts; levels depend on `mode` alone.
            resources_id, forget: See `StreamRollouts`.
            delivered: Groups that were handed out before; given to resume a stream that is in the store already.
            completions: What was read of the store's completion log, to resume from it.
            draw, observe: See `GroupBook`.
            slot_tags: Tags of the groups in turn; by default the manager's.
            first, forgotten, keep_accounts: See `GroupBook`; with a `first`, the store need not have the groups before it.
            hooks: Record what ends, and give results that are known without playing.
            gate, pace: Decide when groups are opened.
            replace_failed: See `GroupRules`.
            ranker: Ranks the members of complete groups, which are recorded with their ranks.
        """
        self._version = version
        self._mode = mode
        self._synchronous = config.async_generation_ratio == 0
        self._group_size = manager.group_size
        self._opened_at_once = manager.largest_group + manager.group_size_redundancy
        self._max_open = manager.num_env_groups
        self._max_refills = config.limits.max_refills
        self._ahead = config.async_generation_ratio * config.batch_size if mode == "train" else 0.0
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
            draw=draw,
            observe=observe,
            first=first,
            forgotten=forgotten,
            keep_accounts=keep_accounts,
        )
        self._rollouts = StreamRollouts(store, mode, config.limits, resources_id, forget)
        self._hooks = hooks or StreamHooks()
        self._settler = RolloutSettler(self._book, self._rollouts, self._hooks, self._notify, ranker)
        self._first = first
        self._delivered = delivered
        self._completions = completions
        self._gate = gate
        self._pace = pace
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
    def causes(self) -> FailureCauses:
        """Why rollouts failed for good, since this scheduler began or was restored."""
        return self._settler.causes

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
            self._cursor = await restore_stream(
                self._settler, self._first, self._delivered, self._completions
            )
            self._completions = None  # a run may have a million of them
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
        await self._settler.close()
        if kind is None:  # otherwise rollouts in progress may be resumed
            await self._settler.finish(self._book.abandon("the run ended"))

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
        # A gate may also open or close with time, or with the rollouts of another stream.
        with suppress(TimeoutError):
            async with asyncio.timeout(None if self._gate is None else GATE_SECONDS):
                await self._news.wait()

    def _notify(self) -> None:
        """Wakes both those that open groups and those that wait for a batch."""
        self._demand.set()
        self._news.set()

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
                opened: list[tuple[str, Episode]] = []
                while self._wants_group():
                    if len(opened) >= OPENED_AT_ONCE:
                        self._demand.set()  # for the rest, when these are in the store
                        break
                    opened += self._leave_out_known(self._book.open_group())
                if opened:
                    await self._hooks.opened()
                    # Book and store would differ if this task were cancelled in between.
                    await shielded(self._rollouts.enqueue(Decision(enqueue=opened)))
                if not self._book.open_groups:
                    # Nothing in flight will bring news: all results were known, or no group may be opened.
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

    def _leave_out_known(self, opened: Decision) -> list[tuple[str, Episode]]:
        """The rollouts of a new group that have to be played; the results of the others are taken over."""
        return [each for each in opened.enqueue if not self._settler.recall(*each)]

    async def _collect(self) -> None:
        """Follows the store's completion log from the cursor on."""
        try:
            while True:
                completions = await self._rollouts.store.read_completions(
                    self._cursor, timeout=COMPLETIONS_SECONDS
                )
                if completions:
                    self._cursor = completions[-1].cursor
                    await shielded(self._settler.settle(completions))
        finally:
            self._news.set()
