"""Gossip over real zenoh sessions on loopback: whole nodes share groups though nobody announces to everybody."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.run.build_swarm import open_transport
from rollwright.swarm.identity import Identity
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.swarm.transports.gossip import GossipTransport

NODES = 6
SWARM = "test-swarm"
"""The name that the nodes of the fixtures play in."""
SECONDS = 60.0
"""For something to happen on a busy machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["all", "views"])
async def nodes(request: pytest.FixtureRequest, node: Callable[..., Any]) -> AsyncIterator[list[Any]]:
    """Real nodes on one bootstrap, with either way to announce."""
    first = f"tcp/127.0.0.1:{free_port()}"
    made: list[Any] = []
    for number in range(NODES):
        place: dict[str, Any] = {"bootstrap": [first]} if number else {"listen": [first]}
        sharing = SwarmConfig(
            name=SWARM,
            communication=CommunicationConfig(
                announce=request.param, gossip_interval=0.2, multicast=False, **place
            ),
        )
        identity = Identity.generate()
        transport = await open_transport(sharing, identity)
        assert isinstance(transport, GossipTransport) is (request.param == "views")
        made.append(node(identity=identity, sharing=sharing, transport_of=lambda _, open=transport: open))
    yield made
    for each in made:
        await each.exchange.close()


async def gathered(node: Any, count: int) -> list[Any]:
    """So many groups, as soon as they can be had."""
    found: list[Any] = []
    async with asyncio.timeout(SECONDS):
        while len(found) < count:
            found += await node.gather(1, count - len(found))
            await asyncio.sleep(0.1)
    return found


async def test_nodes_share_groups_over_zenoh_with_either_way_to_announce(nodes: list[Any]) -> None:
    for node in nodes:
        await node.share(1, 0)
    for node in nodes:
        taken = await gathered(node, 3)
        assert node.peer not in {each.peer for each in taken}
        assert len({each.peer for each in taken}) == 3


async def test_a_node_that_joins_late_gets_groups_by_asking(nodes: list[Any]) -> None:
    for node in nodes[:-1]:
        await node.share(1, 0)
    await gathered(nodes[0], 2)
    late = nodes[-1]  # it has announced nothing, so nobody knows it by a manifest
    assert len(await gathered(late, 2)) == 2


async def test_peers_that_die_leave_the_views_of_the_others(nodes: list[Any]) -> None:
    if not isinstance(nodes[0].transport, GossipTransport):
        pytest.skip("only partial views have members")
    views = [each.transport.gossip.view for each in nodes]
    for node in nodes:
        await node.share(1, 0)
    for node in nodes[:-1]:
        await gathered(node, NODES - 1)
    assert all(nodes[-1].peer in view.members for view in views[:-1]), "its group was accepted"
    await nodes[-1].transport.close()
    async with asyncio.timeout(SECONDS):
        while any(nodes[-1].peer in view.members for view in views[:-1]):
            await asyncio.sleep(0.05)


def test_views_over_a_folder_are_refused_in_one_line(tmp_path: Path) -> None:
    told = {"transport": "directory", "folder": str(tmp_path), "announce": "views"}
    with pytest.raises(ConfigError, match="announce: `views` needs transport `zenoh`, not `directory`"):
        build(
            {
                "swarm": {"communication": told},
                "train_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]},
            }
        )
