"""Helpers that run whole episodes, for the tests of all environments."""

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
    """Resets to a seed and steps through the answers until the episode ends."""
    return _play
