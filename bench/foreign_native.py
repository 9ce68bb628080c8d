"""The native side of `foreign.py`: verifiers' own runner, in the interpreter that has it.

    python foreign_native.py HARNESS URL CONCURRENT ROLLOUTS WARMUP

HARNESS is `foreign_harness` (in this process) or `null` (as shipped: a program for each answer).
"""

import asyncio
import os
import resource
import sys
from importlib.metadata import version

import aiohttp
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

import foreign_harness
import foreign_taskset
from overhead_episode import Cell, Order, allow_open_files, measure, report


async def run(harness: str, order: Order) -> Cell:
    seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": "foreign_taskset"}, "player": seat}))
    tasks = list(env.taskset)
    ctx = ModelContext("simulated", EvalClientConfig(base_url=order.url, api_key_var="NO_API_KEY_IS_NEEDED"))
    played = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as pool, env.serving():
        foreign_harness.PooledHarness.pool = pool

        async def play() -> bool:
            nonlocal played
            played += 1
            (slot,) = env.slots(tasks[played % len(tasks)])
            episode = await env.run_slot(slot, ctx)
            return (
                episode.ok and episode.num_turns == foreign_taskset.TURNS and episode.traces[0].reward == 1.0
            )

        before = _programs()
        cell = await measure(play, order, f"verifiers {version('verifiers')}")
    return Cell(**{**vars(cell), "cpu_seconds": cell.cpu_seconds + _programs() - before})


def _programs() -> float:
    """CPU seconds of the programs that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


if __name__ == "__main__":
    harness = sys.argv.pop(1)
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    report(asyncio.run(run(harness, order)))
