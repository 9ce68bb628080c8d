"""Which settings may change when a run is resumed: every key is decided, and what is played stays as it was."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from rollwright.config import RunConfig, build
from rollwright.config.resuming import MAY_CHANGE, check_resumable, may_change, setting_changes
from rollwright.errors import ConfigError

BASE: dict[str, Any] = {
    "seed": 1,
    "max_steps": 2,
    "custom_envs": {"Lake": {"env_type": "FrozenLake", "env_config": {"size": 4}}},
    "train_env_manager": {"num_env_groups": 4, "group_size": 2, "tags": ["Lake"]},
    "val_env_manager": {"num_env_groups": 4, "tags": ["Lake"]},
}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def keys(model: type[BaseModel], above: str = "") -> set[str]:
    """Every key there can be; `*` stands for a name that the user chooses."""
    found = set()
    for name, field in model.model_fields.items():
        key = f"{above}{name}"
        below = models_in(field.annotation)
        named = getattr(field.annotation, "__origin__", None) is dict
        found |= {each for part in below for each in keys(part, f"{key}.*." if named else f"{key}.")} or {key}
    return found


KEYS = sorted(keys(RunConfig))


@pytest.mark.parametrize("key", KEYS)
def test_it_is_decided_of_every_key_whether_it_may_change(key: str) -> None:
    assert may_change(key) is not None, f"say in rollwright.config.resuming whether `{key}` may change"


@pytest.mark.parametrize("rule", MAY_CHANGE)
def test_every_rule_is_about_a_key_that_there_is(rule: str) -> None:
    assert any(key == rule or key.startswith(f"{rule}.") for key in KEYS)


@pytest.mark.parametrize("rule", MAY_CHANGE)
def test_every_rule_is_on_the_page_about_running(rule: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    assert (
        f"`{rule}`" in page
        or f"`{rule.rpartition('.')[2]}`" in page
        or f"`….{rule.rpartition('.')[2]}`" in page
    )


def changed(*overrides: str) -> tuple[RunConfig, RunConfig]:
    return build(BASE), build(BASE, overrides)


@pytest.mark.parametrize(
    "override",
    [
        "seed=2",
        "name=other",
        "train_env_manager.group_size=4",
        "train_env_manager.tags=[SimpleSokoban]",
        "train_env_manager.filters=[zero_variance]",
        "train_env_manager.group_size_redundancy=1",
        "train_env_manager.min_group_size=1",
        "val_env_manager.num_env_groups=8",
        "val_env_manager=null",
        "custom_envs.Lake.env_config.size=5",
        "custom_envs.Lake.max_steps=3",
        "custom_envs.Lake.agent_template=x",
        "sampling.temperature=0.5",
        "sequence_length=100",
        "agent.history.mode=current",
        "strategy.kind=tree",
        "policy.skill=0.1",
        "policy.kind=random",
    ],
)
def test_what_changes_what_is_played_is_refused_by_name(override: str) -> None:
    before, now = changed(override)
    key = override.partition("=")[0].removesuffix(".kind")
    with pytest.raises(ConfigError, match=rf"would change its episodes: .*{key}"):
        check_resumable(before, now)


@pytest.mark.parametrize(
    "override",
    [
        "max_steps=9",
        "max_inflight=3",
        "limits.step_timeout=5",
        "limits.max_attempts=9",
        "eval_steps=2",
        "rollout_batch_size=4",
        "train_env_manager.max_env_num_per_worker=2",
        "custom_envs.Lake.step_timeout=3",
        "policy.tokens_per_second=5",
        "train_env_manager.num_env_groups=8",
    ],
)
def test_what_changes_pace_and_limits_is_allowed_and_told(override: str) -> None:
    (change,) = check_resumable(*changed(override))
    assert change.key == override.partition("=")[0]
    assert change.key in str(change)


def test_more_groups_at_once_are_refused_where_the_tags_would_come_in_another_order() -> None:
    several = {**BASE, "train_env_manager": {"num_env_groups": 4, "tags": ["Lake", "SimpleSokoban"]}}
    more = ["train_env_manager.num_env_groups=8"]
    assert [each.key for each in check_resumable(build(several), build(several, more))] == [
        "train_env_manager.num_env_groups"
    ]
    uneven = ["train_env_manager.num_env_groups=5"]
    with pytest.raises(ConfigError, match="num_env_groups"):
        check_resumable(build(several), build(several, uneven))


def test_settings_that_are_the_same_have_no_changes() -> None:
    assert setting_changes(*changed()) == []
