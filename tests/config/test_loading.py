"""Configuration: the source document's blocks load as they stand; a mistake gets one clear line."""

from pathlib import Path

import pytest
import yaml

from rollwright.config import build, dump, load
from rollwright.errors import ConfigError

TRAIN = """
train_env_manager:
  max_env_num_per_worker: 16
  num_env_groups: 128
  group_size: 8
  tags: [FrozenLake]
  num_groups_partition: [128]
"""
VAL = """
val_env_manager:
  max_env_num_per_worker: 32
  num_env_groups: 1024
  group_size: 1
  tags: [SimpleSokoban, LargerSokoban, SokobanDifferentGridVocab, FrozenLake]
  num_groups_partition: [256, 256, 256, 256]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "lake.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("text", [TRAIN, VAL, TRAIN + VAL])
def test_the_documents_yaml_blocks_load_as_they_stand_B5(tmp_path: Path, text: str) -> None:
    config = load(written(tmp_path, text))
    plain = yaml.safe_load(text)
    for name, block in plain.items():
        manager = getattr(config, name)
        assert {key: getattr(manager, key) for key in block} == block
    assert config.name == "lake"


def test_environments_and_batch_size_follow_from_the_groups_B5(tmp_path: Path) -> None:
    config = load(written(tmp_path, TRAIN + VAL))
    assert config.train_env_manager is not None
    assert config.val_env_manager is not None
    assert config.train_env_manager.num_envs == 1024
    assert config.batch_size == 1024
    assert config.val_env_manager.num_envs == 1024


def test_dotted_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    file = written(tmp_path, TRAIN)
    config = load(file, ["train_env_manager.group_size=4", "seed=7", "seed=8", "policy.slots=3"])
    assert config.train_env_manager is not None
    assert config.train_env_manager.group_size == 4
    assert config.seed == 8
    assert config.policy.model_dump()["slots"] == 3


def test_an_override_with_another_kind_starts_that_block_anew() -> None:
    content = {**GOOD, "policy": {"kind": "simulated", "slots": 7}}
    assert build(content, ["policy.kind=oracle"]).policy.kind == "oracle"
    assert build(content, ["policy.kind=simulated"]).policy.model_dump()["slots"] == 7


def test_an_unset_partition_splits_evenly_and_loses_no_group_B7() -> None:
    for groups in range(3, 40):
        config = build({"train_env_manager": {"num_env_groups": groups, "tags": ["A", "B", "C"]}})
        manager = config.train_env_manager
        assert manager is not None
        assert sum(manager.partition) == groups
        assert max(manager.partition) - min(manager.partition) <= 1
        assert manager.partition == sorted(manager.partition, reverse=True)


def test_slots_follow_the_partition_and_every_stretch_of_them_is_close_to_it_B5() -> None:
    config = build(
        {
            "train_env_manager": {
                "num_env_groups": 80,
                "tags": ["A", "B", "C"],
                "num_groups_partition": [40, 30, 10],
            }
        }
    )
    assert config.train_env_manager is not None
    slots = config.train_env_manager.slot_tags()
    assert [slots.count(tag) for tag in "ABC"] == [40, 30, 10]
    for length in range(8, 81):
        assert abs(slots[:length].count("A") - length / 2) <= 2
        assert abs(slots[:length].count("C") - length / 8) <= 2


GOOD = {"train_env_manager": {"num_env_groups": 4, "group_size": 2, "tags": ["FrozenLake"]}}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "train_env_manager.group_sise=4",
            "train_env_manager.group_sise: unknown key; did you mean `group_size`?",
        ),
        ("sede=4", "sede: unknown key; did you mean `seed`?"),
        (
            "num_env_group=4",
            "num_env_group: unknown key; did you mean `train_env_manager.num_env_groups`?",
        ),
        ("colour=red", "colour: unknown key; known here: agent, async_generation_ratio"),
        ("policy=null", "policy: got null; expected keys and values"),
        (
            "policies.simulated={kind: simulated, slot: 4}",
            "policies.simulated.slot: unknown key; did you mean",
        ),
        (
            "orchestras.math={kind: math, agents: {solver: {promt: x}}}",
            "orchestras.math.agents.solver.promt: unknown key; did you mean `prompt`?",
        ),
        (
            "train_env_manager.filters=[{kind: overlong, limt: 3}]",
            "filters.0.limt: unknown key; did you mean",
        ),
        ("policy.slot=4", "policy.slot: unknown key; did you mean `slots`?"),
        ("custom_envs.Mine.max_step=4", "custom_envs.Mine.max_step: unknown key; did you mean `max_steps`?"),
        (
            "train_env_manager.group_size=0",
            "train_env_manager.group_size: got 0; expected more than 0",
        ),
        ("train_env_manager.num_env_groups=-1", "num_env_groups: got -1; expected more than 0"),
        ("train_env_manager.tags=[]", "train_env_manager.tags: got []"),
        ("train_env_manager.tags=[A,A]", "train_env_manager.tags: ['A', 'A'] names a tag twice"),
        ("train_env_manager.tags=[A,B,C,D,E]", "4 groups cannot be split over 5 tags; at least 5 are needed"),
        ("train_env_manager.num_groups_partition=[3]", "[3] sums to 3, but num_env_groups is 4"),
        ("train_env_manager.num_groups_partition=[2,2]", "2 numbers for 1 tags; one for each tag is needed"),
        ("train_env_manager.min_group_size=3", "min_group_size: 3 is more than group_size, which is 2"),
        ("rollout_batch_size=7", "rollout_batch_size: 7 is not a multiple of group_size, which is 2"),
        ("async_generation_ratio=-1", "async_generation_ratio: got -1"),
        ("sampling.top_p=0", "sampling.top_p: got 0"),
        ("policy.kind=vlm", "policy.kind: unknown `vlm` (did you mean `vllm`?); known: random, oracle"),
        ("seed=many", "seed: got 'many'; expected a whole number"),
        (
            "agent.history.mode=window",
            "agent.history.length: a window needs the number of earlier turns to keep",
        ),
        ("name=a/b", "name: got 'a/b'"),
        ("seed", "override `seed`: expected key.path=value"),
        ("seed=${missing}", "missing"),
    ],
)
def test_a_mistake_gets_one_line_that_names_the_key_and_what_is_accepted(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(GOOD, [override])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_size": 4}, "only 1 is accepted"),
        ({"group_size_redundancy": 1}, "only 0 is accepted"),
        ({"group_filter": "zero_variance"}, "only null is accepted"),
    ],
)
def test_validation_is_one_greedy_episode_for_each_level_B10(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build({"val_env_manager": {"num_env_groups": 4, "tags": ["FrozenLake"], **change}})


def test_tasks_for_a_function_of_ones_own_need_no_environments() -> None:
    assert build({"seed": 3}).tags == []


@pytest.mark.parametrize(
    ("content", "says"),
    [("- a\n- b\n", "holds a list"), ("a: [1,", "is not valid YAML"), ("\xff", "lake.yaml")],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "lake.yaml"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as caught:
        load(file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml")


def test_the_configuration_as_used_loads_again_to_the_same() -> None:
    config = build(GOOD, ["policy.kind=openai", "policy.base_url=http://127.0.0.1:1/v1", "policy.model=m"])
    assert build(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "abc"}, "environment variable HF_HUB_DOWNLOAD_TIMEOUT=abc: downloads"),
        ({"ROLLWRIGHT__SEED": "x"}, "environment variable ROLLWRIGHT__SEED=x: seed"),
        (
            {"ROLLWRIGHT__SEED": "x", "HF_HUB_DOWNLOAD_TIMEOUT": "abc"},
            "environment variable HF_HUB_DOWNLOAD_TIMEOUT=abc and ROLLWRIGHT__SEED=x: ",
        ),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "7"}, None),
    ],
)
def test_a_wrong_variable_is_blamed_and_not_the_file(
    variables: dict[str, str], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "it.yaml"
    file.write_text("max_steps: 2\n" if says else "max_stepz: 2\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value).startswith(says or f"{file}: max_stepz")
    assert says is None or str(file) not in str(caught.value)
