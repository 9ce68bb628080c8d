"""A whole node in this process: its rounds, what it leaves behind, how it goes on, and what poison does to it (E1, E9)."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

sys.path.insert(0, str(Path(__file__).parent))  # the node's environment is found by its module's name
from tiny_swarm import TAG, OddOnes, configuration, save_model

from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError
from rollwright.run.build_swarm import node_config, task_book
from rollwright.run.folder import RunReader
from rollwright.run.swarm_node import SwarmNode
from rollwright.swarm import content, signed
from rollwright.swarm.exchange import Exchange
from rollwright.swarm.heartbeat import NodePhase, Pulse, read_heartbeat, read_status
from rollwright.swarm.identity import IDENTITY_FILE, Identity
from rollwright.swarm.node import next_round
from rollwright.swarm.recipes import task_digest, task_level, task_seed
from rollwright.swarm.transports.base import digest_of
from rollwright.swarm.transports.memory import MemorySwarm
from rollwright.trajectory import FinishReason

SWARM = "tiny"
AHEAD = 50
"""A round that is fresh for whoever is in its first ones."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, **more: Any) -> RunConfig:
    """Exact to the bit, and without pauses."""
    config = configuration(model, {}, **more).model_dump(mode="json")
    config["policy"]["batch_invariant"] = True
    config["custom_envs"][TAG]["env_config"] = {"pause": 0.0}
    config["swarm"]["per_peer"] = 1
    return build(config)


def key_file(home: Path) -> None:
    """The same node in every run."""
    home.mkdir(exist_ok=True)
    file = home / IDENTITY_FILE
    file.write_text("07" * 32)
    file.chmod(0o600)


class Peer:
    """Somebody who shares groups that nobody has played: answers from a seeded generator."""

    def __init__(self, number: int, network: MemorySwarm, config: RunConfig, folder: Path) -> None:
        self.identity = Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32))
        self.name = self.identity.peer
        self._config = config
        self._random = random.Random(number)
        transport = network.join(self.name)
        self.exchange = Exchange(self.identity, SWARM, transport, task_book(config), folder / self.name)
        self._transport = transport

    async def share(self, index: int, *, lie: float = 0.0) -> None:
        """A group of this peer's stream; `lie` is added to the reward of its first member."""
        seed, env = task_seed(SWARM, self.name), OddOnes(pause=0.0)
        first = await env.reset(task_level(seed, index))
        members = []
        for place in range(2):
            text = "".join(self._random.choices("abcdefgh", k=5))
            earned = (await env.step(text)).reward + lie * (place == 0)
            members.append(
                content.SharedMember((content.SharedAction(text, b"", FinishReason.STOP),), earned)
            )
        recipe = content.Recipe(
            TAG, task_book(self._config).version(TAG), seed, index, task_digest(first.observation)
        )
        group = content.SharedGroup(signed.PROTOCOL, self.name, recipe, "another", tuple(members))
        data = content.encode(group)
        manifest = self.exchange.publisher.manifest(AHEAD, group, data)
        await self._transport.publish(digest_of(data), data)
        await self._transport.announce(signed.sign_manifest(manifest, self.identity))


async def run(home: Path, config: RunConfig, network: MemorySwarm | None = None) -> SwarmNode:
    key_file(home)
    network = network or MemorySwarm()
    peer = Identity(Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)).peer
    node = SwarmNode(config, home, transport=network.join(peer))
    await node.run()
    return node


async def with_peers(home: Path, config: RunConfig, *, poison: bool) -> SwarmNode:
    """Six honest peers, and one that poisons."""
    network = MemorySwarm()
    peers = [Peer(number, network, config, home.parent / f"{home.name}-peers") for number in range(20, 27)]
    for index in range(4):
        for honest in peers[:-1]:
            await honest.share(index)
        if poison:
            await peers[-1].share(index, lie=0.5)
    node = await run(home, config, network)
    for each in peers:
        await each.exchange.close()
    return node


async def test_one_poisoner_of_eight_changes_no_bit_of_the_weights(model: Path, tmp_path: Path) -> None:
    """Nothing of it is trained, and nothing else is trained because of it: the run is the clean one."""
    config = settings(model, max_steps=6)
    clean = await with_peers(tmp_path / "clean", config, poison=False)
    poisoned = await with_peers(tmp_path / "poisoned", config, poison=True)
    told, caught = clean.status(), poisoned.status()
    assert told.accepted == caught.accepted == 12, "two foreign groups in each round"
    assert not told.refused
    assert caught.refused == {"wrong_reward": 1}
    assert len(caught.quarantined) == 1
    assert clean.training.checksum is not None
    assert poisoned.training.checksum == clean.training.checksum
    assert [each.reward for each in caught.rounds] == [each.reward for each in told.rounds]


async def test_a_node_that_stops_goes_on_as_if_it_had_not(model: Path, tmp_path: Path) -> None:
    whole = await run(tmp_path / "whole", settings(model, max_steps=5))
    first = await run(tmp_path / "parts", settings(model, max_steps=3))
    second = await run(tmp_path / "parts", settings(model, max_steps=5))
    assert second.identity.peer == first.identity.peer
    assert second.training.checksum == whole.training.checksum != first.training.checksum
    assert [each.round for each in second.status().rounds] == [1, 2, 3, 4, 5]


async def test_a_node_alone_trains_alone_and_says_so(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "alone"
    node = await run(home, settings(model, max_steps=2))
    status, beat = read_status(home), read_heartbeat(home)
    assert status is not None
    assert beat is not None
    assert [(each.own_groups, each.foreign_groups) for each in status.rounds] == [(2, 0), (2, 0)]
    assert (status.rounds_done, status.version, status.peers, status.accepted) == (2, 2, [], 0)
    assert status.shared > 0, "what it shares waits for those who come"
    assert (beat.phase, beat.rounds_done) == (NodePhase.STOPPED, 2)
    assert beat.beat > 10, "progress inside the phases counts too"
    assert node.training.report is not None
    assert node.training.report.gap is not None
    assert node.training.report.gap < 1e-3


async def test_the_log_probabilities_of_a_check_are_those_of_the_own_engine(
    model: Path, tmp_path: Path
) -> None:
    node = await run(tmp_path / "node", settings(model, max_steps=1, training={"learning_rate": 0.0}))
    played = next(RunReader(node.home).trajectories())
    turn = played.turns[0]
    (found,) = node.training.trainer.logprobs([(turn.prompt_ids, turn.sampled_ids)])
    assert list(found) == pytest.approx(list(turn.logprobs), abs=1e-4)


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"swarm": None}, "swarm: is not set"),
        ({"training": None}, "training: is not set"),
        (
            {"train_env_manager": {"num_env_groups": 2, "tags": [TAG]}},
            "group_size: 1 gives groups without an advantage",
        ),
        ({"rollout_batch_size": 64}, "rollout_batch_size: 64 is not local_groups x group_size, which is 4"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(model: Path, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        node_config(configuration(model, {}, **more), "ab" * 32)


def test_unknown_keys_of_the_communication_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"swarm.communication.beam_sise: unknown key; did you mean `beam_size`"
    ):
        build({"swarm": {"communication": {"beam_sise": 3}}})
    with pytest.raises(ConfigError, match="folder: transport `directory` needs one"):
        build({"swarm": {"communication": {"transport": "directory"}}})


def test_communication_works_without_any_setting() -> None:
    told = build({"swarm": {}}).swarm
    assert told is not None
    assert (told.communication.startup_timeout, told.communication.beam_size) == (60.0, 4)


@pytest.mark.parametrize(
    ("last", "told", "expected"),
    [
        (4, [], 5),
        (4, [4, 5], 5),
        (0, [500], 500),
        (0, [500, 10**9], 500),
        (0, [10**9, 500, 501], 501),
        (7, [3, 3, 3], 4),
        (4, [4, 4], 5),
    ],
)
def test_the_round_is_the_swarms_and_one_liar_does_not_move_it(
    last: int, told: list[int], expected: int
) -> None:
    assert next_round(last, told) == expected


def test_a_heartbeat_counts_progress_and_is_always_whole(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path, clock=lambda: 5.0)
    pulse.enter(NodePhase.GENERATE, 3, 2)
    first = read_heartbeat(tmp_path)
    for _ in range(10):
        pulse.progress()
    pulse.enter(NodePhase.TRAIN, 3, 2)
    second = read_heartbeat(tmp_path)
    assert first is not None
    assert second is not None
    assert (first.phase, first.round, first.rounds_done, first.time) == (NodePhase.GENERATE, 3, 2, 5.0)
    assert second.beat > first.beat + 10
    (tmp_path / "heartbeat.json").write_text('{"pid": 1')
    assert read_heartbeat(tmp_path) is None
