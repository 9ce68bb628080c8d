"""A command as an agent: a program in any language that plays one task and ends.

Always true: each rollout has a folder of its own, which is the working directory and is removed at the end. The command
and everything that came of it are killed when the rollout ends, in whatever way, also when the worker is killed
(`command_supervisor`). An exit code other than 0 and a command that takes too long are failures of the attempt, never a
reward.

The command finds its task in `task.json`, and a model behind the usual variables of the OpenAI and Anthropic SDKs. Its
output is the value that it returns: the end of it is kept.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from rollwright.agents import EpisodeFailure, timed_out
from rollwright.gateway import Access
from rollwright.rollout.agent_session import AgentSession
from rollwright.trajectory import Boundary, ErrorRecord

TASK_FILE = "task.json"
FOLDER_VARIABLE = "ROLLWRIGHT_FOLDER"
"""Environment variable with the folder of the configuration."""

_BLOCK = 64 * 1024
"""As much as a pipe holds."""

_DRAIN_SECONDS = 1.0
"""To read what is left in the pipes once the processes are gone; pipes that nobody holds end at once."""

_SHOWN = 300
"""Characters of a failed command's last line in the error."""

_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(__file__).with_name("command_supervisor.py")))
"""Started in place of the command, which it starts and ends."""

_END_SECONDS = 10.0
"""For the supervisor to kill what is left; it takes milliseconds, unless a process cannot be killed."""


class _Tail:
    """A pipe for a command to write to, of which the end of the text is kept.

    The pipe is made here and not by `asyncio.subprocess`, whose `wait` would also wait for every process that the command
    left behind with the pipe open.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> int:
        """Begins to read; returns the end to write to, which the caller closes."""
        own, theirs = os.pipe()
        stream = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stream)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(own, "rb", 0))
        self._reading = asyncio.create_task(self._read(stream))
        return theirs

    async def finish(self) -> None:
        """Waits until nobody can write any more. A process that left the command's group may, so the wait is limited."""
        if self._reading is None or self._transport is None:
            return
        await asyncio.wait({self._reading}, timeout=_DRAIN_SECONDS)
        self._transport.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        """Reads to the end: a process whose pipe is full would stop."""
        while block := await stream.read(_BLOCK):
            self._kept += block
            del self._kept[: -self._limit]

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


@dataclass(frozen=True)
class CommandAgent:
    """Plays a task by a command."""

    command: tuple[str, ...]
    timeout: float
    output_bytes: int
    folder: Path
    """Of the configuration."""

    @classmethod
    def build(cls, command: Sequence[str], timeout: float, output_kb: int, folder: Path) -> "CommandAgent":
        """Words that name files in the folder become whole paths, because the command runs in another folder."""
        words = [str(folder / word) if (folder / word).is_file() else word for word in command]
        return cls(tuple(words), timeout, 1024 * output_kb, folder)

    async def __call__(self, task: Any, session: AgentSession) -> str:
        """Runs the command to its end; returns the end of its standard output."""
        with TemporaryDirectory(prefix="rollwright-agent-", ignore_cleanup_errors=True) as place:
            (Path(place) / TASK_FILE).write_bytes(msgspec.json.encode(task, enc_hook=str))
            limits = CommandLimits(self.timeout, self.output_bytes)
            environment = agent_environment(session, self.folder)
            return await run_command(self.command, limits, environment, session, cwd=place)


@dataclass(frozen=True)
class CommandLimits:
    """Seconds after which a command is killed, and how much of the end of its output is kept."""

    timeout: float
    output_bytes: int


async def run_command(
    command: Sequence[str],
    limits: CommandLimits,
    environment: Mapping[str, str],
    session: AgentSession,
    *,
    cwd: str | None,
) -> str:
    """Runs a command to its end, for an agent; returns the end of its standard output."""
    output, errors = _Tail(limits.output_bytes), _Tail(limits.output_bytes)
    code: int | None = None
    async with _started(command, cwd, environment, output, errors) as process:
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.timeout):
                code = await process.wait()
    turns = len(session.trajectory.turns)
    if code is None:
        message = f"the command did not end within {limits.timeout:g} s{_last_line(errors, output)}"
        raise timed_out(Boundary.AGENT, message, turns)
    if code != 0:
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        raise EpisodeFailure(
            ErrorRecord(Boundary.AGENT, "command", f"{how}{_last_line(errors, output)}", turns)
        )
    return output.text


def api_variables(access: Access) -> dict[str, str]:
    """The usual variables by which SDKs find a model."""
    root = access.base_url.removesuffix("/v1")  # Anthropic's and Google's SDKs add the version themselves
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": access.api_key,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": access.api_key,
    }


def agent_environment(session: AgentSession, folder: Path) -> dict[str, str]:
    """The worker's own variables, without those that lead to its store, and with the way to the gateway."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("ROLLWRIGHT_")}
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
    return {
        **own,
        **api_variables(session.access()),
        "NO_PROXY": direct,
        "no_proxy": direct,
        FOLDER_VARIABLE: str(folder),
    }


@asynccontextmanager
async def _started(
    command: Sequence[str], cwd: str | None, environment: Mapping[str, str], output: _Tail, errors: _Tail
) -> AsyncIterator[Process]:
    """The command under its supervisor. Afterwards everything that came of it is gone, and all of its output is read."""
    ends = [await output.open(), await errors.open()]
    process: Process | None = None
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *_SUPERVISOR,
                *command,
                cwd=cwd,
                env=environment,
                stdin=PIPE,
                stdout=ends[0],
                stderr=ends[1],
                start_new_session=True,
            )
        finally:
            for each in ends:
                os.close(each)
        yield process
    finally:
        ending = asyncio.ensure_future(_end(process, output, errors))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # a second one: the processes are ended all the same
            await ending
            raise


async def _end(process: Process | None, output: _Tail, errors: _Tail) -> None:
    """Ends the command, and reads the rest of its output."""
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()  # the supervisor takes this as the order to end
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await asyncio.gather(output.finish(), errors.finish())


def _last_line(*tails: _Tail) -> str:
    """The last line that the command wrote, for an error line."""
    for tail in tails:
        if lines := tail.text.splitlines():
            return f": {lines[-1].strip()[:_SHOWN]}"
    return ""
