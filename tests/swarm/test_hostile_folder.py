"""A shared folder in which somebody hostile may do whatever the file system lets it."""

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollwright.errors import RollwrightError
from rollwright.swarm.content import Recipe, SharedAction, SharedGroup, SharedMember, encode
from rollwright.swarm.identity import Identity
from rollwright.swarm.signed import Manifest, sign_manifest
from rollwright.swarm.transports import directory
from rollwright.swarm.transports.base import FetchFailed, FetchProblem, PassedOver, digest_of
from rollwright.swarm.transports.directory import DirectoryTransport
from rollwright.swarm.transports.inbox import MAX_PER_PEER
from rollwright.trajectory import FinishReason

SECONDS = 20.0
"""For something to happen on a busy machine."""

NOBODY = 65_534


def sealed(identity: Identity, number: int = 1) -> bytes:
    manifest = Manifest(
        "s", identity.peer, 1, number, time.time(), "e", "v", number, "ab" * 32, 1, (0.0, 1.0)
    )
    return sign_manifest(manifest, identity)


def own_group(peer: str, index: int) -> bytes:
    members = tuple(
        SharedMember((SharedAction(secrets.token_hex(600), b"", FinishReason.STOP),), float(each))
        for each in range(2)
    )
    return encode(SharedGroup(1, peer, Recipe("e", "v", 1, index, "0" * 64), "bytes", members))


def contents(folder: Path) -> dict[str, str]:
    """Everything below a folder, with what is in it; links are not followed."""
    return {
        str(each.relative_to(folder)): (
            f"-> {os.readlink(each)}"
            if each.is_symlink()
            else hashlib.sha256(each.read_bytes()).hexdigest()
            if each.is_file()
            else "folder"
        )
        for each in folder.rglob("*")
    }


async def use(victim: DirectoryTransport, identity: Identity, start: int, count: int = 3) -> None:
    """All that a node does, whether it works or not."""
    for number in range(start, start + count):
        with contextlib.suppress(RollwrightError):
            await victim.announce(sealed(identity, number))
        content = own_group(identity.peer, number)
        with contextlib.suppress(RollwrightError):
            await victim.publish(digest_of(content), content)
        with contextlib.suppress(RollwrightError):
            await victim.manifests(0)
        with contextlib.suppress(FetchFailed):
            await victim.fetch(identity.peer, digest_of(content), len(content), 0.01)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What nobody may touch: files of any name, those that a node could have written among them."""
    place = tmp_path / "outside"
    place.mkdir()
    for number in range(200):
        data = f"precious {number}".encode()
        (place / digest_of(data)).write_bytes(data)
        os.utime(place / digest_of(data), (0, 0))  # old: the first that pruning would take
    (place / "thesis.txt").write_text("precious")
    return place


PLACES = ("manifests/PEER", "content/PEER", "beats/PEER", "manifests", "content", "beats", ".")


@pytest.mark.parametrize("place", PLACES)
async def test_a_link_in_place_of_any_part_of_the_path_leads_nowhere(
    tmp_path: Path, outside: Path, place: str
) -> None:
    identity = Identity.generate()
    victim = DirectoryTransport(tmp_path / "shared", "s", identity.peer, held_bytes=5000)
    await use(victim, identity, 1)
    swapped = victim._home / place.replace("PEER", identity.peer)
    for each in (victim._home / "manifests" / identity.peer).iterdir():
        shutil.copy(each, outside)  # what the node itself wrote is no less precious there
    for kind in ("manifests", "content", "beats"):
        if place in (".", kind):
            (outside / kind).mkdir(exist_ok=True)
            (outside / identity.peer).mkdir(exist_ok=True)
            (outside / identity.peer / "x").write_text("precious")
            (outside / kind / identity.peer).mkdir(exist_ok=True)
            (outside / kind / identity.peer / ("0" * 64)).write_text("precious")
    before = contents(outside)
    os.rename(swapped, tmp_path / "aside")
    swapped.symlink_to(outside)
    await use(victim, identity, 10, count=2 * MAX_PER_PEER)
    await victim.close()
    assert contents(outside) == before
    with contextlib.suppress(RollwrightError):  # the same for a node that starts now
        again = DirectoryTransport(tmp_path / "shared", "s", identity.peer, held_bytes=5000)
        await use(again, identity, 1000)
        await again.close()
    assert contents(outside) == before


async def test_a_link_under_any_name_of_a_file_under_way_is_not_written_through(
    tmp_path: Path, outside: Path
) -> None:
    identity = Identity.generate()
    victim = DirectoryTransport(tmp_path, "s", identity.peer)
    before = contents(outside)
    manifests = [sealed(identity, number) for number in range(1, 4)]
    for manifest in manifests:
        name = digest_of(manifest)
        for partial in (f".{name}.{os.getpid()}.partial", f".{name}.partial", name):
            (victim._home / "manifests" / identity.peer / partial).symlink_to(outside / "thesis.txt")
    beats = victim._home / "beats"
    (beats / f".{identity.peer}.{os.getpid()}.partial").symlink_to(outside / "thesis.txt")
    (beats / identity.peer).symlink_to(outside / "thesis.txt")
    for manifest in manifests:
        await victim.announce(manifest)
    assert contents(outside) == before
    assert not (victim._home / "manifests" / identity.peer / digest_of(manifests[0])).is_symlink()
    await victim.close()
    assert contents(outside) == before


class Attacker(threading.Thread):
    """Swaps a folder for a link and back as fast as it can, and puts links in place of every file it sees."""

    def __init__(self, folder: Path, outside: Path, aside: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._outside, self._aside = folder, outside, aside
        self._over = threading.Event()
        self.swaps = 0

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):
                os.rename(self._folder, self._aside)
                os.symlink(self._outside, self._folder)
                self.swaps += 1
            with contextlib.suppress(OSError):
                for each in os.listdir(self._aside)[:3]:
                    os.unlink(self._aside / each)
                    os.symlink(self._outside / "thesis.txt", self._aside / each)
            with contextlib.suppress(OSError):
                os.unlink(self._folder)
            with contextlib.suppress(OSError):
                shutil.rmtree(self._folder)  # the victim made a new one meanwhile
            with contextlib.suppress(OSError):
                os.rename(self._aside, self._folder)

    def stop(self) -> None:
        self._over.set()
        self.join(SECONDS)


@pytest.mark.parametrize("place", ["manifests/PEER", "content/PEER", "manifests"])
async def test_whoever_swaps_folders_while_they_are_used_gains_nothing(
    tmp_path: Path, outside: Path, place: str
) -> None:
    identity = Identity.generate()
    victim = DirectoryTransport(tmp_path / "shared", "s", identity.peer, held_bytes=5000)
    await use(victim, identity, 1, count=20)
    for each in (victim._home / "manifests" / identity.peer).iterdir():
        shutil.copy(each, outside)  # names that the node would remove in its own folder
    if place == "manifests":
        shutil.copytree(victim._home / "manifests" / identity.peer, outside / identity.peer)
    before = contents(outside)
    attacker = Attacker(
        victim._home / place.replace("PEER", identity.peer), outside, tmp_path / "shared" / "aside"
    )
    attacker.start()
    try:
        for start in range(100, 4000, 100):
            await use(victim, identity, start, count=20)
            if attacker.swaps > 500 and start > 1000:
                break
    finally:
        attacker.stop()
    assert attacker.swaps
    assert contents(outside) == before


async def test_nothing_but_plain_files_of_their_owner_is_read_and_the_honest_are_heard(
    tmp_path: Path, outside: Path
) -> None:
    hostile, honest, receiver = (Identity.generate() for _ in range(3))
    writing = DirectoryTransport(tmp_path / "shared", "s", honest.peer)
    reading = DirectoryTransport(tmp_path / "shared", "s", receiver.peer)
    evil = DirectoryTransport(tmp_path / "shared", "s", hostile.peer)
    for kind in ("manifests", "content"):
        folder = evil._home / kind / hostile.peer
        (folder / ("1" * 64)).symlink_to(outside / "thesis.txt")
        os.mkfifo(folder / ("2" * 64))
        (folder / ("3" * 64)).mkdir()
        os.link(outside / "thesis.txt", folder / ("4" * 64))
        with socket.socket(socket.AF_UNIX) as there:
            held = os.getcwd()
            os.chdir(folder)  # the whole path is too long for a socket
            try:
                there.bind("5" * 64)
            finally:
                os.chdir(held)
        with (folder / ("6" * 64)).open("wb") as sparse:
            sparse.truncate(1 << 40)
    (evil._home / "manifests" / ("f" * 64)).symlink_to(outside)
    os.mkfifo(evil._home / "manifests" / ("e" * 64))
    os.mkfifo(evil._home / "beats" / hostile.peer)
    content = own_group(honest.peer, 1)
    await writing.publish(digest_of(content), content)
    await writing.announce(sealed(honest))
    async with asyncio.timeout(SECONDS):
        announced = await reading.manifests(0)
        assert sealed_by(honest, announced.manifests) == 1
        assert announced.passed_over[PassedOver.UNACCEPTABLE_FILE] >= 5
        for name in "12345":
            with pytest.raises(FetchFailed):
                await reading.fetch(hostile.peer, name * 64, 100, 0.05)
        with pytest.raises(FetchFailed) as failed:
            await reading.fetch(hostile.peer, "6" * 64, 100, 0.05)
        assert failed.value.problem is FetchProblem.TOO_LARGE
        assert await reading.fetch(honest.peer, digest_of(content), len(content), SECONDS) == content


def sealed_by(identity: Identity, manifests: object) -> int:
    assert isinstance(manifests, list)
    return sum(identity.peer.encode() in each for each in manifests)


async def test_a_crowd_of_names_hides_nobody_and_holds_nobody_up(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(directory, "STRANGER_SECONDS", 0.02)
    known, late, receiver = (Identity.generate() for _ in range(3))
    first = DirectoryTransport(tmp_path, "s", known.peer)
    reading = DirectoryTransport(tmp_path, "s", receiver.peer)
    await first.announce(sealed(known, 1))
    announced = await reading.manifests(0)
    assert sealed_by(known, announced.manifests) == 1
    for number in range(4000):
        os.mkdir(first._home / "manifests" / f"{number:064x}")
        (first._home / "beats" / f"{number:064x}").write_bytes(b"1")
        (first._home / "manifests" / f"junk-{number}").write_bytes(b"")
    second = DirectoryTransport(tmp_path, "s", late.peer)
    await second.announce(sealed(late, 1))
    await first.announce(sealed(known, 2))
    announced = await reading.manifests(announced.cursor)
    assert sealed_by(known, announced.manifests) == 1, "who has signed before is looked at by name"
    found, passed_over = Counter[str](), Counter(announced.passed_over)
    async with asyncio.timeout(SECONDS):
        while not found[late.peer]:
            found[late.peer] += sealed_by(late, announced.manifests)
            announced = await reading.manifests(announced.cursor)
            passed_over.update(announced.passed_over)
    assert passed_over[PassedOver.NOT_LISTED]
    assert len(reading.peers()) < 4000
    assert {known.peer, late.peer} <= {each.id for each in reading.peers() if each.verified}


async def test_a_crowd_in_one_peer_s_folder_is_that_peer_s_alone(tmp_path: Path) -> None:
    loud, quiet, receiver = (Identity.generate() for _ in range(3))
    crowded = DirectoryTransport(tmp_path, "s", loud.peer)
    other = DirectoryTransport(tmp_path, "s", quiet.peer)
    reading = DirectoryTransport(tmp_path, "s", receiver.peer)
    for number in range(directory.LISTED + 500):
        (crowded._home / "manifests" / loud.peer / f"{number:064x}").write_bytes(b"junk")
    await other.announce(sealed(quiet))
    announced = await reading.manifests(0)
    assert sealed_by(quiet, announced.manifests) == 1
    assert len(announced.manifests) <= 1 + MAX_PER_PEER
    assert announced.passed_over[PassedOver.NOT_LISTED] == 1
    await crowded.announce(sealed(loud))
    await crowded.close()
    left = len(list((crowded._home / "manifests" / loud.peer).iterdir()))
    assert left == directory.LISTED + 501, "a node removes only what it wrote"


async def test_what_an_earlier_process_wrote_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    identity, other = Identity.generate(), Identity.generate()
    earlier = DirectoryTransport(tmp_path, "s", identity.peer)
    for number in range(1, 41):
        await earlier.announce(sealed(identity, number))
    groups = [own_group(identity.peer, number) for number in range(40)]
    for each in groups:
        await earlier.publish(digest_of(each), each)
    manifests, content = (earlier._home / kind / identity.peer for kind in ("manifests", "content"))
    (content / f".{'ab' * 16}.partial").write_bytes(b"half")
    foreign = own_group(other.peer, 1)
    kept = {
        content / digest_of(foreign): foreign,
        content / "notes.txt": b"mine",
        content / ("0" * 64): b"what",
    }
    kept |= {manifests / digest_of(sealed(other)): sealed(other)}
    for file, data in kept.items():
        file.write_bytes(data)
        os.utime(file, (0, 0))
    later = DirectoryTransport(tmp_path, "s", identity.peer, held_bytes=20 * len(groups[0]))
    for number in range(41, 41 + MAX_PER_PEER):
        await later.announce(sealed(identity, number))
    newest = own_group(identity.peer, 99)
    await later.publish(digest_of(newest), newest)
    assert len(list(manifests.iterdir())) == MAX_PER_PEER + 1
    assert not (content / f".{'ab' * 16}.partial").exists()
    assert 10 < len(list(content.iterdir())) - 3 <= 20
    assert all(file.exists() for file in kept)
    assert (content / digest_of(newest)).exists()


async def test_a_beat_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    identity, receiver = Identity.generate(), Identity.generate()
    victim = DirectoryTransport(tmp_path, "s", identity.peer)
    (victim._home / "beats" / identity.peer).mkdir()
    await victim.announce(sealed(identity))
    assert (await victim.manifests(0)).passed_over == {PassedOver.UNACCEPTABLE_FILE: 1}
    assert len((await DirectoryTransport(tmp_path, "s", receiver.peer).manifests(0)).manifests) == 1


def as_another_user(work: Callable[[], None]) -> None:
    """Runs in a process of a user that owns nothing here."""

    def run() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.umask(0o022)
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


@pytest.fixture
def meeting_place() -> Iterator[Path]:
    """A folder in which all users may write, as `/tmp` is."""
    if os.geteuid() != 0:
        pytest.skip("only root can play two users")
    place = Path(tempfile.mkdtemp(prefix="rollwright-shared-"))
    place.chmod(0o1777)
    yield place
    shutil.rmtree(place)


def test_two_users_share_a_folder_and_neither_can_pass_for_the_other(
    meeting_place: Path, request: pytest.FixtureRequest
) -> None:
    one, other, third = (Identity.generate() for _ in range(3))
    before = os.umask(0o077)
    request.addfinalizer(lambda: os.umask(before))
    mine = DirectoryTransport(meeting_place, "s", one.peer)
    content = own_group(other.peer, 1)
    junk = own_group(one.peer, 2)

    async def share() -> None:
        theirs = DirectoryTransport(meeting_place, "s", other.peer)
        await theirs.publish(digest_of(content), content)
        await theirs.announce(sealed(other))
        for kind in ("manifests", "content"):
            with pytest.raises(OSError, match=r"denied|permitted"):
                (theirs._home / kind / one.peer / ("0" * 64)).write_bytes(junk)
            with pytest.raises(OSError, match=r"denied|permitted"):
                os.rename(theirs._home / kind / one.peer, theirs._home / kind / "away")
        os.mkdir(theirs._home / "manifests" / third.peer)
        (theirs._home / "beats" / one.peer).write_bytes(b"1")

    as_another_user(lambda: asyncio.run(share()))

    async def hear() -> None:
        announced = await mine.manifests(0)
        assert sealed_by(other, announced.manifests) == 1
        assert await mine.fetch(other.peer, digest_of(content), len(content), SECONDS) == content
        with pytest.raises(RollwrightError, match="belongs to another user"):
            DirectoryTransport(meeting_place, "s", third.peer)
        await mine.announce(sealed(one))

    asyncio.run(hear())
    heard = meeting_place / "heard"

    async def listen() -> None:
        theirs = DirectoryTransport(meeting_place, "s", other.peer)
        heard.write_text(str(sealed_by(one, (await theirs.manifests(0)).manifests)))

    as_another_user(lambda: asyncio.run(listen()))
    assert heard.read_text() == "1"
