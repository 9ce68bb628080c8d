"""Every moment of an attempt belongs to one thing that it waited for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.observe.attribution import Interval, exclusive
from rollwright.observe.profile import Profile
from rollwright.trajectory import Phase, Timing, Wait

ORDER = list(Phase)
WALL = 20


def timing(*waits: Wait, wall: float = WALL) -> Timing:
    return Timing(started=0.0, wall=wall, waits=waits)


def shape(intervals: list[Interval]) -> list[tuple[Phase, float, float]]:
    return [(each.phase, each.start, each.stop) for each in intervals]


waits = st.builds(
    Wait,
    st.sampled_from([phase for phase in Phase if phase is not Phase.AGENT]),
    st.integers(0, WALL + 3).map(float),
    st.integers(0, WALL).map(float),
    agent=st.sampled_from(["", "solver"]),
    name=st.sampled_from(["", "search"]),
)
timings = st.lists(waits, max_size=12).map(lambda each: timing(*each))


@given(timings)
def test_the_intervals_touch_each_other_and_cover_the_wall_time(measured: Timing) -> None:
    found = exclusive(measured)
    assert (found[0].start, found[-1].stop) == (0.0, measured.wall)
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert all(each.stop > each.start for each in found)


@given(timings)
def test_a_moment_belongs_to_the_first_phase_that_is_waited_for_then(measured: Timing) -> None:
    for interval in exclusive(measured):
        middle = (interval.start + interval.stop) / 2
        waited = [each for each in measured.waits if each.start <= middle < each.stop]
        assert interval.phase is min((each.phase for each in waited), key=ORDER.index, default=Phase.AGENT)
        same = [each.start for each in waited if each.phase is interval.phase]
        assert interval.wait is None or interval.wait.start == min(same)


@given(timings, st.randoms(use_true_random=False))
def test_the_order_in_which_waits_were_noted_does_not_matter(measured: Timing, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(measured.waits)
    random.shuffle(shuffled)
    summed, again = Profile(), Profile()
    summed.add("Lab", measured)
    again.add("Lab", timing(*shuffled))
    assert [summed.seconds(phase) for phase in Phase] == [again.seconds(phase) for phase in Phase]


@given(st.lists(timings, max_size=5))
def test_the_phases_of_a_profile_sum_to_the_wall_time_of_its_rollouts(measured: list[Timing]) -> None:
    profile = Profile()
    for each in measured:
        profile.add("Lab", each)
    assert sum(profile.seconds(phase) for phase in Phase) == pytest.approx(profile.wall)
    of_agents = sum(sum(row.waited.values()) for row in profile.agents())
    assert of_agents + profile.seconds(Phase.AGENT) == pytest.approx(profile.wall)
    of_things = sum(row.tally.alone for row in profile.things())
    assert of_things + profile.seconds(Phase.ENGINE) + profile.seconds(Phase.AGENT) == pytest.approx(
        profile.wall
    )


def test_a_tool_that_runs_beside_a_generation_costs_only_what_it_takes_longer() -> None:
    both = timing(Wait(Phase.ENGINE, 1, 4, "planner"), Wait(Phase.TOOL, 2, 6, "solver", "search"), wall=10)
    assert shape(exclusive(both)) == [
        (Phase.AGENT, 0, 1),
        (Phase.ENGINE, 1, 5),
        (Phase.TOOL, 5, 8),
        (Phase.AGENT, 8, 10),
    ]


def test_waits_one_after_the_other_are_taken_as_they_are() -> None:
    chain = timing(
        Wait(Phase.ENVIRONMENT, 0, 2, name="reset"),
        Wait(Phase.ENGINE, 2, 3),
        Wait(Phase.STORE, 6, 9),
        wall=10,
    )
    assert shape(exclusive(chain)) == [
        (Phase.ENVIRONMENT, 0, 2),
        (Phase.ENGINE, 2, 5),
        (Phase.AGENT, 5, 6),
        (Phase.STORE, 6, 10),
    ]


def test_counts_means_and_percentiles_are_of_the_waits_themselves() -> None:
    profile = Profile()
    calls = [Wait(Phase.ENGINE, 0, seconds, "solver", tokens=10) for seconds in range(1, 21)]
    profile.add("Lab", timing(*calls, Wait(Phase.TOOL, 0, 25, "solver", "search"), wall=30))
    profile.add("Lab", None)
    (solver,) = profile.agents()
    assert (solver.calls.count, solver.calls.tokens, solver.calls.mean) == (20, 200, 10.5)
    assert (solver.calls.percentile(0.5), solver.calls.percentile(0.95)) == (10, 19)
    assert solver.waited[Phase.ENGINE] == 20
    (search,) = profile.things()
    assert (search.name, search.tally.mean, search.tally.alone) == ("search", 25, 5)
    assert profile.untimed == 1
