"""Connections to environments in foreign processes, and the fork servers that start them.

Always true: a fork server belongs to one event loop and lives while an environment of it is connected. A request whose answer
is not waited for to the end (a time limit, a cancellation) kills its process, because the state of the environment behind it
is not known any more. Messages are data: what is not one JSON object a line ends the connection.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.foreign.package import ForeignPackage
from rollwright.errors import ConfigError

_START_SECONDS = 180.0
"""For the import of a package on a busy machine."""

_MAX_LINE = 64 << 20
"""Bytes of one message; a conversation that is longer fits no context."""

WORDS_SECONDS = 0.1
"""What a dying process wrote to standard error comes by another way than the end of its connection, and perhaps later."""

_KEPT_LINES = 20
"""Lines of standard error that are kept for the message about a dead process."""

ForeignReply = dict[str, Any]
"""What an operation of a foreign environment returned."""


class _Hello(TypedDict, total=False):
    token: str
    pid: int
    error: str


class ForeignConnection:
    """One environment in its own process."""

    def __init__(self, server: "ForeignForkServer", greeting: "asyncio.Future[_Connected]") -> None:
        self._server = server
        self._greeting = greeting
        self._connected: _Connected | None = None

    async def ask(self, operation: str, **arguments: Any) -> Any:
        """Calls an operation of the environment. Raises an `EnvironmentFailure` for what goes wrong in its process."""
        try:
            line = await self._line()
            line.writer.write(json.dumps({"op": operation, **arguments}).encode() + b"\n")
            raw = await line.reader.readline()
            said = json.loads(raw) if raw else None
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            self.kill()
            raise EnvironmentFailure(f"{self._server.name}: its process sent no message: {error}") from error
        except BaseException:
            self.kill()
            raise
        if not isinstance(said, dict):
            self.kill()
            await asyncio.sleep(WORDS_SECONDS)
            raise EnvironmentFailure(f"{self._server.name}: its process ended{self._server.last_words()}")
        if "error" in said:
            if said.get("settings"):
                raise ConfigError(f"{self._server.name}: {said['error']}")
            raise EnvironmentFailure(f"{self._server.name}: {said['error']}")
        return said["value"]

    async def open_lines(self) -> "tuple[asyncio.StreamReader, asyncio.StreamWriter]":
        """The streams of the connection, for a program that is not asked one thing at a time."""
        line = await self._line()
        return line.reader, line.writer

    def last_words(self) -> str:
        """The last line that a process of the package wrote to standard error, as a clause."""
        return self._server.last_words()

    def fork(self) -> "ForeignConnection":
        """A connection to an exact copy of the environment as it is now: the request waits behind those before it."""
        if self._connected is None:
            raise EnvironmentFailure(f"{self._server.name}: no episode is running; call reset first")
        token, greeting = self._server.expect()
        self._connected.writer.write(json.dumps({"op": "fork", "token": token}).encode() + b"\n")
        return ForeignConnection(self._server, greeting)

    def kill(self) -> None:
        """Ends the process at once; the connection cannot be used any more."""
        self._greeting.cancel()
        if self._connected is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._connected.pid, signal.SIGKILL)
            self._connected.writer.close()
            self._connected = None

    async def close(self) -> None:
        self.kill()
        await self._server.release()

    async def _line(self) -> "_Connected":
        if self._connected is None:
            async with asyncio.timeout(_START_SECONDS):
                self._connected = await self._greeting
        return self._connected


class _Connected:
    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self.reader, self.writer = pid, reader, writer


class ForeignForkServer:
    """The fork server of one package in one event loop."""

    def __init__(self, package: ForeignPackage) -> None:
        self.name = package.name
        self._package = package
        self._users = 0
        self._tokens = itertools.count()
        self._expected: dict[str, asyncio.Future[_Connected]] = {}
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        self._changing = asyncio.Lock()
        """Held while the server is restarted, because the old process has to end first."""
        self._started: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Server | None = None
        self._folder = ""
        self._reading: asyncio.Task[None] | None = None
        self._hello: asyncio.Future[_Connected] | None = None

    async def open(self, options: dict[str, Any]) -> ForeignConnection:
        """A process for one environment with these options."""
        self._users += 1
        try:
            async with self._changing:
                if self._started is None or (
                    self._process is not None and self._process.returncode is not None
                ):
                    await self._stop()
                    self._started = asyncio.ensure_future(self._start())
                started = self._started
            await asyncio.shield(started)
            assert self._process is not None
            assert self._process.stdin is not None
            token, greeting = self._expect()
            self._process.stdin.write(json.dumps({"token": token, "options": options}).encode() + b"\n")
        except BaseException:
            await self.release()
            raise
        return ForeignConnection(self, greeting)

    def expect(self) -> "tuple[str, asyncio.Future[_Connected]]":
        """A token, and the connection of the process that will name it."""
        self._users += 1
        return self._expect()

    def _expect(self) -> "tuple[str, asyncio.Future[_Connected]]":
        token = str(next(self._tokens))
        self._expected[token] = asyncio.get_running_loop().create_future()
        return token, self._expected[token]

    async def release(self) -> None:
        """One user less; behind the last one the server ends."""
        self._users -= 1
        if not self._users:
            # Removed from the table before it ends, so that callers in the meantime get another server.
            of_loop = _servers.get(asyncio.get_running_loop(), {})
            if of_loop.get(self._package) is self:
                del of_loop[self._package]
            await self._stop()

    def last_words(self) -> str:
        """The last line that the server or one of its environments wrote to standard error, as a clause."""
        return f": {self._words[-1]}" if self._words else ""

    async def _start(self) -> None:
        command = await asyncio.to_thread(self._package.command)
        self._folder = tempfile.mkdtemp(prefix="rollwright-env-")
        place = os.path.join(self._folder, "socket")
        self._hello = asyncio.get_running_loop().create_future()
        self._expected["server"] = self._hello
        self._listener = await asyncio.start_unix_server(self._greet, place, limit=_MAX_LINE)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            place,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._reading = asyncio.ensure_future(self._read_words())
        try:
            async with asyncio.timeout(_START_SECONDS):
                ended = asyncio.ensure_future(self._process.wait())
                first: set[asyncio.Future[Any]] = {self._hello, ended}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
        except TimeoutError as error:
            raise EnvironmentFailure(f"{self.name}: not imported within {_START_SECONDS:g} s") from error
        if not self._hello.done():
            raise EnvironmentFailure(f"{self.name}: its process ended{self.last_words()}")
        await self._hello

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello: _Hello = json.loads(await reader.readline())
            expected = self._expected.pop(hello["token"], None)
        except (OSError, ValueError, KeyError, TypeError):
            expected = None
        if expected is None or expected.done():
            writer.close()
            return
        if "error" in hello:
            expected.set_exception(EnvironmentFailure(f"{self.name}: {hello['error']}"))
            writer.close()
            return
        expected.set_result(_Connected(hello["pid"], reader, writer))

    async def _read_words(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # a line without end
                continue
            if not line:
                return
            if words := line.decode(errors="replace").strip():
                self._words.append(words[:500])

    async def _stop(self) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        started.cancel()
        with contextlib.suppress(BaseException):
            await started
        for each in self._expected.values():
            each.cancel()
        self._expected.clear()
        hello = self._hello
        if hello is not None and hello.done() and not hello.cancelled() and hello.exception() is None:
            hello.result().writer.close()
        if self._process is not None:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
            await self._process.wait()
            self._process = None
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_servers: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ForeignPackage, ForeignForkServer]]" = (
    WeakKeyDictionary()
)


async def connect(package: ForeignPackage, options: dict[str, Any]) -> ForeignConnection:
    """A new environment of the package, in a process of its own."""
    of_loop = _servers.setdefault(asyncio.get_running_loop(), {})
    server = of_loop.setdefault(package, ForeignForkServer(package))
    return await server.open(options)
