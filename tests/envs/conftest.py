"""Ways to play a whole episode, shared by the tests of every environment."""

from collections.abc import Awaitable, Callable, Iterable

import pytest

from rollwright.envs.base import Env, Step

Play = Callable[[Env, int, Iterable[str]], Awaitable[list[Step]]]


async def _play(env: Env, seed: int, answers: Iterable[str]) -> list[Step]:
    await env.reset(seed)
    steps = []
    for answer in answers:
        steps.append(await env.step(answer))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


@pytest.fixture
def play() -> Play:
    """Resets to a seed and gives the answers, until the episode ends."""
    return _play
