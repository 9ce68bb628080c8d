"""Routing over a simulated fleet with prefix caches: the rules are as good as they say, and failures lose nothing."""

import pytest

from rollwright.simulation.fleet import plan_episodes, simulate_fleet

EPISODES = plan_episodes(groups=32, members=8)
SERVERS = 4


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, float], dict[str, float]]:
    return {
        (name, failures): simulate_fleet(name, EPISODES, SERVERS, failures)
        for name in ("least_loaded", "sticky", "prefix")
        for failures in (0.0, 0.25)
    }


@pytest.mark.parametrize("failures", [0.0, 0.25])
def test_prefixes_save_most_where_calls_are_routed_by_them(
    measured: dict[tuple[str, float], dict[str, float]], failures: float
) -> None:
    hits = {name: row["hit_rate"] for (name, share), row in measured.items() if share == failures}
    assert hits["least_loaded"] < hits["sticky"] < hits["prefix"]


def test_less_work_takes_less_time(measured: dict[tuple[str, float], dict[str, float]]) -> None:
    """Only without failures: of four servers, one that dies at the end of a run decides how long it takes."""
    assert measured["prefix", 0.0]["makespan"] < measured["sticky", 0.0]["makespan"]
    assert measured["sticky", 0.0]["makespan"] < measured["least_loaded", 0.0]["makespan"]


def test_no_rule_is_better_than_the_bounds(measured: dict[tuple[str, float], dict[str, float]]) -> None:
    for row in measured.values():
        assert row["hit_rate"] <= row["hit_rate_bound"]
        assert row["makespan"] >= row["makespan_bound"]


def test_calls_of_a_server_that_dies_are_sent_again_and_every_episode_ends(
    measured: dict[tuple[str, float], dict[str, float]],
) -> None:
    """`simulate_fleet` returns when all episodes have ended."""
    for (_, failures), row in measured.items():
        assert (row["sent_again"] > 0) == (failures > 0)


def test_the_same_fleet_gives_the_same_figures() -> None:
    few = plan_episodes(groups=6, members=4)
    assert simulate_fleet("prefix", few, 2, 0.5) == simulate_fleet("prefix", few, 2, 0.5)
