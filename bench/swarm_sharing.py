"""What sharing costs a node in one round: announce and pull, against an all-gather.

    python bench/swarm_sharing.py

Nodes are processes on this machine's loopback. In each round every node has made 4 groups of 25 KB. Ours signs and
announces four manifests, hears those of all others, checks them at the gate, draws J = 4 groups uniformly, fetches them
and reads them against their schema. The all-gather is that of RL Swarm: every node stores its 100 KB under one key of a
DHT (hivemind 1.1.12) and reads the key until all are there; it is given hivemind's inner node, because the class that RL
Swarm uses (`hivemind.DHT`) hangs at values of this size, which is tried and shown. Neither side plays the groups again
here: that costs both the same. A round's time is that of its slowest node; the median over the rounds counts.

Prints a table and writes `bench/results/swarm_sharing.json`. Takes about two minutes, and makes `.venvs/hivemind` first.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.swarm import content, signed
from rollwright.swarm.admission import Admission
from rollwright.swarm.identity import Identity
from rollwright.swarm.selection import in_turns
from rollwright.swarm.transports.base import digest_of
from rollwright.swarm.transports.zenoh import ZenohTransport
from rollwright.trajectory import FinishReason
from venvs import peer_python

HERE = Path(__file__).resolve().parent
HIVEMIND = ("hivemind==1.1.12",)
NODES = (2, 4, 8)
GROUPS = 4
"""That a node makes in a round, and J, that it takes."""
GROUP_BYTES = 25_000
MEMBERS = 8
ROUNDS = 20
WARM_UP = 3
"""Rounds that are not counted: connections are made, code is warm."""
FIRST_PORT = 27_600
START_SECONDS, ROUND_SECONDS, HANG_SECONDS = 120.0, 60.0, 20.0
SWARM = "bench"


def made_group(identity: Identity, index: int) -> content.SharedGroup:
    """A group of the size that eight reasoned answers have."""
    luck = random.Random(f"{identity.peer} {index}")
    room = GROUP_BYTES // MEMBERS - 64
    members = []
    for member in range(MEMBERS):
        text = "".join(luck.choices("abcdefgh ", k=room // 2))
        action = content.SharedAction(text, luck.randbytes(room // 8 * 4), FinishReason.STOP)
        members.append(content.SharedMember((action,), float(member % 2)))
    recipe = content.Recipe("bench", "1", 1, index, "0" * 64)
    return content.SharedGroup(signed.PROTOCOL, identity.peer, recipe, "bench", tuple(members))


class Node:
    """One process of ours."""

    def __init__(self, nodes: int) -> None:
        self.identity = Identity.generate()
        self.gate = Admission(SWARM, self.identity.peer)
        self.nodes = nodes
        self.cursor = 0
        self.sequence = 0

    async def join(self, place: int) -> None:
        first = f"tcp/127.0.0.1:{FIRST_PORT + self.nodes}"
        where: dict[str, Any] = {"listen": [first]} if place == 0 else {"bootstrap": [first]}
        self.transport = await ZenohTransport.open(SWARM, self.identity.peer, **where)

    async def met_all(self) -> None:
        while sum(peer.alive for peer in self.transport.peers()) < self.nodes - 1:
            await asyncio.sleep(0.05)

    async def round(self, number: int) -> int:
        """Shares and gathers; the bytes that came."""
        for index in range(GROUPS):
            await self.share(number, self.groups[index])
        heard: list[signed.Manifest] = []
        received = 0
        while len(heard) < GROUPS * (self.nodes - 1):
            announced = await self.transport.manifests(self.cursor)
            self.cursor = announced.cursor
            received += sum(map(len, announced.manifests))
            heard += [self.gate.admit(each, round=number, now=time.time()) for each in announced.manifests]
            if not announced.manifests:
                await asyncio.sleep(0.0005)
        chosen = in_turns(heard, (self.identity.peer, number))[:GROUPS]
        fetched = await asyncio.gather(
            *(self.transport.fetch(each.peer, each.digest, each.size) for each in chosen)
        )
        for data in fetched:
            content.decode(data)
        return received + sum(map(len, fetched))

    def prepare(self, number: int) -> None:
        """Groups are made before a round's clock starts."""
        self.groups = [made_group(self.identity, number * GROUPS + index) for index in range(GROUPS)]

    async def share(self, number: int, group: content.SharedGroup) -> None:
        data = content.encode(group)
        self.sequence += 1
        manifest = signed.Manifest(
            swarm=SWARM,
            peer=self.identity.peer,
            round=number,
            sequence=self.sequence,
            created=time.time(),
            env="bench",
            env_version="1",
            index=group.recipe.index,
            digest=digest_of(data),
            size=len(data),
            rewards=group.rewards,
        )
        await self.transport.publish(manifest.digest, data)
        await self.transport.announce(signed.sign_manifest(manifest, self.identity))


async def serve(place: int, nodes: int) -> None:
    """A node's process: a line in is what to do, a line out is how it went."""
    loop = asyncio.get_running_loop()
    node = Node(nodes)
    await node.join(place)
    print(json.dumps({"address": "none"}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number = int(line)
        if number == 0:
            await node.met_all()
            print(json.dumps({"met": True}), flush=True)
            continue
        node.prepare(number)
        print(json.dumps({"prepared": number}), flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        began = time.perf_counter()
        received = await node.round(number)
        print(json.dumps({"seconds": time.perf_counter() - began, "received": received}), flush=True)
    await node.transport.close()


class Arm:
    """The processes of one way to share."""

    def __init__(self, command: Sequence[str], nodes: int) -> None:
        self._command = command
        self._nodes = nodes
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        first = ""
        for place in range(self._nodes):
            process = await asyncio.create_subprocess_exec(
                *(*self._command, str(place), str(self._nodes), first),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._processes.append(process)
            said = await self._said(process, START_SECONDS)
            first = first or said["address"]
        await self._all("0", START_SECONDS)

    async def round(self, number: int) -> tuple[float, float]:
        """Seconds of the slowest node, and bytes that a node received, on average."""
        await self._all(str(number), ROUND_SECONDS)
        said = await self._all("go", ROUND_SECONDS)
        return max(each["seconds"] for each in said), sum(each["received"] for each in said) / self._nodes

    async def end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # hivemind's daemons too, which it would leave behind
            await process.wait()

    async def _all(self, line: str, seconds: float) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())
        return await asyncio.gather(*(self._said(process, seconds) for process in self._processes))

    async def _said(self, process: asyncio.subprocess.Process, seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), seconds)
        if not line:
            raise RuntimeError(f"a node ended with code {await process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


async def measured(command: Sequence[str], nodes: int) -> dict[str, float]:
    arm = Arm(command, nodes)
    try:
        await arm.start()
        rounds = [await arm.round(number) for number in range(1, WARM_UP + ROUNDS + 1)][WARM_UP:]
    finally:
        await arm.end()
    seconds = sorted(each for each, _ in rounds)
    return {
        "median_ms": median(seconds) * 1e3,
        "p90_ms": seconds[int(0.9 * len(seconds))] * 1e3,
        "received_kb": median(each for _, each in rounds) / 1e3,
    }


async def plain_dht_hangs(python: Path) -> bool:
    """Whether `hivemind.DHT.store` does not come back with one node's 100 KB."""
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(HERE / "swarm_sharing_hivemind.py"), "store", str(GROUPS * GROUP_BYTES), ""),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), START_SECONDS)  # it is up
        said = await asyncio.wait_for(process.stdout.readline(), HANG_SECONDS)
        return said != b"stored\n"
    except TimeoutError:
        return True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def all_figures(console: Console) -> dict[str, Any]:
    python = peer_python("hivemind", HIVEMIND, console)
    ours = [sys.executable, str(HERE / "swarm_sharing.py"), "node"]
    theirs = [str(python), str(HERE / "swarm_sharing_hivemind.py"), "node"]
    found: dict[str, Any] = {}
    for nodes in NODES:
        with console.status(f"{nodes} nodes"):
            found[str(nodes)] = {
                "announce_and_pull": await measured(ours, nodes),
                "all_gather": await measured(theirs, nodes),
            }
    with console.status("hivemind.DHT.store"):
        hangs = await plain_dht_hangs(python)
    return {"groups": GROUPS, "group_bytes": GROUP_BYTES, "nodes": found, "dht_store_of_100_kb_hangs": hangs}


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(
        *("nodes", "ours, ms (p90)", "all-gather, ms (p90)", "× faster"),
        *("ours, KB in", "all-gather, KB in", "least possible, KB", "ours / least"),
    )
    least = figures["groups"] * figures["group_bytes"] / 1e3
    for nodes, row in figures["nodes"].items():
        ours, theirs = row["announce_and_pull"], row["all_gather"]
        table.add_row(
            nodes,
            f"{ours['median_ms']:.1f} ({ours['p90_ms']:.1f})",
            f"{theirs['median_ms']:.1f} ({theirs['p90_ms']:.1f})",
            f"{theirs['median_ms'] / ours['median_ms']:.1f}",
            f"{ours['received_kb']:.0f}",
            f"{theirs['received_kb']:.0f}",
            f"{least:.0f}",
            f"{ours['received_kb'] / least:.2f}",
        )
    console.print(table)
    hangs = "did not come back" if figures["dht_store_of_100_kb_hangs"] else "came back"
    console.print(f"hivemind.DHT.store of one node's {least:.0f} KB {hangs} in {HANG_SECONDS:g} s")


def main() -> None:
    if sys.argv[1:2] == ["node"]:
        asyncio.run(serve(int(sys.argv[2]), int(sys.argv[3])))
        return
    console = Console()
    load = os.getloadavg()[0]
    figures = {"load_before": load, "rounds": ROUNDS, **asyncio.run(all_figures(console))}
    show(console, figures)
    console.print(f"written to {write_results('swarm_sharing', figures)}")


if __name__ == "__main__":
    main()
