"""No barrier, no lost rollout, no failure that spreads: the promises of `get_batch`, on a virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollwright.errors import ConfigError, RollwrightError
from rollwright.rollout import Batch, Fate, RolloutScheduler, TooManyRefills
from rollwright.rollout.episode import level_seed
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.store.records import RolloutStatus
from rollwright.trajectory import StopReason, Trajectory

Pause = Callable[..., Awaitable[float]]


def now() -> float:
    return asyncio.get_running_loop().time()


async def timed(scheduler: RolloutScheduler, batch_size: int) -> tuple[Batch, float]:
    began = now()
    batch = await scheduler.get_batch(batch_size)
    return batch, now() - began


def slow_group(group: int, seconds: float, pause: Pause) -> Callable[[Any], Awaitable[float]]:
    """One group's level takes `seconds` a step, all others one."""
    slow = level_seed(42, "train", group)
    return lambda env: pause(seconds if env.seed == slow else 1.0, reward=env.number % 2)


def test_a_batch_does_not_wait_for_one_slow_group_B2(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch, seconds = await timed(scheduler, 12)
        assert seconds == pytest.approx(2.0)
        assert {group.index for group in batch.groups} == {0, 2, 3}
        assert len(batch.trajectories) == 12

    lab(slow_group(1, 1000.0, pause), rollout_batch_size=16, async_generation_ratio=1).run(experiment)


def test_each_environment_goes_at_its_own_pace_B1(lab: Any, pause: Pause) -> None:
    """Sixteen members with different speeds: each episode takes its own time, not the slowest one's."""
    it = lab(lambda env: pause(1.0 + env.number))

    async def experiment(it: Any, scheduler: RolloutScheduler) -> list[float]:
        return sorted(each.duration for each in (await scheduler.get_batch(16)).trajectories)

    assert it.run(experiment) == pytest.approx([2.0 * (1 + number) for number in range(16)])


def test_a_filtered_group_is_replaced_and_all_its_members_wake_for_the_replacement(
    lab: Any, pause: Pause
) -> None:
    """The first group is left out; its replacement is played by all members at once, not by one after another."""
    first = level_seed(42, "train", 0)
    it = lab(
        lambda env: pause(1.0, reward=1.0 if env.seed == first else env.number % 2),
        manager={"num_env_groups": 1, "group_size": 8, "group_filter": "zero_variance"},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch, seconds = await timed(scheduler, 8)
        assert seconds == pytest.approx(4.0)
        assert [group.index for group in batch.groups] == [1]
        assert scheduler.ledger.reasons == {"filtered: zero_variance": 8}

    it.run(experiment)


def test_one_hung_environment_of_sixteen_is_replaced_and_the_batch_arrives(lab: Any, pause: Pause) -> None:
    it = lab(lambda env: pause(10**9 if env.number == 5 else 1.0), limits={"step_timeout": 30.0})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch, seconds = await timed(scheduler, 16)
        assert len(batch.trajectories) == 16
        assert seconds == pytest.approx(32.0)
        assert it.activity.failures == {"environment: timeout": 1}
        assert it.closed == 1
        assert scheduler.ledger.counts[Fate.FAILED] == 0

    it.run(experiment)


def test_one_environment_that_raises_is_retried_then_recorded_as_failed_and_touches_nobody(
    lab: Any, pause: Pause
) -> None:
    """Member 2 of group 1 raises on every attempt: three attempts, one failure, one replacement, no reward of 0."""
    bad = "lab.train-g1-m2"

    async def behave(env: Any) -> float:
        playing = [rollout for rollout, session in env.lab.activity.sessions.items() if session._env is env]
        if playing == [bad]:
            raise RuntimeError("the board fell off the table")
        return await pause(1.0, reward=1.0)

    it = lab(behave)

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        batch = await scheduler.get_batch(16)
        ids = [each.rollout_id for each in batch.trajectories]
        assert bad not in ids
        assert "lab.train-g1-m4" in ids
        assert {each.reward for each in batch.trajectories} == {2.0}
        assert it.activity.failures == {"environment: RuntimeError": 3}
        assert it.failures == [(bad, "environment: RuntimeError: the board fell off the table")]
        assert scheduler.ledger.counts[Fate.FAILED] == 1
        assert scheduler.ledger.reasons == {"failed: environment: RuntimeError": 1}

    it.run(experiment)


def test_an_episode_that_takes_too_long_ends_as_a_timeout_of_that_attempt(lab: Any, pause: Pause) -> None:
    it = lab(
        lambda env: pause(50.0 if env.number == 0 else 1.0),
        limits={"episode_timeout": 60.0, "max_attempts": 2},
        turns=2,
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        await scheduler.get_batch(16)
        assert it.activity.failures == {"system: timeout": 1}

    it.run(experiment)


def test_everything_dispatched_is_accounted_for_at_every_moment(lab: Any, pause: Pause) -> None:
    async def behave(env: Any) -> float:
        await asyncio.sleep(0.5 + (env.seed % 7) / 10)
        if (env.seed + env.number) % 11 == 0:
            raise ValueError("unlucky")
        return float(env.seed % 3 == 0) * (env.number % 2)

    it = lab(
        behave,
        manager={"group_size_redundancy": 1, "group_filter": "zero_variance", "num_env_groups": 6},
        rollout_batch_size=8,
        async_generation_ratio=1,
        limits={"max_attempts": 1, "max_refills": 10_000},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        async def watch() -> None:
            while True:
                ledger = scheduler.ledger
                statistics = await it.store.statistics()
                assert (
                    ledger.opened
                    == sum(ledger.counts.values())
                    == sum(statistics[each] for each in RolloutStatus)
                )
                assert min(ledger.counts.values()) >= 0
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        delivered = 0
        for _ in range(5):
            delivered += len((await scheduler.get_batch(8)).trajectories)
            assert scheduler.ledger.counts[Fate.DELIVERED] == delivered
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        for place in (Fate.FILTERED, Fate.CANCELLED, Fate.FAILED):
            assert scheduler.ledger.counts[place] > 0

    it.run(experiment)


def engine(slots: int) -> SimulatedEngine:
    return SimulatedEngine(slots=slots, tokens_per_second=10, lengths=LogNormalLength(20, 1.0))


def content(trajectories: list[Trajectory]) -> list[Any]:
    return [(each.rollout_id, each.seed, [turn.sampled_ids for turn in each.turns]) for each in trajectories]


def test_a_synchronous_run_gives_the_same_batches_whatever_the_timing(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> list[Any]:
        batches = [await scheduler.get_batch(8) for _ in range(3)]
        assert [group.index for batch in batches for group in batch.groups] == list(range(6))
        assert scheduler.ledger.opened == 24
        return [content(batch.trajectories) for batch in batches]

    fast = lab(lambda env: pause(0.0), policy=engine(64)).run(experiment)
    slow = lab(lambda env: pause(env.number * 0.3), policy=engine(2)).run(experiment)
    assert fast == slow


def test_a_synchronous_run_opens_exactly_what_the_batch_needs_B3(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        assert scheduler.ledger.opened == 0
        await scheduler.get_batch(8)
        await asyncio.sleep(100)
        assert scheduler.ledger.opened == 8
        await scheduler.get_batch(16)
        assert scheduler.ledger.opened == 24

    lab(lambda env: pause(1.0)).run(experiment)


def test_an_asynchronous_run_goes_on_while_the_batch_is_trained_on_B4(lab: Any, pause: Pause) -> None:
    """With a ratio of 1 the next batch is played during training; with 0.5, half of it; never more."""

    def ahead(ratio: float) -> int:
        async def experiment(it: Any, scheduler: RolloutScheduler) -> int:
            await scheduler.get_batch(16)
            await asyncio.sleep(1000)
            return scheduler.ledger.opened - 16

        return lab(lambda env: pause(1.0), rollout_batch_size=16, async_generation_ratio=ratio).run(
            experiment
        )

    assert [ahead(ratio) for ratio in (0, 0.5, 1, 2)] == [0, 8, 16, 32]


@pytest.mark.parametrize("ratio", [1, 2])
def test_no_token_older_than_the_bound_is_ever_handed_over(lab: Any, pause: Pause, ratio: int) -> None:
    policy = engine(12)
    it = lab(
        lambda env: pause(1.0 if env.seed % 4 else 40.0),
        policy=policy,
        rollout_batch_size=8,
        async_generation_ratio=ratio,
        manager={"num_env_groups": 8, "group_size": 2},
        limits={"max_refills": 10_000},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> int:
        oldest = 0
        for step in range(12):
            batch = await scheduler.get_batch(8)
            ages = [batch.version - each.oldest_version for each in batch.trajectories]
            oldest = max(oldest, *ages)
            await asyncio.sleep(5.0)
            policy.set_version(step + 1)
        assert scheduler.ledger.counts[Fate.STALE] > 0
        assert set(scheduler.ledger.reasons) >= {"stale: too old"}
        return oldest

    assert it.run(experiment) == ratio


def test_an_episode_stops_by_itself_once_it_is_too_old_to_be_used(lab: Any, pause: Pause) -> None:
    policy = engine(64)
    it = lab(lambda env: pause(10.0), turns=15, policy=policy, limits={"max_refills": 10_000})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        waiting = asyncio.create_task(scheduler.get_batch(16))
        await asyncio.sleep(35.0)
        policy.set_version(1)
        batch = await waiting
        assert {each.oldest_version for each in batch.trajectories} == {1}
        assert it.activity.stale >= 1
        assert not any(each.stop is StopReason.STALE for each in it.finished)
        assert it.activity.turns < 15 * 32

    it.run(experiment)


def test_the_redundant_members_are_stopped_as_soon_as_the_group_is_complete(lab: Any, pause: Pause) -> None:
    it = lab(
        lambda env: pause(1.0 if env.number % 5 else 500.0),
        manager={"num_env_groups": 4, "group_size": 4, "group_size_redundancy": 1},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        _, seconds = await timed(scheduler, 16)
        assert seconds == pytest.approx(2.0)
        await asyncio.sleep(0.01)
        assert it.activity.withdrawn == 4
        assert it.activity.inflight == 0
        assert scheduler.ledger.counts[Fate.CANCELLED] == 4

    it.run(experiment)


def test_a_filter_that_drops_everything_ends_with_an_error_that_says_so(lab: Any, pause: Pause) -> None:
    it = lab(
        lambda env: pause(1.0, reward=1.0),
        manager={"group_filter": "zero_variance"},
        limits={"max_refills": 10},
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(TooManyRefills, match="most often `filtered: zero_variance`"):
            await scheduler.get_batch(16)

    it.run(experiment)


def test_rollouts_that_all_fail_end_with_the_root_cause_and_one_of_them(lab: Any) -> None:
    def behave(env: Any) -> Any:
        raise RuntimeError(f"no board for {id(env):#x}")

    it = lab(behave, limits={"max_refills": 4})

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        says = r"most often: environment: RuntimeError: no board for 0x\w+ \(for example lab.train-g0-m\d+\)"
        with pytest.raises(TooManyRefills, match=says):
            await scheduler.get_batch(16)
        assert len(it.activity.causes.rows()) == 1

    it.run(experiment)


def test_a_batch_size_that_is_no_multiple_of_the_group_size_is_refused(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        for wrong in (0, -4, 6):
            with pytest.raises(ConfigError, match="not a positive multiple of group_size, which is 4"):
                await scheduler.get_batch(wrong)

    lab(lambda env: pause(1.0)).run(experiment)


def test_two_callers_are_served_in_turn_and_share_nothing(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        first, second = await asyncio.gather(scheduler.get_batch(8), scheduler.get_batch(8))
        ids = [each.rollout_id for each in first.trajectories + second.trajectories]
        assert len(set(ids)) == 16

    lab(lambda env: pause(1.0)).run(experiment)


def test_a_caller_that_gives_up_leaves_the_groups_to_the_next(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await scheduler.get_batch(8)
        batch, seconds = await timed(scheduler, 8)
        assert seconds == pytest.approx(0.5)
        assert scheduler.ledger.opened == 8
        assert len(batch.trajectories) == 8

    lab(lambda env: pause(1.0)).run(experiment)


def test_when_the_store_breaks_the_caller_hears_of_it(lab: Any, pause: Pause) -> None:
    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        waiting = asyncio.create_task(scheduler.get_batch(16))
        await asyncio.sleep(0.5)
        await it.store.close()
        with pytest.raises(RollwrightError):
            await waiting

    with pytest.raises(Exception, match=r".*") as caught:
        lab(lambda env: pause(1.0)).run(experiment)
    assert isinstance(caught.value, RollwrightError)


def test_a_member_that_reports_while_it_is_being_dropped_disturbs_nobody(lab: Any, pause: Pause) -> None:
    """Filter, redundancy and failures at once, with settled rollouts deleted from the store behind them."""
    it = lab(
        lambda env: pause(1.0, reward=env.seed % 2 and env.number % 2),
        policy=SimulatedEngine(
            slots=8, tokens_per_second=40, lengths=LogNormalLength(20, 0.3), failure_rate=0.1
        ),
        manager={"num_env_groups": 8, "group_size_redundancy": 3, "group_filter": "zero_variance"},
        rollout_batch_size=16,
        async_generation_ratio=1,
        limits={"max_refills": 1000},
        forget=True,
    )

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        for _ in range(10):
            await scheduler.get_batch(16)
        assert it.activity.refused + it.activity.withdrawn > 0
        assert set(it.activity.failures) == {"engine: EngineError"}
        left = await it.store.query_rollouts()
        assert left.total == scheduler.ledger.counts[Fate.RUNNING]

    it.run(experiment)


def test_what_a_synchronous_run_has_left_over_is_stale_once_the_policy_has_moved_on(
    lab: Any, pause: Pause
) -> None:
    policy = engine(64)
    it = lab(lambda env: pause(1.0), policy=policy)

    async def experiment(it: Any, scheduler: RolloutScheduler) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await scheduler.get_batch(8)
        await asyncio.sleep(60.0)
        policy.set_version(1)
        batch = await scheduler.get_batch(8)
        assert {each.oldest_version for each in batch.trajectories} == {1}
        assert scheduler.ledger.counts[Fate.STALE] == 8
        assert scheduler.ledger.reasons["stale: too old"] == 8

    it.run(experiment)
