"""Our side of `foreign.py`: the tag `verifiers:` in a run, from the store to `get_batch()`.

    python foreign_rollwright.py WAY URL CONCURRENT ROLLOUTS WARMUP

CPU seconds are those of this process and of the processes of the environment.
"""

import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil
import uvloop

from overhead_episode import MODEL, Cell, Order, Stopwatch, allow_open_files, report
from rollwright.config import build
from rollwright.run.run import Run

TURNS = 4
GROUP_SIZE = 8
"""A usual size for group-relative training."""

TASKSET = Path(__file__).resolve().with_name("foreign_taskset.py")


async def run(way: str, order: Order) -> Cell:
    config = build(
        {
            "name": "foreign",
            "max_inflight": order.concurrent,
            "policy": {"kind": "openai", "base_url": order.url, "model": MODEL},
            "custom_envs": {"Lake": {"env_type": f"verifiers:{TASKSET}", "env_config": {"way": way}}},
            "train_env_manager": {
                "num_env_groups": order.concurrent // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "tags": ["Lake"],
            },
        }
    )
    async with Run(config) as running:
        await running.get_batch(order.warmup)
        before = _environments()
        watch = Stopwatch()
        batch = await running.get_batch(order.rollouts)
        durations = [
            each.duration for each in batch.trajectories if len(each.turns) == TURNS and each.reward == 1.0
        ]
        cell = watch.cell(order, durations, f"rollwright {version('rollwright')}")
        return replace(cell, cpu_seconds=cell.cpu_seconds + _environments() - before)


def _environments() -> float:
    """CPU seconds of the processes that this one has started."""
    spent = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in spent)


if __name__ == "__main__":
    way = sys.argv.pop(1)
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    report(uvloop.run(run(way, order)))
