"""Processes of a foreign package that play many episodes at once.

Always true: the episodes of one package with the same options share one process in an event loop, so it is imported, made
ready and kept warm once. What ends a process (a crash, `exit`, an operation that blocks its event loop) fails all episodes in
it with one line, because it cannot be told which of them did it. So the next time each of them plays among few others, and the
time after that alone: an episode that ends processes costs the others at most two attempts, and then only itself.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from rollwright.envs.base import EnvironmentFailure
from rollwright.envs.foreign.connection import WORDS_SECONDS, ForeignConnection, connect
from rollwright.envs.foreign.package import ForeignPackage
from rollwright.errors import ConfigError

AnswerQuestion = Callable[[Any], Awaitable[Any]]
"""Answers what an operation asks while it runs."""

_COMPANY = (10_000, 16, 1)
"""Episodes in one process, by how many processes an episode has lost. Sixteen: a few processes for hundreds of episodes, and
few of those are lost a second time."""

_PINGS = 4
"""Unanswered pings after which a process counts as blocked."""

_END_SECONDS = 6.0
"""For a process to end what it started; it ends by itself within five."""


class ProcessLost(EnvironmentFailure):
    """A process has ended, or does not answer, with this and perhaps other episodes in it."""


@dataclass
class _Waiting:
    """An operation under way."""

    value: "asyncio.Future[Any]"
    answer: AnswerQuestion | None
    answering: "set[asyncio.Task[None]]" = field(default_factory=set)


class SharedProcess:
    """One process; operations run in it concurrently."""

    def __init__(self, name: str, connection: ForeignConnection, stall_seconds: float) -> None:
        self.load = 0
        """Episodes that are played in it."""
        self.lost: str | None = None
        """Why it cannot be used any more."""
        self._name = name
        self._connection = connection
        self._stall_seconds = stall_seconds
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._unanswered = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ping: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        reader, self._writer = await self._connection.open_lines()
        self._reading = asyncio.ensure_future(self._read(reader))

    async def ask(self, operation: str, answer: AnswerQuestion | None = None, **arguments: Any) -> Any:
        """Calls an operation. A cancellation ends the operation, and nothing else in the process."""
        if self.lost is not None:
            raise ProcessLost(self.lost)
        number = next(self._numbers)
        waiting = self._waiting[number] = _Waiting(asyncio.get_running_loop().create_future(), answer)
        self._send({"id": number, "op": operation, **arguments})
        if self._ping is None:
            self._schedule_ping()
        try:
            return await waiting.value
        finally:
            if self._waiting.pop(number, None) is not None:
                self._send({"id": number, "op": "cancel"})
            for each in waiting.answering:
                each.cancel()

    async def close(self) -> None:
        """Ends the process: it first ends what it has started."""
        if self._ping is not None:
            self._ping.cancel()
        if self._writer is not None and self.lost is None:
            self.lost = f"{self._name}: its process was closed"
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()
            if self._reading is not None:
                await asyncio.wait({self._reading}, timeout=_END_SECONDS)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._connection.close()

    def _send(self, message: dict[str, Any]) -> None:
        if self.lost is None and self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "its process ended"
        try:
            while line := await reader.readline():
                self._unanswered = 0
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            why = f"its process sent no message: {error}"
        except OSError:  # a reset connection: the process is gone with requests unread
            pass
        await asyncio.sleep(WORDS_SECONDS)
        self._lose(f"{why}{self._connection.last_words()}")

    def _take(self, said: dict[str, Any]) -> None:
        number = said["id"]
        waiting = self._waiting.get(number)
        if waiting is None:  # an answer to a ping, or to what nobody waits for any more
            return
        if "question" in said:
            task = asyncio.ensure_future(self._answer(number, waiting, said))
            waiting.answering.add(task)
            task.add_done_callback(waiting.answering.discard)
            return
        del self._waiting[number]
        if waiting.value.done():
            return
        if "error" in said:
            kind = ConfigError if said.get("settings") else EnvironmentFailure
            waiting.value.set_exception(kind(f"{self._name}: {said['error']}"))
        else:
            waiting.value.set_result(said["value"])

    async def _answer(self, number: int, waiting: _Waiting, said: dict[str, Any]) -> None:
        try:
            if waiting.answer is None:
                raise EnvironmentFailure(f"{self._name}: it asks, and nobody answers")
            value = await waiting.answer(said["asked"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the operation that has asked
            if not waiting.value.done():
                waiting.value.set_exception(error)
            return
        self._send({"id": number, "answer": said["question"], "value": value})

    def _schedule_ping(self) -> None:
        loop = asyncio.get_running_loop()
        self._ping = loop.call_later(self._stall_seconds / _PINGS, self._send_ping)

    def _send_ping(self) -> None:
        self._ping = None
        if self.lost is not None or not self._waiting:
            return
        if self._unanswered >= _PINGS:
            count = len(self._waiting)
            by = "it" if count == 1 else f"one of {count} episodes"
            self._lose(f"its process was blocked for {self._stall_seconds:g} s by {by}")
            return
        self._unanswered += 1
        self._send({"id": next(self._numbers), "op": "ping"})
        self._schedule_ping()

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = f"{self._name}: {why}"
        self._connection.kill()
        for each in self._waiting.values():
            if not each.value.done():
                each.value.set_exception(ProcessLost(self.lost))
        self._waiting.clear()


class EpisodeLease:
    """A place for one episode in a process."""

    def __init__(self, processes: "SharedProcesses", process: SharedProcess, key: int) -> None:
        self._processes = processes
        self._process = process
        self._key = key

    async def ask(self, operation: str, answer: AnswerQuestion | None = None, **arguments: Any) -> Any:
        try:
            return await self._process.ask(operation, answer, **arguments)
        except ProcessLost:
            self._processes.note_loss(self._key)
            raise

    def note_success(self) -> None:
        """The episode came to its end: it ends no processes."""
        self._processes.forget_losses(self._key)

    async def release(self) -> None:
        await self._processes.release(self._process)


class SharedProcesses:
    """All processes of one package with the same options, in one event loop."""

    def __init__(
        self,
        package: ForeignPackage,
        options: dict[str, Any],
        stall_seconds: float,
        company: int = _COMPANY[0],
    ) -> None:
        self._package = package
        self._options = options
        self._stall_seconds = stall_seconds
        self._company = company
        self._users = 0
        self._losses: dict[int, int] = {}
        self._processes: dict[int, list[SharedProcess]] = {}
        self._starting = asyncio.Lock()

    def add_user(self) -> None:
        self._users += 1

    def remove_user(self) -> bool:
        """One user less. Returns whether it was the last one, who closes the processes."""
        self._users -= 1
        return not self._users

    async def close(self) -> None:
        ending = [each for some in self._processes.values() for each in some]
        self._processes.clear()
        await asyncio.gather(*(each.close() for each in ending))

    async def lease(self, key: int) -> EpisodeLease:
        """A place for the episode `key`, in a process that runs."""
        losses = min(self._losses.get(key, 0), len(_COMPANY) - 1)
        async with self._starting:
            some = self._processes.setdefault(losses, [])
            free = (
                each
                for each in some
                if each.lost is None and each.load < min(self._company, _COMPANY[losses])
            )
            process = next(free, None)
            if process is None:
                process = await self._start()
                some.append(process)
            process.load += 1
        return EpisodeLease(self, process, key)

    async def release(self, process: SharedProcess) -> None:
        process.load -= 1
        if process.load:
            return
        for losses, some in self._processes.items():
            if process in some and (losses or process.lost is not None):
                some.remove(process)
                await process.close()
                return

    def note_loss(self, key: int) -> None:
        self._losses[key] = self._losses.get(key, 0) + 1

    def forget_losses(self, key: int) -> None:
        self._losses.pop(key, None)

    async def _start(self) -> SharedProcess:
        connection = await connect(self._package, self._options)
        process = SharedProcess(self._package.name, connection, self._stall_seconds)
        try:
            await process.start()
        except BaseException:
            await process.close()
            raise
        return process


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[ForeignPackage, str], SharedProcesses]]" = (
    WeakKeyDictionary()
)


class SharedUse:
    """The use of a package's processes by one environment. They are kept while anybody uses them."""

    def __init__(
        self,
        package: ForeignPackage,
        options: dict[str, Any],
        stall_seconds: float,
        company: int = _COMPANY[0],
    ) -> None:
        """`company`: most episodes in one process."""
        of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
        self._key = (package, json.dumps(options, sort_keys=True))
        made = of_loop.get(self._key)
        if made is None:
            made = of_loop[self._key] = SharedProcesses(package, options, stall_seconds, company)
        made.add_user()
        self._processes = made

    async def lease(self, key: int) -> EpisodeLease:
        return await self._processes.lease(key)

    async def end(self) -> None:
        if self._processes.remove_user():
            _shared.get(asyncio.get_running_loop(), {}).pop(self._key, None)
            await self._processes.close()
