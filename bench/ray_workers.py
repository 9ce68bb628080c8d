"""Do Ray actors play as many episodes a second as worker processes of this machine?

    python bench/ray_workers.py

The same run with 1, 2 and 4 workers, each with the same number of environments and a simulated engine of its own, once
as processes that open the run's SQLite store and once as actors of a local Ray that reach it
over TCP with a token. Counted are finished rollouts, from when every worker has finished one. Every figure is the
better of two, taken in turns, because whatever else the machine does can only make one smaller.

A last table has processes with an engine that answers at once, and the processor time of a rollout in the main process and in
the workers, which open the store's file themselves: their ratio is the number of workers that one main process can feed.
`python bench/ray_workers.py --processes` measures that table alone and keeps the other figures.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from rich import box
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.config import RunConfig, build
from rollwright.run.ray_fleet import AUTO, LOCAL, RayCluster
from rollwright.run.run import Run
from rollwright.store.records import RolloutStatus

WORKERS = (1, 2, 4)
ROUNDS = 2
SECONDS = 8.0
ENVS_PER_WORKER, GROUP_SIZE = 32, 8
SPARE = 4
"""Rollouts that are open for each environment, so that no worker ever waits for one."""
TURN_SECONDS, NO_SECONDS = 0.02, 1e-5
"""Mean time of a generation: so little that the workers and the store are the limit, not the engine; and practically none."""
MEAN_TOKENS = 40.0


def config(workers: int, turn_seconds: float = TURN_SECONDS) -> RunConfig:
    envs = workers * ENVS_PER_WORKER
    return build(
        {
            "name": "bench",
            "max_inflight": envs,
            "async_generation_ratio": 4,
            "limits": {"heartbeat_interval": 0.5},
            "policy": {
                "slots": ENVS_PER_WORKER,
                "mean_tokens": MEAN_TOKENS,
                "tokens_per_second": MEAN_TOKENS / turn_seconds,
            },
            "train_env_manager": {
                "num_env_groups": SPARE * envs // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "max_env_num_per_worker": ENVS_PER_WORKER,
                "tags": ["FrozenLake"],
            },
        }
    )


async def take_batches(run: Run) -> None:
    while True:
        await run.get_batch()


async def measure(workers: int, ray: str | None) -> dict[str, Any]:
    """Episodes a second, and how long it took until all workers played."""
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store.db")
        async with Run(config(workers), store=store, processes=workers, ray=ray) as run:
            taking = asyncio.create_task(take_batches(run))
            while sum(each.finished > 0 for each in run.activity.elsewhere.values()) < workers:
                await asyncio.sleep(0.05)
            ready = time.monotonic()
            before = (await run.store.statistics())[RolloutStatus.SUCCEEDED]
            await asyncio.sleep(SECONDS)
            played = (await run.store.statistics())[RolloutStatus.SUCCEEDED] - before
            seconds = time.monotonic() - ready
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
    return {"episodes_per_second": played / seconds, "seconds_to_start": ready - began}


async def measure_cpu(workers: int) -> dict[str, Any]:
    """Episodes a second with an engine that answers at once, and milliseconds of CPU for each, here and in the workers."""
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store.db")
        async with Run(config(workers, NO_SECONDS), store=store, processes=workers) as run:
            taking = asyncio.create_task(take_batches(run))
            while sum(each.finished > 0 for each in run.activity.elsewhere.values()) < workers:
                await asyncio.sleep(0.05)
            others = psutil.Process().children(recursive=True)
            began, main, theirs = time.monotonic(), time.process_time(), sum(map(cpu_of, others))
            before = (await run.store.statistics())[RolloutStatus.SUCCEEDED]
            await asyncio.sleep(SECONDS)
            played = (await run.store.statistics())[RolloutStatus.SUCCEEDED] - before
            figures = {
                "workers": workers,
                "episodes_per_second": played / (time.monotonic() - began),
                "main_cpu_ms": 1000 * (time.process_time() - main) / played,
                "worker_cpu_ms": 1000 * (sum(map(cpu_of, others)) - theirs) / played,
            }
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
    return figures


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def show_cpu() -> list[dict[str, Any]]:
    tries = [run_async(measure_cpu(workers)) for _ in range(ROUNDS) for workers in WORKERS[:2]]
    rows = [
        max(
            (each for each in tries if each["workers"] == workers),
            key=lambda each: each["episodes_per_second"],
        )
        for workers in WORKERS[:2]
    ]
    table = Table(box=box.SIMPLE_HEAD, title="an engine that answers at once", title_justify="left")
    for name in ("workers", "episodes/s", "main process: CPU ms", "workers: CPU ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["workers"]),
            f"{row['episodes_per_second']:,.0f}",
            f"{row['main_cpu_ms']:.2f}",
            f"{row['worker_cpu_ms']:.2f}",
        )
    console().print(table)
    return rows


async def compare() -> list[dict[str, Any]]:
    screen = console()
    rows = []
    async with RayCluster(LOCAL):
        for workers in WORKERS:
            found: dict[str, list[dict[str, Any]]] = {"processes": [], "actors": []}
            for _ in range(ROUNDS):
                for kind, ray in (("processes", None), ("actors", AUTO)):
                    with screen.status(f"{workers} {kind} …"):
                        found[kind].append(await measure(workers, ray))
            best = {
                kind: max(tries, key=lambda each: each["episodes_per_second"])
                for kind, tries in found.items()
            }
            rows.append({"workers": workers, **best})
    return rows


def main() -> None:
    if sys.argv[1:] == ["--processes"]:
        before = json.loads((RESULTS / "ray_workers.json").read_text())
        kept = {name: before[name] for name in ("envs_per_worker", "workers")}
        write_results("ray_workers", {**kept, "no_engine": show_cpu()})
        return
    rows = run_async(compare())
    table = Table(box=box.SIMPLE_HEAD, title="processes and Ray actors", title_justify="left")
    for name in (
        "workers",
        "processes: episodes/s",
        "actors: episodes/s",
        "ratio",
        "start s",
        "actors' start s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        processes, actors = row["processes"], row["actors"]
        row["ratio"] = actors["episodes_per_second"] / processes["episodes_per_second"]
        table.add_row(
            str(row["workers"]),
            f"{processes['episodes_per_second']:,.0f}",
            f"{actors['episodes_per_second']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{processes['seconds_to_start']:.1f}",
            f"{actors['seconds_to_start']:.1f}",
        )
    console().print(table)
    write_results(
        "ray_workers", {"envs_per_worker": ENVS_PER_WORKER, "workers": rows, "no_engine": show_cpu()}
    )


if __name__ == "__main__":
    main()
