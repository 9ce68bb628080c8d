"""A swarm over a folder that all nodes see: mounted, synced, or on one machine.

True of it: a file has its name only when it is whole, so a copy that is under way is never read; every file has one
writer, so no two nodes can disagree about one; a file of a stranger is opened only if it is a plain file of bounded
size. Whether a peer is alive is told by its beat changing, by this node's clock alone, so clocks need not agree.

Layout, below a folder named after the swarm: `manifests/PEER/NAME`, `content/PEER/DIGEST`, `beats/PEER`.
"""

import asyncio
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rollwright.errors import RollwrightError
from rollwright.swarm.transport import (
    CALL_SECONDS,
    MAX_CONTENT_BYTES,
    MAX_MANIFEST_BYTES,
    Announced,
    FetchFailed,
    FetchProblem,
    Peer,
    checked_content,
    checked_manifest,
    digest_of,
)
from rollwright.swarm.transport_inbox import HELD_BYTES, MAX_PEERS, MAX_PER_PEER, Inbox

ALIVE_SECONDS = 60.0
"""A synced folder may take this long to pass a beat on."""

BEAT_SECONDS = 5.0
"""How often a node that is doing something writes its beat."""

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_MAX_BEAT_BYTES = 32
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two looks for a file that is not there yet."""

_Result = TypeVar("_Result")


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
        self._home = folder / f"swarm-{sha256(swarm.encode()).hexdigest()[:16]}"
        self._peer = peer
        self._held_bytes = held_bytes
        self._clock = clock
        self._inbox = Inbox(peer)
        self._known: dict[str, set[str]] = {}
        """For each peer, the manifests in its folder that were taken already."""
        self._beats: dict[str, tuple[bytes, float]] = {}
        """Of each peer, its last beat, and when it changed."""
        self._present: set[str] = set()
        """Peers that had not taken their beat away when it was last looked for."""
        self._own_beat = -BEAT_SECONDS
        try:
            for kind in ("manifests", "content"):
                (self._home / kind / peer).mkdir(parents=True, exist_ok=True)
            (self._home / "beats").mkdir(exist_ok=True)
        except OSError as error:
            raise RollwrightError(f"{folder}: cannot be used to share rollouts: {error.strerror}") from error

    async def announce(self, manifest: bytes, deadline: float = CALL_SECONDS) -> None:
        await self._within(deadline, self._announce, checked_manifest(manifest))

    async def manifests(self, since: int = 0, deadline: float = CALL_SECONDS) -> Announced:
        await self._within(deadline, self._collect)
        return self._inbox.read(since)

    async def publish(self, digest: str, content: bytes) -> None:
        await self._within(CALL_SECONDS, self._publish, digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = CALL_SECONDS) -> bytes:
        """Waits until the file is there, because a synced folder may pass on the manifest first."""
        if not _HEX.match(peer) or not _HEX.match(digest):
            raise FetchFailed(FetchProblem.ABSENT, digest)
        file = self._home / "content" / peer / digest
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(deadline):
                while (content := await asyncio.to_thread(_read, file, max_bytes + 1)) is None:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError as error:
            raise FetchFailed(FetchProblem.DEADLINE, digest) from error
        return checked_content(content, digest, max_bytes)

    def peers(self) -> Sequence[Peer]:
        now = self._clock()
        return [
            Peer(peer, peer in self._present and now - seen <= ALIVE_SECONDS, seen)
            for peer, (_, seen) in sorted(self._beats.items())
        ]

    async def close(self) -> None:
        (self._home / "beats" / self._peer).unlink(missing_ok=True)

    async def _within(self, deadline: float, work: Callable[..., _Result], *arguments: object) -> _Result:
        """A mount that hangs holds a thread, never the node."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(work, *arguments), deadline)
        except TimeoutError as error:
            raise RollwrightError(f"{self._home}: no answer from the folder in {deadline:g} s") from error
        except OSError as error:
            raise RollwrightError(f"{self._home}: {error.strerror or error}") from error

    def _announce(self, manifest: bytes) -> None:
        folder = self._home / "manifests" / self._peer
        _write(folder / digest_of(manifest), manifest)
        _keep_newest(folder, MAX_PER_PEER, MAX_PER_PEER * MAX_MANIFEST_BYTES)
        self._beat()

    def _publish(self, digest: str, content: bytes) -> None:
        folder = self._home / "content" / self._peer
        _write(folder / digest, content)
        _keep_newest(folder, self._held_bytes // 1024, self._held_bytes)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._own_beat >= BEAT_SECONDS:
            self._own_beat = now
            _write(self._home / "beats" / self._peer, f"{time.time_ns()}".encode())

    def _collect(self) -> None:
        self._beat()
        folders = list(self._folders())
        self._known = {each.name: self._known.get(each.name, set()) for each in folders}
        for folder in folders:
            known = self._known[folder.name]
            there = set(_names(folder, 2 * MAX_PER_PEER))
            known &= there  # forgets what its owner has removed, so that this stays small
            for name in sorted(there - known):
                manifest = _read(folder / name, MAX_MANIFEST_BYTES)
                if manifest is not None:
                    known.add(name)
                    self._inbox.add(manifest)
        self._present = set(_names(self._home / "beats", MAX_PEERS)) - {self._peer}
        for name in self._present:
            beat = _read(self._home / "beats" / name, _MAX_BEAT_BYTES)
            if beat is not None and self._beats.get(name, (b"", 0.0))[0] != beat:
                self._beats[name] = (beat, self._clock())
        for name in sorted(self._beats.keys() - self._present)[: max(0, len(self._beats) - MAX_PEERS)]:
            del self._beats[name]

    def _folders(self) -> Iterator[Path]:
        for name in _names(self._home / "manifests", MAX_PEERS):
            if name != self._peer:
                yield self._home / "manifests" / name


def _names(folder: Path, limit: int) -> Iterator[str]:
    """Whole files and folders of a place: their names are 64 hex digits, those of copies under way are not."""
    try:
        with os.scandir(folder) as entries:
            yield from islice((each.name for each in entries if _HEX.match(each.name)), limit)
    except (FileNotFoundError, NotADirectoryError):
        return


def _read(file: Path, limit: int) -> bytes | None:
    """At most `limit` bytes of a plain file; `None`: there is none. Follows no link and waits for no pipe."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        with os.fdopen(handle, "rb", closefd=False) as opened:
            return opened.read(min(limit, MAX_CONTENT_BYTES + 1))
    except OSError:
        return None
    finally:
        os.close(handle)


def _write(file: Path, content: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def _keep_newest(folder: Path, count: int, total: int) -> None:
    """Own files only: each node clears away behind itself."""
    with os.scandir(folder) as entries:
        files = sorted(
            ((found.st_mtime_ns, found.st_size, each.path) for each in entries if (found := each.stat())),
            reverse=True,
        )
    kept = 0
    for place, (_, size, path) in enumerate(files):
        kept += size
        if place >= count or kept > total:
            Path(path).unlink(missing_ok=True)
