"""Nodes as processes that come, go, die, freeze, lose the network and have wrong clocks (E1, E4, E9): everybody else's
rounds go on, and nobody trains on stale or duplicate data."""

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the nodes' environment is found by its module's name
from tiny_swarm import CUT, Nodes, check_records, given_by

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


def test_whatever_happens_to_some_nodes_the_rounds_of_the_others_go_on(over_zenoh: Nodes) -> None:
    nodes = over_zenoh
    for name in ("ann", "ben", "cid"):
        nodes.start(name)
    nodes.wait_foreign(3, "ann", "ben", "cid")

    # One comes late: it goes on with the swarm's round, so that its groups are not old from the start.
    nodes.start("dan")
    nodes.wait_foreign(2, "dan")
    assert nodes.rows("dan")[-1]["round"] > len(nodes.rows("dan"))
    dan = nodes.status("dan").peer
    nodes.wait("dan's groups are taken", lambda: given_by(nodes, "ben", dan) > 0)

    # One freezes and falls ten rounds behind, and one loses the network and goes on alone.
    nodes.signal("dan", signal.SIGSTOP)
    (nodes.home("cid") / CUT).touch()
    behind, alone = nodes.rows("dan")[-1]["round"], len(nodes.rows("cid"))
    nodes.wait("ten rounds go by", lambda: nodes.rows("ann")[-1]["round"] >= behind + 10)
    nodes.wait("cid goes on alone", lambda: len(nodes.rows("cid")) >= alone + 4)
    assert not any(row["foreign_groups"] for row in nodes.rows("cid")[alone + 2 :])
    nodes.signal("dan", signal.SIGCONT)
    (nodes.home("cid") / CUT).unlink()
    nodes.wait_foreign(2, "ann", "ben", "cid", "dan")
    nodes.wait("dan has caught up", lambda: nodes.rows("dan")[-1]["round"] >= behind + 10)

    # The only one that the others were told of is killed, and another leaves as one should.
    before, told = nodes.rows("ann"), nodes.status("ann")
    nodes.kill("ann")
    assert nodes.stop("cid") == 0
    gone = {told.peer, nodes.status("cid").peer}
    nodes.wait_foreign(2, "ben", "dan")
    nodes.wait(
        "both are seen to be gone",
        lambda: not any(each.alive for each in nodes.status("ben").peers if each.peer in gone),
    )

    # It comes back with its clock an hour off: nobody takes anything, nobody is accused.
    nodes.start("ann", clock_offset=HOUR)
    nodes.wait("the clock is noticed", lambda: nodes.status("ben").refused.get("clock_skew", 0) > 0)
    nodes.wait("on both sides", lambda: nodes.status("ann").refused.get("clock_skew", 0) > 0)
    nodes.kill("ann")
    rows = nodes.rows("ann")
    assert rows[: len(before)] == before, "what it had done stays done"
    assert not any(row["foreign_groups"] for row in rows[len(before) :])
    assert not nodes.status("ben").quarantined

    # With the clock set right it is the same node as before, and heard again.
    taken = given_by(nodes, "dan", told.peer)
    nodes.start("ann")
    nodes.wait_foreign(2, "ann")
    nodes.wait("ann is heard again", lambda: given_by(nodes, "dan", told.peer) > taken)
    assert nodes.status("ann").peer == told.peer
    assert nodes.status("ann").version > told.version
    check_records(nodes, "ann", "ben", "cid", "dan")
