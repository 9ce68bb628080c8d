"""The simulated engine, as a process that can be killed and that writes down every answer it was paid for.

Always true: an answer is in the file before the client gets it, and no two answers are the same, over all restarts. So it
can be told afterwards which answers became turns, and whether one that was recorded was ever asked for again.
"""

import asyncio
import hashlib
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import uvloop

from rollwright.simulation.http_messages import Request
from rollwright.simulation.server import InjectedFault, ServerOptions, SimulatedConnection, SimulatedServer

STAMP = re.compile(r"\[(\d+-\d+)\]")
"""What every answer begins with."""


class Paid(NamedTuple):
    """One answer. Times are the machine's monotonic ones, the same in every process."""

    stamp: str
    prompt: str
    """Digest of what was asked."""
    shown: list[str]
    """Earlier answers that stand in the question: an answer is recorded before anybody is shown it."""
    arrived: float
    answered: float


class _Recording(SimulatedServer):
    def __init__(self, options: ServerOptions, life: int, file: Path) -> None:
        super().__init__(options)
        self.life = life
        self.arrived: dict[int, float] = {}
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def count_request(self) -> int:
        number = super().count_request()
        self.arrived[number] = time.monotonic()
        return number

    def note(self, number: int, request: Request) -> str:
        """Writes the answer down; gives its stamp."""
        stamp = f"{self.life}-{number}"
        asked = msgspec.json.decode(request.body)["messages"]
        digest = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:24]
        said = [each["content"] for each in asked if each["role"] == "assistant"]
        shown = [found[1] for each in said if (found := STAMP.match(each))]
        paid = Paid(stamp, digest, shown, self.arrived.pop(number), time.monotonic())
        os.write(self._file, msgspec.json.encode(paid) + b"\n")
        return stamp


class _RecordingConnection(SimulatedConnection):
    def __init__(self, server: _Recording) -> None:
        super().__init__(server)
        self._recording = server

    def _answer(
        self, request: Request, number: int, fault: InjectedFault | None, text: str, share: float = 1.0
    ) -> None:
        super()._answer(request, number, fault, f"[{self._recording.note(number, request)}]{text}", share)


async def _serve(options: ServerOptions, life: int, file: Path) -> None:
    server = _Recording(options, life, file)
    listener = await asyncio.get_running_loop().create_server(
        lambda: _RecordingConnection(server), "127.0.0.1", options.port
    )
    await listener.serve_forever()


def serve_engine(port: int, life: int, seed: int, file: Path) -> None:
    """For a process of its own; lasts until it is killed. `life`: how often it was started before."""
    options = ServerOptions(port=port, latency=0.06, latency_sigma=0.6, seed=seed * 1000 + life)
    uvloop.run(_serve(options, life, file))


def read_paid(file: Path) -> list[Paid]:
    if not file.exists():
        return []
    whole = file.read_bytes().rpartition(b"\n")[0]  # it may have been killed while it wrote
    return [msgspec.json.decode(line, type=Paid) for line in whole.splitlines()]
