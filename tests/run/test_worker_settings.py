"""A worker that knows nothing but a store makes each run's policy once, and closes it."""

import asyncio
from typing import Any

import pytest

from rollwright.agents import Session
from rollwright.config import build
from rollwright.engines.base import Prompt, Sampling
from rollwright.errors import ConfigError
from rollwright.run.build_agents import load_function
from rollwright.run.worker_settings import CONFIG_KEY, StoreSettingsSource
from rollwright.store.memory import MemoryStore

CONFIG = build(
    {"policy": {"kind": "oracle"}, "val_env_manager": {"num_env_groups": 1, "tags": ["FrozenLake"]}}
)
EPISODE = {
    "tag": "FrozenLake", "seed": 1, "mode": "val", "group_id": "g", "group": 0, "member": 0, "run_seed": 1,
}  # fmt: skip


class SlowStore(MemoryStore):
    """Answers after the others have asked, as any store behind a network may."""

    async def get_resources_by_id(self, resources_id: str, *, version: int | None = None):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0.01)
        return await super().get_resources_by_id(resources_id, version=version)


async def test_episodes_that_begin_together_share_one_policy() -> None:
    store = SlowStore()
    await store.add_resources({CONFIG_KEY: CONFIG.model_dump(mode="json")}, resources_id="mine")
    for _ in range(8):
        await store.enqueue_rollout(EPISODE, resources_id="mine")
    playbook = StoreSettingsSource(store)
    claimed = await store.dequeue_many_rollouts(8, "w")
    roles = await asyncio.gather(*(playbook(each) for each in claimed))
    assert len({id(role.policy) for role in roles}) == 1
    await playbook.close()
    await store.close()


async def test_a_rollout_without_settings_says_what_is_missing() -> None:
    store = MemoryStore()
    await store.enqueue_rollout(EPISODE)
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    with pytest.raises(ConfigError, match="names no run whose settings"):
        await StoreSettingsSource(store)(claimed)
    await store.close()


async def test_a_function_without_settings_is_played_and_told_if_it_asks_for_a_model() -> None:
    async def agent(task: Any, session: Session) -> float:
        return 1.0

    store = MemoryStore()
    await store.enqueue_rollout({"n": 1})
    claimed = await store.dequeue_rollout("w")
    assert claimed is not None
    playbook = StoreSettingsSource(store, agent)
    role = await playbook(claimed)
    assert role.function is agent
    with pytest.raises(ConfigError, match="enqueued without settings"):
        await role.policy.generate(Prompt("episode", ("key",), ()), Sampling())
    await playbook.close()
    await store.close()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing", "unknown `nothing`; expected module:name"),
        ("no_such_module:agent", "cannot be imported"),
        ("rollwright.errors:agent", "cannot be imported"),
        ("rollwright.rng:_MANTISSA_BITS", "is a int, not a function"),
    ],
)
def test_an_agent_that_cannot_be_found_is_refused_in_one_line(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_function(path)
