"""Advice follows from the run's own settings: nothing is recommended that is set already."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from rollwright.config import RunConfig, build
from rollwright.observe.advice import Cause, RunSetup, StoreKind, advise, more_rollouts

MANAGER = {"num_env_groups": 8, "group_size": 4, "tags": ["FrozenLake"]}


def setup(
    processes: int = 1, cores: int = 4, store: str | None = "runs/it/store.db", **content: Any
) -> RunSetup:
    config = build({"train_env_manager": MANAGER, **content})
    return RunSetup.of(config, processes=processes, cores=cores, store=store)


SETUPS = [
    setup(),
    setup(max_inflight=4, async_generation_ratio=2, rollout_batch_size=16),
    setup(processes=4, store="postgresql://h/d", train_env_manager={**MANAGER, "group_size_redundancy": 2}),
    setup(store="memory", policy={"kind": "torch", "model": "smollm2", "dtype": "bfloat16"}),
    setup(policy={"kind": "openai", "base_url": "http://h/v1", "model": "m"}),
    RunSetup.of(build({"val_env_manager": {"num_env_groups": 3, "tags": ["FrozenLake"]}})),
]


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("which", SETUPS)
def test_every_cause_has_advice_that_names_only_settings_that_exist(cause: Cause, which: RunSetup) -> None:
    said = advise(cause, which)
    assert said
    assert "\n" not in said
    known = json.dumps(RunConfig.model_json_schema()) + json.dumps(["--workers", "--slots", "--store"])
    for name in re.findall(r"`([a-z_.-]+)", said):
        assert f'"{name.removeprefix("policy.")}"' in known or name in ("step", "reset"), name


@pytest.mark.parametrize(
    ("content", "named", "unnamed"),
    [
        ({"max_inflight": 4}, ["`max_inflight` (now 4)"], ["num_env_groups", "rollout_batch_size"]),
        ({"max_inflight": 400}, ["num_env_groups", "now 32 environments"], ["max_inflight"]),
        ({}, ["num_env_groups", "rollout_batch_size", "`async_generation_ratio`"], ["max_inflight"]),
        ({"rollout_batch_size": 8}, ["`rollout_batch_size` (now 8)"], ["num_env_groups", "max_inflight"]),
        (
            {"rollout_batch_size": 8, "async_generation_ratio": 1},
            ["`async_generation_ratio` (now 1)"],
            ["let rollouts run ahead", "num_env_groups"],
        ),
        ({"async_generation_ratio": 3}, ["num_env_groups"], ["async_generation_ratio", "max_inflight"]),
    ],
)
def test_what_limits_the_rollouts_is_named_with_its_value(
    content: dict[str, Any], named: list[str], unnamed: list[str]
) -> None:
    said = more_rollouts(setup(**content))
    assert all(each in said for each in named), said
    assert not any(each in said for each in unnamed), said


def test_a_limit_that_was_never_reached_is_not_blamed() -> None:
    said = more_rollouts(replace(setup(), at_once=10))
    assert "`max_inflight` (up to 32)" in said
    assert "num_env_groups" not in said
    assert "num_env_groups" in more_rollouts(replace(setup(), at_once=32))


@pytest.mark.parametrize(
    ("cause", "which", "unnamed"),
    [
        (Cause.STORE, setup(store="postgresql://h/d", processes=8), "PostgreSQL"),
        (Cause.STORE, setup(), "PostgreSQL"),
        (Cause.STORE, setup(store="memory"), "--store memory"),
        (Cause.AGENT, setup(processes=4, cores=4), "--workers"),
        (Cause.ENVIRONMENT, setup(processes=2), "--workers"),
        (Cause.STRAGGLERS, setup(async_generation_ratio=1), "let rollouts run ahead"),
        (
            Cause.STRAGGLERS,
            setup(train_env_manager={**MANAGER, "group_size_redundancy": 1}),
            "open redundant",
        ),
        (
            Cause.ENGINE,
            setup(policy={"kind": "torch", "model": "smollm2", "dtype": "bfloat16"}),
            "compute in bfloat16",
        ),
        (Cause.ENGINE, setup(), "replicas"),
    ],
)
def test_nothing_is_recommended_that_is_set_already(cause: Cause, which: RunSetup, unnamed: str) -> None:
    assert unnamed not in advise(cause, which)


@pytest.mark.parametrize(
    ("cause", "which", "named"),
    [
        (Cause.STORE, setup(processes=8), "PostgreSQL"),
        (Cause.STORE, setup(), "faster or less busy disk"),
        (Cause.STORE, setup(store="http://h:8700"), "nearer to the store's server"),
        (Cause.AGENT, setup(processes=1, cores=4), "`--workers 4`, now 1"),
        (Cause.STRAGGLERS, setup(async_generation_ratio=1), "`async_generation_ratio` (now 1)"),
        (Cause.ENGINE, setup(policy={"kind": "torch", "model": "smollm2"}), "bfloat16"),
    ],
)
def test_what_would_help_is_recommended(cause: Cause, which: RunSetup, named: str) -> None:
    assert named in advise(cause, which)


def test_stores_are_told_apart_by_their_addresses() -> None:
    kinds = {each: StoreKind.of(each) for each in (None, "memory", "a/b.db", "postgresql://h/d", "http://h")}
    assert list(kinds.values()) == ["memory", "memory", "file", "postgres", "http"]
