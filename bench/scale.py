"""Does a process with 100,000 episodes in flight still cost as little for each as one with 1,000?

    python bench/scale.py

Each size runs in a process of its own: FrozenLake episodes in the whole pipeline against the simulated engine, which
has a slot for every episode, so that nothing caps them. The engine's speed is set so that about the same number of
turns comes due each second at every size; what is compared is memory for each episode in flight and CPU for each turn.

The engine answers nobody before all episodes are in flight, because the first would end while the last are opened.
From then on as many are kept in flight: twice as many rollouts are open, and whoever has played one takes the next,
while batches are handed out. The clock starts when so much time has passed that beginnings, turns and ends come mixed,
and stops after several turns of each episode. The smaller sizes are measured before and after the largest, which takes
minutes, and their mean counts: a machine that becomes slower meanwhile slows them, too. **Exit** is the time from the end of
the last measurement, with all episodes in flight, to the end of the process. On two idle cores it takes about a quarter of
an hour; `python bench/scale.py --sizes 1000,50000` measures others.
"""

import asyncio
import gc
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from results_file import write_results
from rollwright.cli.console import console
from rollwright.cli.event_loop import run_async
from rollwright.config import RunConfig, build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.run.run import Run
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.lengths import LogNormalLength
from rollwright.simulation.players import SkilledPlayer

SIZES = (1_000, 10_000, 50_000, 100_000)
TURNS_PER_SECOND = 1_500
"""About half of what one core can do, so that the event loop's lag shows hiccups and not overload."""
MEAN_TOKENS = 40.0
MAX_STEPS = 4
"""A group is complete with its longest episode, and at 100,000 episodes a turn takes a minute."""
GROUP_SIZE = 5
BATCH = 500
"""Trajectories, at every size: what is handed out at once holds the event loop for as long everywhere."""
MIXING_TURNS = 2
"""Each lasts as long as a turn takes on average; by then as many episodes end as begin."""
MEASURED_TURNS = 3
"""For each episode in flight: about as many as one has."""
LEAST_SECONDS = 20.0
"""A small size is measured for at least so long."""
MOST_SECONDS = 600.0
"""Twice what the largest size takes; a machine that needs longer has something else to do."""
LEAST_INFLIGHT = 0.9
"""Share of its size that must be in flight on average; with less, the figures would be those of a smaller size."""
MOST_GROWTH = 1.3


def resident() -> int:
    """Bytes of memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def resident_peak() -> int:
    """Most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class HeldEngine(SimulatedEngine):
    """Begins to work when it is let go."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.let_go = asyncio.Event()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        await self.let_go.wait()
        return await super().generate(prompt, sampling)


async def lag(samples: list[float], interval: float = 0.01) -> None:
    """How much later than asked for the event loop comes back."""
    clock = time.perf_counter  # the loop's own clock counts milliseconds
    while True:
        due = clock() + interval
        await asyncio.sleep(interval)
        samples.append(clock() - due)


async def take_batches(run: Run) -> None:
    while True:
        await run.get_batch()


def made(size: int, turn_seconds: float) -> tuple[RunConfig, HeldEngine]:
    engine = HeldEngine(
        slots=size,
        tokens_per_second=MEAN_TOKENS / turn_seconds,
        lengths=LogNormalLength(MEAN_TOKENS, 0.5),
        player=SkilledPlayer(0.7),
        track_episodes=False,
    )
    config = build(
        {
            "name": "scale",
            "max_inflight": size,
            "rollout_batch_size": min(BATCH, size),
            "async_generation_ratio": 2 * size / min(BATCH, size),
            "limits": {"generate_timeout": 1e6, "episode_timeout": 1e6, "lease_seconds": 1e6},
            "custom_envs": {"Lake": {"env_type": "FrozenLake", "max_steps": MAX_STEPS}},
            "train_env_manager": {
                "num_env_groups": 2 * size // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "tags": ["Lake"],
            },
        }
    )
    return config, engine


async def import_everything() -> None:
    """What is imported at first use is no episode's memory."""
    config, engine = made(GROUP_SIZE, 0.01)
    engine.let_go.set()
    async with Run(config, policy=engine) as run:
        await run.get_batch()


async def play(size: int) -> dict[str, Any]:
    turn_seconds = size / TURNS_PER_SECOND
    config, engine = made(size, turn_seconds)
    await import_everything()
    before = resident()
    lags: list[float] = []
    async with Run(config, policy=engine) as run:
        while run.activity.inflight < size:
            await asyncio.sleep(0.1)
        engine.let_go.set()
        taking = asyncio.create_task(take_batches(run))
        await asyncio.sleep(MIXING_TURNS * turn_seconds)
        held = resident() - before
        watching = asyncio.create_task(lag(lags))
        inflight = []
        wall, cpu = time.monotonic(), time.process_time()
        turns, claimed = run.activity.turns, run.activity.claimed
        while run.activity.turns - turns < MEASURED_TURNS * size or time.monotonic() - wall < LEAST_SECONDS:
            await asyncio.sleep(0.1)
            inflight.append(run.activity.inflight)
            if taking.done():
                taking.result()
            if time.monotonic() - wall > MOST_SECONDS:
                raise SystemExit(f"{size} episodes: the machine is too busy to keep them going")
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        turns, claimed = run.activity.turns - turns, run.activity.claimed - claimed
        watching.cancel()
        taking.cancel()
        leaving = time.time()
        exit_cpu = time.process_time()
    exit_cpu = time.process_time() - exit_cpu
    if (mean_inflight := sum(inflight) / len(inflight)) < LEAST_INFLIGHT * size:
        raise SystemExit(f"{size} episodes: the machine is too busy, only {mean_inflight:.0f} were in flight")
    lags.sort()
    return {
        "episodes": size,
        "mean_inflight": mean_inflight,
        "begun": claimed,
        "turns": turns,
        "turns_per_second": turns / wall,
        "kib_per_episode": held / size / 1024,
        "mib": resident_peak() >> 20,
        "exit_cpu_seconds": exit_cpu,
        "leaving": leaving,
        "cpu_ms_per_turn": 1000 * cpu / turns,
        "lag_p50_ms": 1000 * lags[len(lags) // 2],
        "lag_p99_ms": 1000 * lags[int(len(lags) * 0.99)],
    }


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(run_async(play(int(sys.argv[1])))), flush=True)
        gc.freeze()  # as the `rollwright` command ends
        return
    sizes = tuple(map(int, sys.argv[2].split(","))) if sys.argv[1:2] == ["--sizes"] else SIZES
    screen = console()
    measured: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for size in (*sizes, *reversed(sizes[:-1])):
        with screen.status(f"{size:,} episodes in flight …"):
            done = subprocess.run([sys.executable, __file__, str(size)], capture_output=True, text=True)
            ended = time.time()
            if done.returncode:
                raise SystemExit(done.stderr.strip().splitlines()[-1])
            row = json.loads(done.stdout)
            row["exit_seconds"] = ended - row.pop("leaving")
            measured[size].append(row)
    rows = [{key: mean(each[key] for each in runs) for key in runs[0]} for runs in measured.values()]
    table = Table(box=box.SIMPLE_HEAD, title="episodes in flight in one process", title_justify="left")
    for name in (
        "episodes",
        "turns/s",
        "KiB/episode",
        "MiB",
        "CPU ms/turn",
        "lag p50 ms",
        "lag p99 ms",
        "exit s",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['episodes']:,}",
            f"{row['turns_per_second']:,.0f}",
            f"{row['kib_per_episode']:.1f}",
            f"{row['mib']:,.0f}",
            f"{row['cpu_ms_per_turn']:.3f}",
            f"{row['lag_p50_ms']:.2f}",
            f"{row['lag_p99_ms']:.2f}",
            f"{row['exit_seconds']:.2f}",
        )
    screen.print(table)
    growth = {key: rows[-1][key] / rows[0][key] for key in ("kib_per_episode", "cpu_ms_per_turn")}
    for key, ratio in growth.items():
        verdict = "met" if ratio <= MOST_GROWTH else "NOT met"
        screen.print(
            f"{key}: {ratio:.2f}x from {sizes[0]:,} to {sizes[-1]:,} (target <= {MOST_GROWTH}): {verdict}"
        )
    write_results("scale", {"sizes": rows, "growth": growth})


if __name__ == "__main__":
    main()
