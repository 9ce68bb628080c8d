"""Files and output between this process and a box.

Always true: what comes out of a box is untrusted. Output is bounded while it is read, an archive is bounded and unpacked with
the rules for foreign archives (nothing outside the target folder, no devices, no links out of it).
"""

import asyncio
import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

from rollwright.sandbox.box import BoxError

MAX_ARCHIVE = 4 << 30
"""Bytes that `get` copies at most."""

_BLOCK = 64 * 1024
_LEFT_OPEN_SECONDS = 0.3
"""Time to read what is left when a command has ended: a process that it left behind may hold the pipe for ever."""


class OutputPipe:
    """A pipe for a command to write to; the begin and the end of long output are kept."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0
        self._reading: asyncio.Task[None] | None = None
        self._is_over = False
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> int:
        """Begins to read; returns the end to write to, which the caller closes."""
        own, theirs = os.pipe()
        stream = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(own, "rb", 0)
        )
        self._reading = asyncio.create_task(self._read(stream))
        return theirs

    async def finish(self) -> str:
        """The text, when nobody can write any more or the time for that is over; then the pipe is read on, so that a program
        in the background does not meet a closed one."""
        if self._reading is not None and self._transport is not None:
            done, _ = await asyncio.wait({self._reading}, timeout=_LEFT_OPEN_SECONDS)
            self._is_over = True
            if done:
                self._transport.close()
        return self.text

    def leave_to(self, left: set["OutputPipe"]) -> None:
        """Puts itself into a set for as long as a program in the background may write to it."""
        if self._is_over and self._reading is not None and not self._reading.done():
            left.add(self)
            self._reading.add_done_callback(lambda _: left.discard(self))

    def abandon(self) -> None:
        """Ends it, also when a program in the background holds it."""
        self._is_over = False
        self.close()

    @property
    def text(self) -> str:
        """What was kept, with a note where something is missing."""
        between = f"\n[{self.dropped} bytes left out]\n".encode() if self.dropped else b""
        return (self._head + between + self._tail).decode(errors="replace")

    def close(self) -> None:
        """Ends it, unless `finish` has left it to a program in the background."""
        if self._is_over:
            return
        if self._transport is not None:
            self._transport.close()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while block := await stream.read(_BLOCK):
            if not self._is_over:
                self.add(block)

    def add(self, block: bytes) -> None:
        room = self._half - len(self._head)
        if room > 0:
            self._head += block[:room]
            block = block[room:]
        self._tail += block
        if (over := len(self._tail) - self._half) > 0:
            self.dropped += over
            del self._tail[:over]


def write_archive(source: bytes | Path, path: str, to: io.BufferedIOBase) -> None:
    """Writes a file, or the content of a folder, as a tar stream; everything in it belongs to root."""

    def own(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        return info

    name = path.rstrip("/").rpartition("/")[2]
    with tarfile.open(fileobj=to, mode="w|") as archive:
        if isinstance(source, bytes):
            info = own(tarfile.TarInfo(name))
            info.size, info.mode = len(source), 0o644
            archive.addfile(info, io.BytesIO(source))
        elif source.is_dir():
            for each in sorted(source.iterdir()):
                archive.add(each, arcname=each.name, filter=own)
        else:
            archive.add(source, arcname=name, filter=own)


def unpack_folder(path: str, source: bytes | Path) -> str:
    """The folder in which `write_archive`'s stream is to be unpacked."""
    if isinstance(source, Path) and source.is_dir():
        return path
    return path.rstrip("/").rpartition("/")[0] or "/"


def read_archive(stream: io.BufferedIOBase, path: str, into: Path | None) -> bytes:
    """Reads a tar stream of a box: the bytes of its one file, or everything to a path of this machine."""
    left = MAX_ARCHIVE
    content = b""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            left -= member.size
            if left < 0:
                raise BoxError(f"{path}: is larger than {MAX_ARCHIVE} bytes")
            is_in_folder = member.name == "." or member.name.startswith("./")
            if is_in_folder and into is None:
                raise BoxError(f"{path}: is not a file; give a folder to copy it into")
            if is_in_folder and into is not None:
                into.mkdir(parents=True, exist_ok=True)
                _extract(archive, member, into)
            elif not member.isreg() or (file := archive.extractfile(member)) is None:
                raise BoxError(f"{path}: is neither a file nor a folder")
            elif into is None:
                content = file.read()
            else:
                target = into / os.path.basename(path) if into.is_dir() else into
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read())
    return content


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    if member.name == ".":
        return
    with suppress(tarfile.FilterError):  # a link that leads out of the folder, or a device
        archive.extract(member, into, filter="data")
