"""Group judges in a run: the members of a group are ranked against each other before the group counts."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from rollwright.cli.main import app
from rollwright.config import build
from rollwright.engines.base import Generation, Policy, Prompt, Renderer, Sampling
from rollwright.observe.plots import picture_of
from rollwright.rollout import TooManyRefills
from rollwright.run.folder import RunFolder, RunReader
from rollwright.run.run import Run
from rollwright.trajectory import Trajectory

RANKED = {"kind": "group_judge", "rubric": "Which number is larger?", "weight": 2.0}


class Ranking:
    """Plays a number of its own for each call, and ranks larger numbers first when it is asked to."""

    renderer: Renderer | None = None
    version = 0
    pressure = 0

    def __init__(self, judge: Callable[[str], str] | None = None, alike: bool = False) -> None:
        self.rankings = 0
        self._played = 0
        self._judge = judge or _rank_by_size
        self._alike = alike

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        said = prompt.messages[-1].content
        if "Rank the answers" in said:
            self.rankings += 1
            return Generation(self._judge(said), exact=False)
        self._played += 1
        return Generation("7" if self._alike else str(self._played), exact=False)

    async def close(self) -> None:
        pass


def _rank_by_size(question: str) -> str:
    shown = re.findall(r"Answer (\d+), between the marks (\S+):\n\2\n(\d+)\n", question)
    best_first = sorted(shown, key=lambda each: -int(each[2]))
    return "ranking: " + " > ".join(place for place, _, _ in best_first)


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLWRIGHT_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"{n} + 1 = ?", "answer": n + 1} for n in range(16)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def content(tmp_path: Path, rewards: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "folder": str(tmp_path),
        "custom_envs": {"Sums": {"tasks": "sums.jsonl", "held_out": 0.3, "rewards": rewards}},
        "train_env_manager": {"num_env_groups": 2, "group_size": 3, "tags": ["Sums"]},
        "val_env_manager": {"num_env_groups": 2, "tags": ["Sums"]},
        **more,
    }


async def play(
    settings: dict[str, Any], policy: Policy, told: list[str] | None = None, **more: Any
) -> list[Trajectory]:
    def note(rollout: str, reason: str) -> None:
        if told is not None:
            told.append(f"{rollout}: {reason}")

    async with Run(build(settings), policy=policy, on_failed=note, **more) as run:
        return (await run.get_batch()).trajectories


def by_group(played: list[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for each in played:
        groups.setdefault(each.group_id, []).append(each)
    return groups


def test_the_members_of_a_group_are_ranked_against_each_other(tmp_path: Path) -> None:
    length = {"kind": "length", "limit": 100, "ramp": 1}
    played = asyncio.run(play(content(tmp_path, [RANKED, length]), Ranking()))
    for members in by_group(played).values():
        best_first = sorted(members, key=lambda each: -int(each.turns[0].text))
        assert [each.components["group_judge"] for each in best_first] == [1.0, 0.5, 0.0]
        assert [each.reward for each in best_first] == [2.0, 1.0, 0.0]
        assert {each.components["length"] for each in members} == {0.0}


def test_ranks_come_before_filters_of_groups(tmp_path: Path) -> None:
    settings = content(tmp_path, [RANKED, {"kind": "length", "limit": 100, "ramp": 1}])
    settings["train_env_manager"]["group_filter"] = "zero_variance"
    played = asyncio.run(play(settings, Ranking()))
    assert len(played) == 6  # without their ranks all rewards would be equal
    settings["limits"] = {"max_refills": 1}
    with pytest.raises(TooManyRefills, match="zero_variance"):
        asyncio.run(play(settings, Ranking(alike=True)))


def test_a_judge_that_answers_nonsense_drops_the_group_in_one_line_and_is_never_a_rank(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    settings = content(tmp_path, [RANKED], limits={"max_attempts": 1, "max_refills": 1})
    with pytest.raises(TooManyRefills):
        asyncio.run(play(settings, Ranking(lambda question: "they are all nice"), told))
    assert told
    for line in told:
        assert re.match(r"sums\.train-g\d+-m\d+: reward: group_judge: ", line), line
        assert "\n" not in line


def test_a_judge_that_fails_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.rollout.ranking._PAUSE_SECONDS", 0.0)
    replies = iter(["nonsense"] * 6)
    policy = Ranking(lambda question: next(replies, None) or _rank_by_size(question))
    told: list[str] = []
    played = asyncio.run(play(content(tmp_path, [RANKED]), policy, told))
    assert not told
    assert {each.components["group_judge"] for each in played} == {0.0, 0.5, 1.0}


def test_ranks_are_recorded_and_not_paid_again_by_a_resumed_run(tmp_path: Path) -> None:
    settings = content(tmp_path, [RANKED], max_steps=2)
    folder, config = RunFolder.create(tmp_path / "runs", build(settings))
    store = folder.store_address(None)

    async def begin(policy: Ranking) -> None:
        async with Run(
            config, policy=policy, store=store, folder=folder, on_finished=folder.add_trajectory
        ) as run:
            batch = await run.get_batch()
            assert {each.components["group_judge"] for each in batch.trajectories} == {0.0, 0.5, 1.0}
            raise KeyboardInterrupt  # before the batch is written down as delivered

    async def resume(policy: Ranking) -> list[Trajectory]:
        async with Run(
            config, policy=policy, store=store, folder=folder, delivered=(), on_finished=folder.add_trajectory
        ) as run:
            return (await run.get_batch()).trajectories

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(begin(Ranking()))
    again = Ranking()
    played = asyncio.run(resume(again))
    assert again.rankings == 0
    recorded = {each.rollout_id: each.components for each in folder.trajectories()}
    assert {each.rollout_id: each.components for each in played} == recorded


def test_components_are_plotted_and_rescored_without_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = content(tmp_path, [RANKED, "exact_match"])
    settings["policy"] = {"kind": "own", "policy": "tests_ranking:make"}
    del settings["folder"]
    module = ModuleType("tests_ranking")
    module.make = Ranking  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests_ranking", module)
    (tmp_path / "sums.yaml").write_text(json.dumps(settings), encoding="utf-8")
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(tmp_path / "sums.yaml"), "--runs", str(tmp_path / "runs")])
    assert ran.exit_code == 0, ran.output
    reader = RunReader(tmp_path / "runs" / "sums")
    components = picture_of(reader).components
    assert components["group_judge"] == {"Sums": [(0, 0.5)]}
    assert set(components["exact_match"]) == {"Sums", "Sums, validation"}
    plotted = runner.invoke(app, ["plot", str(reader.path)])
    assert plotted.exit_code == 0, plotted.output
    assert (reader.path / "plots" / "components.png").is_file()
    rescored = runner.invoke(app, ["rescore", str(reader.path)])
    assert rescored.exit_code == 0, rescored.output
    rows = [json.loads(line) for line in (reader.path / "rescored.jsonl").read_text().splitlines()]
    assert all(row["before"] == row["after"] for row in rows)
    assert len(rows) == 8
