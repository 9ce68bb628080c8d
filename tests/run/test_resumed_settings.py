"""A run is resumed with the settings that it was begun with: others are refused, or said, before anything is played."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rollwright.config import RunConfig, build
from rollwright.errors import ConfigError
from rollwright.run.run import Run
from rollwright.run.worker_settings import leave_settings
from rollwright.store.opening import open_store

SETTINGS: dict[str, Any] = {
    "name": "lake",
    "seed": 1,
    "policy": {"kind": "random"},
    "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
}


async def begun(tmp_path: Path, config: RunConfig) -> tuple[str, list[str]]:
    store = str(tmp_path / "store.db")
    async with Run(config, store=store) as run:
        batch = await run.get_batch()
    return store, [each.group_id for each in batch.groups]


@pytest.mark.parametrize("override", ["seed=2", "train_env_manager.group_size=4"])
async def test_a_resume_that_would_mix_two_runs_is_refused_and_changes_nothing(
    tmp_path: Path, override: str
) -> None:
    store, delivered = await begun(tmp_path, build(SETTINGS))
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        async with Run(build(SETTINGS, [override]), store=store, delivered=delivered):
            pass
    looked_at = await open_store(store)
    found = await looked_at.get_resources_by_id("lake")
    assert found is not None
    assert build(found.resources["config"]) == build(SETTINGS)
    await looked_at.close()


async def test_a_resume_with_another_pace_goes_on_and_says_what_changed(tmp_path: Path) -> None:
    store, delivered = await begun(tmp_path, build(SETTINGS))
    async with Run(build(SETTINGS, ["max_inflight=3"]), store=store, delivered=delivered) as run:
        assert [str(each) for each in run.changes] == ["max_inflight: None → 3"]
        batch = await run.get_batch()
    assert not {each.group_id for each in batch.groups} & set(delivered)


def test_the_command_refuses_another_seed_and_takes_more_steps(crash_lab: Any) -> None:
    config = crash_lab.folder / "crash.yaml"
    config.write_text(yaml.safe_dump({**SETTINGS, "name": "crash"}), encoding="utf-8")
    crash_lab.do("run", "crash.yaml")
    _, errors = crash_lab.finish(crash_lab.start("resume", "runs/crash", "seed=7", "max_steps=2"), code=2)
    assert "seed: 1 → 7" in errors
    shown = crash_lab.do("resume", "runs/crash", "max_steps=2")
    assert "resumed with another setting: max_steps: 1 → 2" in shown
    edited = crash_lab.run_folder / "config.yaml"
    edited.write_text(
        edited.read_text().replace("seed: 1", "seed: 9").replace("max_steps: 2", "max_steps: 3")
    )
    _, errors = crash_lab.finish(crash_lab.start("resume", "runs/crash"), code=2)
    assert "seed: 1 → 9" in errors


async def test_another_model_may_play_as_long_as_nothing_was_handed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the first has begun is played anew; a run whose name begins alike is left alone."""
    store = await open_store(str(tmp_path / "store.db"))
    settings = {
        **SETTINGS,
        "policy": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "large"},
    }
    config = build(settings)
    await leave_settings(store, config, resumed=False, handed_out=False)
    for rollout in ("lake.train-g0-m0", "lake.val3-g0-m0", "lake.2.train-g0-m0"):
        await store.enqueue_rollout({}, rollout_id=rollout)
    smaller = build(settings, ["policy.model=small"])
    with pytest.raises(ConfigError, match=r"policy\.model"):
        await leave_settings(store, smaller, resumed=True, handed_out=True)
    (change,) = await leave_settings(store, smaller, resumed=True, handed_out=False)
    assert change.key == "policy.model"
    assert [each.rollout_id for each in await store.query_rollouts()] == ["lake.2.train-g0-m0"]
    assert "2 rollouts begin anew" in caplog.text
    await store.close()
