"""The peer: `verifiers` (v1), run by the interpreter of its own virtual environment.

The lightest path it has for a multi-turn episode: its single-agent environment on its local runtime, a
harness that plays in this process, one reward that looks at nothing, and nothing written to disk.
"""

from importlib.metadata import version

import aiohttp
import uvloop
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

import overhead_verifiers_plugin as plugin
from overhead_episode import MODEL, TURNS, Cell, Order, allow_open_files, measure, report


async def run(order: Order) -> Cell:
    agent = {"harness": {"id": plugin.__name__}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": plugin.__name__}, "agent": agent}))
    (task,) = env.taskset
    client = EvalClientConfig(base_url=order.url, api_key_var="NO_API_KEY_IS_NEEDED")
    ctx = ModelContext(model=MODEL, client=client)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as pool, env.serving():
        plugin.InProcessHarness.pool = pool

        async def play() -> bool:
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, ctx)
            return episode.ok and episode.num_turns == TURNS

        return await measure(play, order, f"verifiers {version('verifiers')}")


if __name__ == "__main__":
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    report(uvloop.run(run(order)))
