"""Dozens of simulated nodes with the real exchange: churn, a fifth of them hostile, a partition."""

import logging
from collections.abc import Iterator

import pytest

from rollwright.aio import run_virtual
from rollwright.swarm import identity
from rollwright.swarm.simulation.world import WorldReport, WorldSettings, simulate


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """A line for every peer that is caught is too much."""
    log = logging.getLogger("rollwright.swarm")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


def world(nodes: int, **more: object) -> WorldReport:
    return run_virtual(simulate(WorldSettings(nodes, **more)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def swarm() -> WorldReport:
    return world(40, seconds=150.0, partition=(50.0, 80.0))


def test_nothing_of_a_poisoner_is_trained_on_and_poisoners_are_caught(swarm: WorldReport) -> None:
    assert swarm.poison_trained == 0
    assert swarm.poison_refused > 20


def test_nodes_get_nearly_all_the_groups_that_they_may_take(swarm: WorldReport) -> None:
    assert min(each.useful_share for each in swarm.curve[1:]) >= 0.95
    assert swarm.useful_share >= 0.95
    assert swarm.givers > 5


def test_after_a_partition_groups_cross_it_again(swarm: WorldReport) -> None:
    assert swarm.across["during"] < 0.5 * swarm.across["before"]
    assert swarm.across["after"] > 0.5 * swarm.across["before"]


def test_who_joins_late_takes_groups_within_its_first_rounds(swarm: WorldReport) -> None:
    assert swarm.newcomers >= 3
    assert swarm.newcomer_rounds is not None
    assert swarm.newcomer_rounds <= 2.0


def test_hostile_peers_that_name_only_each_other_do_not_fill_the_views(swarm: WorldReport) -> None:
    shares = [each.hostile_in_view for each in swarm.curve]
    assert len(shares) >= 4
    assert shares[-1] is not None
    assert shares[-1] < 0.25, shares


def test_bytes_do_not_grow_with_the_swarm_as_they_do_with_full_announcement(swarm: WorldReport) -> None:
    small, large = world(20, seconds=80.0), world(60, seconds=80.0)
    assert large.received["announce"] < 1.4 * small.received["announce"]
    assert large.checked < 1.4 * small.checked
    few, many = world(20, announce="all", seconds=60.0), world(60, announce="all", seconds=60.0)
    assert many.received["announce"] > 2.0 * few.received["announce"]
    assert few.poison_trained == many.poison_trained == small.poison_trained == large.poison_trained == 0


def test_a_run_that_is_stopped_has_told_what_it_found_so_far() -> None:
    told: list[WorldReport] = []
    settings = WorldSettings(12, seconds=70.0, warm_up=30.0)
    final = run_virtual(simulate(settings, told.append))
    assert [each.seconds for each in told] == pytest.approx([40.0, 50.0, 60.0])
    assert final.seconds == pytest.approx(70.0)
    assert told[0].rounds <= told[-1].rounds <= final.rounds


def test_a_simulation_leaves_no_shared_signatures_behind() -> None:
    world(4, seconds=20.0, warm_up=10.0)
    assert identity._shared is None
