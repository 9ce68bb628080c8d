"""Virtual time: programs take the time that they say, and only the time that they compute."""

import asyncio
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import LONGEST_RUN, run_virtual
from rollwright.errors import RollwrightError


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_sleep_takes_exactly_its_virtual_time() -> None:
    async def main() -> tuple[float, float]:
        before = now()
        await asyncio.sleep(3600)
        return before, now()

    assert run_virtual(main()) == (0.0, 3600.0)


@given(st.lists(st.floats(0, 1e5), max_size=30))
def test_sleepers_wake_in_the_order_of_their_times(seconds: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(duration: float) -> None:
        await asyncio.sleep(duration)
        woken.append((duration, now()))

    async def main() -> None:
        await asyncio.gather(*(sleeper(duration) for duration in seconds))

    run_virtual(main())
    assert [duration for duration, _ in woken] == pytest.approx(sorted(seconds), abs=1e-8)
    assert [at for _, at in woken] == pytest.approx([duration for duration, _ in woken], abs=1e-8)


def test_time_limits_work_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.sleep(6)
        async with asyncio.timeout(5):
            await asyncio.sleep(4)
        return now()

    assert run_virtual(main()) == 9.0


def test_ready_work_runs_before_the_clock_moves() -> None:
    async def main() -> list[float]:
        timer = asyncio.create_task(asyncio.sleep(1))
        times = []
        for _ in range(100):
            await asyncio.sleep(0)
            times.append(now())
        await timer
        return times

    assert run_virtual(main()) == [0.0] * 100


def test_input_that_is_there_is_read_before_the_clock_moves() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        with near, far:
            read: asyncio.Future[float] = loop.create_future()
            loop.add_reader(near, lambda: read.done() or read.set_result(now()))
            loop.call_later(1, far.send, b"x")
            loop.call_later(2, lambda: None)
            try:
                return await read
            finally:
                loop.remove_reader(near)

    assert run_virtual(main()) == 1.0


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[str, float]:
        async with asyncio.timeout(0.01):
            answer = await asyncio.to_thread(lambda: time.sleep(0.1) or "done")
        return answer, now()

    assert run_virtual(main()) == ("done", 0.0)


def test_without_a_timer_the_loop_really_waits_for_a_foreign_thread() -> None:
    async def main() -> tuple[str, float, float]:
        loop = asyncio.get_running_loop()
        told = loop.create_future()
        threading.Timer(0.2, loop.call_soon_threadsafe, (told.set_result, "told")).start()
        start, cpu = time.monotonic(), time.thread_time()
        return await told, time.monotonic() - start, time.thread_time() - cpu

    answer, waited, computed = run_virtual(main())
    assert answer == "told"
    assert computed < waited / 2  # a loop that spins computes all the time it waits


def test_the_result_and_the_exception_of_the_program_come_out() -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_virtual(fails())


def test_a_program_stuck_behind_a_periodic_timer_is_told_so() -> None:
    async def main() -> None:
        for _ in range(200):
            await asyncio.sleep(LONGEST_RUN / 100)

    with pytest.raises(RollwrightError, match="a task waits for an event that never comes"):
        run_virtual(main())


def test_fifty_thousand_sleepers_are_no_burden() -> None:
    async def main() -> float:
        async with asyncio.timeout(1000):
            await asyncio.gather(*(asyncio.sleep(place % 997) for place in range(50_000)))
        return now()

    assert run_virtual(main()) == 996.0
