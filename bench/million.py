"""How long does it take to resume a run that has a million finished rollouts behind it, and one with a million in its queue?

    python bench/million.py [--sizes 10000,100000,1000000] [--queued 1000,1000000] [--only finished|queued]

One step of a real run is played by the `rollwright` command: 1,000 rollouts of one turn on the simulated engine, with a SQLite
store. Its records are then written again under the ids of later steps, with the writers that runs use for the log and the files
beside it, and as rows of the store, until the folder has the wanted number. `rollwright resume RUN max_steps=…` then plays one
more step, and `rollwright show RUN` reads it. Counted are CPU seconds and peak memory of the whole command, and of a resumed run
the CPU seconds until it plays again; what follows is the new step, and the summary over all steps. The first row, with
1,000 rollouts, is what the commands take in any case. A million rollouts take 4 GB of disk, removed afterwards.

A second table has runs that open many rollouts ahead of their batches, with an engine that is so slow that nearly all wait in
the queue. A run is interrupted when all are in the store, resumed and interrupted again when it plays, and resumed with a fast
engine for one batch of 1,000, after which it ends and cancels the rest. Each command counts as a whole, with its exit.
"""

import argparse
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil
import yaml
from rich import box
from rich.table import Table

from results_file import RESULTS, write_results
from rollwright.cli.console import console
from rollwright.run.folder import RunFolder, RunReader

STEP, GROUP = 1_000, 5
"""Rollouts of a step and of a group."""
SIZES = (10_000, 100_000, 1_000_000)
QUEUED = (1_000, 100_000, 1_000_000)
INFLIGHT = 64
MOST_SECONDS = 20.0
NAME = "million"
_ATTEMPT_BITS = 20
"""An attempt's number is its rollout's place, shifted by so many bits, and its own number."""


def begin(*words: str, cwd: Path) -> "subprocess.Popen[bytes]":
    """Starts `rollwright` with one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollwright", *words],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def command(*words: str, cwd: Path, plays: Path | None = None) -> dict[str, float]:
    """Runs `rollwright`; CPU seconds, seconds and peak memory. `plays`: a file that appears when the run plays again; CPU seconds
    until then are counted, too."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = begin(*words, cwd=cwd)
    until = watch(process, plays) if plays is not None else {}
    _, error = process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: {error.decode().strip().splitlines()[-1]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The largest of all children so far: sizes rise, so it is the last one's, or it has not grown.
    return {"cpu_seconds": cpu, "seconds": time.monotonic() - began, "mib": after.ru_maxrss / 1024} | until


def watch(process: "subprocess.Popen[bytes]", plays: Path) -> dict[str, float]:
    """CPU seconds and memory of the process when the file appears."""
    found = psutil.Process(process.pid)
    while process.poll() is None:
        if plays.exists():
            times = found.cpu_times()
            return {
                "plays_cpu_seconds": times.user + times.system,
                "plays_mib": found.memory_info().rss / 2**20,
            }
        time.sleep(0.02)
    return {}


def settings() -> dict[str, Any]:
    return {
        "name": NAME,
        "max_steps": 1,
        "rollout_batch_size": STEP,
        "max_inflight": 256,
        "policy": {"kind": "simulated", "slots": 256, "tokens_per_second": 1e6, "mean_tokens": 4},
        "custom_envs": {"Lake": {"env_type": "FrozenLake", "max_steps": 1}},
        "train_env_manager": {"num_env_groups": STEP // GROUP, "group_size": GROUP, "tags": ["Lake"]},
    }


def later(name: str, steps: int) -> str:
    """The id of a group or rollout, so many steps later."""
    stream, _, rest = name.partition("-g")
    index, mark, member = rest.partition("-m")
    return f"{stream}-g{int(index) + steps * STEP // GROUP}{mark}{member}"


def multiply(run: Path, steps: int) -> None:
    """Writes the run's first step again, as the steps from 1 on."""
    reader = RunReader(run)
    trajectories, costs = list(reader.trajectories()), reader.costs()
    (metrics,) = reader.metrics()
    (run / "summary.json").unlink()  # as after a crash
    folder = RunFolder.reopen(run)
    for step in range(1, steps):
        for each in trajectories:
            moved = msgspec.structs.replace(
                each, rollout_id=later(each.rollout_id, step), group_id=later(each.group_id, step)
            )
            folder.add_trajectory(moved.rollout_id, moved.to_bytes())
        folder.add_costs([{**row, "rollout_id": later(row["rollout_id"], step)} for row in costs])
        folder.add_metrics(
            {**metrics, "step": step, "groups": [later(each, step) for each in metrics["groups"]]}
        )
    folder.log.close()
    with sqlite3.connect(run / "store.db") as store:
        for table, key in (("rollouts", "place"), ("attempts", "number"), ("completions", "cursor")):
            cursor = store.execute(f"SELECT * FROM {table} ORDER BY {key}")
            names = [each[0] for each in cursor.description]
            first = cursor.fetchall()
            marks = ", ".join("?" * len(names))
            store.executemany(
                f"INSERT INTO {table} VALUES ({marks})",
                (
                    moved_row(table, dict(zip(names, row, strict=True)), step)
                    for step in range(1, steps)
                    for row in first
                ),
            )


def moved_row(table: str, row: dict[str, Any], steps: int) -> tuple[Any, ...]:
    row["place"] += steps * STEP
    if "rollout_id" in row:
        row["rollout_id"] = later(row["rollout_id"], steps)
    if row["attempt_id"] is not None:
        row["attempt_id"] += f".{steps}"
    if table == "rollouts":
        episode = msgspec.msgpack.decode(row["input"])
        episode |= {
            "group_id": later(episode["group_id"], steps),
            "group": episode["group"] + steps * STEP // GROUP,
        }
        row["input"] = msgspec.msgpack.encode(episode)
    if table == "attempts":
        row["number"] += steps * STEP << _ATTEMPT_BITS
    if table == "completions":
        row["cursor"] += steps * STEP
    return tuple(row.values())


def measure(size: int, at: Path) -> dict[str, Any]:
    (at / "run.yaml").write_text(yaml.safe_dump(settings()))
    command("run", "run.yaml", "--no-live", cwd=at)
    run = at / "runs" / NAME
    if size > STEP:
        multiply(run, size // STEP)
    disk = sum(each.stat().st_size for each in run.iterdir())
    (run / "live.json").unlink(missing_ok=True)
    shown = command("show", str(run), cwd=at)
    resumed = command(
        "resume", str(run), f"max_steps={size // STEP + 1}", "--no-live", cwd=at, plays=run / "live.json"
    )
    rows = RunReader(run).metrics()
    assert len(rows) == size // STEP + 1, "exactly one more step was played"
    return {"rollouts": size, "disk_mb": disk / 1e6, "resume": resumed, "show": shown}


def queue_settings(size: int) -> dict[str, Any]:
    """A run that opens so many rollouts ahead, and plays next to none of them."""
    changed = {
        "max_steps": 1_000_000,
        "max_inflight": INFLIGHT,
        "async_generation_ratio": size / STEP,
        "policy": {"kind": "simulated", "slots": INFLIGHT, "tokens_per_second": 0.1, "mean_tokens": 4},
    }
    manager = settings()["train_env_manager"] | {"num_env_groups": 2 * size // GROUP}
    return settings() | changed | {"train_env_manager": manager}


def interrupted(*words: str, cwd: Path, when: Callable[[], bool]) -> dict[str, float]:
    """Runs `rollwright` and interrupts it; CPU seconds and peak memory until then, and CPU seconds of all."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = begin(*words, cwd=cwd)
    found = psutil.Process(process.pid)
    while process.poll() is None and not when():
        time.sleep(0.05)
    times, memory = found.cpu_times(), found.memory_info()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    if process.returncode != 128 + signal.SIGINT:
        raise SystemExit(f"{' '.join(words)}: {error.decode().strip().splitlines()[-1:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "until_cpu_seconds": times.user + times.system,
        "until_mib": memory.rss / 2**20,
        "cpu_seconds": cpu,
        "mib": after.ru_maxrss / 1024,
    }


def measure_queue(size: int, at: Path) -> dict[str, Any]:
    (at / "run.yaml").write_text(yaml.safe_dump(queue_settings(size)))
    run = at / "runs" / NAME
    opened = interrupted("run", "run.yaml", "--no-live", cwd=at, when=lambda: enqueued(run) >= size)
    live = run / "live.json"
    resumed = interrupted("resume", str(run), "--no-live", cwd=at, when=live.exists)
    fast = ("max_steps=1", "policy.tokens_per_second=1e6")
    ended = command("resume", str(run), *fast, "--no-live", cwd=at)
    with sqlite3.connect(run / "store.db") as store:
        counts = dict(store.execute("SELECT status, count(*) FROM rollouts GROUP BY status"))
    assert sum(counts.values()) >= size, "all were opened"
    assert set(counts) == {"succeeded", "cancelled"}, f"not all have ended: {counts}"
    return {"rollouts": size, "open": opened, "resume": resumed, "end": ended}


def enqueued(run: Path) -> int:
    """Rollouts in the store of a run that may not have one yet."""
    try:
        with closing(sqlite3.connect(f"file:{run / 'store.db'}?mode=ro", uri=True)) as store:
            return int(store.execute("SELECT coalesce(max(place), 0) FROM rollouts").fetchone()[0])
    except sqlite3.Error:
        return 0


def rows_of(sizes: list[int], measured: Callable[[int, Path], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for size in sizes:
        with TemporaryDirectory() as folder:
            yield measured(size, Path(folder))


def show_finished(sizes: list[int]) -> list[dict[str, Any]]:
    table = Table(box=box.SIMPLE_HEAD, title="finished rollouts behind a run", title_justify="left")
    for name in ("rollouts", "disk MB", "plays after CPU s", "resume: CPU s", "MiB", "show: CPU s", "MiB"):
        table.add_column(name, justify="right")
    found = []
    for row in rows_of([STEP, *sizes], measure):
        found.append(row)
        console().print(
            f"{row['rollouts']:,}: plays after {row['resume'].get('plays_cpu_seconds', 0.0):.1f} s of CPU, "
            f"ends after {row['resume']['cpu_seconds']:.1f}"
        )
        cells = [
            f"{row[name][key]:,.{digits}f}"
            for name in ("resume", "show")
            for key, digits in (("cpu_seconds", 1), ("mib", 0))
        ]
        plays = f"{row['resume'].get('plays_cpu_seconds', 0.0):.1f}"
        table.add_row(f"{row['rollouts']:,}", f"{row['disk_mb']:,.0f}", plays, *cells)
    console().print(table)
    return found


def show_queued(sizes: list[int]) -> list[dict[str, Any]]:
    table = Table(box=box.SIMPLE_HEAD, title="rollouts in the queue of a run", title_justify="left")
    for name in (
        "rollouts",
        "all open: CPU s",
        "MiB",
        "plays again: CPU s",
        "MiB",
        "plays a batch and ends: CPU s",
        "MiB",
    ):
        table.add_column(name, justify="right")
    found = []
    for row in rows_of(sizes, measure_queue):
        found.append(row)
        cells = [
            f"{row[name][key]:,.{digits}f}"
            for name, cpu in (
                ("open", "until_cpu_seconds"),
                ("resume", "until_cpu_seconds"),
                ("end", "cpu_seconds"),
            )
            for key, digits in ((cpu, 1), ("mib", 0))
        ]
        table.add_row(f"{row['rollouts']:,}", *cells)
        console().print(f"{row['rollouts']:,} queued: {row}")
    console().print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--queued", default=",".join(map(str, QUEUED)))
    parser.add_argument("--only", choices=("finished", "queued"), help="the other figures are kept")
    told = parser.parse_args()
    before = json.loads((RESULTS / "million.json").read_text())
    figures = {name: before[name] for name in ("sizes", "queued") if name in before}
    if told.only != "queued":
        figures["sizes"] = show_finished(list(map(int, told.sizes.split(","))))
    if told.only != "finished":
        figures["queued"] = show_queued(list(map(int, told.queued.split(","))))
    write_results("million", {"most_seconds": MOST_SECONDS, **figures})


if __name__ == "__main__":
    main()
