"""Runs of environments that bring their own loop: recorded like any agent, in every kind of worker, and never a made-up reward."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollwright.config import build
from rollwright.errors import ConfigError
from rollwright.rollout import TooManyRefills
from rollwright.run.checks import check_config
from rollwright.run.run import Run
from rollwright.trajectory import StopReason, Trajectory, check

PROGRAM = Path(__file__).parents[1] / "envs" / "foreign" / "episode_program.py"

FACTORIES = f"""
from pathlib import Path
from rollwright.envs.foreign import ForeignEpisodeEnv, ForeignPackage

PACKAGE = ForeignPackage("json", Path({str(PROGRAM)!r}), ())

class Odd(ForeignEpisodeEnv):
    def __init__(self, level: int | None = None, turns: int = 2) -> None:
        super().__init__(PACKAGE, {{"turns": turns}})
        self._level = level

    async def reset(self, seed):
        return await super().reset(seed % 100 if self._level is None else self._level)

class Direct(Odd):
    needs_gateway = False
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Modules are found once in a process, so every test has one of its own."""
    name = f"loops_of_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


def content(env_type: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "name": "loops",
        "custom_envs": {"Loop": {"env_type": env_type, "env_config": options or {}}},
        "policy": {
            "kind": "simulated",
            "tokens_per_second": 1e5,
            "script": [{"say": "You asked: {task}"}],
        },
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Loop"]},
        **more,
    }


async def play(settings: dict[str, Any], told: list[str] | None = None, **more: Any) -> list[Trajectory]:
    def note(rollout: str, reason: str) -> None:
        if told is not None:
            told.append(reason)

    async with Run(build(settings), on_failed=note, **more) as run:
        return (await run.get_batch()).trajectories


@pytest.mark.parametrize("way", ["Odd", "Direct"])
@pytest.mark.parametrize("processes", [None, 2])
def test_every_call_is_recorded_and_the_reward_is_the_packages(
    module: str, way: str, processes: int | None
) -> None:
    played = asyncio.run(play(content(f"{module}:{way}"), processes=processes))
    assert len(played) == 4
    for each in played:
        check(each)
        assert [turn.extends for turn in each.turns] == [None, 0]
        assert each.not_trainable is None
        assert each.reward == 1.0
        assert each.components == {"right": 1.0}
        assert each.metrics["letters"] > 0
        assert each.success
        assert each.stop is StopReason.TERMINATED
        assert [said.role for said in each.conversation] == ["user", "assistant"] * 2
        assert each.conversation[0].content == each.observation


def test_an_agent_has_the_name_that_the_package_gives_it(module: str) -> None:
    played = asyncio.run(play(content(f"{module}:Direct")))
    assert {turn.agent for each in played for turn in each.turns} == {"player"}


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (670, "environment: EnvironmentFailure: json: LookupError: no such thing"),
        (666, "environment: ProcessLost: json: its process ended: last words"),
        (668, "environment: timeout: the episode went on for 1 s without a call of the model"),
    ],
)
def test_what_goes_wrong_is_a_failure_in_one_line_and_no_reward(module: str, level: int, said: str) -> None:
    settings = content(
        f"{module}:Direct",
        {"level": level},
        limits={"max_attempts": 2, "max_refills": 1, "step_timeout": 1.0},
    )
    told: list[str] = []
    with pytest.raises(TooManyRefills):
        asyncio.run(play(settings, told))
    assert told
    assert all(each.startswith(said) for each in told), told[0]


def test_a_conversation_that_is_full_ends_the_episode(module: str) -> None:
    settings = content(f"{module}:Direct", {"turns": 40}, sequence_length=300)
    for each in asyncio.run(play(settings)):
        assert each.stop is StopReason.MAX_LENGTH
        assert each.turns


def test_trees_and_teams_are_refused_before_anything_is_played(module: str) -> None:
    with pytest.raises(ConfigError, match="plays whole episodes by itself, along one path"):
        check_config(build(content(f"{module}:Direct", strategy={"kind": "tree"})))
