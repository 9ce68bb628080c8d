"""A pool leases each resource to one rollout at a time, in FIFO order, and every lease ends."""

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError, RollwrightError
from rollwright.rng import seed as draw
from rollwright.rng import uniform
from rollwright.tools import Lease, Pool, ToolContext


class Thing:
    def __init__(self, key: Any) -> None:
        self.key = key
        self.holder: int | None = None
        self.is_closed = False


class Workshop:
    """Creates resources and keeps track of all of them."""

    def __init__(self, size: int, seed: int = 0, *, renews: bool = True, **options: Any) -> None:
        self.size = size
        self.things: list[Thing] = []
        self.seed = seed
        self.calls = 0
        renewing = {"renew": self.renew if renews else None}
        self.pool: Pool[Thing] = Pool(self.make, size=size, close=self.close, **{**renewing, **options})

    @property
    def alive(self) -> int:
        return sum(not thing.is_closed for thing in self.things)

    def luck(self) -> float:
        self.calls += 1
        return uniform(self.seed, self.calls)

    async def make(self, key: Any) -> Thing:
        await asyncio.sleep(self.luck())
        if self.seed and self.luck() < 0.05:
            raise RuntimeError("could not be made")
        thing = Thing(key)
        self.things.append(thing)
        assert self.alive <= self.size
        return thing

    async def close(self, thing: Thing) -> None:
        await asyncio.sleep(self.luck() / 10)
        assert not thing.is_closed
        thing.is_closed = True
        if self.seed and self.luck() < 0.05:
            raise RuntimeError("closed with a bang")

    async def renew(self, thing: Thing) -> bool:
        await asyncio.sleep(self.luck() / 10)
        return self.luck() < 0.7


async def rollout(workshop: Workshop, number: int, fate: str) -> None:
    """Leases one key twice and another once, like the tools of a rollout."""
    key = draw(workshop.seed, number, "key") % 5
    if fate == "drop":
        lease: Lease[Thing] | None = await workshop.pool.acquire(key)
        assert lease is not None
        claim(lease.resource, number, key)
        del lease  # dropped without release
        gc.collect(0)
        return
    context = ToolContext(f"r{number}")
    thing = await context.lease(workshop.pool, key)
    claim(thing, number, key)
    try:
        await asyncio.sleep(uniform(workshop.seed, number, "work"))
        assert await context.lease(workshop.pool, key) is thing
        if fate == "raise":
            raise ValueError("the rollout failed")
        assert thing.holder == number
        assert not thing.is_closed
    finally:
        thing.holder = None
        context.close() if fate != "forget" else None


def claim(thing: Thing, number: int, key: int) -> None:
    assert thing.holder is None, "in two hands"
    assert not thing.is_closed
    assert thing.key == key
    thing.holder = number


FATES = ("finish", "finish", "raise", "cancel", "cancel twice", "kill", "forget", "drop")


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(1, 2**31), size=st.integers(1, 40))
def test_a_thousand_rollouts_that_end_in_every_way_leave_nothing_behind(seed: int, size: int) -> None:
    async def main() -> None:
        workshop = Workshop(size, seed)
        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        for number in range(1000):
            fate = FATES[draw(seed, number, "fate") % len(FATES)]
            coroutine = rollout(workshop, number, fate)
            task = asyncio.create_task(coroutine)
            tasks.append(task)
            moment = 60 * uniform(seed, number, "moment")
            if fate.startswith("cancel"):
                loop.call_later(moment, task.cancel)
            if fate == "cancel twice":
                loop.call_later(moment + 0.01, task.cancel)
            if fate == "kill":
                loop.call_later(moment, kill, task, coroutine)
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 100_000)
        odd = Counter(repr(end) for end in ends if isinstance(end, AssertionError))
        assert not odd
        await asyncio.sleep(10)
        assert (workshop.pool.leased, workshop.pool.waiting) == (0, 0)
        assert workshop.alive == workshop.pool.idle <= size
        lease = await asyncio.wait_for(workshop_lease(workshop), 100)
        lease.release()
        await workshop.pool.close()
        assert workshop.alive == 0

    run_virtual(main())


async def workshop_lease(workshop: Workshop) -> Lease[Thing]:
    while True:
        try:
            return await workshop.pool.acquire("last")
        except RuntimeError:
            continue


def kill(task: "asyncio.Task[None]", coroutine: Any) -> None:
    """Ends a task's coroutine at its current await, without cancelling the task."""
    if not task.done():
        coroutine.close()
        task.cancel()


def test_waiters_are_served_in_the_order_of_asking_whatever_they_ask_for() -> None:
    async def main() -> list[int]:
        workshop = Workshop(1)
        served: list[int] = []
        first = await workshop.pool.acquire("a")

        async def ask(number: int) -> None:
            lease = await workshop.pool.acquire("ab"[number % 2])
            served.append(number)
            lease.release()

        tasks = [asyncio.create_task(ask(number)) for number in range(20)]
        await asyncio.sleep(1)
        tasks[3].cancel()
        tasks[0].cancel()
        first.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        return served

    assert run_virtual(main()) == [number for number in range(20) if number not in (0, 3)]


def test_a_resource_that_is_as_new_is_lent_again_only_for_what_it_was_made_for() -> None:
    async def main() -> None:
        workshop = Workshop(2, renew=always)
        for key in ("a", "a", "b", "a"):
            lease = await workshop.pool.acquire(key)
            assert lease.resource.key == key
            lease.release()
            await asyncio.sleep(1)
        assert workshop.pool.made == 2
        lease = await workshop.pool.acquire("c")  # evicts an idle resource
        assert workshop.alive == 2
        assert lease.resource.key == "c"

    run_virtual(main())


async def always(thing: Thing) -> bool:
    return True


def test_a_waiter_that_is_cancelled_at_the_moment_of_its_turn_passes_the_turn_on() -> None:
    async def main() -> None:
        pool = Pool(
            Workshop(9).make, size=1
        )  # without `close`, a released slot goes to the next waiter at once
        first = await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(2)]
        await asyncio.sleep(0)
        first.release()
        waiting[0].cancel()  # the slot is assigned, and the task has not run yet
        lease = await asyncio.wait_for(waiting[1], 100)
        assert not lease.is_over

    run_virtual(main())


def test_cancelling_a_rollout_frees_its_resource_at_once() -> None:
    async def main() -> None:
        workshop = Workshop(1, renews=False)

        async def play() -> None:
            async with ToolContext("r") as context:
                await context.lease(workshop.pool)
                await asyncio.sleep(1e6)

        task = asyncio.create_task(play())
        await asyncio.sleep(5)
        assert workshop.pool.leased == 1
        before = asyncio.get_running_loop().time()
        task.cancel()
        await asyncio.wait({task})
        assert workshop.pool.leased == 0
        assert asyncio.get_running_loop().time() == before

    run_virtual(main())


def test_a_lease_that_lasts_too_long_is_taken_away_and_its_resource_never_used_again() -> None:
    async def main() -> None:
        workshop = Workshop(1, max_lease_seconds=10)
        kept = await workshop.pool.acquire()
        thing = kept.resource
        other = await asyncio.wait_for(workshop.pool.acquire(), 20)
        assert other.resource is not thing
        assert thing.is_closed
        assert workshop.pool.reaped == 1
        with pytest.raises(RollwrightError, match="the lease is over"):
            _ = kept.resource
        kept.release()  # no effect after the lease was reaped
        assert workshop.pool.leased == 1

    run_virtual(main())


def test_calls_of_one_rollout_that_ask_at_the_same_time_share_one_lease() -> None:
    async def main() -> None:
        workshop = Workshop(5)
        async with ToolContext("r") as context:
            things = await asyncio.gather(*(context.lease(workshop.pool, key) for key in "aabab"))
            assert len({id(thing) for thing in things}) == 2
            assert [thing.key for thing in things] == list("aabab")
        assert workshop.pool.leased == 0
        with pytest.raises(RollwrightError, match="its tools are closed"):
            await context.lease(workshop.pool, "a")

    run_virtual(main())


def test_a_call_that_asked_together_with_others_never_gets_a_new_resource_because_one_gave_theirs_back() -> (
    None
):
    """In any scheduling order, and for any delay between lease and release, all calls get the same resource or an error
    that it is gone."""

    async def main(passes: int) -> None:
        workshop = Workshop(5, renews=False)
        async with ToolContext("r") as context:

            async def use() -> Thing:
                thing = await context.lease(workshop.pool)
                for _ in range(passes):
                    await asyncio.sleep(0)
                context.release(workshop.pool)
                return thing

            first, *others = await asyncio.gather(*(use() for _ in range(4)), return_exceptions=True)
            assert isinstance(first, Thing)
            assert all(other is first or "the lease is over" in str(other) for other in others)
            assert passes == 0 or others == [first] * 3
            assert workshop.pool.made == 1
            assert await context.lease(workshop.pool) is not first
        await asyncio.sleep(1)
        assert workshop.alive == 0

    for passes in range(8):
        run_virtual(main(passes))


@pytest.mark.parametrize("leaves", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_a_call_that_is_cancelled_while_it_waits_leaves_the_others_theirs(leaves: tuple[int, ...]) -> None:
    async def main() -> None:
        workshop = Workshop(1, renews=False)
        other = await workshop.pool.acquire()
        async with ToolContext("r") as context:
            calls = [asyncio.create_task(context.lease(workshop.pool)) for _ in range(3)]
            await asyncio.sleep(1)
            for place in leaves:
                calls[place].cancel()
            await asyncio.sleep(1)
            assert workshop.pool.waiting == (len(leaves) < len(calls))
            other.release()
            things = await asyncio.gather(*calls, return_exceptions=True)
            stayed = [thing for place, thing in enumerate(things) if place not in leaves]
            assert len(set(map(id, stayed))) <= 1
            assert all(isinstance(things[place], asyncio.CancelledError) for place in leaves)
            late = await context.lease(workshop.pool)
            assert all(thing is late for thing in stayed)
        assert workshop.pool.leased == 0

    run_virtual(main())


def test_closing_a_context_ends_what_its_calls_wait_for() -> None:
    async def main() -> None:
        workshop = Workshop(1, renews=False)
        other = await workshop.pool.acquire()
        context = ToolContext("r")
        calls = [asyncio.create_task(context.lease(workshop.pool)) for _ in range(2)]
        await asyncio.sleep(1)
        context.close()
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, RollwrightError)
            assert "its tools are closed" in str(end)
        assert workshop.pool.waiting == 0
        other.release()
        await asyncio.sleep(1)
        assert workshop.alive == workshop.pool.leased == 0

    run_virtual(main())


def test_a_closed_pool_turns_waiters_away_and_closes_what_comes_back() -> None:
    async def main() -> None:
        workshop = Workshop(1)
        lease = await workshop.pool.acquire()
        waiting = asyncio.ensure_future(workshop.pool.acquire())
        await asyncio.sleep(0)
        closing: Awaitable[None] = workshop.pool.close()
        await closing
        with pytest.raises(RollwrightError, match="the pool is closed"):
            await waiting
        lease.release()
        await asyncio.sleep(1)
        assert workshop.alive == 0
        with pytest.raises(RollwrightError, match="the pool is closed"):
            await workshop.pool.acquire()

    run_virtual(main())


def test_a_pool_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Workshop(0)
