import asyncio
import copy
import threading

import gymnasium
import pytest

from rollwright import rng
from rollwright.envs import registry
from rollwright.envs.base import Env, Forkable, Step
from rollwright.errors import ConfigError

TAGS = ["gymnasium:FrozenLake-v1", "gymnasium:CliffWalking-v1", "gymnasium:Taxi-v4", "gymnasium:Blackjack-v1"]


class Parrot(gymnasium.Env[str, str]):
    """Echoes text; its lock prevents copying."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(5)

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say", {}

    def step(self, action):
        return action, 0.5, action == "bye", False, {}


class Shared(gymnasium.Env[int, int]):
    """Its copies share state with the original."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2, start=1)
    count = 0

    def __deepcopy__(self, memo):
        return self

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return 0, {}

    def step(self, action):
        self.count += action
        return self.count, 0.0, False, False, {}


@pytest.fixture(autouse=True, scope="module")
def own_environments():
    for name, kind in {"Parrot-v0": Parrot, "Shared-v0": Shared}.items():
        gymnasium.register(name, entry_point=kind, disable_env_checker=True)
    yield
    for name in ("Parrot-v0", "Shared-v0"):
        del gymnasium.registry[name]


def _random_answers(env: Env, count: int, *key: int) -> list[str]:
    chance = rng.generator("test", *key)
    names = env.actions()
    return [env.answer(names[int(chance.random() * len(names))]) for _ in range(count)]


@pytest.mark.parametrize("tag", TAGS)
async def test_an_episode_is_a_function_of_its_seed_and_answers(play, tag: str) -> None:
    env, other = registry.make(tag), registry.make(tag)
    for seed in range(3):
        answers = _random_answers(env, 30, seed)
        steps = await play(env, seed, answers)
        assert steps == await play(other, seed, answers)
        assert all(step.observation and step.info["valid"] for step in steps)
    await asyncio.gather(env.close(), other.close())


@pytest.mark.parametrize("tag", TAGS)
async def test_a_fork_plays_on_exactly_and_alone(tag: str) -> None:
    env = registry.make(tag)
    assert isinstance(env, Forkable)
    for seed in range(5):
        await env.reset(seed)
        fork = env.fork()
        answers = _random_answers(env, 20, seed)
        ahead = await _until_the_end(fork, answers)
        assert await _until_the_end(env, answers) == ahead
        await fork.close()
    await env.close()


async def _until_the_end(env: Env, answers: list[str]) -> list[Step]:
    steps = []
    for answer in answers:
        steps.append(await env.step(answer))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


async def test_it_plays_as_gymnasium_itself_does(play) -> None:
    env = registry.make("gymnasium:CliffWalking-v1")
    plain = gymnasium.make("CliffWalking-v1")
    plain.reset(seed=1)
    moves = [0, 1, 1, 2, 3, 0, 1]
    expected = [plain.step(move)[1] for move in moves]
    steps = await play(env, 1, [env.answer(str(move)) for move in moves])
    assert [step.reward for step in steps] == expected
    await env.close()


async def test_what_colours_say_is_kept_in_words() -> None:
    env = registry.make("gymnasium:FrozenLake-v1", {"is_slippery": False})
    assert (await env.reset(0)).observation == "[red:S]FFF\nFHFH\nFFFH\nHFFG"
    assert (await env.step("<answer>2</answer>")).observation.endswith("S[red:F]FF\nFHFH\nFFFH\nHFFG")
    assert "[red:A]" in env.instruction
    assert "2 = Move right" in env.instruction
    await env.close()


async def test_actions_can_be_given_names(play) -> None:
    env = registry.make("gymnasium:Blackjack-v1", {"action_names": ["Stick", "Hit"]})
    assert list(env.actions()) == ["Stick", "Hit"]
    assert "Stick, Hit" in env.instruction
    (step,) = await play(env, 1, ["<answer>stick</answer>"])
    assert step.info["action"] == "Stick"
    assert step.terminated
    await env.close()


async def test_an_answer_without_an_action_leaves_the_environment_alone_but_counts(play) -> None:
    env = registry.make("gymnasium:CliffWalking-v1", {"max_steps": 3, "format_penalty": -0.2})
    steps = await play(env, 0, ["nonsense", "<answer>4</answer>", "<answer>0</answer>", "<answer>0</answer>"])
    assert [step.info["penalty"] for step in steps] == [-0.2, -0.2, 0.0]
    assert [step.reward for step in steps] == [0.0, 0.0, -1.0]
    assert [step.truncated for step in steps] == [False, False, True]
    assert steps[0].observation == steps[1].observation != steps[2].observation
    await env.close()


async def test_the_limit_is_the_one_that_its_spec_tells(play) -> None:
    for tag in ("gymnasium:Taxi-v4", "gymnasium:CliffWalking-v1"):
        env = registry.make(tag)
        steps = await play(env, 0, [env.answer("0")] * 1000)
        assert len(steps) == registry.spec(tag).max_steps
        assert steps[-1].truncated
        await env.close()


async def test_text_actions_are_free(play) -> None:
    env = registry.make("gymnasium:Parrot-v0")
    assert env.actions() == ()
    answers = [env.answer(text) for text in ("hello", "too long for it", "bye")]
    steps = await play(env, 0, answers)
    assert [step.observation for step in steps] == ["hello", "hello", "bye"]
    assert [step.info["valid"] for step in steps] == [True, False, True]
    assert [step.reward for step in steps] == [0.5, 0.0, 0.5]
    assert steps[-1].terminated
    await env.close()


async def test_no_fork_is_offered_where_copies_are_not_exact() -> None:
    with pytest.raises(TypeError):
        copy.deepcopy(Parrot())
    for tag in ("gymnasium:Parrot-v0", "gymnasium:Shared-v0"):
        env = registry.make(tag)
        assert not isinstance(env, Forkable)
        await env.close()


async def test_actions_that_do_not_start_at_zero_keep_their_numbers(play) -> None:
    env = registry.make("gymnasium:Shared-v0")
    assert list(env.actions()) == ["1", "2"]
    steps = await play(env, 0, [env.answer("1"), env.answer("2")])
    assert [step.observation for step in steps] == ["1", "3"]
    await env.close()


@pytest.mark.parametrize(
    ("tag", "config", "words"),
    [
        ("gymnasium:FrozenLak-v1", {}, "Did you mean: `FrozenLake`"),
        ("gymnasium:not an id", {}, "Malformed environment ID"),
        ("gymnasium:FrozenLake-v1", {"is_slipery": 1}, "did you mean 'is_slippery'.*accepted: action_names"),
        ("gymnasium:FrozenLake-v1", {"render_mode": "human"}, "unknown setting 'render_mode'"),
        ("gymnasium:FrozenLake-v1", {"map_name": "9x9"}, "refuses {'map_name': '9x9'}"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["a", "b"]}, "must be 4 different names"),
        ("gymnasium:Pendulum-v1", {}, "only Discrete and Text actions"),
        ("gymnasium:Parrot-v0", {"action_names": ["a"]}, "free-text actions"),
        ("gymnasium:Taxi-v4", {"max_steps": 0}, "max_steps must be 1 or more"),
        ("gymnasium:Taxi-v4", {"max_steps": "10"}, "max_steps: expected int"),
    ],
)
def test_what_gymnasium_cannot_make_is_one_clear_line(tag: str, config, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        registry.make(tag, config)
    assert "\n" not in str(caught.value)
