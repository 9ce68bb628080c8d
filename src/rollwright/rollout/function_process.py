"""A user's function as an agent in a process of its own, started anew for each rollout.

For programs that build their client from the environment, also when they are imported: `OPENAI_BASE_URL` and the other
usual variables are set before the function's module is. Always true: the process is watched and ended like a command
(`command`); an exception of the function fails the attempt with the same line as in the worker's own process.

`main` is the other side: it runs in the new process, calls the function, and writes its value to a file.
"""

import asyncio
import importlib
import os
import sys
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rollwright.rollout.agent_session import AgentSession

RESULT_FILE = "result.json"

_OUTPUT_BYTES = 64 * 1024
"""Kept of what the function prints, for the error line of a process that ends without a result."""


class Result(msgspec.Struct, frozen=True):
    """How the function ended."""

    value: Any = None
    error: str | None = None
    """Class of its exception."""
    message: str = ""


class EnvironmentSession(msgspec.Struct, frozen=True):
    """The session of a function in a process of its own: the way to the gateway."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class ProcessAgent:
    """Plays a task by a function in a process of its own."""

    function: str
    """As `module:function`."""
    timeout: float
    folder: Path
    """Of the configuration."""

    async def __call__(self, task: Any, session: "AgentSession") -> Any:
        # imported here: the new process needs none of these, and starts the sooner
        from rollwright.agents import EpisodeFailure
        from rollwright.rollout.command import TASK_FILE, CommandLimits, agent_environment, run_command
        from rollwright.trajectory import Boundary, ErrorRecord

        with TemporaryDirectory(prefix="rollwright-agent-", ignore_cleanup_errors=True) as place:
            (Path(place) / TASK_FILE).write_bytes(msgspec.json.encode(task, enc_hook=str))
            command = (sys.executable, "-m", __name__, self.function, place, str(self.folder), *sys.path)
            environment = agent_environment(session, self.folder)
            limits = CommandLimits(self.timeout, _OUTPUT_BYTES)
            await run_command(command, limits, environment, session, cwd=None)
            result = msgspec.json.decode((Path(place) / RESULT_FILE).read_bytes(), type=Result)
        if result.error is not None:
            turns = len(session.trajectory.turns)
            raise EpisodeFailure(ErrorRecord(Boundary.AGENT, result.error, result.message, turns))
        return result.value


def main(name: str, place: str, folder: str, *paths: str) -> None:
    """Calls the function `name` with the task in the folder `place`, and writes the result there."""
    sys.path += [each for each in (*paths, folder) if each not in sys.path]
    task = msgspec.json.decode((Path(place) / "task.json").read_bytes())
    session = EnvironmentSession(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    try:
        module, _, attribute = name.partition(":")
        value = getattr(importlib.import_module(module), attribute)(task, session)
        encoded = msgspec.json.encode(Result(asyncio.run(_awaited(value)) if isawaitable(value) else value))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the worker's line tells it
        line = " ".join(str(error).split())
        encoded = msgspec.json.encode(Result(error=type(error).__name__, message=line))
    (Path(place) / RESULT_FILE).write_bytes(encoded)


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main(*sys.argv[1:])
