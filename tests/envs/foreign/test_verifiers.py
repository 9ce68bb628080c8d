"""verifiers by tag: the rewards of its own runner, its errors as failures, and one line for what cannot be played."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollwright.agents import ChatAgent, EpisodeFailure
from rollwright.engines.base import Prompt, Sampling
from rollwright.envs import registry
from rollwright.envs.adapters.verifiers import Verifiers
from rollwright.envs.base import PromptTemplates, can_fork
from rollwright.errors import ConfigError
from rollwright.gateway import Gateway
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play_episode
from rollwright.rollout.settings import LimitsConfig
from rollwright.rollout.whole_episode import WholeEpisodeStrategy
from rollwright.simulation.engine import SimulatedEngine
from rollwright.simulation.players import Choice
from rollwright.simulation.script import ScriptedPlayer, read_script
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


ENGINE = SimulatedEngine(tokens_per_second=1e9, player=RulePlayer())


async def play_in(
    env: Verifiers,
    level: int,
    gateway: Gateway | None = None,
    step_timeout: float = 600.0,
    engine: SimulatedEngine = ENGINE,
) -> Trajectory:
    """Plays a level as a worker does: session, gateway, strategy."""
    settings = EpisodeSettings(
        env_type="verifiers",
        env_config={},
        agent=ChatAgent(PromptTemplates("", "{observation}", "{observation}")),
        sampling=Sampling(max_tokens=512),
        max_steps=50,
        sequence_length=100_000,
        strategy=WholeEpisodeStrategy(),
        limits=LimitsConfig(step_timeout=step_timeout),
    )
    episode = Episode("V", level, "val", f"g{level}", level, 0, 0)
    session = new_session(
        episode, engine, settings, env, rollout_id=f"ro-{level}", attempt_id="at", gateway=gateway
    )
    return check(await play_episode(session, env, settings, engine, lambda: env))


async def play(
    tag: str,
    options: dict[str, Any],
    levels: Sequence[int],
    concurrent: int = CONCURRENT,
    step_timeout: float = 600.0,
) -> list[Trajectory]:
    gateway = Gateway()
    left = iter(levels)
    played: dict[int, Trajectory] = {}

    async def work() -> None:
        env = make(tag, **options)
        try:
            for level in left:
                played[level] = await play_in(env, level, gateway, step_timeout)
        finally:
            await env.close()

    try:
        await asyncio.gather(*(work() for _ in range(concurrent)))
    finally:
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
    """What `openenv init` makes, with levels and room for several sessions: it echoes, and pays a tenth for each character."""
    folder = tmp_path_factory.mktemp("openenv")
    python = make(f"verifiers:{SETS / 'vf_sums.py'}", install=BOTH)._package.interpreter()
    subprocess.run(
        [str(python.with_name("openenv")), "init", "echoing"], cwd=folder, check=True, capture_output=True
    )
    server_folder = folder / "echoing" / "server"
    app = server_folder / "app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=64"))
    scaffold = server_folder / "echoing_environment.py"
    levels = scaffold.read_text().replace("def reset(self)", "def reset(self, seed: int = 0)")
    scaffold.write_text(levels.replace('"Echoing environment ready!"', 'f"ready, level {seed}"', 2))
    server = subprocess.Popen(
        [str(python), "-m", "uvicorn", "echoing.server.app:app", "--port", "0"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", server.stderr.readline())):
        assert server.poll() is None
    threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
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


TROUBLE = f"verifiers:{SETS / 'vf_trouble.py'}"


@pytest.mark.parametrize(
    ("level", "said"),
    [
        (1, "EpisodeFailed: TaskError: task TroubleTask scoring: LookupError: no such thing"),
        (2, "its process ended: last words"),
        (3, "its process was blocked for 3 s by it"),
        (4, "environment: timeout: the episode went on for 20 s without a call of the model"),
        (5, "Connection refused"),
        (6, "EpisodeFailed: scoring did not end: no value of paid"),
    ],
)
async def test_trouble_is_one_line_and_no_reward_and_the_next_episode_is_played(
    level: int, said: str
) -> None:
    options = {"stall_seconds": 3.0}
    with pytest.raises(EpisodeFailure) as caught:
        await play(TROUBLE, options, [level], 1, step_timeout=20.0 if level == 4 else 600.0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    (good,) = await play(TROUBLE, options, [0], 1)
    assert good.reward == 1.0


async def test_an_error_in_one_episode_ends_no_other_in_its_process() -> None:
    bad, good = make(TROUBLE), make(TROUBLE)
    played = await asyncio.gather(play_in(bad, 1), play_in(good, 0), return_exceptions=True)
    assert isinstance(played[0], EpisodeFailure)
    assert isinstance(played[1], Trajectory)
    assert played[1].reward == 1.0
    await bad.close()
    await good.close()


@pytest.mark.parametrize("way", ["direct", "gateway"])
async def test_tools_of_its_servers_are_called_and_the_conversation_is_one_sequence(way: str) -> None:
    script = [
        {"call": {"name": "calc_add", "arguments": {"a": 5, "b": 7}}},
        {"say": "it is {result}"},
    ]
    engine = SimulatedEngine(tokens_per_second=1e9, player=read_script(list(script)))
    env, gateway = make(f"verifiers:{SETS / 'vf_tools.py'}", way=way), Gateway()
    played = await play_in(env, 0, gateway, engine=engine)
    await env.close()
    await gateway.close()
    assert played.reward == 1.0
    assert [turn.extends for turn in played.turns] == [None, 0]
    assert [each.role for each in played.conversation] == ["user", "assistant", "tool", "assistant"]


async def test_tasks_that_rewrite_answers_are_played_through_the_gateway() -> None:
    tag = f"verifiers:{SETS / 'vf_rewriting.py'}"
    env = make(tag)
    assert env.way == "gateway"
    (played,) = await play(tag, {}, [0], 1)
    assert played.reward == 1.0
    with pytest.raises(ConfigError, match=r"way: direct cannot be taken: its tasks look at .* \(shout\)"):
        make(tag, way="direct")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no-such-set", {}, "taskset 'no-such-set' not found"),
        ("./no/such/folder", {}, "no such folder or file"),
        (str(SETS / "vf_sums.py"), {"taskset": {"largest": "many"}}, "largest"),
        (
            str(SETS / "vf_sums.py"),
            {"way": "direct", "harness": "bash"},
            "its harness is bash, which is a program",
        ),
        (str(SETS / "vf_sums.py"), {"harness": "no-such-harness"}, "harness 'no-such-harness' not found"),
        (str(SETS / "vf_sums.py"), {"max_steps": 0}, "max_steps must be 1 or more"),
        (str(SETS / "vf_sums.py"), {"way": "fast"}, "way"),
        ("textarena", {"taskset": {"game": "Hangman-v0"}}, "textarena requires nltk and textarena"),
    ],
)
def test_what_cannot_be_played_is_one_line_before_anything_is_opened(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(f"verifiers:{name}", **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_package_folder_is_found_with_what_it_requires(tmp_path: Path) -> None:
    folder = tmp_path / "my-sums"
    (folder / "my_sums").mkdir(parents=True)
    described = folder / "pyproject.toml"
    described.write_text('[project]\nname = "my-sums"\ndependencies = ["verifiers"]\n')
    (folder / "my_sums" / "__init__.py").write_text((SETS / "vf_sums.py").read_text())
    env = make(f"verifiers:{folder}")
    assert env.way == "direct"
    assert not can_fork(env)
    assert env._package.beside == ()
    described.write_text('[project]\ndependencies = ["no-such-package-of-anybody==99"]\n')
    with pytest.raises(ConfigError, match="no-such-package"):
        make(f"verifiers:{folder}")
