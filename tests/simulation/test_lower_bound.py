"""The lower bound: no schedule of the work that was seen could have taken less time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.aio import run_virtual
from rollwright.engines import EngineError, Prompt, Sampling
from rollwright.simulation.engine import LowerBound, SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength

ROOMY = Sampling(max_tokens=100_000)


class Board:
    def actions(self) -> tuple[str, ...]:
        return ("Left", "Right")

    def best_action(self) -> str | None:
        return None

    def answer(self, action: str) -> str:
        return action


EPISODES = st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=1, max_size=8)
"""For each episode, how many calls it makes side by side at each of its turns."""


async def play(engine: SimulatedEngine, name: str, turns: list[int], patience: float) -> None:
    async def call(turn: int, member: int) -> None:
        try:
            async with asyncio.timeout(patience):
                await engine.generate(Prompt(name, (name, turn, member), (), env=Board()), ROOMY)
        except (EngineError, TimeoutError):
            pass  # a call that failed or took too long is over; the episode goes on

    for turn, width in enumerate(turns):
        await asyncio.gather(*(call(turn, member) for member in range(width)))


@given(
    EPISODES,
    st.integers(1, 4),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
def test_the_bound_never_exceeds_the_time_it_took(
    episodes: list[list[int]], slots: int, failure_rate: float, hang_rate: float, track: bool
) -> None:
    async def main() -> None:
        engine = SimulatedEngine(
            slots=slots,
            lengths=LogNormalLength(60, 1.0),
            failure_rate=failure_rate,
            hang_rate=hang_rate,
            track_episodes=track,
        )
        await asyncio.gather(
            *(play(engine, f"e{place}", turns, patience=50) for place, turns in enumerate(episodes))
        )
        took = asyncio.get_running_loop().time()
        assert engine.lower_bound() <= took * (1 + 1e-9)
        assert engine.occupancy() <= 1 + 1e-9

    run_virtual(main())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_with_a_slot_for_each_episode_the_bound_is_reached(turns: list[int]) -> None:
    async def main() -> None:
        engine = SimulatedEngine(slots=len(turns), lengths=LogNormalLength(60, 1.0))
        await asyncio.gather(
            *(play(engine, f"e{place}", [1] * count, patience=1e9) for place, count in enumerate(turns))
        )
        assert engine.lower_bound() == pytest.approx(asyncio.get_running_loop().time())

    run_virtual(main())


def test_total_work_binds_where_slots_are_few_and_the_longest_episode_where_they_are_many() -> None:
    for slots, seconds in ((2, 9.0), (8, 7.0)):
        bound = LowerBound(slots)
        for episode, services in {"a": (3.0, 4.0), "b": (6.0,), "c": (5.0,)}.items():
            for service in services:
                bound.add(episode, bound.path(episode), service)
        assert bound.seconds == seconds


def test_calls_side_by_side_do_not_add_up_to_a_longer_episode() -> None:
    bound = LowerBound(slots=100)
    before = bound.path("tree")
    for service in (3.0, 5.0, 4.0):
        bound.add("tree", before, service)
    assert bound.seconds == 5.0
    bound.add("tree", bound.path("tree"), 2.0)
    assert bound.seconds == 7.0


def test_without_tracking_only_single_calls_are_known() -> None:
    bound = LowerBound(slots=100, track_episodes=False)
    for service in (3.0, 5.0):
        bound.add("chain", bound.path("chain"), service)
    assert bound.seconds == 5.0
