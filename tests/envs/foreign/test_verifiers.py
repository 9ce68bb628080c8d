"""verifiers by tag: the rewards of its own runner, its errors as failures, and one line for what cannot be played."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import ChatAgent
from rollwright.engines.base import Prompt, Sampling
from rollwright.envs import registry
from rollwright.envs.adapters.verifiers import Verifiers
from rollwright.envs.base import PromptTemplates
from rollwright.gateway import Gateway
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play_episode
from rollwright.rollout.whole_episode import WholeEpisodeStrategy
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.players import Choice
from rollwright.simulation.script import ScriptedPlayer
from rollwright.trajectory import Trajectory, check

pytestmark = pytest.mark.foreign

HERE = Path(__file__).parent
SETS = HERE / "verifiers_sets"
EPISODES = 200
CONCURRENT = 16

sys.path.append(str(HERE))
from scripted_answers import answer  # noqa: E402


class RulePlayer:
    """Answers by the rules that the native runner's provider has."""

    renderer = ScriptedPlayer.renderer

    def choose(self, prompt: Prompt, sampling: Sampling) -> Choice:
        messages = list(prompt.messages) if prompt.ids is None else self.renderer.read(prompt.ids)
        said = answer([{"role": each.role, "content": each.content} for each in messages])
        return Choice(said, 0.0, whole=True)


async def play(
    tag: str, options: dict[str, Any], levels: Sequence[int], concurrent: int = CONCURRENT
) -> list[Trajectory]:
    """Plays the levels as a worker does: session, gateway, strategy."""
    engine = SimulatedEngine(tokens_per_second=1e9, player=RulePlayer())
    settings = EpisodeSettings(
        env_type=tag,
        env_config=options,
        agent=ChatAgent(PromptTemplates("", "{observation}", "{observation}")),
        sampling=Sampling(max_tokens=512),
        max_steps=50,
        sequence_length=100_000,
        strategy=WholeEpisodeStrategy(),
    )
    gateway = Gateway()
    left = iter(levels)
    played: dict[int, Trajectory] = {}

    async def work() -> None:
        env = registry.make(tag, options)
        for level in left:
            episode = Episode("V", level, "val", f"g{level}", level, 0, 0)
            session = new_session(
                episode, engine, settings, env, rollout_id=f"ro-{level}", attempt_id="at", gateway=gateway
            )
            played[level] = check(
                await play_episode(session, env, settings, engine, lambda: registry.make(tag, options))
            )
        await env.close()

    await asyncio.gather(*(work() for _ in range(concurrent)))
    await gateway.close()
    return [played[level] for level in levels]


def native(
    env: Verifiers,
    taskset: dict[str, Any],
    levels: Sequence[int],
    *,
    max_turns: int = 50,
    concurrent: int = CONCURRENT,
    shipped: bool = False,
) -> list[Any]:
    order = {
        "taskset": taskset,
        "episodes": list(levels),
        "path": env._options["path"],
        "max_turns": max_turns,
        "concurrent": concurrent,
        "shipped": shipped,
    }
    done = subprocess.run(
        [str(env._package.interpreter()), str(HERE / "native_verifiers.py")],
        input=json.dumps(order),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def told(trajectory: Trajectory) -> list[Any]:
    """A trajectory in the native runner's words."""
    metrics = {
        name: value
        for name, value in trajectory.metrics.items()
        if not name.startswith(("stop_", "gateway_"))
    }
    (stop,) = (name for name in trajectory.metrics if name.startswith("stop_"))
    return [
        trajectory.reward,
        trajectory.components,
        metrics,
        stop.removeprefix("stop_"),
        len(trajectory.turns),
    ]


def make(tag: str, **options: Any) -> Verifiers:
    made = registry.make(tag, options)
    assert isinstance(made, Verifiers)
    return made


@pytest.mark.parametrize("way", ["direct", "gateway"])
@pytest.mark.parametrize("name", ["vf_sums", "vf_guessing"])
async def test_rewards_are_those_of_its_own_runner(name: str, way: str) -> None:
    tag, levels = f"verifiers:{SETS / name}.py", range(EPISODES)
    env = make(tag, way=way)
    ours = [told(each) for each in await play(tag, {"way": way}, levels)]
    assert ours == native(env, {"id": name}, levels)
    assert len({each[0] for each in ours}) > 2, "the script earns always the same"


async def test_rewards_are_those_of_its_shipped_program_on_every_way() -> None:
    tag, levels = f"verifiers:{SETS / 'vf_sums.py'}", range(4)
    expected = native(make(tag), {"id": "vf_sums"}, levels, concurrent=2, shipped=True)
    for way in ("direct", "gateway", "program"):
        assert [told(each) for each in await play(tag, {"way": way}, levels, 2)] == expected


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word lists that verifiers would download."""
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    made = sorted(
        {f"{a}{b}{c}" for a in ("st", "tr", "pl", "gr") for b in "aeiou" for c in ("nd", "ck", "ne")}
    )
    for name in ("en", "en-basic"):
        (folder / name).write_text("\n".join(made) + "\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


BOTH = ["verifiers[ta,openenv]"]


async def test_its_own_textarena_games_pay_what_its_runner_pays(words: None) -> None:
    options = {"taskset": {"game": "Hangman-v0"}, "install": BOTH}
    env = make("verifiers:textarena", **options)
    assert env.way == "direct"
    levels = range(EPISODES)
    ours = [told(each) for each in await play("verifiers:textarena", options, levels)]
    assert ours == native(env, {"id": "textarena", "game": "Hangman-v0"}, levels)
    assert len({each[0] for each in ours}) > 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What `openenv init` makes, with room for several sessions: it echoes, and pays a tenth for each character."""
    folder = tmp_path_factory.mktemp("openenv")
    python = make(f"verifiers:{SETS / 'vf_sums.py'}", install=BOTH)._package.interpreter()
    subprocess.run(
        [str(python.with_name("openenv")), "init", "echoing"], cwd=folder, check=True, capture_output=True
    )
    app = folder / "echoing" / "server" / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    environment = next((folder / "echoing" / "server").glob("*_environment.py"))
    environment.write_text(
        environment.read_text().replace(
            "SUPPORTS_CONCURRENT_SESSIONS: bool = False", "SUPPORTS_CONCURRENT_SESSIONS: bool = True"
        )
    )
    server = subprocess.Popen(
        [str(python), "-m", "uvicorn", "echoing.server.app:app", "--port", "0"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())):
        assert server.poll() is None
    yield found[0]
    server.kill()
    server.wait()


async def test_its_own_openenv_client_pays_what_its_runner_pays(served: str) -> None:
    resets: list[dict[str, Any]] = [{"seed": seed} for seed in range(EPISODES)]
    options = {"taskset": {"base_url": served, "resets": resets}, "install": BOTH, "max_steps": 3}
    env = make("verifiers:openenv", **options)
    levels = range(EPISODES)
    ours = [told(each) for each in await play("verifiers:openenv", options, levels, 8)]
    expected = native(
        env, {"id": "openenv", "base_url": served, "resets": resets}, levels, max_turns=3, concurrent=8
    )
    assert ours == expected
    assert len({each[0] for each in ours}) > 1
