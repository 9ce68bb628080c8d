"""Timeouts expire when their time is up, and one timer serves all of one length."""

import asyncio
from collections.abc import Callable
from threading import Timer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright import aio as module
from rollwright.aio import MAX_LENGTHS, TimeoutQueue, run_virtual, timeout_queue


class Bell:
    def __init__(self, on_expire: Callable[[], None] = lambda: None) -> None:
        self.rang: list[float] = []
        self._on_expire = on_expire

    def expire(self) -> None:
        self.rang.append(asyncio.get_running_loop().time())
        self._on_expire()


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts the timers that were asked for."""

    timers = 0

    def call_at(self, *args: object, **kwargs: object) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(*args, **kwargs)  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([3, 10]), st.none() | st.integers(0, 20)), max_size=30
    )
)
def test_timeouts_that_are_not_cancelled_in_time_expire_exactly_then(
    plan: list[tuple[int, int, int | None]],
) -> None:
    """Each starts at a moment, with a length, and is cancelled after a while or never."""

    async def one(start: int, length: int, held: int | None) -> None:
        loop, bell = asyncio.get_running_loop(), Bell()
        await asyncio.sleep(start)
        timeout_queue(loop, length).start(bell)
        if held is not None:
            await asyncio.sleep(held + 0.5)
            timeout_queue(loop, length).cancel(bell)
        await asyncio.sleep(30)
        late = held is None or held + 0.5 > length
        assert bell.rang == ([pytest.approx(start + length)] if late else [])

    async def main() -> None:
        await asyncio.gather(*(one(*each) for each in plan))

    run_virtual(main())


def test_thousands_that_are_cancelled_in_time_share_one_timer() -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()

        async def main() -> None:
            queue = timeout_queue(loop, 60.0)
            for _ in range(1000):
                bells = [Bell(), Bell()]
                for bell in bells:
                    queue.start(bell)
                for bell in bells:
                    queue.cancel(bell)

        runner.run(main())
        assert isinstance(loop, CountingLoop)
        assert loop.timers == 1


async def test_a_timeout_that_expires_may_start_and_cancel_others() -> None:
    loop = asyncio.get_running_loop()
    queue = TimeoutQueue(loop, 0.01)
    again, other = Bell(), Bell()

    def change() -> None:
        queue.cancel(other)
        queue.start(again)

    first = Bell(change)
    queue.start(first)
    queue.start(other)
    while not again.rang:
        await asyncio.sleep(0.001)
    assert (len(first.rang), len(other.rang), len(again.rang)) == (1, 0, 1)
    assert not queue


async def test_a_queue_that_is_used_once_leaves_no_timer() -> None:
    loop = asyncio.get_running_loop()
    queue, bell = TimeoutQueue(loop, 3600.0, once=True), Bell()
    queue.start(bell)
    timer = queue._timer
    queue.cancel(bell)
    assert timer is not None
    assert timer.cancelled()


async def test_lengths_that_nobody_uses_are_forgotten_with_their_timers() -> None:
    loop, bell, other = asyncio.get_running_loop(), Bell(), Bell()
    timeout_queue(loop, 5000.0).start(bell)
    timers = []
    for length in range(10 * MAX_LENGTHS):
        queue = timeout_queue(loop, 6000.0 + length)
        queue.start(other)
        timers.append(queue._timer)
        queue.cancel(other)
    assert len(module._QUEUES[loop]) <= MAX_LENGTHS
    assert sum(not timer.cancelled() for timer in timers if timer is not None) <= MAX_LENGTHS
    assert len(timeout_queue(loop, 5000.0)) == 1


def test_a_timeout_restarted_while_others_expire_has_its_whole_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue, again = TimeoutQueue(loop, 10.0), Bell()

        def anew() -> None:
            queue.cancel(again)
            queue.start(again)

        queue.start(Bell(anew))
        queue.start(again)
        await asyncio.sleep(30.0)
        assert again.rang == [20.0]

    run_virtual(main())


def test_a_clock_that_jumps_is_not_led_astray_by_timeouts_that_were_cancelled() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        queue, bell, told = timeout_queue(loop, 3600.0), Bell(), loop.create_future()
        queue.start(bell)
        await asyncio.sleep(1.0)
        queue.cancel(bell)
        Timer(0.05, loop.call_soon_threadsafe, (told.set_result, None)).start()
        await told
        return loop.time()

    assert run_virtual(main()) == 1.0


def test_event_loops_that_ended_are_forgotten() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        timeout_queue(loop, 1.0)
        return loop

    ended = [asyncio.run(main()) for _ in range(3)]
    assert [loop in module._QUEUES for loop in ended] == [False, False, True]
