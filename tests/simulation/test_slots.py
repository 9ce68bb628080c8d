"""Slots: never more than there are, first come first served, nothing lost to cancellation."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError
from rollwright.simulation.slots import Slots


def now() -> float:
    return asyncio.get_running_loop().time()


CALLS = st.lists(
    st.tuples(
        st.integers(0, 20),  # comes at
        st.integers(0, 8),  # needs
        st.none() | st.integers(0, 12),  # is cancelled so long after it came
    ),
    max_size=25,
)


@given(CALLS, st.integers(1, 4))
def test_slots_hold_their_promises_under_any_arrivals_and_cancellations(
    calls: list[tuple[int, int, int | None]], count: int
) -> None:
    slots = Slots(count)
    came: list[int] = []
    served: dict[int, float] = {}
    held = peak = 0.0

    async def use(place: int, needs: int) -> None:
        nonlocal held, peak
        came.append(place)
        await slots.acquire()
        start = served[place] = now()
        peak = max(peak, slots.running)
        try:
            await asyncio.sleep(needs)
        finally:
            held += now() - start
            slots.release()

    async def call(place: int, comes: int, needs: int, patience: int | None) -> None:
        await asyncio.sleep(comes)
        task = asyncio.create_task(use(place, needs))
        if patience is not None:
            await asyncio.sleep(patience)
            task.cancel()
        await asyncio.wait([task])

    async def main() -> None:
        await asyncio.gather(*(call(place, *each) for place, each in enumerate(calls)))
        assert (slots.running, slots.queued) == (0, 0)
        assert slots.busy_seconds(now()) == pytest.approx(held)

    run_virtual(main())
    assert peak <= count
    starts = [served[place] for place in came if place in served]
    assert starts == sorted(starts)


def test_the_longest_waiting_caller_is_served_next() -> None:
    async def main() -> list[int]:
        slots = Slots(2)
        served: list[int] = []

        async def use(place: int) -> None:
            await slots.acquire()
            served.append(place)
            await asyncio.sleep(1 + place % 3)
            slots.release()

        await asyncio.gather(*(use(place) for place in range(50)))
        return served

    assert run_virtual(main()) == list(range(50))


@pytest.mark.parametrize("handed_over_first", [True, False])
def test_a_caller_cancelled_as_it_is_served_passes_its_slot_on(handed_over_first: bool) -> None:
    async def main() -> None:
        slots = Slots(1)
        await slots.acquire()
        unlucky = asyncio.create_task(slots.acquire())
        next_one = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        if handed_over_first:
            slots.release()
            unlucky.cancel()
        else:
            unlucky.cancel()
            slots.release()
        async with asyncio.timeout(1):
            await next_one
        assert unlucky.cancelled()
        assert (slots.running, slots.queued) == (1, 0)

    run_virtual(main())


def test_no_slots_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots: 0 is too few"):
        Slots(0)
