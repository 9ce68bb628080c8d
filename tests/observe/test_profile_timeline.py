"""The timeline is a file that viewers of the Chrome-trace format open."""

import json
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollwright.observe.timeline import Played, chrome_trace, stacked
from rollwright.trajectory import Phase, Timing, Trajectory, Wait

waits = st.lists(
    st.builds(
        Wait,
        st.sampled_from([Phase.ENGINE, Phase.TOOL]),
        st.integers(0, 8).map(float),
        st.integers(0, 2).map(float),
    ),
    max_size=6,
)
played = st.lists(
    st.builds(
        lambda number, start, worker, waits: Played(
            f"r{number}", "Lab", 1, 0.5, Timing(1e9 + start, 10.0, worker, 7, tuple(waits))
        ),
        st.integers(0, 99),
        st.integers(0, 30),
        st.sampled_from(["a", "b"]),
        waits,
    ),
    max_size=8,
)


def events(rollouts: list[Played]) -> list[dict[str, Any]]:
    return list(json.loads("".join(chrome_trace(rollouts)))["traceEvents"])


@given(played)
def test_on_one_lane_events_nest_or_stand_apart(rollouts: list[Played]) -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(rollouts):
        if event["ph"] == "X":
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
    for lane in lanes.values():
        for (start, stop), (other_start, other_stop) in combinations(lane, 2):
            apart = stop <= other_start or other_stop <= start
            inside = (start <= other_start and other_stop <= stop) or (
                other_start <= start and stop <= other_stop
            )
            assert apart or inside


@given(played)
def test_every_rollout_and_every_wait_is_drawn_once(rollouts: list[Played]) -> None:
    drawn = [event for event in events(rollouts) if event["ph"] == "X"]
    assert len(drawn) == len(rollouts) + sum(len(each.timing.waits) for each in rollouts)
    assert min((event["ts"] for event in drawn), default=0) == 0


@given(waits)
def test_waits_take_as_many_rows_as_run_at_once(some: list[Wait]) -> None:
    some = [wait for wait in some if wait.seconds]
    most = max((sum(a.start <= b.start < a.stop for a in some) for b in some), default=0)
    assert len(stacked(some)) == most


def test_workers_are_processes_and_carry_their_names() -> None:
    two = [Played("r1", "Lab", 1, 0.0, Timing(5.0, 1.0, name, 1)) for name in ("process-0", "process-1")]
    names = {event["pid"]: event["args"]["name"] for event in events(two) if event["ph"] == "M"}
    assert names == {1: "process-0", 2: "process-1"}
    assert {event["pid"] for event in events(two) if event["ph"] == "X"} == {1, 2}


def test_a_trajectory_without_timing_is_not_drawn() -> None:
    assert Played.of(Trajectory("r", "a", "g", "Lab", seed=1)) is None
