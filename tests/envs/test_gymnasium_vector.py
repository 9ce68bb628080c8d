"""Gymnasium environments in vectors: exactly the episodes of single ones, without waiting for each other."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import pytest

from rollwright.envs import registry
from rollwright.envs.adapters.gymnasium_vector import VectorGymnasium
from rollwright.envs.base import Env, can_fork
from rollwright.errors import ConfigError
from rollwright.rng import digest

EPISODES = 200


class Odd(gymnasium.Env[int, int]):
    """Raises at action 1, waits at action 2 until it is let go, and else counts."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(3)
    let_go = threading.Event()
    threads: ClassVar[set[int]] = set()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = (seed or 0) % 100
        return self.count, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        Odd.threads.add(threading.get_ident())
        if action == 1:
            raise LookupError("no such thing")
        if action == 2:
            Odd.let_go.wait(60)
        self.count += 1
        return self.count, 1.0, False, False, {}


gymnasium.register("rollwright/Odd-v0", Odd)


def script(env_id: str, seed: int, actions: int) -> list[str]:
    """Answers of one episode; one in ten is no action."""
    drawn = [digest("vector", env_id, seed, step) for step in range(30)]
    return ["no tags" if each % 10 == 0 else f"<answer>{each // 10 % actions}</answer>" for each in drawn]


async def play(env: Env, seed: int, answers: list[str]) -> list[Any]:
    seen: list[Any] = [await env.reset(seed)]
    for answer in answers:
        step = await env.step(answer)
        seen.append(step)
        if step.terminated or step.truncated:
            break
    return seen


async def played(make: Callable[[], Env], env_id: str, actions: int) -> list[list[Any]]:
    left, results = iter(range(EPISODES)), {}

    async def work() -> None:
        env = make()
        for seed in left:
            results[seed] = await play(env, seed, script(env_id, seed, actions))
        await env.close()

    await asyncio.gather(*(work() for _ in range(24)))
    return [results[seed] for seed in range(EPISODES)]


def native(env_id: str, seed: int, answers: list[str], **options: Any) -> float:
    """The reward of gymnasium's own loop; an answer without an action does nothing."""
    env = gymnasium.make(env_id, **options)
    env.reset(seed=seed)
    total, done = 0.0, False
    for answer in answers:
        if answer == "no tags" or done:
            continue
        _, reward, terminated, truncated, _ = env.step(int(answer.removeprefix("<answer>")[0]))
        total += float(reward)
        done = terminated or truncated
    env.close()
    return total


@pytest.mark.parametrize(
    ("env_id", "actions", "options"),
    [("FrozenLake-v1", 4, {"is_slippery": True}), ("CartPole-v1", 2, {}), ("Taxi-v4", 6, {})],
)
async def test_episodes_in_a_vector_are_those_of_single_environments_and_of_its_own_loop(
    env_id: str, actions: int, options: dict[str, Any]
) -> None:
    tag = f"gymnasium:{env_id}"
    single = await played(lambda: registry.make(tag, options), env_id, actions)
    vector = await played(lambda: registry.make(tag, {**options, "num_envs": 8}), env_id, actions)
    assert vector == single
    rewards = [sum(step.reward for step in seen[1:]) for seen in vector]
    assert rewards == [
        pytest.approx(native(env_id, seed, script(env_id, seed, actions), **options), abs=1e-12)
        for seed in range(EPISODES)
    ]
    assert len(set(rewards)) > 1


def odd(num_envs: int = 4) -> VectorGymnasium:
    made = registry.make("gymnasium:rollwright/Odd-v0", {"num_envs": num_envs})
    assert isinstance(made, VectorGymnasium)
    return made


async def test_a_vector_has_one_thread_and_its_episodes_are_apart() -> None:
    Odd.threads.clear()
    envs = [odd() for _ in range(4)]
    await asyncio.gather(*(env.reset(10 * place) for place, env in enumerate(envs)))
    for _ in range(3):
        steps = await asyncio.gather(*(env.step("<answer>0</answer>") for env in envs))
    assert [step.observation for step in steps] == ["3", "13", "23", "33"]
    assert len(Odd.threads) == 1
    assert not can_fork(envs[0])
    for env in envs:
        await env.close()


async def test_no_episode_waits_for_another_one() -> None:
    first, second = odd(), odd()
    await asyncio.gather(first.reset(1), second.reset(2))
    for count in range(3, 8):
        assert (await second.step("<answer>0</answer>")).observation == str(count)
    assert (await first.step("<answer>0</answer>")).observation == "2"
    await first.close()
    await second.close()


async def test_an_exception_fails_one_episode_alone() -> None:
    bad, good = odd(), odd()
    await asyncio.gather(bad.reset(1), good.reset(2))
    failure, step = await asyncio.gather(
        bad.step("<answer>1</answer>"), good.step("<answer>0</answer>"), return_exceptions=True
    )
    assert isinstance(failure, LookupError)
    assert not isinstance(step, BaseException)
    assert step.observation == "3"
    await bad.close()
    await good.close()


async def test_one_that_hangs_gives_its_vector_up_and_the_next_episodes_get_a_new_one() -> None:
    Odd.let_go.clear()
    bad, good = odd(), odd()
    await asyncio.gather(bad.reset(1), good.reset(2))
    hanging = asyncio.ensure_future(bad.step("<answer>2</answer>"))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    await bad.close()
    await good.close()
    assert (await good.reset(5)).observation == "5"
    assert (await good.step("<answer>0</answer>")).observation == "6"
    await good.close()
    Odd.let_go.set()


def test_a_vector_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_envs must be 1 or more, got 0"):
        registry.make("gymnasium:CartPole-v1", {"num_envs": 0})
