"""A real zenoh session of somebody hostile beside honest nodes: it answers, announces and declares whatever it likes."""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import zenoh

from rollwright.swarm.identity import Identity
from rollwright.swarm.signed import Manifest, sign_manifest
from rollwright.swarm.transports.base import PassedOver, digest_of
from rollwright.swarm.transports.inbox import MAX_PER_PEER, Inbox
from rollwright.swarm.transports.peer_table import MAX_PEERS, PeerTable, Rank
from rollwright.swarm.transports.zenoh import ZenohTransport
from rollwright.swarm.transports.zenoh_queries import AT_ONCE, CatchUp, ReplyThread

from .test_transports import SECONDS, free_port, heard, until

FETCHES = 10


def sealed(identity: Identity, number: int = 1, swarm: str = "s") -> bytes:
    manifest = Manifest(
        swarm, identity.peer, 1, number, time.time(), "e", "v", number, "ab" * 32, 1, (0.0, 1.0)
    )
    return sign_manifest(manifest, identity)


class Hostile:
    """A session with zenoh's own interface, joined to the same mesh."""

    def __init__(self, address: str, root: str) -> None:
        config = zenoh.Config()
        for key, value in {
            "mode": "peer",
            "listen/endpoints": ["tcp/127.0.0.1:0"],
            "connect/endpoints": [address],
            "scouting/multicast/enabled": False,
        }.items():
            config.insert_json5(key, json.dumps(value))
        self.session = zenoh.open(config)
        self.root = root
        self.asked = 0
        self._declared: list[Any] = []
        self._over = threading.Event()

    def answer(self, keys: str, junk: Callable[[str], Iterator[bytes]]) -> None:
        """Claims to know everything there, and answers every query with all that `junk` gives for its key."""

        def reply(query: Any) -> None:
            self.asked += 1
            key = str(query.key_expr).replace("*", "9")
            for each in junk(key):
                if self._over.is_set():
                    return
                query.reply(key, each)

        self._declared.append(self.session.declare_queryable(f"{self.root}/{keys}", reply, complete=True))

    def hold(self, keys: str) -> None:
        """Takes every query and never comes to an end with it."""
        held: list[Any] = []

        def keep(query: Any) -> None:
            self.asked += 1
            held.append(query)

        self._declared += [self.session.declare_queryable(f"{self.root}/{keys}", keep, complete=True), held]

    def tokens(self, peers: Iterator[str]) -> None:
        self._declared += [
            self.session.liveliness().declare_token(f"{self.root}/alive/{each}") for each in peers
        ]

    def close(self) -> None:
        self._over.set()
        self._declared.clear()
        self.session.close()


@contextlib.asynccontextmanager
async def mesh() -> AsyncIterator[tuple[ZenohTransport, ZenohTransport, Identity, Hostile]]:
    """A node that asks, an honest one with its identity, and somebody hostile; all know each other."""
    address = f"tcp/127.0.0.1:{free_port()}"
    owner = Identity.generate()
    asking = await ZenohTransport.open("s", Identity.generate().peer, listen=[address])
    serving = await ZenohTransport.open("s", owner.peer, bootstrap=[address])
    hostile = await asyncio.to_thread(Hostile, address, asking._root)
    try:
        await until(lambda: any(each.id == owner.peer and each.alive for each in asking.peers()))
        yield asking, serving, owner, hostile
    finally:
        await asyncio.to_thread(hostile.close)
        await serving.close()
        await asking.close()


async def is_asked(hostile: Hostile, asking: ZenohTransport, kind: str) -> None:
    """Until the mesh has heard of what the hostile one claims to know."""
    async with asyncio.timeout(SECONDS):
        while not hostile.asked:
            asking._session.get(f"{asking._root}/{kind}/{'0' * 64}/0", lambda _: None, timeout=0.1)
            await asyncio.sleep(0.02)


def almost(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


CONTENT = [os.urandom(25_000) for _ in range(FETCHES)]

JUNK: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "small": lambda content: (b"junk" for _ in range(500)),
    "almost right": lambda content: (almost(content) for _ in range(200)),
    "a bit too long": lambda content: (content + b"\0" for _ in range(200)),
    "of another digest": lambda content: (each for each in CONTENT * 20 if each != content),
    "huge": lambda content: (bytes(4 << 20) for _ in range(10)),
    "empty": lambda content: (b"" for _ in range(500)),
}


@pytest.mark.parametrize("kind", JUNK)
async def test_no_junk_keeps_the_right_answer_out(kind: str) -> None:
    by_digest = {digest_of(each): each for each in CONTENT}
    async with mesh() as (asking, serving, owner, hostile):
        hostile.answer("content/**", lambda key: JUNK[kind](by_digest.get(key.rpartition("/")[2], b"?")))
        await is_asked(hostile, asking, "content")
        before = hostile.asked
        late = LateAnswers(serving)
        for each in CONTENT:
            await serving.publish(digest_of(each), each)
            late.wait_for(hostile)
            fetched = await asking.fetch(owner.peer, digest_of(each), len(each), SECONDS)
            assert fetched == each
        assert hostile.asked == before + FETCHES
        assert (await asking.manifests(0)).passed_over[PassedOver.JUNK_REPLY] >= FETCHES


class LateAnswers:
    """Makes an honest node answer only when the hostile one has begun to."""

    def __init__(self, serving: ZenohTransport) -> None:
        self._serving = serving
        self._get = serving._held.get
        serving._held.get = self._held  # type: ignore[method-assign]
        self._begun: Callable[[], bool] = lambda: True

    def wait_for(self, hostile: Hostile) -> None:
        before = hostile.asked
        self._begun = lambda: hostile.asked > before

    def _held(self, digest: str) -> bytes | None:
        deadline = time.monotonic() + SECONDS
        while not self._begun() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.02)  # junk is on its way meanwhile
        return self._get(digest)


async def test_who_never_comes_to_an_end_with_its_answer_delays_nobody() -> None:
    """Everything that could be waited for would take an hour."""
    async with mesh() as (asking, serving, owner, hostile):
        hostile.hold("content/**")
        await is_asked(hostile, asking, "content")
        async with asyncio.timeout(SECONDS):
            for each in CONTENT:
                await serving.publish(digest_of(each), each)
                assert await asking.fetch(owner.peer, digest_of(each), len(each), 3600.0) == each


async def test_a_fetch_that_only_junk_answers_takes_no_room() -> None:
    async with mesh() as (asking, _, owner, hostile):
        hostile.answer("content/**", lambda key: (bytes(1 << 20) for _ in range(300)))
        await is_asked(hostile, asking, "content")
        before = resident()
        with pytest.raises(Exception, match=r"wrong_digest|deadline"):
            await asking.fetch(owner.peer, "0" * 64, 1 << 20, SECONDS)
        assert resident() - before < 150 << 20


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def fake_peers(count: int) -> Iterator[str]:
    return (os.urandom(32).hex() for _ in range(count))


async def test_made_up_tokens_push_out_nobody_who_has_signed() -> None:
    async with mesh() as (asking, serving, owner, hostile):
        await serving.announce(sealed(owner))
        await heard(asking, 1)
        await asyncio.to_thread(hostile.tokens, fake_peers(MAX_PEERS + 100))
        await until(lambda: len(asking.peers()) > MAX_PEERS)
        assert [each for each in asking.peers() if each.id == owner.peer and each.alive and each.verified]
        assert len(asking.peers()) <= 1 + MAX_PEERS


async def test_who_comes_behind_a_flood_of_made_up_tokens_is_found_and_heard() -> None:
    async with mesh() as (asking, _, _, hostile):
        hostile.hold("manifests/**")
        await is_asked(hostile, asking, "manifests")
        await asyncio.to_thread(hostile.tokens, fake_peers(MAX_PEERS + 100))
        await until(lambda: len(asking.peers()) >= MAX_PEERS)
        late = Identity.generate()
        joined = await ZenohTransport.open("s", late.peer, bootstrap=[address_of(asking)])
        try:
            await until(lambda: bool(joined.peers()))
            await joined.announce(sealed(late))
            await heard(asking, 1)
            await until(
                lambda: any(each.id == late.peer and each.alive and each.verified for each in asking.peers())
            )
        finally:
            await joined.close()


def address_of(transport: ZenohTransport) -> str:
    return str(transport._session.info.links()[0].src)


async def test_who_joins_late_hears_the_honest_though_strangers_answer_for_them() -> None:
    """The hostile one claims to have every manifest, answers with junk, and has declared more tokens than can be asked."""
    async with mesh() as (asking, serving, owner, hostile):
        old = [sealed(owner, number) for number in range(1, 3 * MAX_PER_PEER)]
        hostile.answer("manifests/**", lambda key: iter([*old, *(b"junk %d" % each for each in range(200))]))
        await is_asked(hostile, asking, "manifests")
        await asyncio.to_thread(hostile.tokens, fake_peers(200))
        newest = [sealed(owner, 1000 + number) for number in range(5)]
        for each in newest:
            await serving.announce(each)
        late = await ZenohTransport.open("s", Identity.generate().peer, bootstrap=[address_of(asking)])
        try:
            found: set[bytes] = set()
            cursor = 0
            async with asyncio.timeout(SECONDS):
                while not set(newest) <= found:
                    announced = await late.manifests(cursor)
                    cursor = announced.cursor
                    found.update(announced.manifests)
                    await asyncio.sleep(0.02)
        finally:
            await late.close()


async def test_a_thousand_keys_that_announce_push_out_nobody_whose_group_held_up() -> None:
    async with mesh() as (asking, serving, owner, hostile):
        asking.prefer(owner.peer)
        await serving.announce(sealed(owner))
        await until(lambda: asking._inbox._count > 0)
        for number in range(MAX_PEERS + 200):
            key = Identity.generate()
            hostile.session.put(
                f"{hostile.root}/manifests/{key.peer}/{number}",
                sealed(key),
                congestion_control=zenoh.CongestionControl.BLOCK,
            )
        await until(lambda: asking._inbox._count > MAX_PEERS + 100)
        announced = await asking.manifests(0)
        assert sealed_peer(announced.manifests, owner) == 1
        assert len(announced.manifests) <= 1 + MAX_PEERS
        assert announced.missed


def sealed_peer(manifests: Any, identity: Identity) -> int:
    return sum(identity.peer.encode() in each for each in manifests)


def test_what_a_peer_signed_long_ago_pushes_out_nothing_when_it_is_repeated() -> None:
    inbox, peer = Inbox("own"), Identity.generate()
    newest = [sealed(peer, 1000 + number) for number in range(MAX_PER_PEER)]
    for each in newest:
        inbox.add(each)
    for number in range(1, 2 * MAX_PER_PEER):
        inbox.add(sealed(peer, number))
        inbox.add(sealed(peer, 5000 + number, swarm="another"))
    announced = inbox.read(0)
    assert set(newest) <= set(announced.manifests)
    assert announced.missed == 2 * (2 * MAX_PER_PEER - 1) - MAX_PER_PEER


def test_each_rank_of_peers_has_room_of_its_own() -> None:
    table = PeerTable("own", limit=10)
    for rank in (Rank.PROVEN, Rank.SIGNED):
        for number in range(8):
            table.raise_to(rank, f"{rank.name} {number}", seen=0.0)
            table.note(f"{rank.name} {number}", alive=True, seen=0.0)
    kept = {each.id for each in table.all()}
    table.note("own", alive=True, seen=0.0)
    for number in range(1000):
        table.note(f"heard {number}", alive=True, seen=1.0)
    assert len(table) == 16 + 10
    for number in range(1000):
        table.raise_to(Rank.SIGNED, f"signed {number}", seen=1.0)
    assert len(table) == 8 + 10 + 10
    assert {each.id for each in table.all() if each.id in kept} >= {f"PROVEN {each}" for each in range(8)}
    assert all(each.verified == (not each.id.startswith("heard")) for each in table.all())


def test_who_is_away_goes_before_who_is_there() -> None:
    table = PeerTable("own", limit=64)
    for number in range(64):
        table.note(str(number), alive=number >= 60, seen=0.0)
    for number in range(100, 140):
        table.note(str(number), alive=True, seen=0.0)
    there = {each.id for each in table.all() if each.alive}
    assert len(table) == 64
    assert len(there) >= 40


def test_taking_a_query_never_waits_and_the_newest_is_answered_first() -> None:
    replies, stuck, answered = ReplyThread(max_waiting=3), threading.Event(), list[int]()
    begun, done = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        stuck.wait(SECONDS)
        raise RuntimeError("the asker has gone")

    replies.send(hang)
    assert begun.wait(SECONDS)
    for number in range(10):
        replies.send(lambda number=number: (answered.append(number), number == 7 and done.set()))
    stuck.set()
    assert done.wait(SECONDS)
    assert answered == [9, 8, 7]
    replies.close()
    replies.send(lambda: answered.append(99))
    assert answered == [9, 8, 7]


def test_few_are_asked_at_once_and_many_all_together() -> None:
    now = 0.0
    asked: list[tuple[str, Callable[[], None]]] = []
    wide: list[float] = []
    catch_up = CatchUp(
        lambda peer, done: asked.append((peer, done)), lambda done: wide.append(now), clock=lambda: now
    )
    for number in range(AT_ONCE):
        catch_up.want(f"fake {number}", Rank.HEARD)
    assert len(asked) == AT_ONCE
    for number in range(3 * AT_ONCE):
        catch_up.want(f"more {number}", Rank.HEARD)
    assert (len(asked), wide) == (AT_ONCE, [0.0]), "nobody answered, so all are asked together, once"
    catch_up.want("proven", Rank.PROVEN)
    asked[0][1]()
    assert asked[-1][0] == "proven"
    for _, done in list(asked[1:]):
        done()
    assert len(asked) <= 2 * AT_ONCE + 1 + 3 * AT_ONCE
    now = 31.0
    for number in range(10 * AT_ONCE):
        catch_up.want(f"again {number}", Rank.HEARD)
    assert wide == [0.0, 31.0]
