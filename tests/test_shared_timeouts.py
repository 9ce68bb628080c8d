"""Alarms go off when their time is up, and one timer is enough for all of a length."""

import asyncio
from collections.abc import Callable
from threading import Timer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright import aio as module
from rollwright.aio import MOST_LENGTHS, Alarms, alarms_of, run_virtual


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
def test_those_go_off_that_are_not_unset_in_time_and_exactly_then(
    plan: list[tuple[int, int, int | None]],
) -> None:
    """Each is set at a moment, for a length, and unset after a while or never."""

    async def one(start: int, length: int, held: int | None) -> None:
        loop, bell = asyncio.get_running_loop(), Bell()
        await asyncio.sleep(start)
        alarms_of(loop, length).set(bell)
        if held is not None:
            await asyncio.sleep(held + 0.5)
            alarms_of(loop, length).unset(bell)
        await asyncio.sleep(30)
        late = held is None or held + 0.5 > length
        assert bell.rang == ([pytest.approx(start + length)] if late else [])

    async def main() -> None:
        await asyncio.gather(*(one(*each) for each in plan))

    run_virtual(main())


def test_thousands_that_are_unset_in_time_share_one_timer() -> None:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()

        async def main() -> None:
            alarms = alarms_of(loop, 60.0)
            for _ in range(1000):
                bells = [Bell(), Bell()]
                for bell in bells:
                    alarms.set(bell)
                for bell in bells:
                    alarms.unset(bell)

        runner.run(main())
        assert isinstance(loop, CountingLoop)
        assert loop.timers == 1


async def test_one_that_goes_off_may_set_and_unset_others() -> None:
    loop = asyncio.get_running_loop()
    alarms = Alarms(loop, 0.01)
    again, other = Bell(), Bell()

    def change() -> None:
        alarms.unset(other)
        alarms.set(again)

    first = Bell(change)
    alarms.set(first)
    alarms.set(other)
    while not again.rang:
        await asyncio.sleep(0.001)
    assert (len(first.rang), len(other.rang), len(again.rang)) == (1, 0, 1)
    assert not alarms


async def test_alarms_of_a_length_that_is_used_once_leave_no_timer() -> None:
    loop = asyncio.get_running_loop()
    alarms, bell = Alarms(loop, 3600.0, once=True), Bell()
    alarms.set(bell)
    timer = alarms._timer
    alarms.unset(bell)
    assert timer is not None
    assert timer.cancelled()


async def test_lengths_that_nobody_uses_are_forgotten_with_their_timers() -> None:
    loop, bell, other = asyncio.get_running_loop(), Bell(), Bell()
    alarms_of(loop, 5000.0).set(bell)
    timers = []
    for length in range(10 * MOST_LENGTHS):
        alarms = alarms_of(loop, 6000.0 + length)
        alarms.set(other)
        timers.append(alarms._timer)
        alarms.unset(other)
    assert len(module._LOOPS[loop]) <= MOST_LENGTHS
    assert sum(not timer.cancelled() for timer in timers if timer is not None) <= MOST_LENGTHS
    assert len(alarms_of(loop, 5000.0)) == 1


def test_one_that_is_set_anew_as_others_go_off_has_its_whole_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        alarms, again = Alarms(loop, 10.0), Bell()

        def anew() -> None:
            alarms.unset(again)
            alarms.set(again)

        alarms.set(Bell(anew))
        alarms.set(again)
        await asyncio.sleep(30.0)
        assert again.rang == [20.0]

    run_virtual(main())


def test_a_clock_that_jumps_is_not_led_astray_by_alarms_that_were_unset() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        alarms, bell, told = alarms_of(loop, 3600.0), Bell(), loop.create_future()
        alarms.set(bell)
        await asyncio.sleep(1.0)
        alarms.unset(bell)
        Timer(0.05, loop.call_soon_threadsafe, (told.set_result, None)).start()
        await told
        return loop.time()

    assert run_virtual(main()) == 1.0


def test_event_loops_that_ended_are_forgotten() -> None:
    async def main() -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        alarms_of(loop, 1.0)
        return loop

    ended = [asyncio.run(main()) for _ in range(3)]
    assert [loop in module._LOOPS for loop in ended] == [False, False, True]
