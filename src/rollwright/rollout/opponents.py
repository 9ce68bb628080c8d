"""Policies of the run that play other seats of an environment: the trained policy itself, or a frozen one.

Always true: their answers are part of the environment. They are neither recorded nor trained, their draws depend on the
episode alone, and their tokens are in the ledger of costs under the agent `opponent-SEAT`.
"""

import itertools
from collections.abc import Sequence

from rollwright.agents import Session
from rollwright.engines.base import NamedPolicies, Policy
from rollwright.envs.base import OpponentPlayer
from rollwright.errors import ConfigError
from rollwright.trajectory import Message

_FIRST = 1_000_000
"""Number of the first answer; numbers below belong to calls that a team throws away."""


def opponent_player(session: Session) -> OpponentPlayer:
    """Lets the policies of a session's run answer for other seats."""
    numbers = itertools.count(_FIRST)

    async def play(policy_name: str, seat: int, prompts: Sequence[tuple[str, str]]) -> str:
        turn = await session.generate_aside(
            [Message(role, content) for role, content in prompts],
            next(numbers),
            agent=f"opponent-{seat}",
            policy=_named(session, policy_name),
            policy_name=policy_name,
        )
        return turn.text

    return play


def _named(session: Session, name: str) -> Policy | None:
    if not name:
        return None
    if not isinstance(session.run_policy, NamedPolicies):
        raise ConfigError(
            f"opponent.policy: no policy {name!r} is at hand here; accepted: names of `policies`"
        )
    return session.run_policy.named(name)
