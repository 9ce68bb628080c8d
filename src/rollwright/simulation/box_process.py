"""A program in a bubblewrap box with streams: what the simulated services of this package run commands with."""

import asyncio
import os
from contextlib import suppress

from rollwright.sandbox.box import BoxCommand, BoxError
from rollwright.sandbox.bubblewrap import BubblewrapBox

STDOUT, STDERR = 1, 2
_BLOCK = 64 * 1024


class BoxProcess:
    """One program. Its streams end when the last process that holds them has closed them, which may be after its exit."""

    def __init__(self) -> None:
        self._input: asyncio.StreamWriter | None = None
        self._output: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(maxsize=64)
        self._ending: asyncio.Task[int] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        box: BubblewrapBox,
        command: BoxCommand,
        *,
        has_input: bool = True,
    ) -> "BoxProcess":
        made = cls()
        pipes = [os.pipe() for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        try:
            call = await box.begin(command, theirs)
        except BaseException:
            for each in ours:
                os.close(each)
            raise
        finally:
            for each in theirs:
                os.close(each)
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(ours[0], "wb", 0)
        )
        made._input = asyncio.StreamWriter(transport, protocol, None, loop)
        if not has_input:
            made.close_input()
        readers = []
        for number, file in ((STDOUT, ours[1]), (STDERR, ours[2])):
            reader = asyncio.StreamReader()
            await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                os.fdopen(file, "rb", 0),
            )
            readers.append(made._read(number, reader))

        async def finish() -> int:
            try:
                done, _ = await call.result()
            finally:
                call.close()
            return done.exit_code

        async def read_all() -> None:
            await asyncio.gather(*readers)
            await made._output.put(None)

        made._ending = asyncio.create_task(finish())
        made._reading = asyncio.create_task(read_all())
        return made

    async def write(self, data: bytes) -> None:
        assert self._input is not None
        with suppress(OSError):
            self._input.write(data)
            await self._input.drain()

    def close_input(self) -> None:
        if self._input is not None:
            self._input.close()

    async def read(self) -> tuple[int, bytes] | None:
        """The next output; `None`: nobody can write any more."""
        return await self._output.get()

    async def wait(self) -> int:
        """The exit code."""
        assert self._ending is not None
        try:
            return await asyncio.shield(self._ending)
        except asyncio.CancelledError:
            if self._ending.cancelled():
                raise BoxError("the program was killed") from None
            raise

    def leave(self) -> None:
        """Lets the program run on, with nobody to read its output."""
        if self._ending is not None and not self._ending.done():
            self._leaving = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        while await self.read() is not None:
            pass
        await self.wait()

    async def close(self) -> None:
        """Kills the program."""
        self.close_input()
        tasks = [each for each in (self._ending, self._reading, self._leaving) if each is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._output.full():
            self._output.get_nowait()
        self._output.put_nowait(None)

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        while block := await reader.read(_BLOCK):
            await self._output.put((number, block))
