"""The moments between two steps: a caller that gives up, a restart, a policy that moves on, a broken filter."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollwright.aio import run_virtual
from rollwright.config import build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.errors import RollwrightError
from rollwright.rollout import (
    Fate,
    GroupBook,
    GroupRules,
    InflightLimit,
    RolloutContext,
    RolloutScheduler,
    settling,
)
from rollwright.rollout.filters import Action, Filter
from rollwright.rollout.filters.filters import OwnTest
from rollwright.rollout.worker import RolloutWorker, WorkerSettings
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import FixedLength
from rollwright.simulation.players import RandomPlayer
from rollwright.store.memory import MemoryStore
from rollwright.store.records import RolloutStatus
from rollwright.trajectory import Trajectory, floats

Pause = Callable[..., Awaitable[float]]


class SlowStore(MemoryStore):
    """Takes a second to enqueue."""

    async def enqueue_many_rollouts(self, requests: Any) -> Any:
        await asyncio.sleep(1.0)
        return await super().enqueue_many_rollouts(requests)


async def with_workers(
    it: Any, store: MemoryStore, delivered: Any, experiment: Callable[..., Awaitable[Any]]
) -> Any:
    context = RolloutContext(store, it.role, lambda _: it.env(), InflightLimit(1000), it.activity)
    work = asyncio.create_task(RolloutWorker(context, "worker-0", WorkerSettings(it.manager.num_envs)).run())
    scheduler = RolloutScheduler(
        store, it.config, it.manager, lambda: it.policy.version, mode="train", delivered=delivered
    )
    try:
        async with scheduler:
            return await experiment(scheduler)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("patience", [0.3, 0.9, 1.5, 2.5])
def test_a_caller_that_gives_up_at_any_moment_costs_no_rollout_and_no_batch(
    lab: Any, pause: Pause, patience: float
) -> None:
    it = lab(lambda env: pause(0.7), rollout_batch_size=16, async_generation_ratio=1)

    store = SlowStore()

    async def experiment(scheduler: RolloutScheduler) -> None:
        batches = []
        for _ in range(40):
            try:
                batches.append(await asyncio.wait_for(scheduler.get_batch(16), patience))
            except TimeoutError:
                continue
        ids = [each.rollout_id for batch in batches for each in batch.trajectories]
        assert len(ids) == len(set(ids)) == scheduler.ledger.counts[Fate.DELIVERED]
        assert len(batches) >= 3
        await asyncio.sleep(10.0)
        known = await store.query_rollouts()
        assert known.total == scheduler.ledger.opened

    run_virtual(with_workers(it, store, None, experiment))


def test_a_restart_takes_the_same_decisions_again_replacements_and_all(lab: Any, pause: Pause) -> None:
    """A member failed and was replaced, all before the crash: the restarted book must come to the same place."""

    async def behave(env: Any) -> float:
        playing = [rollout for rollout, session in env.lab.activity.sessions.items() if session._env is env]
        if playing == ["lab.train-g0-m1"]:
            raise RuntimeError("always")
        return await pause(1.0)

    async def run() -> None:
        store = MemoryStore()
        first = lab(behave, limits={"max_attempts": 1}, rollout_batch_size=16, async_generation_ratio=1)
        counts: dict[Fate, int] = {}

        async def until_all_waits(scheduler: RolloutScheduler) -> None:
            await asyncio.sleep(100.0)
            counts.update(scheduler.ledger.counts)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await with_workers(first, store, None, until_all_waits)
        assert (counts[Fate.WAITING], counts[Fate.FAILED]) == (16, 1)

        async def after(scheduler: RolloutScheduler) -> None:
            assert scheduler.ledger.counts == counts
            batch = await scheduler.get_batch(16)
            assert "lab.train-g0-m4" in [each.rollout_id for each in batch.trajectories]

        second = lab(behave, limits={"max_attempts": 1}, rollout_batch_size=16, async_generation_ratio=1)
        await with_workers(second, store, [], after)

    run_virtual(run())


def test_groups_that_were_handed_out_before_a_restart_are_not_handed_out_again(
    lab: Any, pause: Pause
) -> None:
    async def run() -> None:
        store = MemoryStore()
        it = lab(lambda env: pause(1.0))

        async def first(scheduler: RolloutScheduler) -> list[str]:
            batch = await scheduler.get_batch(8)
            return [group.group_id for group in batch.groups]

        delivered = await with_workers(it, store, None, first)

        async def second(scheduler: RolloutScheduler) -> list[str]:
            assert scheduler.ledger.counts[Fate.DELIVERED] == 8
            return [group.group_id for group in (await scheduler.get_batch(8)).groups]

        again = await with_workers(lab(lambda env: pause(1.0)), store, delivered, second)
        assert delivered == ["lab.train-g0", "lab.train-g1"]
        assert again == ["lab.train-g2", "lab.train-g3"]

    run_virtual(run())


def test_many_groups_that_grow_old_at_once_do_not_end_the_run(lab: Any, pause: Pause) -> None:
    policy = SimulatedEngine(slots=400, tokens_per_second=100, lengths=FixedLength(10))
    it = lab(
        lambda env: pause(1.0),
        policy=policy,
        manager={"num_env_groups": 80, "group_size": 2},
        rollout_batch_size=80,
        async_generation_ratio=1,
        limits={"max_refills": 4},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        await asyncio.sleep(60.0)
        policy.set_version(5)
        batch = await scheduler.get_batch(80)
        assert {each.oldest_version for each in batch.trajectories} == {5}
        assert scheduler.ledger.counts[Fate.STALE] >= 80

    it.run(experiment)


def test_validation_keeps_its_levels_whatever_the_policy_and_the_failures_do_B10() -> None:
    config = build(
        {
            "name": "val",
            "val_env_manager": {"num_env_groups": 6, "tags": ["FrozenLake"]},
            "limits": {"max_attempts": 1},
        }
    )
    policy = SimulatedEngine(slots=2, tokens_per_second=10, failure_rate=0.1)

    async def run() -> tuple[list[int], int]:
        async with Run(config, policy=policy) as it:
            waiting = asyncio.create_task(it.evaluate())
            for version in range(1, 20):
                await asyncio.sleep(5.0)
                policy.set_version(version)
            batch = await waiting
            return [group.index for group in batch.groups], batch.ledger.counts[Fate.FAILED]

    levels, failed = run_virtual(run())
    assert set(levels) <= set(range(6))
    assert failed > 0


def test_validating_twice_plays_twice() -> None:
    config = build({"name": "val", "val_env_manager": {"num_env_groups": 3, "tags": ["FrozenLake"]}})

    async def run() -> int:
        async with Run(config, policy=RandomPlayer(), store=MemoryStore()) as it:
            await it.evaluate()
            turns = it.activity.turns
            await it.evaluate()
            return it.activity.turns - turns

    assert asyncio.run(run()) > 0


def test_a_filter_that_raises_is_named() -> None:
    def broken(group: Any) -> str | None:
        raise ZeroDivisionError("no members")

    book = GroupBook(
        GroupRules(1, filters=(Filter(OwnTest("my:filter", broken), Action.DROP),)),
        ["A"],
        run_seed=1,
        mode="train",
        prefix="r",
    )
    [(rollout, _)] = book.open_group().enqueue
    with pytest.raises(
        RollwrightError, match="group_filter: my:filter raised ZeroDivisionError for group r-g0: no members"
    ):
        book.finish(rollout, Trajectory(rollout, "a", "r-g0", "A", 0))


class Forgetful(RandomPlayer):
    """Loses a log-probability in one member of one group."""

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        made = await super().generate(prompt, sampling)
        if prompt.episode == "lab.train-g0-m0":
            return Generation(
                made.text, made.sampled_ids, floats(), made.versions, completion_tokens=made.completion_tokens
            )
        return made


def test_what_could_not_be_read_again_is_a_failure_of_that_episode_alone(lab: Any, pause: Pause) -> None:
    it = lab(lambda env: pause(1.0), policy=Forgetful(), limits={"max_attempts": 1})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch = await scheduler.get_batch(16)
        assert "lab.train-g0-m0" not in [each.rollout_id for each in batch.trajectories]
        [(rollout, reason)] = it.failures
        assert rollout == "lab.train-g0-m0"
        assert "log-probabilities" in reason

    it.run(experiment)


async def test_at_the_end_only_journals_of_rollouts_that_had_begun_are_read(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may leave a million rollouts in its queue."""
    monkeypatch.setattr(settling, "ASKED_ONE_BY_ONE", 4)
    monkeypatch.setattr(settling, "CANCELLED_AT_ONCE", 8)
    read: list[str] = []

    class Noting(MemoryStore):
        async def read_journal(self, rollout_id: str) -> Any:
            read.append(rollout_id)
            return await super().read_journal(rollout_id)

    it, store = lab(lambda env: None, rollout_batch_size=16, async_generation_ratio=1), Noting()
    async with RolloutScheduler(store, it.config, it.manager, lambda: 0, mode="train") as scheduler:
        while not (begun := await store.dequeue_rollout("worker")):
            await asyncio.sleep(0)
    known = await store.query_rollouts()
    assert known.total == 16
    assert {each.status for each in known} == {RolloutStatus.CANCELLED}
    assert scheduler.ledger.counts[Fate.CANCELLED] == known.total
    assert read == [begun.rollout_id]
    await store.close()
