"""An agent written with the plain `openai` client, recorded turn by turn with exact token ids.

    python examples/gateway_openai.py

The agent knows nothing of rollwright but an address and a key: `session.base_url` and `session.api_key`. Each worker
serves them on loopback, for each episode its own. The policy is a simulated engine without a model; name an engine of
your own in the configuration to play for real.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openai import AsyncOpenAI

from rollwright import Trajectory, WorkerSettings, load_config, open_store, run_worker, samples
from rollwright.run.worker_settings import CONFIG_KEY

TASKS = [{"topic": topic} for topic in ("rivers", "bridges", "tides")]


async def agent(task: dict[str, Any], session: Any) -> float:
    """Asks for a text, then has it shortened twice; short texts are good ones."""
    messages: list[Any] = [{"role": "user", "content": f"Write about {task['topic']}."}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Shorter!"}]
    return 1.0 / (1 + len(text))


async def main() -> None:
    with TemporaryDirectory() as folder:
        address = str(Path(folder) / "texts.db")
        config = load_config(
            {
                "name": "texts",
                "policy": {"kind": "simulated", "tokens_per_second": 2000},
                "val_env_manager": {
                    "num_env_groups": 1,
                    "tags": ["FrozenLake"],
                },  # not played: the function is
            }
        )
        store = await open_store(address)
        await store.add_resources({CONFIG_KEY: config.model_dump(mode="json")}, resources_id=config.name)
        rollouts = [await store.enqueue_rollout(task, resources_id=config.name) for task in TASKS]
        settings = WorkerSettings(max_env_num_per_worker=4, max_rollouts=len(TASKS))
        await run_worker(address, "worker-0", settings, function=agent)
        kept = await store.get_trajectories([each.rollout_id for each in rollouts])
        for each in rollouts:
            trajectory = Trajectory.from_bytes(kept[each.rollout_id])
            (sample,) = samples(trajectory)  # three calls, one token sequence
            trained = sum(sample.mask)
            print(
                f"{each.input['topic']}: {len(trajectory.turns)} turns, {trained} of {len(sample.mask)} tokens trained"
            )
        await store.close()


if __name__ == "__main__":
    asyncio.run(main())
