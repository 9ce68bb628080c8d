"""Inspect's tasks are played by their own solvers through the run's gateway, and scored by their own scorers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rollwright as rw
from rollwright.envs import registry

FILE = Path(__file__).with_name("inspect_samples.py")


def evaluated(tmp_path: Path, task: str, **more: Any) -> rw.Evaluation:
    config = {
        "policy": {"kind": "simulated", "tokens_per_second": 1e5, "script": [{"say": "4"}]},
        "custom_envs": {"Inspected": {"env_type": f"inspect:{FILE}@{task}", "env_config": more}},
        "limits": {"max_attempts": 1},
        "max_inflight": 4,
    }
    return rw.evaluate(config, tags=["Inspected"], runs=tmp_path)


def test_a_task_file_that_is_not_there_is_one_line() -> None:
    with pytest.raises(
        rw.ConfigError, match=r"environment inspect:nothing.py@sums: there is no file nothing.py"
    ):
        registry.make("inspect:nothing.py@sums")


@pytest.mark.foreign
def test_every_sample_is_played_once_and_its_score_is_the_reward(tmp_path: Path) -> None:
    found = evaluated(tmp_path, "sums", args={"count": 7})
    assert {each.seed: each.reward for each in found.trajectories} == {n: float(n == 3) for n in range(7)}
    for each in found.trajectories:
        assert each.components == {"match": each.reward, "includes": each.reward}
        assert each.success is (each.reward == 1.0)
        assert len(each.turns) == 1
        assert each.turns[0].exact
    assert found.report["plan"]["tasks"] == 7


@pytest.mark.foreign
def test_rewards_are_those_of_inspects_own_runner(tmp_path: Path) -> None:
    """The same answers by Inspect's own mock model."""
    from rollwright.envs.adapters.inspect_tasks import PACKAGE

    program = (
        "import json, sys, inspect_ai\n"
        "from inspect_ai.model import ModelOutput, ModelUsage, get_model\n"
        "outputs = [ModelOutput.from_content('mockllm/model', '4') for _ in range(10)]\n"
        "for each in outputs:\n"
        "    each.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)\n"  # else it needs a network
        "model = get_model('mockllm/model', custom_outputs=outputs)\n"
        f"[log] = inspect_ai.eval('{FILE}@sums', model=model, display='none', log_dir={str(tmp_path)!r})\n"
        "print(json.dumps([[s.scores[n].value for n in ('match', 'includes')] for s in log.samples]))\n"
    )
    done = subprocess.run(
        [str(PACKAGE.interpreter()), "-c", program], capture_output=True, text=True, check=True
    )
    native = [
        [float(grade == "C") for grade in grades] for grades in json.loads(done.stdout.splitlines()[-1])
    ]
    found = evaluated(tmp_path / "runs", "sums")
    ours = {each.seed: [each.components["match"], each.components["includes"]] for each in found.trajectories}
    assert [ours[n] for n in range(10)] == native


@pytest.mark.foreign
def test_an_error_of_the_solver_is_a_failure_and_never_a_zero(tmp_path: Path) -> None:
    found = evaluated(tmp_path, "broken")
    assert found.report["episodes"] == {"finished": 0, "failed": 1, "not_played": 0}
    assert "the solver broke off" in found.report["failures"][0]["cause"]


@pytest.mark.foreign
def test_parts_of_a_score_are_components_and_one_may_be_chosen(tmp_path: Path) -> None:
    found = evaluated(tmp_path, "graded", scorer="parts.right")
    assert found.trajectories[0].components == {"parts.length": 1.0, "parts.right": 0.5}
    assert found.reward == 0.5


@pytest.mark.foreign
@pytest.mark.parametrize(
    ("task", "said"),
    [("nothing", "cannot be loaded"), ("sums@x", "cannot be loaded")],
)
def test_a_task_that_is_not_in_the_file_is_one_line(task: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(rw.ConfigError, match=said) as raised:
        evaluated(tmp_path, task)
    assert "\n" not in str(raised.value)


@pytest.mark.foreign
def test_nothing_of_an_episode_stays_behind(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("rollwright-inspect-*"))
    evaluated(tmp_path, "sums", args={"count": 2})
    assert set(Path("/tmp").glob("rollwright-inspect-*")) <= before
