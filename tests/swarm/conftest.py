"""Whole nodes in one process: real environments, real keys, a network in memory."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollwright.config import build
from rollwright.engines.base import Policy
from rollwright.engines.rendering.bytes import BytesRenderer
from rollwright.rollout.episode import Episode, new_session, play_episode
from rollwright.rollout.scoring import task_of
from rollwright.run.build import SettingsTable
from rollwright.run.build_swarm import unverifiable_tags
from rollwright.simulation.players import SkilledPlayer
from rollwright.swarm import content, signed
from rollwright.swarm.exchange import Exchange, ForeignGroup
from rollwright.swarm.identity import Identity
from rollwright.swarm.recipes import TaskBook, task_digest, task_seed
from rollwright.swarm.selection import is_flat
from rollwright.swarm.transports.base import Transport, digest_of
from rollwright.swarm.transports.memory import MemorySwarm
from rollwright.trajectory import Floats, TokenIds, Trajectory, floats

SWARM = "test-swarm"
TOKENIZER = "bytes"
SKILLS = (1.0, 0.5, 0.0, 0.0)
"""How well the members of a group play: their rewards differ."""


@dataclasses.dataclass
class ByteScorer:
    """A policy that thinks the same of every byte."""

    tokenizer: str = TOKENIZER
    version: int = 7
    renderer: BytesRenderer = dataclasses.field(default_factory=BytesRenderer)

    async def logprobs(self, prompt: TokenIds, sampled: TokenIds) -> Floats:
        return floats([-2.0]) * len(sampled)

    def encode(self, text: str) -> TokenIds:
        return self.renderer.encode(text)


def book_of(*tags: str, **settings: Any) -> TaskBook:
    config = build({"train_env_manager": {"num_env_groups": len(tags), "tags": list(tags)}, **settings})
    table = SettingsTable(config)
    own = {tag: table(Episode(tag, 0, "train", "", 0, 0, 0)) for tag in tags}
    return TaskBook(own, level_of=table.swarm_level, unverifiable=unverifiable_tags(config))


async def play_group(
    book: TaskBook, peer: str, index: int, tag: str, policies: Sequence[Policy]
) -> list[Trajectory]:
    """A group as a node of that name plays it."""
    seed = task_seed(SWARM, peer)
    settings = book.settings(tag)
    group = []
    env = book.make_env(settings)
    for member, policy in enumerate(policies):
        episode = Episode(tag, book.level_of(tag, seed, index), "train", f"g{index}", index, member, seed)
        name = f"g{index}-m{member}"
        session = new_session(episode, policy, settings, env, rollout_id=name, attempt_id=name)
        played = await play_episode(session, env, settings, policy, lambda: env)
        rewards = settings.rewards
        group.append(played if rewards is None else await rewards.score(task_of(env), played))
    await env.close()
    return group


class Node:
    """An honest node, and the tools of a dishonest one."""

    def __init__(
        self, transport_of: Callable[[str], Transport], folder: Path, tags: Sequence[str], **options: Any
    ):
        self.identity = options.pop("identity")
        self.peer = self.identity.peer
        self.folder = folder / self.peer
        self.book = book_of(*tags, **options.pop("settings", {}))
        self.scorer = options.pop("scorer", None) or ByteScorer()
        self.tag = tags[0]
        self.transport = transport_of(self.peer)
        sharing = options.pop("sharing", None)
        self.exchange = Exchange(
            self.identity, SWARM, self.transport, self.book, self.folder, settings=sharing, **options
        )

    async def useful(self, number: int, tag: str | None = None) -> tuple[int, list[Trajectory]]:
        """The `number`-th group of this node's stream whose rewards differ, and its index."""
        players = [SkilledPlayer(skill) for skill in SKILLS]
        index, found = -1, -1
        while found < number:
            index += 1
            played = await play_group(self.book, self.peer, index, tag or self.tag, players)
            found += not is_flat([each.reward for each in played])
        return index, played

    async def group(self, number: int, tag: str | None = None) -> list[Trajectory]:
        return (await self.useful(number, tag))[1]

    async def share(self, round: int, number: int, tag: str | None = None) -> str | None:
        tag = tag or self.tag
        index, played = await self.useful(number, tag)
        return await self.exchange.share(round, index, tag, played, self.scorer.tokenizer)

    async def gather(self, round: int, count: int) -> list[ForeignGroup]:
        return await self.exchange.gather(round, count, self.scorer)

    async def shared_group(self, number: int, tag: str | None = None) -> content.SharedGroup:
        """What `share` would send, to be tampered with."""
        tag = tag or self.tag
        index, played = await self.useful(number, tag)
        recipe = content.Recipe(
            tag,
            self.book.version(tag),
            task_seed(SWARM, self.peer),
            index,
            task_digest(played[0].observation),
        )
        members = tuple(map(content.shared_member, played))
        return content.SharedGroup(signed.PROTOCOL, self.peer, recipe, TOKENIZER, members)

    async def send(self, group: content.SharedGroup, round: int, **claims: Any) -> bytes:
        """Announces and serves a group as it is, under this node's signature."""
        return await self.send_raw(content.encode(group), group, round, **claims)

    async def send_raw(self, data: bytes, group: content.SharedGroup, round: int, **claims: Any) -> bytes:
        """The same for any bytes that are said to be a group."""
        manifest = self.exchange.publisher.manifest(round, group, data)
        manifest = msgspec.structs.replace(manifest, **{"peer": self.peer, **claims})
        sealed = signed.sign_manifest(manifest, self.identity)
        await self.transport.publish(digest_of(data), data)
        await self.transport.announce(sealed)
        return sealed


Nodes = Callable[..., Node]


@pytest.fixture
def network() -> MemorySwarm:
    return MemorySwarm()


@pytest.fixture
def node(network: MemorySwarm, tmp_path: Path) -> Nodes:
    """Makes a node; tags are what it plays, FrozenLake unless told otherwise. Keys are the same in every run."""
    numbers = count(1)

    def make(*tags: str, **options: Any) -> Node:
        key = Ed25519PrivateKey.from_private_bytes(bytes([next(numbers)]) * 32)
        transport_of = options.pop("transport_of", network.join)
        return Node(transport_of, tmp_path, tags or ("FrozenLake",), **{"identity": Identity(key), **options})

    return make
