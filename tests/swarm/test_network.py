"""Nodes on machines of their own, as far as a network can tell: four namespaces, parted, cut, healed, and without the
bootstrap that they met at."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the nodes' environment is found by its module's name
from network import Network, why_not
from tiny_swarm import Nodes, check_records, given_by

PORT = 7447
NEAR, FAR = ("ann", "ben"), ("cid", "dan")
ALL = (*NEAR, *FAR)


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    made = Network((NEAR, FAR))
    yield made
    made.close()


@pytest.fixture
def nodes(tmp_path: Path, network: Network) -> Iterator[Nodes]:
    """`ann` says where it listens, the others are told of `ann` and of nothing else."""

    def communication(name: str) -> dict[str, object]:
        if name == "ann":
            return {"listen": [f"tcp/0.0.0.0:{PORT}"], "multicast": False}
        return {"bootstrap": [f"tcp/{network.address('ann')}:{PORT}"], "multicast": False}

    made = Nodes(tmp_path, communication)
    yield made
    made.stop_all()


def wait_given(nodes: Nodes, *pairs: tuple[str, str]) -> None:
    """Until each taker has trained on one more group of its peer than now."""
    ids = {peer: nodes.status(peer).peer for _, peer in pairs}
    before = {pair: given_by(nodes, pair[0], ids[pair[1]]) for pair in pairs}
    nodes.wait(
        f"groups go along {pairs}",
        lambda: all(given_by(nodes, taker, ids[peer]) > before[taker, peer] for taker, peer in pairs),
    )


def alive(nodes: Nodes, name: str) -> set[str]:
    """The peers that a node believes to be there."""
    return {each.peer for each in nodes.status(name).peers if each.alive}


def test_a_swarm_over_a_network_outlives_partitions_cuts_and_its_bootstrap(
    network: Network, nodes: Nodes
) -> None:
    for name in ALL:
        nodes.start(name, namespace=network.namespace(name))
    nodes.wait_foreign(2, *ALL)
    ids = {name: nodes.status(name).peer for name in ALL}

    # Parted: each half goes on with itself.
    network.part()
    nodes.wait(
        "each half sees itself alone",
        lambda: all(
            alive(nodes, name) == {ids[each] for each in half if each != name}
            for half in (NEAR, FAR)
            for name in half
        ),
    )
    nodes.wait_rounds(2, *ALL)
    wait_given(nodes, ("ann", "ben"), ("ben", "ann"), ("cid", "dan"), ("dan", "cid"))

    # Joined again: groups go from half to half.
    network.join()
    nodes.wait("all see each other", lambda: all(len(alive(nodes, name)) == len(ALL) - 1 for name in ALL))
    wait_given(nodes, ("ann", "cid"), ("ben", "dan"), ("cid", "ann"), ("dan", "ben"))

    # One is cut off: it goes on alone, and the others with each other.
    network.cut("dan")
    nodes.wait("dan is alone", lambda: not alive(nodes, "dan"))
    nodes.wait_rounds(2, *ALL)
    wait_given(nodes, ("ann", "cid"), ("ben", "cid"), ("cid", "ben"))
    network.heal("dan")
    nodes.wait_foreign(1, "dan")

    # The bootstrap is killed: those who met there know each other.
    nodes.wait("all see each other", lambda: all(len(alive(nodes, name)) == len(ALL) - 1 for name in ALL))
    nodes.kill("ann")
    nodes.wait("ann is missed", lambda: not any(ids["ann"] in alive(nodes, name) for name in ("ben", *FAR)))
    nodes.wait_rounds(2, "ben", *FAR)
    wait_given(nodes, ("ben", "cid"), ("cid", "dan"), ("dan", "ben"))
    assert not any(nodes.status(name).quarantined for name in ALL)
    check_records(nodes, *ALL)
