"""A fork continues exactly like the original, and neither affects the other."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.envs import registry
from rollwright.envs.base import Env, Forkable, Step

GAMES = {
    "FrozenLake": {},
    "slippery FrozenLake": {"is_slippery": True, "p": 0.95},
    "SimpleSokoban": {},
    "LargerSokoban": {"max_steps": 30},
    "SokobanDifferentGridVocab": {},
}

answers = st.lists(
    st.sampled_from([f"<answer>{a}</answer>" for a in ("Up", "Down", "Left", "Right", "Fly")]), max_size=12
)


async def _go_on(env: Env, given: Sequence[str], steps: list[Step]) -> list[Step]:
    for answer in given:
        if steps and (steps[-1].terminated or steps[-1].truncated):
            break
        steps = [*steps, await env.step(answer)]
    return steps


@pytest.mark.parametrize("game", GAMES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), before=answers, mine=answers, theirs=answers)
def test_a_fork_is_exact_and_independent(
    game: str, seed: int, before: list[str], mine: list[str], theirs: list[str]
) -> None:
    async def check() -> None:
        make = lambda: registry.make(game.split()[-1], GAMES[game])  # noqa: E731
        env, alone_mine, alone_theirs = make(), make(), make()
        await env.reset(seed)
        start = await _go_on(env, before, [])
        assert isinstance(env, Forkable)
        fork = env.fork()
        forked = await _go_on(fork, theirs, start)
        went_on = await _go_on(env, mine, start)

        await alone_mine.reset(seed)
        assert went_on == await _go_on(alone_mine, [*before, *mine], [])
        await alone_theirs.reset(seed)
        assert forked == await _go_on(alone_theirs, [*before, *theirs], [])
        assert env.best_action() == alone_mine.best_action()
        assert fork.best_action() == alone_theirs.best_action()

    asyncio.run(check())


async def test_a_fork_can_be_reset_without_the_original_noticing() -> None:
    env = registry.make("SimpleSokoban")
    shown = (await env.reset(1)).observation
    fork = env.fork()
    assert (await fork.reset(2)).observation != shown
    assert (await env.step("nonsense")).observation == shown
