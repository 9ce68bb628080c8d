"""The client's side of holders: one `HolderLine` per box, and the `HolderPool` that renews their leases and runs the reaper.

Always true: closing a line ends its box; `end` returns when everything of the box is gone. A holder that was killed is
noticed, and this process removes the rest of its box.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rollwright.sandbox.box import BoxError, BoxLabel
from rollwright.sandbox.client import ServerProcess
from rollwright.sandbox.leases import (
    BoxRecord,
    boxes_folder,
    read_record,
    reap,
    remove_box,
    rewrite_record,
)
from rollwright.sandbox.messages import (
    BoxReady,
    CallDone,
    CallFailed,
    HolderReply,
    HoldRequest,
    RenewRequest,
    receive,
    send,
)

REAP_SECONDS = 2.0
"""Seconds between two rounds of the reaper; with the holders' grace this keeps abandoned boxes below lease + 5 s."""

_START_SECONDS = 60.0
_END_SECONDS = 30.0
_RENEWALS_PER_LEASE = 4
_QUICK_STARTS = 16
"""Requests that surely fit into the server's socket."""

_log = logging.getLogger(__name__)


class _HolderServer(ServerProcess):
    def __init__(self) -> None:
        super().__init__("rollwright.sandbox.holder")

    def hold(self, request: HoldRequest) -> socket.socket:
        """Starts a holder and returns its socket, on which `BoxReady` or `CallFailed` arrives first."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                self._hand_over(lambda control: send(control, request, (theirs.fileno(),)))
            except OSError as error:
                ours.close()
                raise BoxError(f"the holders of boxes cannot be started: {error}") from error
        return ours


class HolderLine:
    """The connection to one holder."""

    def __init__(self, line: socket.socket, record: BoxRecord, folder: Path) -> None:
        self.record = record
        self.folder = folder
        self._line = line
        self._is_watched = False
        self._ended = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait_until_ready(self) -> BoxReady:
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply, _ = await _receive(self._line)
        except TimeoutError:
            reply = None
        except BaseException:
            self._close()
            raise
        if isinstance(reply, BoxReady):
            asyncio.get_running_loop().add_reader(self._line, self._notice)
            self._is_watched = True
            return reply
        self._close()
        why = reply.reason if isinstance(reply, CallFailed) else "its holder ended, or did not answer"
        raise BoxError(f"a box did not start: {why}")

    async def open_call(self, request: msgspec.Struct, files: Sequence[int] = ()) -> "HolderCall":
        """Sends a request with files, which the caller closes; its answer comes on a socket of its own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                await self._send(request, (theirs.fileno(), *files))
            except BaseException:
                ours.close()
                raise
        return HolderCall(ours)

    def relabel(self, label: BoxLabel) -> None:
        """Gives the box another owner; its lease stays as long as it was."""
        label = msgspec.structs.replace(label, lease_seconds=self.record.label.lease_seconds)
        written = read_record(self.folder) or self.record
        self.record = msgspec.structs.replace(self.record, label=label)
        if not self.has_ended:
            rewrite_record(self.folder, msgspec.structs.replace(written, label=label))

    async def renew(self) -> None:
        with suppress(BoxError):
            await self._send(RenewRequest())

    async def wait_until_ended(self) -> None:
        await self._ended.wait()

    async def end(self) -> None:
        """Ends the box, and returns when it is gone."""
        if not self.has_ended:
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_WR)
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await self._ended.wait()
        self._close()
        if self.folder.exists():  # the holder was killed, or hangs
            await asyncio.to_thread(remove_box, self.folder, read_record(self.folder) or self.record)

    def drop(self) -> None:
        """Ends the box without waiting; its holder, or the reaper, removes it."""
        self._close()

    def _notice(self) -> None:
        try:
            if self._line.recv(1):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._close()

    def _close(self) -> None:
        if self._is_watched:
            asyncio.get_running_loop().remove_reader(self._line)
            self._is_watched = False
        self._line.close()
        self._ended.set()

    async def _send(self, request: msgspec.Struct, files: tuple[int, ...] = ()) -> None:
        while not self.has_ended:
            try:
                return send(self._line, request, files)
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError:
                break
        raise BoxError("the box has ended")


class HolderCall:
    """One call to a holder; closing it ends what the call runs."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    async def result(self) -> tuple[CallDone, list[int]]:
        """The end of the call, with the files that came with it."""
        reply, files = await _receive(self._line)
        if isinstance(reply, CallDone):
            return reply, files
        if isinstance(reply, CallFailed):
            raise BoxError(reply.reason)
        raise BoxError("the box has ended")

    def give_up(self) -> None:
        """Has the call killed; its result still comes."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._line.close()


async def _receive(line: socket.socket) -> tuple[Any, list[int]]:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return receive(line, HolderReply)  # type: ignore[arg-type]
        except BlockingIOError:
            pass
        except OSError:
            return None, []
        readable = loop.create_future()
        loop.add_reader(line, _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(line)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class HolderPool:
    """All holders of one process. Belongs to one event loop."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._server = _HolderServer()
        self._keeping: dict[HolderLine, asyncio.Task[None]] = {}
        self._reaping: asyncio.Task[None] | None = None
        self._starting = 0
        """Holders that were asked for and have not answered."""

    @property
    def lines(self) -> frozenset[HolderLine]:
        return frozenset(self._keeping)

    async def hold(self, request: HoldRequest) -> tuple[HolderLine, BoxReady]:
        """Starts a holder and waits until its box runs."""
        if self._reaping is None:
            self._reaping = asyncio.create_task(self._reap())
            boxes_folder(self.state).mkdir(parents=True, exist_ok=True)
        self._starting += 1
        try:
            # A thread is for a server that has to be started, or has not read the last requests yet.
            is_quick = self._server.is_running and self._starting <= _QUICK_STARTS
            socket_line = (
                self._server.hold(request)
                if is_quick
                else await asyncio.to_thread(self._server.hold, request)
            )
            line = HolderLine(socket_line, request.record, Path(request.folder))
            ready = await line.wait_until_ready()
        finally:
            self._starting -= 1
        self._keeping[line] = asyncio.create_task(self._keep(line))
        return line, ready

    async def end(self, line: HolderLine) -> None:
        await line.end()
        if (task := self._keeping.pop(line, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends all boxes."""
        tasks = [*self._keeping.values(), *filter(None, [self._reaping])]
        self._reaping = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.end() for each in self._keeping))
        self._keeping.clear()
        self._server.close()

    async def _keep(self, line: HolderLine) -> None:
        """Renews a lease until the box ends, and removes what is left if it has not ended by `end`."""
        while not line.has_ended:
            await line.renew()
            with suppress(TimeoutError):
                async with asyncio.timeout(line.record.label.lease_seconds / _RENEWALS_PER_LEASE):
                    await line.wait_until_ended()
        await line.end()
        self._keeping.pop(line, None)

    async def _reap(self) -> None:
        while True:
            try:
                for box_id in await asyncio.to_thread(reap, self.state):
                    _log.warning("removed box %s, which nobody held any more", box_id)
            except OSError as error:
                _log.warning("boxes that were left behind cannot be removed: %s", error)
            await asyncio.sleep(REAP_SECONDS)


def own_process() -> str:
    """Name of this process in records."""
    return f"{socket.gethostname()}:{os.getpid()}"
