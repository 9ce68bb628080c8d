"""Runs whose tags have rewards: what is kept of them, and what becomes of one that fails."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.run.folder import RunReader
from rollwright.run.run import Run
from rollwright.simulation.players import OraclePlayer
from rollwright.trajectory import Message, Trajectory

CALLS: Counter[str] = Counter()


def fails_at_first(task: dict[str, Any], trajectory: Trajectory) -> float:
    CALLS[trajectory.rollout_id] += 1
    if CALLS[trajectory.rollout_id] == 1:
        raise ZeroDivisionError("no reward yet")
    return 0.25


def always_fails(answer: str) -> float:
    raise RuntimeError("broken\nreward")


def gives_nonsense(answer: str) -> Any:
    return "good"


async def hangs(answer: str) -> float:
    await asyncio.sleep(3600)
    return 1.0


def half(answer: str) -> float:
    return 0.5


@pytest.fixture(autouse=True)
def own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    # Tests are imported under names that no path in a configuration could have.
    module = ModuleType("reward_runs")
    for each in (fails_at_first, always_fails, gives_nonsense, hangs, half):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "reward_runs", module)
    CALLS.clear()


def content(tmp_path: Path, rewards: list[Any], **more: Any) -> dict[str, Any]:
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": {"tasks": "sums.jsonl", "rewards": rewards, **more.pop("custom", {})}},
        "policy": {"kind": "oracle"},
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Sums"]},
        **more,
    }


async def play(settings: dict[str, Any], told: list[str] | None = None, **more: Any) -> list[Trajectory]:
    def note(rollout: str, reason: str) -> None:
        if told is not None:
            told.append(reason)

    async with Run(build(settings), on_failed=note, **more) as run:
        return (await run.get_batch()).trajectories


def test_the_weighted_sum_is_the_reward_and_every_component_is_kept(tmp_path: Path) -> None:
    weighted = {"kind": "function", "function": "reward_runs:half", "weight": 3.0}
    played = asyncio.run(play(content(tmp_path, ["exact_match", weighted], custom={"success_at": 2.6})))
    for each in played:
        assert each.components == {"exact_match": 1.0, "half": 0.5}
        assert (each.reward, each.episode_reward, each.success) == (2.5, 2.5, False)


def test_a_reward_that_fails_is_tried_again_without_another_engine_call(tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(OraclePlayer):
        async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
            asked.append(prompt.episode)
            return await super().generate(prompt, sampling)

    played = asyncio.run(play(content(tmp_path, ["reward_runs:fails_at_first"]), policy=Counting()))
    assert {each.reward for each in played} == {0.25}
    assert set(CALLS.values()) == {2}
    assert len(asked) == len(set(asked)) == len(played)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("always_fails", "raised RuntimeError: broken reward"),
        ("gives_nonsense", "its value is a str ('good'); a finite number is accepted"),
        ("hangs", "gave no value within 0.05 s"),
    ],
)
def test_a_reward_that_gives_no_number_fails_the_rollout_by_name_and_is_never_a_0(
    tmp_path: Path, name: str, cause: str
) -> None:
    broken = {"kind": "function", "function": f"reward_runs:{name}", "time_limit": 0.05}
    told: list[str] = []
    limits = {"max_attempts": 2, "max_refills": 1}
    with pytest.raises(Exception, match=f"reward: {name}: "):
        asyncio.run(play(content(tmp_path, [broken], limits=limits), told))
    assert set(told) == {f"reward: {name}: {cause}"}


def test_rewards_judge_environments_too_and_add_to_their_own(tmp_path: Path) -> None:
    manager = {"num_env_groups": 2, "group_size": 2, "tags": ["FrozenLake"]}
    settings = {
        "train_env_manager": manager,
        "custom_envs": {"FrozenLake": {"rewards": ["reward_runs:half"]}},
        "policy": {"kind": "oracle"},
    }
    for each in asyncio.run(play(settings)):
        assert (each.reward, each.components, each.success) == (1.5, {"half": 0.5}, True)


def test_every_leaf_of_a_tree_is_judged(tmp_path: Path) -> None:
    rewards = [{"kind": "exact_match", "extract": r"(\S+)\s*$"}]
    settings = content(tmp_path, rewards, strategy={"kind": "tree", "width": 4, "depth": 1, "fork": "root"})
    settings["policy"] = {"kind": "simulated", "skill": 0.5, "tokens_per_second": 1e5, "mean_tokens": 5}
    played = asyncio.run(play(settings))
    leaf_rewards = [turn.outcome.reward for each in played for turn in each.turns if turn.outcome]
    assert set(leaf_rewards) == {0.0, 1.0}
    for each in played:
        assert each.episode_reward == 0.0
        assert each.reward == pytest.approx(each.components["exact_match"])
        assert each.success_share == pytest.approx(each.reward)


class Judging(OraclePlayer):
    """Plays, and grades when it is asked to."""

    def choose(self, prompt: Prompt, sampling: Sampling) -> Any:
        raise NotImplementedError

    renderer = None  # type: ignore[assignment]

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        said: list[Message] = list(prompt.messages)
        if said[0].content.startswith("You grade answers"):
            assert sampling.temperature == 0.0
            return Generation("score: 0.75", exact=False)
        return Generation("four", exact=False)


def test_a_judge_asks_the_runs_policy_outside_of_the_trajectory(tmp_path: Path) -> None:
    judge = {"kind": "judge", "rubric": "Is it right?", "weight": 2.0}
    played = asyncio.run(play(content(tmp_path, [judge]), policy=Judging()))
    for each in played:
        assert each.components == {"judge": 0.75}
        assert (each.reward, [turn.text for turn in each.turns]) == (1.5, ["four"])


def test_a_judge_may_have_a_policy_of_its_own(tmp_path: Path) -> None:
    own = {"kind": "judge", "rubric": "r", "policy": {"kind": "own", "policy": "judging_policy:make"}}
    module = ModuleType("judging_policy")
    module.make = Judging  # type: ignore[attr-defined]
    sys.modules["judging_policy"] = module
    try:
        played = asyncio.run(play(content(tmp_path, [own, "exact_match"])))
    finally:
        del sys.modules["judging_policy"]
    assert {each.components["judge"] for each in played} == {0.75}
    assert {each.components["exact_match"] for each in played} == {1.0}


def test_components_are_shown_and_averaged_in_the_metrics(tmp_path: Path) -> None:
    settings = content(tmp_path, ["exact_match", "reward_runs:half"])
    del settings["folder"]
    (tmp_path / "sums.yaml").write_text(json.dumps(settings), encoding="utf-8")
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(tmp_path / "sums.yaml"), "--runs", str(tmp_path / "runs")])
    assert ran.exit_code == 0, ran.output
    reader = RunReader(tmp_path / "runs" / "sums")
    (row,) = reader.metrics()
    assert row["tags"]["Sums"]["components"] == {"exact_match": 1.0, "half": 0.5}
    first = next(iter(reader.trajectories())).rollout_id
    shown = runner.invoke(app, ["show", str(tmp_path / "runs" / "sums"), first])
    assert "rewards: exact_match 1, half 0.5" in shown.output
