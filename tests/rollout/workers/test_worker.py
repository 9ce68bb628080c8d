"""What a worker promises: it takes what it may, stops what is taken from it, and hands back what it cannot finish."""

import asyncio
from typing import Any

import pytest

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError
from rollwright.rollout.worker import RolloutWorker

PATIENCE = 30.0
"""Seconds after which something that was waited for will not come any more."""


async def quick(task: Any, session: Any) -> float:
    await asyncio.sleep(0)
    return 1.0


class Held:
    """An agent whose episodes begin and then wait to be let go."""

    def __init__(self) -> None:
        self.began: asyncio.Queue[int] = asyncio.Queue()
        self.go = asyncio.Event()
        self.open = self.most_open = 0

    async def play(self, task: Any, session: Any) -> float:
        self.began.put_nowait(task["task"])
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self.go.wait()
            await asyncio.sleep(0)  # so that the next ones are open at the same time, too
        finally:
            self.open -= 1
        return 1.0

    async def wait_until_began(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            for _ in range(count):
                await self.began.get()


async def statuses(store: Any, rollout_ids: list[str]) -> list[str]:
    page = await store.query_rollouts(rollout_ids=rollout_ids)
    return [str(each.status) for each in page]


async def test_a_worker_ends_by_itself_after_max_rollouts_C5(workshop: Any) -> None:
    await workshop.enqueue(10)
    async with asyncio.timeout(PATIENCE):
        await workshop.worker(quick, max_rollouts=7).run()
    assert await workshop.by_worker() == {"worker-0": 7}
    counts = await workshop.store.statistics()
    assert (counts["succeeded"], counts["queuing"]) == (7, 3)


async def test_no_more_episodes_are_open_than_a_worker_may_have(workshop: Any) -> None:
    held = Held()
    rollouts = await workshop.enqueue(9)
    workshop.start(workshop.worker(held.play, envs=3))
    await held.wait_until_began(3)
    assert (await workshop.store.statistics())["queuing"] == 6
    held.go.set()
    await workshop.store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    assert await statuses(workshop.store, rollouts) == ["succeeded"] * 9
    assert held.most_open == 3


@pytest.mark.parametrize("interval", [5.0, 6.0])
async def test_heartbeats_that_would_come_too_late_are_refused(workshop: Any, interval: float) -> None:
    await workshop.enqueue(1, unresponsive_seconds=5.0)
    with pytest.raises(ConfigError, match=r"heartbeat_interval: \d s is not shorter than the lease"):
        async with asyncio.timeout(PATIENCE):
            await workshop.worker(quick, heartbeat_interval=interval).run()


def test_heartbeats_keep_a_long_episode_alive_past_its_lease_C7(new_workshop: Any) -> None:
    async def main() -> tuple[list[str], dict[str, int]]:
        held, workshop = Held(), new_workshop()
        [rollout] = await workshop.enqueue(1, unresponsive_seconds=30.0, max_attempts=1)
        workshop.start(workshop.worker(held.play, heartbeat_interval=5.0))
        await held.wait_until_began(1)
        await asyncio.sleep(600.0)  # twenty leases
        held.go.set()
        await workshop.store.wait_for_rollouts([rollout], timeout=PATIENCE)
        ended = await statuses(workshop.store, [rollout]), await workshop.by_worker()
        await workshop.close()
        return ended

    assert run_virtual(main()) == (["succeeded"], {"worker-0": 1})


async def test_a_rollout_whose_worker_falls_silent_goes_to_another_C7(workshop: Any) -> None:
    held = Held()
    [rollout] = await workshop.enqueue(1, unresponsive_seconds=0.3)
    dead = workshop.start(workshop.worker(held.play, "silent", heartbeat_interval=0.05))
    await held.wait_until_began(1)
    dead.cancel()
    workshop.start(workshop.worker(quick, "other", heartbeat_interval=0.05))
    await workshop.store.wait_for_rollouts([rollout], timeout=PATIENCE)
    attempts = await workshop.store.query_attempts(rollout)
    assert [(each.worker_id, str(each.status)) for each in attempts] == [
        ("silent", "unresponsive"),
        ("other", "succeeded"),
    ]


async def test_a_drained_worker_hands_back_what_it_cannot_finish(workshop: Any) -> None:
    held = Held()
    rollouts = await workshop.enqueue(6)
    stopped = workshop.worker(held.play, "stopped", envs=4)
    running = workshop.start(stopped)
    await held.wait_until_began(4)
    assert await stopped.drain(0.05) == 4
    await asyncio.wait_for(running, PATIENCE)
    assert sorted(await statuses(workshop.store, rollouts)) == [*["queuing"] * 2, *["requeuing"] * 4]
    workshop.start(workshop.worker(quick, "other"))
    await workshop.store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    assert await statuses(workshop.store, rollouts) == ["succeeded"] * 6


async def test_a_drained_worker_finishes_what_it_can_and_takes_nothing_new(workshop: Any) -> None:
    held = Held()
    rollouts = await workshop.enqueue(6)
    stopped = workshop.worker(held.play, envs=4)
    running = workshop.start(stopped)
    await held.wait_until_began(4)
    asyncio.get_running_loop().call_later(0.05, held.go.set)
    assert await stopped.drain() == 0
    await asyncio.wait_for(running, PATIENCE)
    assert sorted(await statuses(workshop.store, rollouts)) == [*["queuing"] * 2, *["succeeded"] * 4]


async def test_a_worker_that_waits_for_rollouts_drains_at_once(workshop: Any) -> None:
    idle: RolloutWorker = workshop.worker(quick)
    running = workshop.start(idle)
    await asyncio.sleep(0.05)
    assert await idle.drain() == 0
    await asyncio.wait_for(running, PATIENCE)


async def test_a_cancelled_rollout_stops_and_is_never_recorded_as_succeeded(workshop: Any) -> None:
    held = Held()
    rollouts = await workshop.enqueue(3)
    workshop.start(workshop.worker(held.play))
    await held.wait_until_began(3)
    assert await workshop.store.cancel_rollouts([rollouts[1]], "not needed") == [rollouts[1]]
    async with asyncio.timeout(PATIENCE):
        while not workshop.activity.withdrawn:
            await asyncio.sleep(0.01)
    assert workshop.activity.withdrawn == 1
    held.go.set()
    await workshop.store.wait_for_rollouts(rollouts, timeout=PATIENCE)
    assert await statuses(workshop.store, rollouts) == ["succeeded", "cancelled", "succeeded"]
    assert [str(each.status) for each in await workshop.store.query_attempts(rollouts[1])] == ["cancelled"]


async def test_an_agent_that_swallows_its_cancellation_gains_nothing_and_stops_nobody(workshop: Any) -> None:
    """It returns a reward all the same; its rollout stays cancelled, and its worker can still be ended."""
    began: asyncio.Queue[None] = asyncio.Queue()

    async def stubborn(task: Any, session: Any) -> float:
        began.put_nowait(None)
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            return 1.0
        return 0.0

    rollouts = await workshop.enqueue(3)
    running = workshop.start(workshop.worker(stubborn, envs=1))
    async with asyncio.timeout(PATIENCE):
        for rollout in rollouts[:2]:
            await began.get()
            await workshop.store.cancel_rollouts([rollout], "not needed")
        await began.get()
        assert await statuses(workshop.store, rollouts) == ["cancelled", "cancelled", "preparing"]
        assert workshop.activity.withdrawn == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert await statuses(workshop.store, rollouts) == ["cancelled", "cancelled", "preparing"]


async def test_two_workers_in_one_process_do_not_disturb_each_other(workshop: Any) -> None:
    """One is stopped, and has a rollout cancelled; the other's episodes go on."""
    held = Held()
    first = workshop.worker(held.play, "first", envs=2)
    one = workshop.start(first)
    mine = await workshop.enqueue(2)
    await held.wait_until_began(2)
    workshop.start(workshop.worker(held.play, "second", envs=2))
    others = await workshop.enqueue(2)
    await held.wait_until_began(2)
    await workshop.store.cancel_rollouts([mine[0]], "not needed")
    await first.drain(0.0)
    await asyncio.wait_for(one, PATIENCE)
    assert await statuses(workshop.store, others) == ["preparing", "preparing"]
    held.go.set()
    await workshop.store.wait_for_rollouts([mine[1], *others], timeout=PATIENCE)
    assert await statuses(workshop.store, [*mine, *others]) == ["cancelled", *["succeeded"] * 3]
    attempts = [await workshop.store.query_attempts(each) for each in others]
    assert [[each.worker_id for each in page] for page in attempts] == [["second"], ["second"]]


async def test_workers_share_the_rollouts_about_evenly_C4(workshop: Any) -> None:
    async def short(task: Any, session: Any) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    await workshop.enqueue(20)
    for number in range(4):
        workshop.start(workshop.worker(short, f"worker-{number}", envs=1))
    ids = [each.rollout_id for each in await workshop.store.query_rollouts()]
    await workshop.store.wait_for_rollouts(ids, timeout=PATIENCE)
    taken = await workshop.by_worker()
    assert sum(taken.values()) == 20
    assert set(taken) == {f"worker-{number}" for number in range(4)}
    assert min(taken.values()) >= 3


async def test_a_failed_rollout_is_tried_again_as_its_config_says_C8(workshop: Any) -> None:
    tries: list[int] = []

    async def flaky(task: Any, session: Any) -> float:
        tries.append(task["task"])
        raise LookupError("not this time")

    [rollout] = await workshop.enqueue(1, max_attempts=3)
    workshop.start(workshop.worker(flaky))
    [done] = await workshop.store.wait_for_rollouts([rollout], timeout=PATIENCE)
    assert str(done.status) == "failed"
    assert len(tries) == 3
    attempts = await workshop.store.query_attempts(rollout)
    assert all("LookupError" in (each.reason or "") for each in attempts)
