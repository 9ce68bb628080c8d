"""The peer before its rewrite: `verifiers` 0.1 and its `MultiTurnEnv`, in a virtual environment of its own.

Its in-process path, which has no proxy between the environment and the engine: one client for all rollouts,
one reward that looks at nothing, nothing written to disk.
"""

from importlib.metadata import version
from typing import Any

import uvloop
import verifiers as vf
from datasets import Dataset
from verifiers.clients import resolve_client
from verifiers.types import ClientConfig

from overhead_episode import (
    MODEL,
    OBSERVATION,
    OPENING,
    SYSTEM,
    TURNS,
    Cell,
    Order,
    allow_open_files,
    measure,
    report,
)


class LakeEnv(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content=OBSERVATION)]


async def always(completion: Any) -> float:
    return 1.0


async def run(order: Order) -> Cell:
    rows = Dataset.from_list([{"question": OPENING, "answer": ""}])
    env = LakeEnv(max_turns=TURNS, dataset=rows, system_prompt=SYSTEM, rubric=vf.Rubric(funcs=[always]))
    row = env.get_dataset()[0]
    config = ClientConfig(api_base_url=order.url, api_key_var="NO_API_KEY_IS_NEEDED")
    client = resolve_client(config)

    async def play() -> bool:
        output = await env.run_rollout(row, client, MODEL, sampling_args={})
        return output.get("error") is None and output["metrics"]["num_turns"] == TURNS

    cell = await measure(play, order, f"verifiers {version('verifiers')}")
    await client.close()
    return cell


if __name__ == "__main__":
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    report(uvloop.run(run(order)))
