"""Ours: the pipeline as `rollwright run` puts it together, from the store to `get_batch()`.

Every rollout is opened in a group, claimed from the in-memory store, played by an environment manager with a
chat agent over the OpenAI-compatible policy, recorded as a trajectory, encoded, committed, and handed out in
a batch. The warm-up is a batch too.
"""

from importlib.metadata import version

import uvloop

from overhead_episode import (
    MODEL,
    OBSERVATION,
    OPENING,
    SYSTEM,
    TURNS,
    Cell,
    Order,
    Stopwatch,
    allow_open_files,
    report,
)
from rollwright.config import RunConfig
from rollwright.envs.base import PromptTemplates, Reset, Step
from rollwright.envs.registry import EnvSpec, register
from rollwright.run.run import Run

TAG = "OverheadLake"

GROUP_SIZE = 8
"""A usual size for group-relative training."""


class Lake:
    """Shows the texts that all arms show, and ends after `TURNS` answers."""

    instruction = ""
    prompts = PromptTemplates(system=SYSTEM, opening="{observation}", turn="{observation}")

    def __init__(self) -> None:
        self._answers = 0

    async def reset(self, seed: int) -> Reset:
        self._answers = 0
        return Reset(OPENING, {})

    async def step(self, answer: str) -> Step:
        self._answers += 1
        return Step(OBSERVATION, 1.0, self._answers == TURNS, False, {})

    async def close(self) -> None:
        pass


def configuration(order: Order) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "overhead",
            "max_inflight": order.concurrent,
            "policy": {"kind": "openai", "base_url": order.url, "model": MODEL},
            "train_env_manager": {
                "num_env_groups": order.concurrent // GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "tags": [TAG],
            },
        }
    )


async def run(order: Order, store: str | None = None) -> Cell:
    """With the address of a store, otherwise with one in memory."""
    register(EnvSpec(TAG, "the episode of the overhead benchmark", Lake, max_steps=TURNS))
    async with Run(configuration(order), store=store) as running:
        await running.get_batch(order.warmup)
        watch = Stopwatch()
        batch = await running.get_batch(order.rollouts)
        durations = [each.duration for each in batch.trajectories if len(each.turns) == TURNS]
        return watch.cell(order, durations, f"rollwright {version('rollwright')}")


if __name__ == "__main__":
    order = Order.from_command_line()
    allow_open_files(order.concurrent)
    report(uvloop.run(run(order)))
