"""Nodes as processes that come, go, die, freeze, lose the network and have wrong clocks (E1, E4, E9): everybody else's
rounds go on, and nobody trains on stale or duplicate data."""

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the nodes' environment is found by its module's name
from tiny_swarm import CUT, Nodes

MAX_LAG = 3
HOUR = 3600.0


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def over_zenoh(tmp_path: Path, free_port: int) -> Iterator[Nodes]:
    """Nodes on loopback that know nobody but `ann`."""
    address = f"tcp/127.0.0.1:{free_port}"

    def communication(name: str) -> dict[str, object]:
        if name == "ann":
            return {"listen": [address], "multicast": False}
        return {"bootstrap": [address], "multicast": False}

    nodes = Nodes(tmp_path, communication)
    yield nodes
    nodes.stop_all()


@pytest.fixture
def over_folder(tmp_path: Path) -> Iterator[Nodes]:
    shared = str(tmp_path / "shared")
    nodes = Nodes(tmp_path, lambda name: {"transport": "directory", "folder": shared})
    yield nodes
    nodes.stop_all()


def check_records(nodes: Nodes, *names: str) -> None:
    """Nothing stale, nothing twice, nothing of oneself."""
    for name in names:
        given = [(row["round"], each) for row in nodes.rows(name) for each in row["foreign"]]
        groups = [each["group"] for _, each in given]
        assert len(set(groups)) == len(groups), f"{name} trained on a group twice"
        assert all(taken - each["round"] <= MAX_LAG for taken, each in given), (
            f"{name} trained on stale groups"
        )
        assert nodes.status(name).peer not in {each["peer"] for _, each in given}


def test_nodes_come_and_go_and_the_bootstrap_dies(over_zenoh: Nodes) -> None:
    nodes = over_zenoh
    for name in ("ann", "ben", "cid"):
        nodes.start(name)
    nodes.wait_foreign(4, "ann", "ben", "cid")

    nodes.start("dan")  # late
    nodes.wait_foreign(4, "dan")
    caught_up = nodes.rows("dan")[-1]["round"] - len(nodes.rows("dan"))
    assert caught_up > 0, "who joins late goes on with the swarm's round, not with its own first"
    dan = nodes.status("dan").peer
    nodes.wait(
        "dan's groups are taken",
        lambda: any(e["peer"] == dan for r in nodes.rows("ben") for e in r["foreign"]),
    )

    before, told = nodes.rows("ann"), nodes.status("ann")
    nodes.kill("ann")  # the only one that the others were told of
    nodes.wait_rounds(3, "ben", "cid", "dan")
    nodes.wait_foreign(4, "ben", "cid", "dan")

    assert nodes.stop("cid") == 0  # leaves as one should
    nodes.wait_rounds(3, "ben", "dan")
    gone = nodes.status("cid").peer
    nodes.wait(
        "cid is seen to be gone",
        lambda: not any(e.alive for e in nodes.status("ben").peers if e.peer == gone),
    )

    nodes.start("ann")  # with the same home
    nodes.wait_rounds(3, "ann")
    nodes.wait_foreign(2, "ann")
    assert nodes.status("ann").peer == told.peer
    assert nodes.rows("ann")[: len(before)] == before, "what it had done stays done"
    assert nodes.status("ann").version > told.version
    ann = told.peer
    taken = len([e for r in nodes.rows("dan") for e in r["foreign"] if e["peer"] == ann])
    nodes.wait(
        "ann is heard again",
        lambda: len([e for r in nodes.rows("dan") for e in r["foreign"] if e["peer"] == ann]) > taken,
    )
    check_records(nodes, "ann", "ben", "cid", "dan")


def test_a_cut_link_a_frozen_node_and_a_wrong_clock_stop_nobody_else(over_folder: Nodes) -> None:
    nodes = over_folder
    for name in ("ann", "ben", "cid"):
        nodes.start(name)
    nodes.start("eve", clock_offset=HOUR)
    nodes.wait_foreign(4, "ann", "ben", "cid")
    nodes.wait_rounds(1, "eve")

    eve = nodes.status("eve").peer
    nodes.wait("the clock is noticed", lambda: nodes.status("ann").refused.get("clock_skew", 0) > 0)
    nodes.wait("on both sides", lambda: nodes.status("eve").refused.get("clock_skew", 0) > 0)
    assert nodes.foreign("eve") == 0
    assert not nodes.status("ann").quarantined, "a wrong clock is nobody's crime"

    nodes.signal("ben", signal.SIGSTOP)
    (nodes.home("cid") / CUT).touch()
    ben, alone = nodes.rows("ben")[-1]["round"], len(nodes.rows("cid"))
    nodes.wait("ten rounds go by", lambda: nodes.rows("ann")[-1]["round"] >= ben + 10)
    nodes.wait("cid goes on alone", lambda: len(nodes.rows("cid")) >= alone + 4)
    assert not any(row["foreign_groups"] for row in nodes.rows("cid")[alone + 2 :])

    nodes.signal("ben", signal.SIGCONT)
    (nodes.home("cid") / CUT).unlink()
    nodes.wait_foreign(4, "ann", "ben", "cid")
    nodes.wait("ben has caught up", lambda: nodes.rows("ben")[-1]["round"] >= ben + 10)
    check_records(nodes, "ann", "ben", "cid", "eve")
    given = {
        each["peer"] for name in ("ann", "ben", "cid") for row in nodes.rows(name) for each in row["foreign"]
    }
    assert eve not in given
