"""`import rollwright as rw` gives everything that a user's program needs, typed, and loads nothing before it is used."""

import ast
import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rollwright as rw

ROOT = Path(__file__).parent.parent


def names_for_type_checkers() -> set[str]:
    tree = ast.parse((ROOT / "src" / "rollwright" / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name
        for block in blocks
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("name", [name for name in rw.__all__ if name != "__version__"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rw, name) is not None
    assert name in dir(rw)


def test_type_checkers_see_the_same_names() -> None:
    assert names_for_type_checkers() == {*rw.__all__} - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rollwright' has no attribute 'Rum'"):
        rw.Rum  # noqa: B018


def test_importing_it_loads_no_other_module_of_the_package() -> None:
    code = "import sys, rollwright; print(*[each for each in sys.modules if each.startswith('rollwright')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rollwright"]


def python_on_pages() -> list[tuple[str, str]]:
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found += [(page.name, code) for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    return found


def test_a_name_that_is_public_is_taken_from_the_public_api_on_every_page_and_in_every_example() -> None:
    inside = {
        (place.partition(":")[0], place.partition(":")[2] or name): name for name, place in rw._PLACES.items()
    }
    codes = python_on_pages() + [(each.name, each.read_text()) for each in (ROOT / "examples").rglob("*.py")]
    assert len(codes) > 30
    wrong = []
    for where, code in codes:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    value = getattr(sys.modules.get(node.module), alias.name, None)
                    public = inside.get((node.module, alias.name)) or next(
                        (name for name in rw.__all__ if value is not None and getattr(rw, name) is value),
                        None,
                    )
                    if public is not None and node.module != "rollwright":
                        wrong.append(f"{where}: {node.module}.{alias.name} is rollwright.{public}")
    assert not wrong


def test_a_policy_is_evaluated_by_tag_on_held_out_levels() -> None:
    found = rw.evaluate(tags=["FrozenLake", "SimpleSokoban"], episodes=8, policy=rw.OraclePlayer())
    assert {tag: (score.episodes, score.success) for tag, score in found.scores.items()} == {
        "FrozenLake": (4, 1.0),
        "SimpleSokoban": (4, 1.0),
    }
    assert found.scores["FrozenLake"].interval == (1.0, 1.0)
    assert str(found).startswith("FrozenLake: reward 1.000 ± 0.000 over 4, 100% solved")
    again = rw.evaluate(tags=["FrozenLake", "SimpleSokoban"], episodes=8, policy=rw.OraclePlayer())
    assert [each.seed for each in again.trajectories] == [each.seed for each in found.trajectories]


def test_an_evaluation_works_beside_a_running_event_loop_as_in_a_notebook() -> None:
    async def cell() -> rw.Evaluation:
        return rw.evaluate(tags=["FrozenLake"], episodes=4, policy={"kind": "random"})

    assert asyncio.run(cell()).scores["FrozenLake"].episodes == 4


def test_a_level_that_fails_is_counted_and_in_no_mean() -> None:
    found = rw.evaluate(
        {"policy": {"kind": "simulated", "failure_rate": 0.5}, "limits": {"max_attempts": 1}},
        tags=["FrozenLake"],
        episodes=16,
    )
    score = found.scores["FrozenLake"]
    assert score.failed > 0
    assert score.episodes + score.failed == 16
    assert 0.0 <= score.reward <= 1.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rw.evaluate(), "evaluate: nothing to play; give `tags`, or a configuration that has some"),
        (
            lambda: rw.evaluate(tags=["FrozenLake"], policy={}, model="x"),
            "`policy` and `model` both name what plays",
        ),
        (lambda: rw.load_config({"sead": 7}), "sead: unknown key; did you mean `seed`?"),
        (lambda: rw.load_config("no_such.yaml"), "no_such.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(call: object, said: str) -> None:
    with pytest.raises(rw.ConfigError) as raised:
        call()  # type: ignore[operator]
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_overrides_win_over_a_mapping_a_file_and_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 3\n")
    for source in ({"seed": 3}, tmp_path / "run.yaml", rw.load_config({"seed": 3})):
        assert rw.load_config(source).seed == 3
        assert rw.load_config(source, "seed=7").seed == 7


@pytest.fixture
def small_training() -> dict[str, object]:
    return {
        "name": "small",
        "policy": {"kind": "torch", "model": str(ROOT / "models" / "frozen_lake")},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]},
        "agent": {"history": {"mode": "current"}},
        "custom_envs": {
            "FrozenLake": {
                "env_config": {"action_pattern": "(.+)", "answer_template": "{action}"},
                "agent_system_template": "",
                "agent_opening_template": "{observation}",
                "agent_template": "{observation}",
                "max_steps": 3,
                "max_tokens_per_step": 4,
            }
        },
        "rollout_batch_size": 4,
    }


def test_a_training_leaves_a_model_and_is_resumed_from_its_folder(
    tmp_path: Path, small_training: dict[str, object]
) -> None:
    first = rw.train(small_training, steps=1, runs=tmp_path)
    assert first.folder == tmp_path / "small"
    assert (first.model / "config.json").is_file()
    assert first.summary["training"]["steps"] == 1
    assert rw.train(resume=first.folder, steps=2).summary["training"]["steps"] == 2
    with pytest.raises(rw.ConfigError, match="seed"):
        rw.train(None, "seed=8", resume=first.folder)


def test_a_wrong_training_writes_nothing(tmp_path: Path, small_training: dict[str, object]) -> None:
    for wrong, said in (
        ({"tags": ["FrozenLak"]}, "FrozenLak"),
        ({"model": tmp_path / "no_such_model"}, "no_such_model"),
    ):
        with pytest.raises(rw.RollwrightError, match=said):
            rw.train(small_training, runs=tmp_path / "runs", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()
