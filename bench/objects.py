"""What trajectories as objects save in the store's database, and what they cost a report.

    python bench/objects.py

Rollouts are started and finished with a trajectory of 8 KB by 64 callers at a time, on SQLite: with the trajectory in its row,
as an object in a folder, and as an object in an S3-compatible server on loopback (moto, in Python: its own CPU is counted apart,
in its process). Sizes are those of the database file after a checkpoint, at 1,000 and at 10,000 rollouts (S3: 500 and 1,000);
what a million would take follows from the slope between the two. The arms take turns in chunks, so that all meet the same load.

Prints a table and writes `bench/results/objects.json`. Takes about two minutes of CPU.
"""

import asyncio
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.store.api import Store
from rollwright.store.opening import open_store

BYTES = 8192
CALLERS = 64
CHUNK = 500
SIZES = {"row": (1000, 10_000), "folder": (1000, 10_000), "s3": (500, 1000)}
MILLION = 1_000_000


class Arm:
    """One way to keep trajectories, with the rollouts so far."""

    def __init__(self, name: str, folder: Path, place: str | None) -> None:
        self.name = name
        self.file = folder / f"{name}.db"
        self._place = place
        self.done = 0
        self.cpu = 0.0
        self.wall = 0.0
        self.sizes: dict[int, int] = {}
        self._luck = random.Random(name)

    async def open(self) -> None:
        self.store: Store = await open_store(str(self.file), trajectories=self._place)

    async def play(self, count: int) -> None:
        room = asyncio.Semaphore(CALLERS)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(self._finish(f"ro-{self.done + number}", room) for number in range(count)))
        self.cpu += time.process_time() - cpu
        self.wall += time.perf_counter() - wall
        self.done += count
        if self.done in SIZES[self.name]:
            self.sizes[self.done] = self._size()

    async def _finish(self, name: str, room: asyncio.Semaphore) -> None:
        async with room:
            claimed = await self.store.start_rollout({"task": 1}, rollout_id=name)
            data = self._luck.randbytes(BYTES)
            await self.store.update_attempt(
                name, claimed.attempt.attempt_id, status="succeeded", trajectory=data
            )

    def _size(self) -> int:
        """Bytes of the database, without what its log still holds."""
        with sqlite3.connect(self.file) as database:
            database.execute("PRAGMA wal_checkpoint(FULL)")
            [[pages]] = database.execute("PRAGMA page_count")
            [[size]] = database.execute("PRAGMA page_size")
            [[free]] = database.execute("PRAGMA freelist_count")
        return int((pages - free) * size)

    def figures(self) -> dict[str, Any]:
        small, large = SIZES[self.name]
        slope = (self.sizes[large] - self.sizes[small]) / (large - small)
        return {
            "rollouts": self.done,
            "bytes_per_rollout": slope,
            "million_mb": slope * MILLION / 1e6,
            "cpu_us_per_rollout": 1e6 * self.cpu / self.done,
            "wall_us_per_rollout": 1e6 * self.wall / self.done,
        }


def start_s3() -> tuple[subprocess.Popen[bytes], str]:
    """A server in a process of its own, with one bucket; credentials are in the environment alone."""
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    boto3.client("s3").create_bucket(Bucket="bench")
    return server, "s3://bench/objects"


async def measure(folder: Path, s3: str) -> dict[str, Any]:
    arms = [
        Arm("row", folder, None),
        Arm("folder", folder, (folder / "objects").as_uri()),
        Arm("s3", folder, s3),
    ]
    for arm in arms:
        await arm.open()
    while waiting := [arm for arm in arms if arm.done < SIZES[arm.name][1]]:
        for arm in waiting:
            await arm.play(CHUNK)
    for arm in arms:
        await arm.store.close()
    return {arm.name: arm.figures() for arm in arms}


def show(console: Console, arms: dict[str, Any]) -> None:
    table = Table(
        "trajectories in",
        "rollouts",
        "bytes of the database each",
        "a million, MB",
        "CPU µs each",
        "× the row's",
    )
    for name, row in arms.items():
        table.add_row(
            name,
            f"{row['rollouts']:,}",
            f"{row['bytes_per_rollout']:,.0f}",
            f"{row['million_mb']:,.0f}",
            f"{row['cpu_us_per_rollout']:,.0f}",
            f"{row['cpu_us_per_rollout'] / arms['row']['cpu_us_per_rollout']:.1f}",
        )
    console.print(table)


def main() -> None:
    console = Console()
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="rollwright-objects-"))
    server, place = start_s3()
    try:
        arms = asyncio.run(measure(folder, place))
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    show(console, arms)
    figures = {"load_before": load, "trajectory_bytes": BYTES, "callers": CALLERS, "arms": arms}
    console.print(f"written to {write_results('objects', figures)}")


if __name__ == "__main__":
    main()
