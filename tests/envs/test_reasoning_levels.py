"""The nine kinds of puzzles of a swarm and their levels (E9)."""

import pytest

from rollwright.config import build
from rollwright.envs import registry
from rollwright.errors import ConfigError
from rollwright.rollout.episode import Episode
from rollwright.run.build import SettingsTable, build_curriculum

TASKS = (
    "arc_1d",
    "basic_arithmetic",
    "base_conversion",
    "bf",
    "binary_matrix",
    "calendar_arithmetic",
    "decimal_arithmetic",
    "fraction_simplification",
    "propositional_logic",
)


@pytest.mark.parametrize("task", TASKS)
async def test_every_kind_has_levels_and_its_own_answer_earns_everything(task: str) -> None:
    env = registry.make(f"reasoning_gym:{task}", {"level": 0})
    asked = {(await env.reset(seed)).observation for seed in range(8)}
    assert len(asked) > 1, "another seed is another question"
    if (
        best := env.best_action()
    ) is not None:  # propositional_logic has many right answers and provides none
        assert (await env.step(env.answer(best))).reward == 1.0


async def test_a_higher_level_asks_for_more() -> None:
    easy, hard = (registry.make("reasoning_gym:decimal_arithmetic", {"level": each}) for each in (0, 3))
    lengths = [len((await env.reset(level)).observation) for env in (easy, hard) for level in range(20)]
    assert sum(lengths[20:]) > sum(lengths[:20])


def test_a_level_that_does_not_exist_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"bf has no level 9; accepted: 0 to 2"):
        registry.make("reasoning_gym:bf", {"level": 9})


def test_the_levels_of_a_curriculum_are_tags_of_their_own() -> None:
    tag = "reasoning_gym:bf"
    config = build(
        {
            "train_env_manager": {
                "num_env_groups": 2,
                "group_size": 2,
                "tags": [tag, "FrozenLake"],
                "curriculum": {"levels": 2},
            }
        }
    )
    table = SettingsTable(config)
    assert table.training_tags() == [tag, "FrozenLake", f"{tag}@0", f"{tag}@1"]
    settings = table(Episode(f"{tag}@1", 0, "train", "", 0, 0, 0))
    assert settings.env_config["level"] == 1
    book = build_curriculum(config)
    assert book is not None
    assert book.tag(tag) == f"{tag}@0"
    assert book.tag("FrozenLake") == "FrozenLake"


def test_a_curriculum_over_nothing_that_has_levels_is_refused() -> None:
    manager = {"num_env_groups": 1, "tags": ["FrozenLake"], "curriculum": {}}
    with pytest.raises(ConfigError, match="none of FrozenLake has levels"):
        SettingsTable(build({"train_env_manager": manager}))
