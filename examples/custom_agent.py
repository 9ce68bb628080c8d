"""An agent of one's own: a plain async function, played by workers, without an environment class.

    python examples/custom_agent.py

Each call of `session.generate` is recorded as a turn and journalled, so a worker that dies costs at most the
generation it was waiting for. From a shell, with tasks as JSON lines and an engine named in `config.yaml`:

    rollwright enqueue tasks.jsonl --store sums.db --config config.yaml
    PYTHONPATH=examples rollwright worker --store sums.db --agent custom_agent:agent
"""

import asyncio
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollwright import (
    AttemptedRollout,
    Message,
    Session,
    Trajectory,
    WorkerSettings,
    load_config,
    open_store,
    run_worker,
    simulated_server,
)
from rollwright.run.worker_settings import CONFIG_KEY

TASKS = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in (1, 2, 3) for b in (1, 2, 3)]


async def agent(task: dict[str, Any], session: Session) -> float:
    """Asks, and asks once more when the answer is wrong; returns the reward."""
    turn = await session.generate([Message("user", task["question"])])
    if _number(turn.text) == task["answer"]:
        return 1.0
    turn = await session.generate([Message("user", "That is wrong. Once more.")], continues=turn)
    return 0.5 if _number(turn.text) == task["answer"] else 0.0


def _number(text: str) -> int | None:
    found = re.search(r"<answer>(\d+)</answer>", text)
    return int(found[1]) if found else None


async def main() -> None:
    """Two workers share the tasks; an engine without a model guesses one of three answers."""
    with TemporaryDirectory() as folder:
        address = str(Path(folder) / "sums.db")
        async with simulated_server(latency=0.05, actions=("3", "4", "5")) as engine:
            await _enqueue(address, engine.base_url)
            await _play(address)


async def _enqueue(address: str, base_url: str) -> None:
    config = load_config(
        {
            "name": "sums",
            "policy": {"kind": "openai", "base_url": base_url, "model": "simulated"},
        }
    )
    store = await open_store(address)
    await store.add_resources({CONFIG_KEY: config.model_dump(mode="json")}, resources_id=config.name)
    for task in TASKS:
        await store.enqueue_rollout(task, resources_id=config.name)
    await store.close()


async def _play(address: str) -> None:
    def say(claimed: AttemptedRollout) -> None:
        print(f"{claimed.attempt.worker_id} took {claimed.rollout_id}: {claimed.input['question']}")

    stop = asyncio.Event()
    settings = WorkerSettings(max_env_num_per_worker=2)
    workers = [
        asyncio.create_task(
            run_worker(address, f"worker-{number}", settings, function=agent, on_claim=say, stop=stop)
        )
        for number in range(2)
    ]
    store = await open_store(address)
    rollouts = await store.query_rollouts()
    await store.wait_for_rollouts([each.rollout_id for each in rollouts])
    stop.set()
    await asyncio.gather(*workers)
    kept = await store.get_trajectories([each.rollout_id for each in rollouts])
    for each in rollouts:
        trajectory = Trajectory.from_bytes(kept[each.rollout_id])
        print(f"{each.input['question']} reward {trajectory.reward:g} after {len(trajectory.turns)} turns")
    await store.close()


if __name__ == "__main__":
    asyncio.run(main())
