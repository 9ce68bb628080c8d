"""Forks of forks, stepped in any order, in every environment: each continues independently of the others."""

import asyncio
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.envs import registry
from rollwright.envs.base import Env, Forkable, Step

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "FrozenLake": {"is_slippery": True},
    "SimpleSokoban": {},
    "LargerSokoban": {"max_steps": 30},
    "SokobanDifferentGridVocab": {},
    "gymnasium:CliffWalking-v1": {"max_steps": 30},
    "gymnasium:Blackjack-v1": {},
    "gymnasium:FrozenLake-v1": {"max_steps": 30},
    "gymnasium:CartPole-v1": {"max_steps": 30},
    "gymnasium:Acrobot-v1": {"max_steps": 30},
    "reasoning_gym:basic_arithmetic": {},
}
MOST_FORKS = 5
NONSENSE = 9
"""Index of a move without a valid action."""


class Op(NamedTuple):
    """An operation on one of the branches."""

    branch: int
    move: int | None
    """`None`: fork the branch."""


OPS = st.lists(
    st.builds(Op, st.integers(0, MOST_FORKS), st.one_of(st.none(), st.integers(0, NONSENSE))), max_size=25
)


class Branch(NamedTuple):
    env: Env
    given: list[str]
    seen: list[Step]

    @property
    def running(self) -> bool:
        return not self.seen or not (self.seen[-1].terminated or self.seen[-1].truncated)


def move(env: Any, number: int) -> str:
    """An answer with the action of this number; the number itself if there is no list of actions."""
    if number == NONSENSE:
        return "nonsense"
    actions = list(env.actions())
    return str(env.answer(actions[number % len(actions)] if actions else str(number)))


async def played(tag: str, seed: int, ops: list[Op]) -> tuple[str, list[Branch]]:
    env = registry.make(tag, ENVIRONMENTS[tag])
    first = (await env.reset(seed)).observation
    branches = [Branch(env, [], [])]
    for op in ops:
        branch = branches[op.branch % len(branches)]
        if op.move is None and len(branches) < MOST_FORKS:
            assert isinstance(branch.env, Forkable)
            branches.append(Branch(branch.env.fork(), list(branch.given), list(branch.seen)))
        elif op.move is not None and branch.running:
            branch.given.append(move(branch.env, op.move))
            branch.seen.append(await branch.env.step(branch.given[-1]))
    return first, branches


async def alone(tag: str, seed: int, branch: Branch, first: str) -> None:
    env = registry.make(tag, ENVIRONMENTS[tag])
    assert (await env.reset(seed)).observation == first
    assert [await env.step(answer) for answer in branch.given] == branch.seen
    await env.close()


@pytest.mark.parametrize("tag", ENVIRONMENTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**31 - 1), ops=OPS)
def test_forks_never_share_state(tag: str, seed: int, ops: list[Op]) -> None:
    async def check() -> None:
        first, branches = await played(tag, seed, ops)
        for branch in branches:
            await alone(tag, seed, branch, first)
        for branch in branches:
            await branch.env.close()

    asyncio.run(check())


@pytest.mark.parametrize("tag", [tag for tag in ENVIRONMENTS if not tag.startswith("reasoning_gym")])
def test_forks_do_part_ways(tag: str) -> None:
    """Otherwise the property above would be vacuous."""
    ops = [Op(0, None), *(Op(step % 2, step // 2 + 1 if step % 2 else 0) for step in range(12))]

    async def check() -> None:
        differ = False
        for seed in range(5):
            _, branches = await played(tag, seed, ops)
            differ |= branches[0].seen != branches[1].seen
            for branch in branches:
                await branch.env.close()
        assert differ

    asyncio.run(check())


def test_closing_a_fork_leaves_the_others_running() -> None:
    async def check() -> None:
        for tag in ENVIRONMENTS:
            _, (one, other) = await played(tag, 3, [Op(0, None)])
            await one.env.close()
            await other.env.step(move(other.env, 0))
            await other.env.close()

    asyncio.run(check())


def test_every_tag_is_among_them() -> None:
    assert set(registry.tags()) <= set(ENVIRONMENTS)
    # With tests of their own; of these only TextArena's and Harbor's can be forked.
    elsewhere = {"textarena", "openenv", "harbor", "inspect", "nemo_gym", "verifiers"}
    assert {tag.partition(":")[0] for tag in ENVIRONMENTS if ":" in tag} == set(registry.PREFIXES) - elsewhere
