"""The smallest real node: a random Llama, a game with graded rewards, and a process around it that can be killed.

`start` forks nodes from a server that has imported the heavy libraries once; each is a process of its own, with its own
home, key, store, trainer and network session.
"""

import asyncio
import ctypes
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from rollwright.config import RunConfig, build
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.errors import RollwrightError
from rollwright.models.tiny import tiny_llama, tiny_tokenizer
from rollwright.swarm.heartbeat import Heartbeat, NodeStatus, read_heartbeat, read_status
from rollwright.swarm.transports.base import Announced, FetchFailed, FetchProblem, Peer, Transport

TAG = "OddOnes"
CUT = "cut"
"""A file of this name in a node's home takes its network away."""
PATIENCE = 240.0
"""Seconds for anything to happen; on an idle machine nothing that is waited for takes more than a few."""
ROUNDS = 200
"""Rounds of all nodes together within which anything happens: a busy machine gets more time, a fault does not."""
LAST = 1200.0
"""Seconds after which nodes that do no rounds at all are given up."""
CLONE_NEWNET = 0x40000000
MAX_LAG = 3
"""Rounds, as it is when it is not set."""


class OddOnes:
    """One answer, worth the share of odd characters in it. Takes its time, so that nodes do not fight for the cores."""

    prompts = PromptTemplates(system="", opening="{observation}", turn="{observation}")
    instruction = ""

    def __init__(self, pause: float = 0.12) -> None:
        self._pause = pause

    async def reset(self, seed: int) -> Reset:
        return Reset(f"{seed % 1_000_000}", {})

    async def step(self, answer: str) -> Step:
        await asyncio.sleep(self._pause)
        reward = sum(ord(each) % 2 for each in answer) / max(len(answer), 1)
        return Step("", reward, True, False, {"success": reward > 0.5, "valid": True})

    async def close(self) -> None:
        """Holds nothing."""


def save_model(folder: Path) -> Path:
    tokenizer = tiny_tokenizer(["0123456789", "odd and even"], vocabulary_size=270)
    tiny_llama(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(model: Path, communication: Mapping[str, Any], **more: Any) -> RunConfig:
    content: dict[str, Any] = {
        "name": "node",
        "max_steps": 100_000,
        "sequence_length": 64,
        "policy": {
            "kind": "torch",
            "model": str(model),
            "renderer": "template",
            "device": "cpu",
            "threads": 1,
        },
        "training": {"learning_rate": 1e-3, "checkpoint_steps": 2, "device": "cpu"},
        "swarm": {
            "name": "tiny",
            "local_groups": 2,
            "external_groups": 2,
            "communication": {"fetch_timeout": 2.0, **communication},
        },
        "custom_envs": {TAG: {"env_type": "tiny_swarm:OddOnes", "max_steps": 1, "max_tokens_per_step": 6}},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": [TAG]},
    }
    return build({**content, **more})


class CutTransport:
    """A network that is gone as long as a file says so."""

    def __init__(self, inner: Transport, cut: Path) -> None:
        self._inner = inner
        self._cut = cut

    async def announce(self, manifest: bytes, deadline: float = 10.0) -> None:
        if self._cut.exists():
            raise RollwrightError("no network")
        await self._inner.announce(manifest, deadline)

    async def manifests(self, since: int = 0, deadline: float = 10.0) -> Announced:
        if self._cut.exists():
            raise RollwrightError("no network")
        return await self._inner.manifests(since, deadline)

    async def publish(self, digest: str, content: bytes) -> None:
        await self._inner.publish(digest, content)

    async def fetch(self, peer: str, digest: str, max_bytes: int, deadline: float = 10.0) -> bytes:
        if self._cut.exists():
            raise FetchFailed(FetchProblem.DEADLINE, digest)
        return await self._inner.fetch(peer, digest, max_bytes, deadline)

    def peers(self) -> Sequence[Peer]:
        there = not self._cut.exists()
        return [Peer(each.id, each.alive and there, each.seen) for each in self._inner.peers()]

    def prefer(self, peer: str) -> None:
        self._inner.prefer(peer)

    async def close(self) -> None:
        await self._inner.close()


def node_process(home: Path, config: dict[str, Any], clock_offset: float, namespace: str | None) -> None:
    """What a process does until it is killed."""
    if namespace is not None:
        _enter(namespace)
    home.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(home / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_node(home, build(config), clock_offset))


async def _node(home: Path, config: RunConfig, clock_offset: float) -> None:
    import signal

    from rollwright.run.build_swarm import open_transport, swarm_of
    from rollwright.run.swarm_node import SwarmNode
    from rollwright.swarm.identity import IDENTITY_FILE, load_identity

    def clock() -> float:
        return time.time() + clock_offset

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    identity = load_identity(home / IDENTITY_FILE)
    transport = CutTransport(await open_transport(swarm_of(config), identity, clock=clock), home / CUT)
    node = SwarmNode(config, home, transport=transport, clock=clock)
    try:
        await node.run()
    except asyncio.CancelledError:
        return


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)


class Nodes:
    """Processes of nodes, by name; all end with the test."""

    def __init__(self, folder: Path, communication: Callable[[str], Mapping[str, Any]]) -> None:
        self._folder = folder
        self._communication = communication
        self._model = save_model(folder / "model")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["tiny_swarm", "torch", "transformers", "rollwright.run.swarm_node"]
        )
        self.processes: dict[str, ForkServerProcess] = {}

    def home(self, name: str) -> Path:
        return self._folder / name

    def start(
        self, name: str, *, clock_offset: float = 0.0, namespace: str | None = None, **more: Any
    ) -> None:
        config = configuration(self._model, self._communication(name), **more).model_dump(mode="json")
        process = self._context.Process(
            target=node_process, args=(self.home(name), config, clock_offset, namespace), name=name
        )
        process.start()
        self.processes[name] = process

    def signal(self, name: str, number: int) -> None:
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def stop(self, name: str) -> int | None:
        """Asks it to end; its exit code."""
        self.processes[name].terminate()
        self.processes[name].join(PATIENCE)
        return self.processes[name].exitcode

    def stop_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()

    def status(self, name: str) -> NodeStatus:
        found = read_status(self.home(name))
        assert found is not None
        return found

    def heartbeat(self, name: str) -> Heartbeat:
        found = read_heartbeat(self.home(name))
        assert found is not None
        return found

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The record: one row for each round."""
        file = self.home(name) / "metrics.jsonl"
        lines = file.read_text().rpartition("\n")[0].splitlines() if file.is_file() else []
        return [json.loads(each) for each in lines]

    def foreign(self, name: str) -> int:
        return sum(each["foreign_groups"] for each in self.rows(name))

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        began, first = time.monotonic(), self._rounds()
        while not holds():
            waited = time.monotonic() - began
            if waited > LAST or (waited > PATIENCE and self._rounds() - first > ROUNDS):
                logs = {name: (self.home(name) / "log").read_text()[-2000:] for name in self.processes}
                raise AssertionError(f"waited {waited:.0f} s for: {what}; logs: {logs}")
            time.sleep(0.1)

    def _rounds(self) -> int:
        return sum(len(self.rows(name)) for name in self.processes)

    def wait_rounds(self, count: int, *names: str) -> None:
        """Until each of them has done so many more rounds than now."""
        goals = {name: len(self.rows(name)) + count for name in names}
        self.wait(
            f"{count} more rounds of {names}", lambda: all(len(self.rows(n)) >= g for n, g in goals.items())
        )

    def wait_foreign(self, count: int, *names: str) -> None:
        """Until each of them has trained on so many more foreign groups than now."""
        goals = {name: self.foreign(name) + count for name in names}
        self.wait(
            f"{count} more foreign groups of {names}",
            lambda: all(self.foreign(n) >= g for n, g in goals.items()),
        )


def check_records(nodes: Nodes, *names: str) -> None:
    """Nothing stale, nothing twice, nothing of oneself."""
    for name in names:
        given = [(row["round"], each) for row in nodes.rows(name) for each in row["foreign"]]
        groups = [each["group"] for _, each in given]
        assert len(set(groups)) == len(groups), f"{name} trained on a group twice"
        assert all(taken - each["round"] <= MAX_LAG for taken, each in given), (
            f"{name} trained on stale groups"
        )
        assert nodes.status(name).peer not in {each["peer"] for _, each in given}


def given_by(nodes: Nodes, taker: str, peer: str) -> int:
    """Groups of a peer that a node has trained on."""
    return sum(each["peer"] == peer for row in nodes.rows(taker) for each in row["foreign"])
