"""A transport over a folder that all nodes see: mounted, synced, or on one machine.

Invariants:
- Files are renamed into place when complete, so a partial copy is never read. Every file has one writer, so two nodes
  cannot disagree about one. Everything else in the folder may be hostile, see `shared_folder`.
- A node removes only its own files: those of this process, and those of earlier processes that prove it by their content.
- The cost of a scan is bounded: peers that have signed are read by name, strangers within a time limit, and the next scan
  continues there.
- A peer is alive if its beat changes, by this node's clock alone, so clocks need not agree.

Layout, below a folder named after the swarm: `manifests/PEER/NAME`, `content/PEER/DIGEST`, `beats/PEER`.
"""

import asyncio
import contextlib
import errno
import logging
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rollwright.errors import RollwrightError
from rollwright.swarm.content import head_of
from rollwright.swarm.refusals import PeerRefused
from rollwright.swarm.settings import SwarmConfig
from rollwright.swarm.signed import open_signed
from rollwright.swarm.transports.base import (
    CALL_SECONDS,
    MAX_CONTENT_BYTES,
    MAX_MANIFEST_BYTES,
    Announced,
    FetchFailed,
    FetchProblem,
    PassedOver,
    Peer,
    check_content,
    check_manifest,
    digest_of,
)
from rollwright.swarm.transports.inbox import HELD_BYTES, MAX_PER_PEER, Inbox
from rollwright.swarm.transports.peer_table import PeerTable, Rank
from rollwright.swarm.transports.shared_folder import PARTIAL, SharedFolder, UnacceptableFile

ALIVE_SECONDS = 60.0
"""A synced folder may delay a beat for this long."""

BEAT_SECONDS = 5.0
"""Interval of an active node's beats."""

STRANGER_SECONDS = 1.0
"""Time limit of a scan for strangers: some ten thousand folders."""

KNOWN_SHARE = 0.4
"""Share of a scan's time for peers that have signed: a thousand of them take some tenths of a second unless they crowd
their folders."""

LISTED = 4096
"""Entries listed of one peer's folder; an honest one has `MAX_PER_PEER`."""

OWN_LISTED = 100_000
"""Entries of an own folder that are searched for files of earlier processes."""

_READ_AT_ONCE = 2 * MAX_PER_PEER
"""Files of one peer read in one scan."""

_REMEMBERED = 4 * MAX_PER_PEER
"""Names in one peer's folder that are remembered as read."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_OLD_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.[0-9]+\.partial\Z")
"""Partial files of release 0.1.0."""

_OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of this machine, which say nothing about a peer."""

_MAX_BEAT_BYTES = 32
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts to read a file that is not there yet."""

_MANIFESTS, _CONTENT, _BEATS = "manifests", "content", "beats"

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class OwnFiles:
    """The files in one own folder that this node wrote, the oldest first, with their sizes."""

    def __init__(self, count: int, total: int, is_own: Callable[[SharedFolder, str], bool]) -> None:
        """Keeps at most `count` files of `total` bytes. `is_own`: whether a file's content proves that this node wrote it."""
        self._count = count
        self._total = total
        self._is_own = is_own
        self._sizes: OrderedDict[str, int] | None = None
        """`None` until the files of earlier processes are collected."""
        self._bytes = 0

    def add(self, folder: SharedFolder, user: int, name: str, size: int) -> None:
        """Account for a new file, and remove the oldest beyond the limits."""
        if self._sizes is None:
            self._sizes = self._of_earlier_processes(folder, user)
            self._bytes = sum(self._sizes.values())
        self._bytes += size - self._sizes.pop(name, 0)
        self._sizes[name] = size
        while len(self._sizes) > self._count or self._bytes > self._total:
            oldest, freed = self._sizes.popitem(last=False)
            self._bytes -= freed
            folder.remove(oldest, user)

    def _of_earlier_processes(self, folder: SharedFolder, user: int) -> OrderedDict[str, int]:
        found: list[tuple[int, str, int]] = []
        for name in islice(folder.entries(), OWN_LISTED):
            if PARTIAL.match(name) or _OLD_PARTIAL.match(name):
                folder.remove(name, user)
            elif (
                _HEX.match(name)
                and (known := folder.stat_own(name, user)) is not None
                and self._is_own(folder, name)
            ):
                found.append((known.st_mtime_ns, name, known.st_size))
        return OrderedDict((name, size) for _, name, size in sorted(found))


class DirectoryTransport:
    def __init__(
        self,
        folder: Path,
        swarm: str,
        peer: str,
        *,
        held_bytes: int = HELD_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = folder
        self._home = folder / f"swarm-{sha256(swarm.encode()).hexdigest()[:16]}"
        self._peer = peer
        self._clock = clock
        self._inbox = Inbox(peer)
        self._known: dict[str, set[str]] = {}
        """Manifests of each peer's folder that were read."""
        self._peers = PeerTable(peer)
        self._beats: dict[str, tuple[bytes, float]] = {}
        """Each peer's last beat, and the time when it changed."""
        self._own_beat = -BEAT_SECONDS
        self._own_manifests = OwnFiles(
            MAX_PER_PEER,
            MAX_PER_PEER * MAX_MANIFEST_BYTES,
            lambda place, name: _signed_by(place, name) == peer,
        )
        self._own_content = OwnFiles(
            held_bytes // 1024, held_bytes, lambda place, name: _begins(place, name, head_of(peer))
        )
        self._writing = threading.Lock()
        self._scanning = threading.Lock()
        self._sweep: Iterator[str] | None = None
        """Names in the manifest folder, from where the last scan stopped."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._own(_MANIFESTS) as own:
                self._user = own.user()
            for kind in (_MANIFESTS, _CONTENT):
                with self._own(kind) as own:
                    self._check_own(own, kind)
            with self._shared(_BEATS, make=True):
                pass
        except OSError as error:
            raise RollwrightError(f"{folder}: cannot be used to share rollouts: {error.strerror}") from error
        except UnacceptableFile as error:
            raise RollwrightError(f"{self._home}: cannot be used to share rollouts: {error}") from error

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        await self._within(deadline, self._announce, check_manifest(manifest))

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        await self._within(deadline, self._collect, deadline)
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        await self._within(CALL_SECONDS, self._publish, digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        """Wait for the file, because a synced folder may deliver the manifest first."""
        if not _HEX.match(peer) or not _HEX.match(digest):
            raise FetchFailed(FetchProblem.ABSENT, digest)
        pause = _FIRST_PAUSE
        limit = min(max_bytes, MAX_CONTENT_BYTES) + 1
        try:
            async with asyncio.timeout(deadline):
                while (content := await asyncio.to_thread(self._content, peer, digest, limit)) is None:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError as error:
            raise FetchFailed(FetchProblem.DEADLINE, digest) from error
        return check_content(content, digest, max_bytes)

    def peers(self) -> Sequence[Peer]:
        now = self._clock()
        return [
            each._replace(alive=each.alive and now - each.seen <= ALIVE_SECONDS) for each in self._peers.all()
        ]

    def prefer(self, peer: str) -> None:
        self._peers.raise_to(Rank.PROVEN, peer, seen=self._clock())
        self._inbox.prefer(peer)

    async def close(self) -> None:
        with contextlib.suppress(OSError, UnacceptableFile), self._shared(_BEATS) as beats:
            beats.remove(self._peer, self._user)

    async def _within(self, deadline: float, work: Callable[..., _Result], *arguments: object) -> _Result:
        """Run blocking work in a thread: a hanging mount blocks that thread, never the node."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(work, *arguments), deadline)
        except TimeoutError as error:
            raise RollwrightError(f"{self._home}: no answer from the folder in {deadline:g} s") from error
        except OSError as error:
            raise RollwrightError(f"{self._home}: {error.strerror or error}") from error
        except UnacceptableFile as error:
            raise RollwrightError(f"{self._home}: {error}") from error

    @contextlib.contextmanager
    def _shared(self, *names: str, make: bool = False) -> Iterator[SharedFolder]:
        """Open a folder below the swarm's, component by component."""
        with contextlib.ExitStack() as opened:
            place = opened.enter_context(SharedFolder.root(self._root))
            for name in (self._home.name, *names):
                step = place.make_folder(name, shared=True) if make else place.folder(name)
                place = opened.enter_context(step)
            yield place

    @contextlib.contextmanager
    def _own(self, kind: str) -> Iterator[SharedFolder]:
        with self._shared(kind, make=True) as place, place.make_folder(self._peer, shared=False) as own:
            yield own

    def _check_own(self, own: SharedFolder, kind: str) -> None:
        if own.owner != self._user:
            raise UnacceptableFile(
                f"{kind}/{self._peer} belongs to another user (number {own.owner}, this node's is {self._user}); "
                "remove it, or share through another folder"
            )

    def _announce(self, manifest: bytes) -> None:
        name = digest_of(manifest)
        with self._writing, self._own(_MANIFESTS) as own:
            self._check_own(own, _MANIFESTS)
            own.write(name, manifest)
            self._own_manifests.add(own, self._user, name, len(manifest))
        self._beat()

    def _publish(self, digest: str, content: bytes) -> None:
        if not _HEX.match(digest):
            raise UnacceptableFile(f"{digest[:80]!r}: not a digest")
        with self._writing, self._own(_CONTENT) as own:
            self._check_own(own, _CONTENT)
            own.write(digest, content)
            self._own_content.add(own, self._user, digest, len(content))

    def _content(self, peer: str, digest: str, limit: int) -> bytes | None:
        """`None` if it is missing or unacceptable."""
        try:
            with self._shared(_CONTENT, peer) as place:
                return place.read(digest, limit)
        except UnacceptableFile:
            self._inbox.pass_over(PassedOver.UNACCEPTABLE_FILE)
            return None
        except OSError:
            return None

    def _beat(self) -> None:
        """Write this node's beat. If another user has taken the name, the node only looks dead."""
        now = time.monotonic()
        if now - self._own_beat < BEAT_SECONDS:
            return
        self._own_beat = now
        try:
            with self._own(_MANIFESTS) as own, self._shared(_BEATS, make=True) as beats:
                self._check_own(own, _MANIFESTS)
                own.write(self._peer, f"{time.time_ns()}".encode(), into=beats)
        except (OSError, UnacceptableFile) as error:
            self._inbox.pass_over(PassedOver.UNACCEPTABLE_FILE)
            _log.warning("%s: this node's beat cannot be written: %s", self._home / _BEATS, error)

    def _collect(self, seconds: float) -> None:
        self._beat()
        if not self._scanning.acquire(blocking=False):
            return  # an earlier scan still waits for the folder
        try:
            with self._shared(_MANIFESTS) as manifests, self._shared(_BEATS) as beats:
                known = self._scan_known(manifests, beats, time.monotonic() + KNOWN_SHARE * seconds)
                self._scan_strangers(manifests, beats, known)
        finally:
            self._scanning.release()
        for peer in self._beats.keys() - self._known.keys():
            del self._beats[peer]

    def _scan_known(self, manifests: SharedFolder, beats: SharedFolder, until: float) -> set[str]:
        """Read peers that have signed, by name; in random order, in case time runs out."""
        proven, signed = self._peers.of(Rank.PROVEN), self._peers.of(Rank.SIGNED)
        random.shuffle(proven)
        random.shuffle(signed)
        for place, peer in enumerate((*proven, *signed)):
            if time.monotonic() > until:
                self._inbox.pass_over(PassedOver.NOT_LISTED, len(proven) + len(signed) - place)
                break
            self._scan_peer(manifests, beats, peer)
        return {*proven, *signed}

    def _scan_strangers(self, manifests: SharedFolder, beats: SharedFolder, known: set[str]) -> None:
        """Go through the names once at most; the next scan continues where the time ran out."""
        until = time.monotonic() + STRANGER_SECONDS
        if self._sweep is None:
            self._sweep = manifests.entries()
        for name in self._sweep:
            if _HEX.match(name) and name != self._peer and name not in known:
                self._scan_peer(manifests, beats, name)
            if time.monotonic() > until:
                self._inbox.pass_over(PassedOver.NOT_LISTED)
                break
        else:
            self._sweep = None
        for peer in self._known.keys() - {each.id for each in self._peers.all()}:
            del self._known[peer]  # the table had no room for it

    def _scan_peer(self, manifests: SharedFolder, beats: SharedFolder, peer: str) -> None:
        """Read new manifests and the beat of one peer."""
        try:
            with manifests.folder(peer) as place:
                self._read_manifests(place, peer)
                self._read_beat(beats, peer, place.owner)
        except UnacceptableFile:
            self._inbox.pass_over(PassedOver.UNACCEPTABLE_FILE)
        except OSError as error:
            if error.errno in _OWN_TROUBLE:
                raise
            self._note_gone(peer)  # its folder is gone, or closed to this user

    def _read_manifests(self, place: SharedFolder, peer: str) -> None:
        names = place.entries()
        there = {each for each in islice(names, LISTED) if _HEX.match(each)}
        if next(names, None) is not None:
            self._inbox.pass_over(PassedOver.NOT_LISTED)
        known = self._known.get(peer, set()) & there
        new = sorted(there - known)
        for name in random.sample(new, min(len(new), _READ_AT_ONCE)):
            try:
                manifest = place.read(name, MAX_MANIFEST_BYTES)
            except UnacceptableFile:
                self._inbox.pass_over(PassedOver.UNACCEPTABLE_FILE)
                continue
            if manifest is None:
                continue
            known.add(name)
            if self._inbox.add(manifest) == peer:
                self._peers.raise_to(Rank.SIGNED, peer, seen=self._clock())
        self._known[peer] = (
            known if len(known) <= _REMEMBERED else set(random.sample(sorted(known), _REMEMBERED))
        )

    def _read_beat(self, beats: SharedFolder, peer: str, owner: int) -> None:
        beat = beats.read(peer, _MAX_BEAT_BYTES, owner=owner)
        if beat is None:
            self._note_gone(peer)
            return
        last, seen = self._beats.get(peer, (b"", 0.0))
        if last != beat:
            seen = self._clock()
            self._beats[peer] = (beat, seen)
        self._peers.note(peer, alive=True, seen=seen)

    def _note_gone(self, peer: str) -> None:
        """Mark a peer that was alive as gone."""
        if peer in self._beats:
            self._peers.note(peer, alive=False, seen=self._beats[peer][1])


def _signed_by(place: SharedFolder, name: str) -> str | None:
    try:
        return open_signed(place.read(name, MAX_MANIFEST_BYTES) or b"").peer
    except (UnacceptableFile, PeerRefused):
        return None


def _begins(place: SharedFolder, name: str, head: bytes) -> bool:
    try:
        return place.read(name, len(head)) == head
    except UnacceptableFile:
        return False


def open_directory(
    swarm: SwarmConfig, peer: str, *, clock: Callable[[], float] = time.time
) -> DirectoryTransport:
    """Open the transport through the folder that the settings name."""
    folder = swarm.communication.folder
    assert folder is not None, "checked by the settings"
    return DirectoryTransport(Path(folder), swarm.name, peer, clock=clock)
