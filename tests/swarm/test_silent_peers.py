"""Peers that say nothing: asked once in a round at most, and nobody's round waits for them."""

import asyncio
import socket
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from rollwright.swarm import signed
from rollwright.swarm.gathering import PATIENCE, TIMEOUT_WEIGHT
from rollwright.swarm.identity import Identity
from rollwright.swarm.refusals import PeerRefusal
from rollwright.swarm.settings import CommunicationConfig, SwarmConfig
from rollwright.swarm.transports.base import FetchFailed, FetchProblem
from rollwright.swarm.transports.memory import MemorySwarm
from rollwright.swarm.transports.zenoh import ZenohTransport

FOREVER = 3600.0
SECONDS = 60.0
"""For something to happen on a busy machine."""


class Silent(ZenohTransport):
    """Is there, is asked, and answers nothing."""

    asked = 0

    def _serve(self, query: Any) -> None:
        self.asked += 1

    def _tell(self, query: Any) -> None:
        self.asked += 1


class Unanswering:
    """A network in which some are not heard when they are asked."""

    def __init__(self, inner: Any, silent: set[str], empty: Collection[str] = ()) -> None:
        self._inner = inner
        self._silent = silent
        self._empty = empty
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = FOREVER) -> bytes:
        self.asked[peer] += 1
        if peer in self._silent:
            await asyncio.sleep(deadline)
            raise FetchFailed(FetchProblem.DEADLINE, digest)
        if peer in self._empty:
            raise FetchFailed(FetchProblem.ABSENT, digest)
        content: bytes = await self._inner.fetch(peer, digest, max_bytes, deadline)
        return content


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_peer_that_announces_nothing_is_asked_once_and_holds_no_round_back(node) -> None:
    """Everything that could be waited for would take an hour."""
    address = f"tcp/127.0.0.1:{free_port()}"
    keys = [Identity.generate() for _ in range(3)]
    silent = await Silent.open("s", keys[0].peer, listen=[address])
    assert isinstance(silent, Silent)
    settings = SwarmConfig(communication=CommunicationConfig(fetch_timeout=FOREVER, gather_timeout=FOREVER))
    nodes = []
    try:
        for identity in keys[1:]:
            joined = await ZenohTransport.open("s", identity.peer, bootstrap=[address])
            nodes.append(
                node(identity=identity, transport_of=lambda _, joined=joined: joined, sharing=settings)
            )
        receiver, honest = nodes
        async with asyncio.timeout(SECONDS):
            while sum(each.alive for each in receiver.exchange.peers()) < 2:
                await asyncio.sleep(0.02)
            for round in range(1, 5):
                await honest.share(round, round)
                while not (taken := await receiver.gather(round, 4)):
                    await asyncio.sleep(0.02)
                assert {each.peer for each in taken} == {honest.peer}
        assert silent.asked <= len(nodes), "once by each, when they met"
        assert not receiver.exchange.counts[PeerRefusal.NOT_FETCHED]
    finally:
        for each in nodes:
            await each.exchange.close()
        await silent.close()


async def test_a_peer_that_announces_and_does_not_answer_is_asked_once_in_a_round(node) -> None:
    network = MemorySwarm()
    silent: set[str] = set()
    settings = SwarmConfig(communication=CommunicationConfig(fetch_timeout=0.1, beam_size=8))
    receiver = node(transport_of=lambda peer: Unanswering(network.join(peer), silent), sharing=settings)
    honest, mute = node(transport_of=network.join), node(transport_of=network.join)
    silent.add(mute.peer)
    for number in range(3):
        await mute.share(1, number)
    for round in (1, 2):
        digest = await honest.share(round, round)
        assert [each.digest for each in await receiver.gather(round, 4)] == [digest]
        assert receiver.transport.asked[mute.peer] == round
        assert receiver.exchange.counts[PeerRefusal.NOT_FETCHED] == round
    assert not receiver.exchange.quarantine.verdicts
    silent.clear()
    assert [each.peer for each in await receiver.gather(3, 4)] == [mute.peer], "its last group is still fresh"


@pytest.mark.parametrize("silently", [False, True])
async def test_a_flood_of_announcements_for_content_that_nobody_has_starves_nobody(
    node, silently: bool
) -> None:
    """Keys cost nothing: three hundred strangers announce, and either say that they have nothing or say nothing."""
    network = MemorySwarm()
    silent: set[str] = set()
    empty: set[str] = set()
    settings = SwarmConfig(communication=CommunicationConfig(fetch_timeout=0.05, beam_size=4))
    receiver = node(
        transport_of=lambda peer: Unanswering(network.join(peer), silent, empty), sharing=settings
    )
    honest = node(transport_of=network.join)
    first = await honest.share(1, 0)
    assert [each.digest for each in await receiver.gather(1, 4)] == [first]
    template = await honest.shared_group(0)
    for round in range(2, 5):
        strangers = [Identity.generate() for _ in range(300)]
        for number, key in enumerate(strangers):
            claimed = honest.exchange.publisher.manifest(round, template, b"")
            claimed = msgspec.structs.replace(claimed, peer=key.peer, digest=f"{number:064x}", size=1000)
            receiver.transport.inbox.add(signed.sign_manifest(claimed, key))
            (silent if silently else empty).add(key.peer)
        digest = await honest.share(round, round)
        before = receiver.transport.asked.total()
        assert [each.digest for each in await receiver.gather(round, 4)] == [digest]
        in_vain = PATIENCE // (TIMEOUT_WEIGHT if silently else 1)
        assert receiver.transport.asked.total() - before <= in_vain + settings.communication.beam_size
        assert not receiver.exchange.quarantine.verdicts
