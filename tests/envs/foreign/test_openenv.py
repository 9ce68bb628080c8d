"""OpenEnv by tag: a folder as its scaffold makes it, and a server at an address."""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollwright.envs import registry
from rollwright.envs.adapters.openenv import PACKAGE, OpenEnv
from rollwright.envs.base import can_fork
from rollwright.errors import ConfigError

pytestmark = pytest.mark.foreign

EPISODES = 200


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `openenv init` makes: an environment that echoes, and pays a tenth for each character."""
    folder = tmp_path_factory.mktemp("openenv")
    command = PACKAGE.interpreter().with_name("openenv")
    subprocess.run([str(command), "init", "echoing"], cwd=folder, check=True, capture_output=True)
    return folder / "echoing"


@pytest.fixture
def served(scaffold: Path) -> Iterator[str]:
    server = subprocess.Popen(
        [str(PACKAGE.interpreter()), "-m", "uvicorn", "echoing.server.app:app", "--port", "0"],
        cwd=scaffold.parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())):
        assert server.poll() is None
    yield found[0]
    server.kill()
    server.wait()


async def play(env: OpenEnv) -> None:
    for seed in range(EPISODES):
        assert "environment ready" in (await env.reset(seed)).observation
        word = "a" * (seed % 7 + 1)
        step = await env.step(f"<answer>{word}</answer>")
        assert step.reward == pytest.approx(0.1 * len(word), abs=1e-12)
        assert f"echoed_message: {word}" in step.observation


async def test_a_folder_is_served_here_and_pays_what_its_code_pays(scaffold: Path) -> None:
    env = registry.make(f"openenv:{scaffold}")
    assert isinstance(env, OpenEnv)
    assert "Message to echo back" in env.instruction
    assert not can_fork(env)
    await play(env)
    missing = await env.step("no tags")
    assert not missing.info["valid"]
    await env.close()


async def test_a_server_that_runs_already_is_used(served: str) -> None:
    env = registry.make(f"openenv:{served}")
    assert isinstance(env, OpenEnv)
    await play(env)
    await env.close()


async def test_many_environments_have_a_server_each_though_the_scaffold_allows_one_session(
    scaffold: Path,
) -> None:
    envs = [registry.make(f"openenv:{scaffold}") for _ in range(6)]
    await asyncio.gather(*(each.reset(1) for each in envs))
    steps = await asyncio.gather(*(each.step("<answer>hi</answer>") for each in envs))
    assert [each.reward for each in steps] == pytest.approx([0.2] * 6)
    await asyncio.gather(*(each.close() for each in envs))


@pytest.mark.parametrize("place", ["http://127.0.0.1:9", "no_such_package"])
def test_what_is_not_there_is_one_line(place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)):
        registry.make(f"openenv:{place}")
