"""Simulated nodes: honest ones with the real exchange, and two kinds that are not.

An honest node runs `RoundCounter`, `Exchange.share` and `Exchange.gather` as a node does. A poisoner announces groups that
must not be trained on, and passes on those of other hostile nodes. A censor passes nothing on and offers what it never
delivers; its own groups are honest. Both name only each other to their peers, know everybody, and open more exchanges than
honest nodes do.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from rollwright.swarm import content
from rollwright.swarm.exchange import Exchange, ForeignGroup
from rollwright.swarm.gossip import Gossip, Outgoing
from rollwright.swarm.gossip_messages import ID_BYTES, OFFERED, RECORDS, manifest_id
from rollwright.swarm.identity import Identity
from rollwright.swarm.node import RoundCounter
from rollwright.swarm.recipes import TaskBook, task_digest, task_level, task_seed
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import PROTOCOL, sign_manifest
from rollwright.swarm.simulation.quiz import TAG, TOKENIZER, QuizScorer, played_group, question
from rollwright.swarm.transports.base import Transport, digest_of

MEMBERS = (True, False)
"""Who of a group answers right: its rewards differ."""

HOSTILE_EXCHANGES = 5
"""Exchanges that a hostile node opens in an interval, with peers drawn from all that there are, beside the two that every node
opens."""

PASSED_AROUND = 512
"""Manifests of hostile nodes that are passed on by the others of them."""


class Role(StrEnum):
    """What a simulated node does."""

    HONEST = "honest"
    POISONER = "poisoner"
    CENSOR = "censor"


class Poison(StrEnum):
    """What a poisoner's groups are."""

    REWARDS = "rewards"
    """Wrong answers that are said to be right, and the other way round."""
    STOLEN = "stolen"
    """Another peer's tasks."""
    MALFORMED = "malformed"
    """Bytes that are no group."""
    ABSENT = "absent"
    """Content that nobody has."""
    DIFFERENT = "different"
    """Other rewards in the manifest than in the content."""


class Accomplices:
    """What hostile nodes know together: each other's names, records and manifests, and the names of all that there are."""

    def __init__(self, everybody: Sequence[str]) -> None:
        self.everybody = everybody
        self.records: dict[str, bytes] = {}
        self.manifests: deque[bytes] = deque(maxlen=PASSED_AROUND)


class HostileGossip(Gossip):
    """Names accomplices only and passes on nothing of others: offers junk, or accomplices' manifests."""

    accomplices: Accomplices
    offers_junk: bool
    _around: Sequence[bytes] = ()
    """Accomplices' manifests that are offered in this interval."""

    def announce(self, envelope: bytes, now: float) -> None:
        super().announce(envelope, now)
        self.accomplices.manifests.append(envelope)

    def tick(self, now: float) -> list[Outgoing]:
        around = self.accomplices.manifests
        self._around = self._random.sample(around, min(OFFERED, len(around)))
        for envelope in self._around:
            self._hold(manifest_id(envelope), envelope, now)
        return super().tick(now) + self.meet(
            self._random.choices(self.accomplices.everybody, k=HOSTILE_EXCHANGES), now
        )

    def _tell(self, now: float) -> tuple[bytes, ...]:
        own, *_ = super()._tell(now)
        records = self.accomplices.records
        records[self._identity.peer] = own
        names = self._random.sample(list(records), min(RECORDS - 1, len(records)))
        return (own, *(records[each] for each in names))

    def _to_offer(self) -> list[bytes]:
        own = [each for each in self._own if each in self._held]
        if self.offers_junk:
            return own + [self._random.randbytes(ID_BYTES) for _ in range(OFFERED - len(own))]
        return list(dict.fromkeys([*own, *map(manifest_id, self._around)]))[:OFFERED]


@dataclass(frozen=True)
class TakenGroup:
    """What is noted of a group that a node took."""

    peer: str
    is_true: bool
    """Whether each of its rewards is what the answer earns."""


@dataclass(frozen=True)
class RoundNote:
    """What is noted of an honest node's round when it ends."""

    at: float
    """By the swarm's clock."""
    most: int
    """Groups that it may take."""
    taken: tuple[TakenGroup, ...]
    received: int
    """Bytes since the node joined, of all kinds; so are the next three."""
    sent: int
    checked: int
    """Signatures."""
    signed: int
    hostile_in_view: float | None
    """Share of hostile peers among the members of its view."""


@dataclass
class SimulatedNode:
    """One node of the world, and what is noted about it."""

    identity: Identity
    role: Role
    region: int
    joined: float
    """In virtual seconds."""
    exchange: Exchange
    transport: Transport
    book: TaskBook
    swarm: SwarmConfig
    random: random.Random
    play_seconds: tuple[float, float]
    gathers: bool = True
    """Whether it takes groups; the cost of full announcement is measured at some nodes only."""
    rounds: int = 0
    index: int = 0
    """The next task of its stream."""
    poison: Poison = Poison.REWARDS
    notes: list[RoundNote] = field(default_factory=list)
    """Of each round."""
    note: Callable[["SimulatedNode", int, Sequence[ForeignGroup]], RoundNote] | None = None
    """Makes the note of a round, from the groups that it may take and those that it took."""
    task: "asyncio.Task[None] | None" = None

    @property
    def peer(self) -> str:
        return self.identity.peer

    async def run(self) -> None:
        """Rounds, until it is cancelled."""
        counter = RoundCounter(self.exchange, 0)
        scorer = QuizScorer()
        while True:
            round = await counter.advance(self.rounds)
            await asyncio.sleep(self.random.uniform(*self.play_seconds))
            for _ in range(self.swarm.local_groups):
                await self._share(round)
            if self.role is Role.HONEST and self.gathers:
                count = self.swarm.external_groups
                taken = await self.exchange.gather(round, count, scorer)
                if self.note is not None:
                    self.notes.append(self.note(self, count, taken))
            self.rounds += 1

    async def _share(self, round: int) -> None:
        self.index += 1
        if self.role is Role.POISONER:
            await self._share_poison(round)
        else:
            group = played_group(self.swarm.name, self.peer, self.index, MEMBERS)
            await self.exchange.share(round, self.index, TAG, group, TOKENIZER)

    async def _share_poison(self, round: int) -> None:
        """Announce and serve a group as no honest node would, under this node's own signature."""
        false = self.poison is Poison.REWARDS
        group = self._group(self.peer if self.poison is not Poison.STOLEN else "ab" * 32, false=false)
        data = b"\x95junk" if self.poison is Poison.MALFORMED else content.encode(group)
        manifest = self.exchange.publisher.manifest(round, group, data)
        if self.poison is Poison.DIFFERENT:
            manifest = msgspec.structs.replace(manifest, rewards=tuple(reversed(manifest.rewards)))
        if self.poison is not Poison.ABSENT:
            await self.transport.publish(digest_of(data), data)
        await self.transport.announce(sign_manifest(manifest, self.identity))

    def _group(self, peer: str, *, false: bool) -> content.SharedGroup:
        seed = task_seed(self.swarm.name, peer)
        recipe = content.Recipe(
            TAG,
            self.book.version(TAG),
            seed,
            self.index,
            task_digest(question(task_level(seed, self.index))),
        )
        played = played_group(self.swarm.name, peer, self.index, MEMBERS)
        members = tuple(content.shared_member(each) for each in played)
        if false:
            members = tuple(msgspec.structs.replace(each, reward=1.0 - each.reward) for each in members)
        return content.SharedGroup(PROTOCOL, self.peer, recipe, TOKENIZER, members)

    async def leave(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.exchange.close()


def folder_of(home: Path, peer: str) -> Path:
    """The state of one node; two levels, because a folder of ten thousand is slow."""
    return home / peer[:2] / peer
