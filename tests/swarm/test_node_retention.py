"""A node that runs for ever: its home does not grow, and forgetting changes nothing of what it learns."""

import asyncio
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

sys.path.insert(0, str(Path(__file__).parent))  # the node's environment is found by its module's name
from test_node import Peer, key_file, run, settings, with_peers
from tiny_swarm import configuration, save_model

from rollwright.config import RunConfig
from rollwright.run.build_swarm import KEPT_STEPS, node_config
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.retention import read_forgotten
from rollwright.run.swarm_node import SwarmNode
from rollwright.swarm import admission
from rollwright.swarm.heartbeat import NodeStatus
from rollwright.swarm.identity import Identity
from rollwright.swarm.transports.memory import MemorySwarm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def keeping(model: Path, keep: int | str | None, steps: int) -> RunConfig:
    training = {
        "learning_rate": 1e-3,
        "checkpoint_steps": 1,
        "keep_checkpoints": 1,
        "device": "cpu",
        "keep_steps": keep,
    }
    return settings(model, max_steps=steps, training=training)


def in_log(home: Path) -> set[str]:
    """Groups whose trajectories are written, not what readers make of it."""
    (home / "forgotten.json").rename(home / "aside")
    groups = {each.group_id for each in RunReader(home).trajectories()}
    (home / "aside").rename(home / "forgotten.json")
    return groups


async def test_a_node_that_forgets_learns_the_same_from_its_peers(model: Path, tmp_path: Path) -> None:
    whole = await with_peers(tmp_path / "whole", keeping(model, "all", 6), poison=False)
    short = await with_peers(tmp_path / "short", keeping(model, 2, 6), poison=False)
    assert short.status().accepted == whole.status().accepted == 12, "two foreign groups in each round"
    assert short.training.checksum == whole.training.checksum is not None
    assert short.training.summary()["length_bias"] == whole.training.summary()["length_bias"]
    assert read_forgotten(whole.home).steps == 0
    rows = RunReader(short.home).metrics()
    assert [row["step"] for row in rows] == [4, 5]
    assert in_log(short.home) == {group for row in rows for group in row["groups"]}
    assert len({each for each in in_log(short.home) if each.startswith("swarm-")}) == 4


async def test_groups_of_peers_that_came_into_no_batch_go_with_the_next_that_are_forgotten(
    model: Path, tmp_path: Path
) -> None:
    """A node that is killed between writing what it took and recording it takes something else the next time."""
    node = await with_peers(tmp_path / "node", keeping(model, 2, 3), poison=False)
    played = next(each for each in RunReader(node.home).trajectories() if each.group_id.startswith("swarm-"))
    name = f"swarm-{'0' * 16}-{'1' * 16}"
    orphan = type(played)(f"{name}-m0", "1", name, played.tag, seed=1)
    folder = RunFolder.reopen(node.home)
    folder.add_trajectory(orphan.rollout_id, orphan.to_bytes())
    folder.log.close()
    again = await run(node.home, keeping(model, 2, 6))
    assert again.training.state.forgotten.steps > 0
    assert name not in in_log(node.home)


def sizes(node: SwarmNode) -> dict[str, int]:
    return {
        str(file.relative_to(node.home)): file.stat().st_size
        for file in sorted(node.home.rglob("*"))
        if file.is_file() and "checkpoints" not in file.parts
    }


async def test_a_home_does_not_grow_with_the_rounds(model: Path, tmp_path: Path) -> None:
    keep = 3
    short = await run(tmp_path / "short", keeping(model, keep, 3 * keep))
    long = await run(tmp_path / "long", keeping(model, keep, 12 * keep))
    before, after = sizes(short), sizes(long)
    assert set(before) == set(after)
    bounded = {"seen", "status.json"}
    """By limits of their own, which are far away here."""
    for name in set(after) - bounded:
        assert after[name] <= 1.5 * before[name] + 100, f"{name} grows: {before[name]}, then {after[name]}"
    assert keep <= len(long.training.state.record.rows) <= 2 * keep


async def test_a_node_that_forgets_and_stops_goes_on_as_if_it_had_not(model: Path, tmp_path: Path) -> None:
    whole = await run(tmp_path / "whole", keeping(model, "all", 7))
    for steps in (2, 4, 5, 7):
        node = await run(tmp_path / "parts", keeping(model, 1, steps))
    assert node.training.checksum == whole.training.checksum
    assert node.training.state.forgotten.steps == 6
    assert [each.round for each in node.status().rounds][-1] == 7
    groups = [group for row in RunReader(node.home).metrics() for group in row["groups"]]
    last = RunReader(whole.home).metrics()[-1]["groups"]
    assert groups == last, "the stream goes on with the same groups"


def test_a_node_keeps_two_hundred_steps_unless_it_is_told_another_number(model: Path) -> None:
    def kept(**training: Any) -> Any:
        config = node_config(configuration(model, {}, training=training), "ab" * 32)
        assert config.training is not None
        return config.training.keep_steps

    assert kept() == KEPT_STEPS == 200
    assert kept(keep_steps=None) == 200
    assert kept(keep_steps=7) == 7
    assert kept(keep_steps="all") == "all"


async def test_peers_that_the_gate_has_forgotten_are_forgotten(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of peers that come and go, three at a time, with keys that are new each time."""
    monkeypatch.setattr(admission, "MAX_PEERS", 3)
    config, network = keeping(model, 2, 4), MemorySwarm()
    peers = [Peer(number, network, config, tmp_path / "peers") for number in range(20, 32)]
    left = iter(peers)
    sharing: list[asyncio.Task[None]] = []

    def next_peers(status: NodeStatus | None = None) -> None:
        sharing.extend(asyncio.create_task(each.share(0)) for each in islice(left, 3))

    next_peers()
    await asyncio.gather(*sharing)
    key_file(tmp_path / "node")
    own = Identity(Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)).peer
    node = SwarmNode(config, tmp_path / "node", transport=network.join(own), on_round=next_peers)
    await node.run()
    await asyncio.gather(*sharing)
    assert len(sharing) == len(peers)
    assert node.counter is not None
    assert len(node.counter.heard) <= 3
    assert node.training.pipeline.done == 4
    for each in peers:
        await each.exchange.close()
