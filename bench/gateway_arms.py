"""The gateways that `bench/gateway.py` compares: how each is started, and how a rollout is opened and ended at it.

True of all arms: one process serves, in front of the same simulated engine; its CPU time is read from the system. rLLM's
gateway and the litellm proxy are installed in environments of their own. Opening and ending a rollout is: at ours, creating
and committing it; at rLLM's, creating a session and fetching its traces; at the litellm proxy, which knows no rollouts,
nothing.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from venvs import peer_python

ADMIN = "rw-admin-bench"
START_SECONDS = 180.0
"""Time that a server may take to answer; the litellm proxy imports for half a minute on a busy machine."""

OURS = "import typer; from rollwright.cli.gateway import gateway; typer.run(gateway)"
RLLM = ("rllm-model-gateway==0.1.0",)
LITELLM = ("litellm[proxy]==1.106.2",)
TICKS = os.sysconf("SC_CLK_TCK")


class Place(NamedTuple):
    """Where an agent's calls go."""

    url: str
    key: str
    rollout: str = ""


@dataclass
class Arm:
    """A server in front of the engine."""

    name: str
    url: str
    pid: int | None
    http: httpx.AsyncClient

    async def open(self) -> Place:
        return Place(self.url, "none")

    async def end(self, place: Place, turns: int) -> None:
        """Nothing to end."""

    def cpu_seconds(self) -> float:
        """CPU time of the server's process, and of those that it has started."""
        return 0.0 if self.pid is None else sum(map(_cpu_seconds, [self.pid, *_children(self.pid)]))


class Ours(Arm):
    async def open(self) -> Place:
        made = await self.http.post(
            f"{self.url}/rollouts", json={"input": None}, headers={"x-api-key": ADMIN}
        )
        told = made.raise_for_status().json()
        return Place(told["base_url"], told["api_key"], told["rollout_id"])

    async def end(self, place: Place, turns: int) -> None:
        url = f"{place.url.removesuffix('/v1')}/end"
        ended = await self.http.post(url, json={"reward": 1.0}, headers={"x-api-key": place.key})
        assert ended.raise_for_status().json()["turns"] == turns


class Rllm(Arm):
    async def open(self) -> Place:
        made = (await self.http.post(f"{self.url}/sessions", json={})).raise_for_status().json()
        return Place(f"{self.url}/sessions/{made['session_id']}/v1", "none", made["session_id"])

    async def end(self, place: Place, turns: int) -> None:
        # It writes traces behind the answers; its own engine flushes before it reads them.
        (await self.http.post(f"{self.url}/admin/flush")).raise_for_status()
        traces = await self.http.get(f"{self.url}/sessions/{place.rollout}/traces")
        assert len(traces.raise_for_status().json()) >= turns  # more if the SDK repeated a call


class Litellm(Arm):
    async def open(self) -> Place:
        return Place(f"{self.url}/v1", ADMIN)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _children(pid: int) -> list[int]:
    told = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return [each for child in map(int, told) for each in (child, *_children(child))]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@asynccontextmanager
async def served(
    command: list[str], url: str, health: str, http: httpx.AsyncClient, **variables: str
) -> AsyncIterator[int]:
    """A server's process id, from the moment on at which it answers."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    try:
        started = time.monotonic()
        while True:
            try:
                if (await http.get(f"{url}{health}")).is_success:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.2)
            if process.returncode is not None or time.monotonic() - started > START_SECONDS:
                raise RuntimeError(f"{' '.join(command[:4])} did not start")
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def ours(folder: Path, engine: str, store: str) -> tuple[list[str], str]:
    """The command of our gateway, and its address."""
    port = free_port()
    config = f'policy: {{kind: openai, base_url: "{engine}", model: simulated}}\n'
    (folder / "ours.yaml").write_text(config, encoding="utf-8")
    command = [sys.executable, "-c", OURS, str(folder / "ours.yaml"), "--store", store, "--port", str(port)]
    return command, f"http://127.0.0.1:{port}"


def rllm(folder: Path, engine: str, store: str) -> tuple[list[str], str]:
    port = free_port()
    python = peer_python("gateway-rllm", RLLM)
    command = [str(python.parent / "rllm-model-gateway"), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--worker", engine, "--store", store, "--db-path", str(folder / "rllm.db")]
    return [*command, "--log-level", "error"], f"http://127.0.0.1:{port}"


def litellm(folder: Path, engine: str, store: str) -> tuple[list[str], str]:
    port = free_port()
    python = peer_python("gateway-litellm", LITELLM)
    config = (
        "model_list:\n- model_name: simulated\n"
        f"  litellm_params: {{model: openai/simulated, api_base: '{engine}', api_key: none}}\n"
        f"general_settings: {{master_key: {ADMIN}}}\nlitellm_settings: {{telemetry: false}}\n"
    )
    (folder / "litellm.yaml").write_text(config, encoding="utf-8")
    command = [str(python.parent / "litellm"), "--config", str(folder / "litellm.yaml")]
    return [*command, "--host", "127.0.0.1", "--port", str(port)], f"http://127.0.0.1:{port}"


ARMS: dict[str, tuple[Callable[[Path, str, str], tuple[list[str], str]], type[Arm], str, str]] = {
    "gateway, memory": (ours, Ours, "memory", "/health"),
    "gateway, SQLite": (ours, Ours, "sqlite", "/health"),
    "rLLM's gateway 0.1.0, memory": (rllm, Rllm, "memory", "/health"),
    "rLLM's gateway 0.1.0, SQLite": (rllm, Rllm, "sqlite", "/health"),
    "litellm proxy 1.106, records nothing": (litellm, Litellm, "", "/health/liveliness"),
}
"""How each is started, what it is spoken to by, its store, and the path at which it says that it is up."""


@asynccontextmanager
async def running(name: str, folder: Path, engine: str, http: httpx.AsyncClient) -> AsyncIterator[Arm]:
    start, kind, store, health = ARMS[name]
    own = str(folder / "ours.db") if kind is Ours and store == "sqlite" else store
    command, url = await asyncio.to_thread(start, folder, engine, own)
    variables = {"ROLLWRIGHT_GATEWAY_KEY": ADMIN, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    async with served(command, url, health, http, **variables) as pid:
        yield kind(name, url, pid, http)
