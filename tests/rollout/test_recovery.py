"""A stream that is gone on with counts what happened to every member of the groups handed out before."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollwright.aio import run_virtual
from rollwright.rollout import Fate, GroupBook, GroupRules, InflightLimit, RolloutContext, RolloutScheduler
from rollwright.rollout.filters import Action, Filter
from rollwright.rollout.recovery import CompletionReplay
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.store.memory import MemoryStore
from rollwright.store.records import CompletionEntry, RolloutStatus
from rollwright.trajectory import Trajectory

Pause = Callable[..., Awaitable[float]]


async def with_scheduler(
    it: Any,
    store: MemoryStore,
    delivered: Any,
    experiment: Callable[[RolloutScheduler], Awaitable[Any]],
    **more: Any,
) -> Any:
    context = RolloutContext(store, it.role, lambda _: it.env(), InflightLimit(1000), it.activity)
    work = asyncio.create_task(RolloutWorker(context, "worker-0", WorkerSettings(it.manager.num_envs)).run())
    scheduler = RolloutScheduler(
        store, it.config, it.manager, lambda: it.policy.version, mode="train", delivered=delivered, **more
    )
    try:
        async with scheduler:
            return await experiment(scheduler)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("redundancy", [0, 1])
def test_failures_of_groups_that_were_handed_out_before_stay_counted(
    lab: Any, pause: Pause, redundancy: int
) -> None:
    async def behave(env: Any) -> float:
        playing = [rollout for rollout, session in env.lab.activity.sessions.items() if session._env is env]
        if playing == ["lab.train-g0-m1"]:
            raise RuntimeError("always")
        return await pause(1.0)

    def new_lab() -> Any:
        manager = {"num_env_groups": 2, "group_size": 4, "group_size_redundancy": redundancy}
        return lab(behave, manager=manager, limits={"max_attempts": 1})

    async def run() -> None:
        store = MemoryStore()
        counts: dict[Fate, int] = {}
        reasons: dict[str, int] = {}

        async def first(scheduler: RolloutScheduler) -> list[str]:
            batch = await scheduler.get_batch(8)
            await asyncio.sleep(10.0)  # what was cancelled has ended
            counts.update(scheduler.ledger.counts)
            reasons.update(scheduler.ledger.reasons)
            return [group.group_id for group in batch.groups]

        delivered = await with_scheduler(new_lab(), store, None, first)
        assert counts[Fate.FAILED] == 1
        assert counts[Fate.DELIVERED] == 8

        async def second(scheduler: RolloutScheduler) -> None:
            assert scheduler.ledger.counts == counts
            assert scheduler.ledger.reasons == reasons

        await with_scheduler(new_lab(), store, delivered, second)

    run_virtual(run())


def test_a_group_of_which_the_store_knows_nothing_more_counts_as_handed_out() -> None:
    book = GroupBook(
        GroupRules(group_size=2, redundancy=1), ["FrozenLake"], run_seed=0, mode="train", prefix="a"
    )
    book.open_group()
    book.settle_as_delivered("a-g0")
    assert book.ledger.counts[Fate.DELIVERED] == 2
    assert book.ledger.counts[Fate.CANCELLED] == 1
    assert book.open_groups == 0


@pytest.mark.parametrize(
    "fates",
    [
        [],
        [(Fate.DELIVERED, None)] * 2,
        [(Fate.FAILED, "system: X"), (Fate.DELIVERED, None), (Fate.DELIVERED, None)],
        [(Fate.FAILED, "a"), (Fate.FAILED, "a"), (Fate.FAILED, "b"), (Fate.DELIVERED, None)],
    ],
)
def test_a_group_counts_the_same_whether_its_members_were_opened_or_not(fates: Any) -> None:
    rules = GroupRules(group_size=2, redundancy=1)
    opened, counted = (
        GroupBook(rules, ["FrozenLake"], run_seed=0, mode="train", prefix="a", keep_accounts=True)
        for _ in range(2)
    )
    opened.open_group()
    assert counted.open_empty() == "a-g0"
    for book in (opened, counted):
        book.settle_as_delivered("a-g0", fates)
        book.open_group()
    assert counted.ledger == opened.ledger
    assert (counted.supply, counted.open_groups) == (opened.supply, opened.open_groups) == (2, 1)
    assert counted.forget(1) == opened.forget(1)


FILTERS = [{"kind": "overlong", "limit": 3}, {"kind": "duplicate"}, "zero_variance"]


def test_what_filters_caught_in_groups_that_were_handed_out_before_stays_counted(
    lab: Any, pause: Pause
) -> None:
    """D3."""

    async def behave(env: Any) -> float:
        await pause(1.0)
        return float(env.number % 9 == 0)

    def new_lab() -> Any:
        manager = {"num_env_groups": 3, "group_size": 4, "filters": [*FILTERS]}
        return lab(behave, manager=manager, limits={"max_refills": 1000})

    async def run() -> None:
        store = MemoryStore()
        before: list[Any] = []

        def found(scheduler: RolloutScheduler) -> list[Any]:
            ledger = scheduler.ledger
            caught = {name: catch.count for name, catch in ledger.catches.by_filter.items()}
            return [dict(ledger.counts), dict(ledger.reasons), caught]

        async def first(scheduler: RolloutScheduler) -> list[str]:
            batch = await scheduler.get_batch(12)
            await asyncio.sleep(10.0)
            before.extend(found(scheduler))
            return [group.group_id for group in batch.groups]

        delivered = await with_scheduler(new_lab(), store, None, first)
        assert set(before[2]) == {"overlong", "duplicate", "zero_variance"}

        async def second(scheduler: RolloutScheduler) -> None:
            assert found(scheduler) == before

        await with_scheduler(new_lab(), store, delivered, second)

    run_virtual(run())


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_stream_whose_first_groups_are_forgotten_goes_on_with_the_same_ledger_and_the_next_index(
    lab: Any, pause: Pause, ratio: int
) -> None:
    async def behave(env: Any) -> float:
        (playing,) = [name for name, session in env.lab.activity.sessions.items() if session._env is env]
        slow = ratio and int(playing.partition("-g")[2].partition("-m")[0]) % 4 == 0
        await pause(30.0 if slow else 1.0)
        return float(env.number % 5 == 0)

    def new_lab() -> Any:
        manager = {"num_env_groups": 12, "group_size": 2, "filters": [*FILTERS]}
        return lab(behave, manager=manager, limits={"max_refills": 1000}, async_generation_ratio=ratio)

    async def run() -> None:
        store = MemoryStore()
        batches: list[list[str]] = []
        before: list[Any] = []
        gone: list[Any] = []
        opened: set[int] = set()

        def told(scheduler: RolloutScheduler) -> list[Any]:
            ledger = scheduler.ledger
            caught = {name: catch.count for name, catch in ledger.catches.by_filter.items()}
            return [dict(ledger.counts), dict(ledger.reasons), caught]

        async def first(scheduler: RolloutScheduler) -> None:
            for _ in range(14):
                batch = await scheduler.get_batch(4)
                batches.append([group.group_id for group in batch.groups])
            await asyncio.sleep(100.0)
            kept = [scheduler.group_index(group) for batch in batches[11:] for group in batch]
            floor = min([each for each in kept if each is not None] + [scheduler.first_unsettled])
            gone.extend([floor, scheduler.forget(floor)])
            before.extend(told(scheduler))
            ids = [each.rollout_id for each in await store.query_rollouts()]
            opened.update(index for each in ids if (index := scheduler.group_index(each)) is not None)
            await store.delete_rollouts([each for each in ids if (scheduler.group_index(each) or 0) < floor])
            raise InterruptedError  # so that what is open is left open

        with pytest.raises(InterruptedError):
            await with_scheduler(new_lab(), store, None, first, keep_accounts=True)
        floor, ledger = gone
        assert floor > 2
        assert ledger.counts[Fate.FILTERED] > 0, "groups that were left out are among them"
        delivered = [group for batch in batches for group in batch if int(group.rpartition("-g")[2]) >= floor]
        overtook = [group for batch in batches[:11] for group in batch if group in delivered]
        assert bool(overtook) == bool(ratio), "of forgotten batches, groups that were faster than kept ones"

        async def second(scheduler: RolloutScheduler) -> None:
            assert told(scheduler) == before
            again = await scheduler.get_batch(4)
            indices = {group.index for group in again.groups}
            assert not {group.group_id for group in again.groups} & {
                each for batch in batches for each in batch
            }
            assert min(indices) >= floor
            known = {scheduler.group_index(each.rollout_id) for each in await store.query_rollouts()}
            assert max(each for each in known if each is not None) >= max(opened), "no index is used again"

        more = {"first": floor, "forgotten": ledger, "keep_accounts": True}
        await with_scheduler(new_lab(), store, delivered, second, **more)

    run_virtual(run())


def test_groups_that_were_dropped_between_others_before_a_restart_do_not_count_as_dropped_in_a_row(
    lab: Any, pause: Pause
) -> None:
    async def behave(env: Any) -> float:
        await pause(1.0)
        return float(env.number % 5 == 0)

    def new_lab() -> Any:
        manager = {"num_env_groups": 4, "group_size": 2, "filters": ["zero_variance"]}
        return lab(behave, manager=manager, limits={"max_refills": 12})

    async def run() -> None:
        store = MemoryStore()

        async def first(scheduler: RolloutScheduler) -> list[str]:
            batches = [await scheduler.get_batch(4) for _ in range(12)]
            assert scheduler.ledger.counts[Fate.FILTERED] > 2 * 12
            return [group.group_id for batch in batches for group in batch.groups]

        delivered = await with_scheduler(new_lab(), store, None, first)

        async def second(scheduler: RolloutScheduler) -> None:
            assert len((await scheduler.get_batch(4)).groups) == 2

        await with_scheduler(new_lab(), store, delivered, second)

    run_virtual(run())


def completion(number: int, status: str, reason: str | None = None) -> CompletionEntry:
    return CompletionEntry(number + 1, f"a-g0-m{number}", "at", RolloutStatus(status), reason)


def test_a_member_that_a_filter_dropped_was_replaced_and_not_handed_out() -> None:
    """Of four that finished in a group of two, one was dropped, and the last was not needed."""

    class Even:
        name = "even"

        def catches(self, trajectory: Trajectory) -> bool:
            return trajectory.seed % 2 == 0

    filters = (Filter(Even(), Action.DROP),)
    replay = CompletionReplay(["a-g0"], lambda group_id: 2, filters)
    log = [completion(each, "succeeded") for each in (0, 1, 3)] + [completion(2, "failed", "engine: gone")]
    log.append(completion(4, "succeeded"))
    for each in log:
        assert replay.needs_trajectory(each) == (each.status is RolloutStatus.SUCCEEDED)
        seed = int(each.rollout_id[-1])
        replay.apply(each, Trajectory(each.rollout_id, "1", "a-g0", "Lab", seed=seed))
    replay.finish()
    places = [place for place, _ in replay.fates["a-g0"]]
    assert places == [Fate.FILTERED, Fate.DELIVERED, Fate.DELIVERED, Fate.FAILED, Fate.CANCELLED]
    assert replay.caught["a-g0"].by_filter["even"].count == 1, "the last one came too late to be looked at"
