"""The gateway and the proxy in a box that has no network at all: connections carried by the streams of one program.

A small Python program in the box listens on its loopback; what its connections say goes through its output, and the answers
come through its input. So a pod or a hosted sandbox needs no way to this machine, and no address of it, and cannot reach the
gateway of another rollout: the other end of its tunnel is one relay, that of its own attempt.

A frame is a line `NUMBER KIND BASE64`: `o` opens a connection, `d` carries bytes, `e` is the end of one direction, `c` closes,
`q` ends the program.
"""

import asyncio
import base64
import binascii
import socket
from contextlib import suppress

from rollwright.sandbox.box import BoxError
from rollwright.sandbox.relay import Relay

PROGRAM = r"""
import asyncio, base64, itertools, sys
writers, numbers = {}, itertools.count(1)
def say(n, kind, data=b""):
    sys.stdout.write("%d %s %s\n" % (n, kind, base64.b64encode(data).decode())); sys.stdout.flush()
async def accept(reader, writer):
    n = next(numbers)
    writers[n] = writer
    say(n, "o")
    try:
        while True:
            data = await reader.read(32768)
            say(n, "d" if data else "e", data)
            if not data: break
    except OSError:
        say(n, "c")
async def main(port):
    await asyncio.start_server(accept, "127.0.0.1", port)
    lines = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say(0, "r")
    while True:
        line = await lines.readline()
        if not line: return
        words = line.split()
        if words[1] == b"q": return
        writer = writers.get(int(words[0]))
        if writer is None: continue
        try:
            if words[1] == b"d":
                writer.write(base64.b64decode(words[2])); await writer.drain()
            elif words[1] == b"e": writer.write_eof()
            elif words[1] == b"c": writers.pop(int(words[0])).close()
        except (OSError, RuntimeError): pass
asyncio.new_event_loop().run_until_complete(main(int(sys.argv[1])))
"""
"""Needs Python 3.7 or later in the box."""

_OPEN_SECONDS = 60.0
_BLOCK = 32 * 1024
_MAX_LINE = 1 << 20


class Tunnel:
    """Joins the connections of the program in a box with a relay of this process."""

    def __init__(self, stream, relay: Relay) -> None:  # type: ignore[no-untyped-def]
        """`stream`: a `ShellStream` in which `PROGRAM` runs."""
        self._stream = stream
        self._relay = relay
        self._ends: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._sending = asyncio.Lock()
        self._errors = b""

    async def open(self) -> None:
        """Returns when the program listens; a `BoxError` says that it does not."""
        reading = self._run(self._read())
        waiting = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({reading, waiting}, timeout=_OPEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not self._ready.is_set():
            await self.close()
            told = self._errors.decode(errors="replace").strip().splitlines()
            raise BoxError(told[-1][-200:] if told else "no answer")

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, writer in self._ends.values():
            writer.close()
        self._ends.clear()
        await self._relay.close()
        with suppress(BoxError):
            await self._send(0, "q")
            await self._stream.close()

    async def _read(self) -> None:
        held = b""
        with suppress(BoxError):
            while (received := await self._stream.receive()) is not None:
                channel, piece = received
                if channel != 1:
                    self._errors = (self._errors + piece)[-4096:]
                    continue
                *lines, held = (held + piece).split(b"\n")
                if len(held) > _MAX_LINE:
                    return  # no frame of the program's; something else writes to the stream
                for line in lines:
                    await self._take(line)

    async def _take(self, line: bytes) -> None:
        try:
            number, kind, *rest = line.split()
            n, data = int(number), base64.b64decode(rest[0], validate=True) if rest else b""
        except (ValueError, binascii.Error):
            return
        if kind == b"r":
            self._ready.set()
        elif kind == b"o" and n not in self._ends:
            ours, theirs = socket.socketpair()
            self._relay.join_socket(theirs)
            self._ends[n] = await asyncio.open_connection(sock=ours)
            self._run(self._pump(n))
        elif (end := self._ends.get(n)) is not None:
            with suppress(OSError, RuntimeError):
                if kind == b"d":
                    end[1].write(data)
                    await end[1].drain()
                elif kind == b"e":
                    end[1].write_eof()
                elif kind == b"c":
                    end[1].close()

    async def _pump(self, n: int) -> None:
        """Sends what the relay answers into the box."""
        reader, writer = self._ends[n]
        with suppress(BoxError, OSError):
            while data := await reader.read(_BLOCK):
                await self._send(n, "d", data)
            await self._send(n, "c")
        writer.close()

    async def _send(self, n: int, kind: str, data: bytes = b"") -> None:
        async with self._sending:  # frames of two connections must not mix
            await self._stream.send(f"{n} {kind} {base64.b64encode(data).decode()}\n".encode())

    def _run(self, work) -> "asyncio.Task[None]":  # type: ignore[no-untyped-def]
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
