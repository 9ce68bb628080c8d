"""Packages that play whole episodes: many at once in one process, and one that misbehaves costs the others little."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollwright.envs.base import EnvironmentFailure, EpisodeResult
from rollwright.envs.foreign import ForeignEpisodeEnv, ForeignPackage

ODD = ForeignPackage("json", Path(__file__).with_name("episode_program.py"), ())


class InProcess(ForeignEpisodeEnv):
    needs_gateway = False


class Echo:
    """A model that repeats the first message."""

    base_url = "unused"
    api_key = "unused"

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.agents: set[str] = set()

    async def complete(self, body: bytes, agent: str = "agent") -> tuple[int, bytes]:
        self.agents.add(agent)
        await asyncio.sleep(0)
        if self.status != 200:
            return self.status, b'{"error": {"message": "no room"}}'
        said = json.loads(body)["messages"][0]["content"]
        return 200, json.dumps({"choices": [{"message": {"content": said}}]}).encode()


def make(stall_seconds: float = 60.0, **options: Any) -> InProcess:
    return InProcess(ODD, {"turns": 2, **options}, stall_seconds=stall_seconds)


async def play(env: InProcess, seed: int) -> EpisodeResult:
    await env.reset(seed)
    return await env.play_episode(Echo())


async def test_many_episodes_are_played_at_once_in_one_process_that_is_made_once() -> None:
    envs = [make() for _ in range(32)]
    model = Echo()
    for env, first in zip(
        envs, await asyncio.gather(*(env.reset(seed) for seed, env in enumerate(envs))), strict=True
    ):
        assert first.observation.startswith("question ")
        assert env.task["made"] == 1
    assert len({env.task["pid"] for env in envs}) == 1
    results = await asyncio.gather(*(env.play_episode(model) for env in envs))
    assert [each.reward for each in results] == [1.0] * 32
    assert results[0].components == {"right": 1.0}
    assert results[0].metrics == {"letters": 10}
    assert all(each.success for each in results)
    assert model.agents == {"player"}
    pid = envs[0].task["pid"]
    for env in envs:
        await env.close()
    await _wait_until_gone(pid)


@pytest.mark.parametrize(
    ("seed", "said"),
    [(669, "SystemExit: I leave"), (670, "LookupError: no such thing")],
)
async def test_an_error_of_one_episode_is_one_line_and_ends_no_other(seed: int, said: str) -> None:
    bad, good = make(), make()
    playing = asyncio.gather(play(bad, seed), play(good, 1), return_exceptions=True)
    failure, result = await playing
    assert isinstance(failure, EnvironmentFailure)
    assert said in str(failure)
    assert "\n" not in str(failure)
    assert isinstance(result, EpisodeResult)
    assert bad.task["pid"] == good.task["pid"]
    await bad.close()
    await good.close()


async def test_a_crash_is_said_and_the_next_time_costs_few_others_and_then_none() -> None:
    envs = [make() for _ in range(20)]
    seeds = [666, *range(19)]
    lost = await asyncio.gather(*map(play, envs, seeds), return_exceptions=True)
    assert isinstance(lost[0], EnvironmentFailure)
    assert "its process ended: last words" in str(lost[0])
    second = await asyncio.gather(*map(play, envs, seeds), return_exceptions=True)
    assert isinstance(second[0], EnvironmentFailure)
    assert sum(isinstance(each, EnvironmentFailure) for each in second) <= 16
    third = await asyncio.gather(*map(play, envs, seeds), return_exceptions=True)
    assert isinstance(third[0], EnvironmentFailure)
    assert all(isinstance(each, EpisodeResult) for each in third[1:])
    for env in envs:
        await env.close()


async def test_a_process_that_blocks_is_killed_and_said() -> None:
    env = make(stall_seconds=2.0)
    with pytest.raises(EnvironmentFailure, match="was blocked for 2 s by it"):
        await play(env, 667)
    assert (await play(env, 1)).reward == 1.0
    await env.close()


async def test_a_cancelled_episode_ends_alone() -> None:
    bad, good = make(), make()
    await bad.reset(668)
    hanging = asyncio.ensure_future(bad.play_episode(Echo()))
    await good.reset(1)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await good.play_episode(Echo())).reward == 1.0
    assert (await play(bad, 2)).reward == 1.0
    await bad.close()
    await good.close()


async def test_a_refused_call_is_the_packages_to_handle() -> None:
    env = make()
    await env.reset(3)
    with pytest.raises(EnvironmentFailure, match="RuntimeError: 400: no room"):
        await env.play_episode(Echo(400))
    await env.close()


async def test_what_the_package_has_started_is_closed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("EPISODE_PROGRAM_MARK", str(mark))
    env = make()
    await play(env, 1)
    await env.close()
    assert mark.read_text() == "closed"


async def test_it_takes_no_steps() -> None:
    env = make()
    with pytest.raises(EnvironmentFailure, match="takes no steps"):
        await env.step("up")
    with pytest.raises(EnvironmentFailure, match="call reset first"):
        await env.play_episode(Echo())


async def _wait_until_gone(pid: int) -> None:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the process never ended")
