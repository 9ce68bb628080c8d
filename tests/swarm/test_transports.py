"""Every transport keeps the same promises, over memory, a folder and zenoh."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rollwright.aio import run_virtual
from rollwright.errors import ConfigError, RollwrightError
from rollwright.swarm.identity import Identity
from rollwright.swarm.signed import Manifest, sign_manifest
from rollwright.swarm.transports.base import (
    MAX_CONTENT_BYTES,
    MAX_MANIFEST_BYTES,
    Announced,
    FetchFailed,
    FetchProblem,
    PassedOver,
    Transport,
    digest_of,
)
from rollwright.swarm.transports.directory import ALIVE_SECONDS, DirectoryTransport
from rollwright.swarm.transports.inbox import MAX_PER_PEER, Held, Inbox
from rollwright.swarm.transports.memory import MemorySwarm
from rollwright.swarm.transports.zenoh import ZenohTransport, listening

SECONDS = 20.0
"""For something to happen on a busy machine."""

Join = Callable[[Identity], Awaitable[Transport]]


def sealed(identity: Identity, number: int = 1) -> bytes:
    manifest = Manifest(
        "s", identity.peer, 1, number, time.time(), "e", "v", number, "ab" * 32, 1, (0.0, 1.0)
    )
    return sign_manifest(manifest, identity)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.02)


async def heard(transport: Transport, count: int, since: int = 0) -> Announced:
    """What came since, once there are so many."""
    async with asyncio.timeout(SECONDS):
        while len((announced := await transport.manifests(since)).manifests) < count:
            await asyncio.sleep(0.02)
    return announced


async def fails(call: Awaitable[bytes]) -> FetchProblem:
    with pytest.raises(FetchFailed) as failed:
        await call
    return failed.value.problem


@pytest.fixture(params=["memory", "directory", "zenoh"])
async def join(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Join]:
    memory, port = MemorySwarm(), free_port()
    joined: list[Transport] = []

    async def make(identity: Identity) -> Transport:
        made: Transport
        if request.param == "memory":
            made = memory.join(identity.peer)
        elif request.param == "directory":
            made = DirectoryTransport(tmp_path, "s", identity.peer)
        elif not joined:
            made = await ZenohTransport.open("s", identity.peer, listen=[f"tcp/127.0.0.1:{port}"])
        else:
            made = await ZenohTransport.open("s", identity.peer, bootstrap=[f"tcp/127.0.0.1:{port}"])
        joined.append(made)
        return made

    yield make
    for each in joined:
        await each.close()


@pytest.fixture
async def three(join: Join) -> list[tuple[Identity, Transport]]:
    """Three nodes that know each other."""
    found = []
    for _ in range(3):
        identity = Identity.generate()
        found.append((identity, await join(identity)))
    for _ in range(2):
        for _, transport in found:
            await transport.manifests(0)  # a folder is looked into when somebody asks
    for _, transport in found:
        await until(lambda transport=transport: sum(each.alive for each in transport.peers()) == 2)
    return found


async def test_all_others_hear_an_announcement_once_and_in_order(three) -> None:
    (sender, announcing), (_, second), (_, third) = three
    sent = [sealed(sender, number) for number in range(1, 4)]
    for each in sent:
        await announcing.announce(each)
    for transport in (second, third):
        announced = await heard(transport, 3)
        assert sorted(announced.manifests) == sorted(sent)
        assert (await transport.manifests(announced.cursor)).manifests == []
    assert (await announcing.manifests(0)).manifests == []


async def test_who_comes_late_hears_the_last_announcements(three, join: Join) -> None:
    sender, announcing = three[1]
    await announcing.announce(sealed(sender))
    late = await join(Identity.generate())
    assert (await heard(late, 1)).manifests == [await last(three[0][1])]


async def last(transport: Transport) -> bytes:
    return (await heard(transport, 1)).manifests[-1]


@pytest.mark.parametrize("size", [1, 25_000, 1_000_000])
async def test_content_comes_whole(three, size: int) -> None:
    (_, asking), (owner, serving), _ = three
    content = os.urandom(size)
    await serving.publish(digest_of(content), content)
    assert await asking.fetch(owner.peer, digest_of(content), size, SECONDS) == content


async def test_what_is_not_there_too_large_or_nobody_s_fails_in_time(three) -> None:
    (_, asking), (owner, serving), _ = three
    content = b"x" * 1000
    await serving.publish(digest_of(content), content)
    too_large = asking.fetch(owner.peer, digest_of(content), 999, SECONDS)
    absent = {FetchProblem.ABSENT, FetchProblem.DEADLINE}
    async with asyncio.timeout(10 * SECONDS):  # each ends by itself
        assert await fails(too_large) is FetchProblem.TOO_LARGE
        assert await fails(asking.fetch(owner.peer, "0" * 64, 10, 0.3)) in absent
        assert await fails(asking.fetch("f" * 64, digest_of(content), 1000, 0.3)) in absent
        assert await fails(asking.fetch("../../etc", "passwd", 1000, 0.3)) in absent


async def test_content_that_is_not_what_was_asked_for_is_never_returned(three) -> None:
    (_, asking), (owner, serving), _ = three
    await serving.publish("0" * 64, b"something else")
    assert await fails(asking.fetch(owner.peer, "0" * 64, 100, SECONDS)) is FetchProblem.WRONG_DIGEST


async def test_many_fetches_at_the_same_time(three) -> None:
    (_, asking), (owner, serving), _ = three
    contents = [os.urandom(25_000) for _ in range(16)]
    for each in contents:
        await serving.publish(digest_of(each), each)
    calls = (asking.fetch(owner.peer, digest_of(each), 25_000, SECONDS) for each in contents)
    assert await asyncio.gather(*calls) == contents


async def test_a_manifest_that_is_too_large_is_not_announced(three) -> None:
    with pytest.raises(RollwrightError, match="too large to announce"):
        await three[0][1].announce(b"x" * (MAX_MANIFEST_BYTES + 1))


async def test_junk_between_manifests_hurts_nobody(three) -> None:
    (sender, announcing), (_, second), _ = three
    await announcing.announce(b"\xff" * 100)
    await announcing.announce(sealed(sender))
    assert len((await heard(second, 2)).manifests) == 2


async def test_who_leaves_is_missed_and_the_others_go_on(three) -> None:
    (_, asking), (owner, serving), (left, leaving) = three
    await leaving.close()
    await asking.manifests(0)
    await until(lambda: [each.id for each in asking.peers() if each.alive] == [owner.peer])
    assert left.peer in {each.id for each in asking.peers()}
    await serving.publish(digest_of(b"x"), b"x")
    assert await asking.fetch(owner.peer, digest_of(b"x"), 1, SECONDS) == b"x"


async def test_a_group_goes_from_node_to_node(join: Join, node) -> None:
    pair = []
    for _ in range(2):
        identity = Identity.generate()
        joined = await join(identity)
        pair.append(node(identity=identity, transport_of=lambda _, joined=joined: joined))
    sender, receiver = pair
    digest = await sender.share(1, 0)
    async with asyncio.timeout(SECONDS):
        while not (taken := await receiver.gather(1, 4)):
            await asyncio.sleep(0.02)
    assert [(each.peer, each.digest) for each in taken] == [(sender.peer, digest)]
    assert receiver.exchange.rounds() == {sender.peer: 1}


async def test_a_beat_that_does_not_change_is_no_life_whatever_the_clocks_say(tmp_path: Path) -> None:
    now = 0.0
    silent, watching = Identity.generate(), Identity.generate()
    DirectoryTransport(tmp_path, "s", silent.peer)._beat()
    reading = DirectoryTransport(tmp_path, "s", watching.peer, clock=lambda: now)
    await reading.manifests(0)
    assert [each.alive for each in reading.peers()] == [True]
    now = ALIVE_SECONDS + 1
    await reading.manifests(0)
    assert [each.alive for each in reading.peers()] == [False]


async def test_swarms_in_one_place_do_not_meet(tmp_path: Path) -> None:
    one, other = Identity.generate(), Identity.generate()
    first = DirectoryTransport(tmp_path, "first", one.peer)
    second = DirectoryTransport(tmp_path, "../second", other.peer)
    await first.announce(sealed(one))
    assert (await second.manifests(0)).manifests == []
    assert second.peers() == []
    assert first._home.parent == second._home.parent == tmp_path


async def test_partial_files_links_and_pipes_in_the_folder_are_not_read(tmp_path: Path) -> None:
    sender, receiver = Identity.generate(), Identity.generate()
    writing = DirectoryTransport(tmp_path, "s", sender.peer)
    reading = DirectoryTransport(tmp_path, "s", receiver.peer)
    folder = writing._home / "manifests" / sender.peer
    (folder / f".{'0' * 64}.1.partial").write_bytes(sealed(sender, 1))
    (folder / f"{'0' * 64}.conflict").write_bytes(sealed(sender, 2))
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (folder / ("1" * 64)).symlink_to(secret)
    os.mkfifo(folder / ("2" * 64))
    (folder / ("3" * 64)).mkdir()
    (writing._home / "content" / sender.peer / digest_of(b"secret")).symlink_to(secret)
    assert (await reading.manifests(0)).manifests == []
    problem = await fails(reading.fetch(sender.peer, digest_of(b"secret"), 10, 0.1))
    assert problem is FetchProblem.DEADLINE
    await writing.announce(sealed(sender, 3))
    assert len((await reading.manifests(0)).manifests) == 1


async def test_a_folder_does_not_grow_for_ever(tmp_path: Path) -> None:
    sender = Identity.generate()
    writing = DirectoryTransport(tmp_path, "s", sender.peer, held_bytes=10_000)
    for number in range(1, MAX_PER_PEER + 20):
        await writing.announce(sealed(sender, number))
        content = os.urandom(1000)
        await writing.publish(digest_of(content), content)
    assert len(list((writing._home / "manifests" / sender.peer).iterdir())) == MAX_PER_PEER
    assert (
        sum(each.stat().st_size for each in (writing._home / "content").rglob("*") if each.is_file())
        <= 10_000
    )


def test_content_that_is_synced_after_its_manifest_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        sender, receiver = Identity.generate(), Identity.generate()
        writing = DirectoryTransport(tmp_path, "s", sender.peer)
        reading = DirectoryTransport(tmp_path, "s", receiver.peer)
        fetching = asyncio.create_task(reading.fetch(sender.peer, digest_of(b"late"), 10, SECONDS))
        await asyncio.sleep(SECONDS / 2)  # in virtual time
        assert not fetching.done()
        await writing.publish(digest_of(b"late"), b"late")
        assert await fetching == b"late"

    run_virtual(main())


async def test_a_folder_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RollwrightError, match="cannot be used"):
        DirectoryTransport(tmp_path / "file", "s", "0" * 64)


async def test_zenoh_says_what_is_wrong_with_an_address() -> None:
    with pytest.raises(ConfigError, match="listen/endpoints"):
        await ZenohTransport.open("s", "0" * 64, listen=["nowhere"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RollwrightError, match="Address already in use"):
            await ZenohTransport.open("s", "0" * 64, listen=[f"tcp/127.0.0.1:{taken.getsockname()[1]}"])


async def test_a_node_starts_alone_and_joins_when_the_bootstrap_appears() -> None:
    port = free_port()
    early, late = Identity.generate(), Identity.generate()
    alone = await ZenohTransport.open("s", early.peer, bootstrap=[f"tcp/127.0.0.1:{port}"])
    await alone.announce(sealed(early))
    assert alone.peers() == []
    bootstrap = await ZenohTransport.open("s", late.peer, listen=[f"tcp/127.0.0.1:{port}"])
    try:
        await until(lambda: [each.id for each in alone.peers() if each.alive] == [late.peer])
        assert len((await heard(bootstrap, 1)).manifests) == 1
    finally:
        await alone.close()
        await bootstrap.close()


async def test_a_closed_transport_says_so() -> None:
    closed = await ZenohTransport.open("s", "0" * 64)
    await closed.close()
    await closed.close()
    assert await fails(closed.fetch("1" * 64, "2" * 64, 1, 1.0)) is FetchProblem.CLOSED
    with pytest.raises(RollwrightError, match="closed"):
        await closed.announce(sealed(Identity.generate()))


BOOTSTRAP = """
import asyncio, sys
from rollwright.swarm.transports.base import digest_of
from rollwright.swarm.transports.zenoh import ZenohTransport
async def main():
    transport = await ZenohTransport.open("s", "0" * 64, listen=[sys.argv[1]])
    await transport.publish(digest_of(b"content"), b"content")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def bootstrap_process(address: str):
    process = subprocess.Popen([sys.executable, "-c", BOOTSTRAP, address], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_the_mesh_survives_the_death_of_the_bootstrap() -> None:
    address = f"tcp/127.0.0.1:{free_port()}"
    identities = [Identity.generate() for _ in range(3)]
    with bootstrap_process(address) as process:
        nodes = [await ZenohTransport.open("s", each.peer, bootstrap=[address]) for each in identities]
        try:
            for node in nodes:
                await until(lambda node=node: sum(each.alive for each in node.peers()) == 3)
            os.kill(process.pid, signal.SIGKILL)
            for node in nodes:
                await until(lambda node=node: sum(each.alive for each in node.peers()) == 2)
            content = os.urandom(25_000)
            await nodes[1].publish(digest_of(content), content)
            await nodes[1].announce(sealed(identities[1]))
            for node in (nodes[0], nodes[2]):
                assert len((await heard(node, 1)).manifests) == 1
                fetched = await node.fetch(identities[1].peer, digest_of(content), 25_000, SECONDS)
                assert fetched == content
        finally:
            for node in nodes:
                await node.close()


async def test_a_peer_that_hangs_holds_nobody_up() -> None:
    address = f"tcp/127.0.0.1:{free_port()}"
    one, other = Identity.generate(), Identity.generate()
    with bootstrap_process(address) as process:
        asking = await ZenohTransport.open("s", one.peer, bootstrap=[address])
        third = await ZenohTransport.open("s", other.peer, bootstrap=[address])
        try:
            for node in (asking, third):
                await until(lambda node=node: sum(each.alive for each in node.peers()) == 2)
            assert await asking.fetch("0" * 64, digest_of(b"content"), 10, SECONDS) == b"content"
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.to_thread(
                os.waitid, os.P_PID, process.pid, os.WSTOPPED
            )  # until then it may still answer
            problem = await fails(asking.fetch("0" * 64, digest_of(b"content"), 10, 0.3))
            assert problem in {FetchProblem.DEADLINE, FetchProblem.ABSENT}
            number = 0
            async with asyncio.timeout(SECONDS):  # on a busy machine a link may drop some
                while len((await asking.manifests()).manifests) < 50:
                    await third.announce(sealed(other, number := number + 1))
                    await asyncio.sleep(0 if number < 50 else 0.02)
            assert process.poll() is None
        finally:
            await asking.close()
            await third.close()


def test_who_floods_pushes_out_its_own_alone() -> None:
    inbox = Inbox("own")
    quiet, loud = Identity.generate(), Identity.generate()
    inbox.add(sealed(quiet))
    for number in range(1, 3 * MAX_PER_PEER):
        inbox.add(sealed(loud, number))
        inbox.add(f"junk {number}".encode())
    announced = inbox.read(0)
    assert len(announced.manifests) == 1 + 2 * MAX_PER_PEER
    assert announced.missed == 2 * MAX_PER_PEER - 1
    assert announced.passed_over == {PassedOver.UNSIGNED: 2 * MAX_PER_PEER - 1}
    assert inbox.read(announced.cursor) == Announced([], announced.cursor, 0)


def test_the_number_of_peers_with_unread_manifests_is_bounded() -> None:
    inbox = Inbox("own", max_peers=5)
    for _ in range(20):
        inbox.add(sealed(Identity.generate()))
    announced = inbox.read(0)
    assert len(announced.manifests) == 5
    assert announced.missed == 15
    inbox.read(announced.cursor)
    inbox.add(sealed(Identity.generate()))
    assert len(inbox.read(announced.cursor).manifests) == 1


def test_held_content_is_bounded_and_the_oldest_goes() -> None:
    third = MAX_CONTENT_BYTES // 3
    held = Held(limit=0)  # at least one content of the largest size has room
    for number in range(5):
        held.add(f"d{number}", bytes(third))
        held.add(f"d{number}", bytes(third))
    assert [held.get(f"d{number}") is not None for number in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("listen", "bootstrap", "expected"),
    [
        ([], [], "tcp/127.0.0.1:0"),
        ([], ["tcp/127.0.0.1:7447"], "tcp/127.0.0.1:0"),
        ([], ["tcp/localhost:7447", "tcp/[::1]:7447"], "tcp/127.0.0.1:0"),
        ([], ["tcp/127.0.0.1:7447", "tcp/192.0.2.7:7447"], "tcp/0.0.0.0:0"),
        ([], ["tcp/node.example:7447"], "tcp/0.0.0.0:0"),
        ([], ["tcp/[2001:db8::7]:7447"], "tcp/[::]:0"),
        ([], ["tls/node.example:7447"], "tcp/127.0.0.1:0"),
        (["tcp/192.0.2.1:7447"], ["tcp/192.0.2.7:7447"], "tcp/192.0.2.1:7447"),
    ],
)
def test_a_node_is_reachable_from_other_machines_once_it_knows_one(
    listen: list[str], bootstrap: list[str], expected: str
) -> None:
    assert listening(listen, bootstrap) == [expected]
