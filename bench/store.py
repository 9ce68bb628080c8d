"""Throughput of the stores beside agentlightning's, and the cost of an operation among 100,000 other rollouts.

    python bench/store.py [--only-sqlite] [ROUNDS]

Four workers enqueue, claim, heartbeat and finish rollouts one by one. Every arm is a process of its own; the arms
alternate, forwards and backwards, and the result is the median over the rounds of the ratio of two arms in the same
round: a machine that is busy for a while slows both. The CPU time is printed beside the wall time, to tell a slow disk
from a slow store. The second part runs the same load with few and with very many other rollouts in the store, which gives
the cost of one operation at scale. Prints tables and writes `bench/results/store.json`, with every round in it.
agentlightning gets a virtual environment of its own under `.venvs/`, created on first use (800 MB). Takes about twenty
minutes, and a few more for the environment. Every arm has rollwright's garbage collector settings, so that no collection
of all objects falls into a measurement.

With `--only-sqlite` only the throughput of SQLite is measured, beside agentlightning's memory store, in half a minute;
nothing is written.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from results_file import write_results
from rollwright.run import gc_tuning
from venvs import peer_python

HERE = Path(__file__).resolve().parent
PEER = ["agentlightning==0.3.0"]
"""The last release that has a store."""

OURS = ("memory", "sqlite", "postgres", "http", "http_sqlite")
THEIRS = ("memory", "http")
ROUNDS = 5

PLAYED = 2_000
PLAYED_BY_SLOW_PEER = 400
"""Fewer rollouts for agentlightning over HTTP, which plays some hundred a second."""
PLAYED_IN_MEMORY = 20_000
"""For the memory store's cost at scale: fewer would be over in an instant, and the collector's pauses would not average
out."""
FEW, MANY = 2_000, 100_000
"""Rollouts that wait in the store during the scale measurement; as many more are held by other workers."""

MEMORY_RATIO, SQLITE_RATIO, HTTP_RATIO = 10.0, 2.0, 10.0
"""Promised ratios of throughput: memory against their memory store, SQLite on disk against their memory store, HTTP
against HTTP."""
SCALE_RATIO, SQLITE_SCALE_RATIO = 1.3, 1.2
"""Promised ratios of the cost of an operation among many rollouts to that among few."""

OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Keeps a library that agentlightning imports from downloading a price list during the measurement."""

COLLECTOR = inspect.getfile(gc_tuning)
"""File of the collector settings, loaded by the peer's interpreter, which does not have rollwright."""

Figures = Mapping[str, Any]


def run(python: Path | str, script: object, *arguments: object) -> Figures:
    command = [str(python), str(HERE / str(script)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | OFFLINE)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(
            f"{script} {arguments}: {(done.stderr or 'it said nothing').strip().splitlines()[-1]}"
        )
    figures: Figures = json.loads(lines[-1])
    return figures


def speed(
    rounds: int, peer: Path, console: Console, ours: Sequence[str] = OURS, theirs: Sequence[str] = THEIRS
) -> dict[str, dict[str, Any]]:
    """Measures the rollouts per second of every arm."""
    arms: list[tuple[str, Path | str, list[object]]] = []
    for arm in ours:
        arms.append((arm, sys.executable, ["store_load.py", arm, 0, PLAYED]))
    for arm in theirs:
        played = PLAYED if arm == "memory" else PLAYED_BY_SLOW_PEER
        arms.append((f"agentlightning {arm}", peer, ["store_agentlightning.py", arm, 0, played, COLLECTOR]))
    seen: dict[str, list[Figures]] = {name: [] for name, *_ in arms}
    for number in range(rounds):
        with console.status(f"speed, round {number + 1} of {rounds}"):
            for name, python, command in arms if number % 2 == 0 else reversed(arms):
                seen[name].append(run(python, *command))
    return {arm: rates(each) for arm, each in seen.items()}


def rates(rounds: Sequence[Figures]) -> dict[str, Any]:
    def each(*phases: str) -> list[float]:
        return [seen["played"] / sum(seen[phase] for phase in phases) for seen in rounds]

    cpu = [seen["client_cpu_seconds"] / seen["played"] * 1e6 for seen in rounds]
    every_round = each("enqueue_seconds", "play_seconds")
    return {
        "enqueued_per_second": median(each("enqueue_seconds")),
        "played_per_second": median(each("play_seconds")),
        "rollouts_per_second": median(every_round),
        "client_cpu_us_per_rollout": median(cpu),
        "every_round": every_round,
    }


def scale(rounds: int, peer: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Measures the microseconds per rollout among few and among many others."""
    arms: list[tuple[Path | str, str, str, str, list[object]]] = []
    for arm in OURS[:4]:
        arms.append((sys.executable, "store_load.py", arm, arm, []))
    arms.append((peer, "store_agentlightning.py", "memory", "agentlightning memory", [COLLECTOR]))
    found: dict[str, dict[str, Any]] = {}
    for python, script, arm, name, more in arms:
        costs: dict[int, list[float]] = {FEW: [], MANY: []}
        cpu: dict[int, list[float]] = {FEW: [], MANY: []}
        for number in range(rounds):
            for kept in (FEW, MANY) if number % 2 == 0 else (MANY, FEW):
                with console.status(f"scale of {name}, {kept:,} others, round {number + 1} of {rounds}"):
                    played = PLAYED_IN_MEMORY if name == "memory" else PLAYED
                    figures = run(python, script, arm, kept, played, *more)
                seconds = figures["enqueue_seconds"] + figures["play_seconds"]
                costs[kept].append(seconds / figures["played"] * 1e6)
                cpu[kept].append(figures["client_cpu_seconds"] / figures["played"] * 1e6)
        ratios = [many / few for few, many in zip(costs[FEW], costs[MANY], strict=True)]
        found[name] = {
            "us_among_few": median(costs[FEW]),
            "us_among_many": median(costs[MANY]),
            "ratio": median(ratios),
            "client_cpu_ratio": median(cpu[MANY]) / median(cpu[FEW]),
            "every_round": ratios,
        }
    return found


def compare(speeds: Mapping[str, Figures], ours: str, theirs: str) -> float:
    """The median over the rounds of our throughput divided by theirs."""
    pairs = zip(speeds[ours]["every_round"], speeds[f"agentlightning {theirs}"]["every_round"], strict=True)
    return median(mine / other for mine, other in pairs)


def promises(speeds: Mapping[str, Figures], scales: Mapping[str, Figures]) -> list[dict[str, Any]]:
    against = "times agentlightning's memory store"
    found = [
        (f"memory, {against}", compare(speeds, "memory", "memory"), MEMORY_RATIO),
        (f"SQLite on disk, {against}", compare(speeds, "sqlite", "memory"), SQLITE_RATIO),
        ("HTTP, times agentlightning's HTTP store", compare(speeds, "http", "http"), HTTP_RATIO),
    ]
    kept = [
        {"promise": text, "measured": got, "wanted": want, "kept": got >= want} for text, got, want in found
    ]
    for name in OURS[:4]:
        got, want = scales[name]["ratio"], SQLITE_SCALE_RATIO if name == "sqlite" else SCALE_RATIO
        text = f"{name}: cost among {MANY:,} others, times that among {FEW:,}"
        kept.append({"promise": text, "measured": got, "wanted": want, "kept": got <= want})
    return kept


def show_speed(console: Console, speeds: Mapping[str, Figures]) -> None:
    table = Table("store", "enqueued/s", "played/s", "rollouts/s", "client CPU µs", title="speed, 4 workers")
    for arm, rate in speeds.items():
        table.add_row(arm, *(f"{value:,.0f}" for value in rate.values() if isinstance(value, float)))
    console.print(table)


def show(console: Console, figures: Mapping[str, Any]) -> None:
    show_speed(console, figures["speed"])
    scales = Table(
        "store",
        f"µs among {FEW:,}",
        f"µs among {MANY:,}",
        "ratio",
        "ratio of CPU",
        title="one rollout among others",
    )
    for arm, cost in figures["scale"].items():
        scales.add_row(
            arm,
            f"{cost['us_among_few']:,.0f}",
            f"{cost['us_among_many']:,.0f}",
            f"{cost['ratio']:.2f}",
            f"{cost['client_cpu_ratio']:.2f}",
        )
    console.print(scales)
    show_promises(console, figures["promises"])


def show_promises(console: Console, promises: Sequence[Figures]) -> None:
    kept = Table("promise", "measured", "wanted", "kept")
    for row in promises:
        kept.add_row(
            row["promise"], f"{row['measured']:,.2f}", f"{row['wanted']:g}", "yes" if row["kept"] else "NO"
        )
    console.print(kept)


def main() -> None:
    console = Console()
    options = argparse.ArgumentParser(description="Throughput of the stores beside agentlightning's.")
    options.add_argument("rounds", nargs="?", type=int, default=ROUNDS, help="rounds of every arm")
    options.add_argument(
        "--only-sqlite", action="store_true", help="measure only SQLite, beside the peer's memory store"
    )
    given = options.parse_args()
    rounds, load = given.rounds, os.getloadavg()[0]
    peer = peer_python("agentlightning", PEER, console)
    if given.only_sqlite:
        found = speed(rounds, peer, console, ["sqlite"], ["memory"])
        show_speed(console, found)
        ratio = compare(found, "sqlite", "memory")
        console.print(
            f"SQLite on disk: {ratio:.2f}× agentlightning's memory store, promised {SQLITE_RATIO:g}×"
        )
        return
    speeds = speed(rounds, peer, console)
    scales = scale(rounds, peer, console)
    figures = {
        "load_before": load,
        "rounds": rounds,
        "peer": PEER[0],
        "speed": speeds,
        "scale": scales,
        "promises": promises(speeds, scales),
    }
    show(console, figures)
    console.print(f"written to {write_results('store', figures)}")


if __name__ == "__main__":
    main()
