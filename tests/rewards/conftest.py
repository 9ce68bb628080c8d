"""Attempts and policies for the tests of this folder."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from rollwright.engines.base import Generation, Prompt, Sampling
from rollwright.trajectory import FinishReason, Message, Outcome, Trajectory, Turn


def make_attempt(answer: str = "4", returned: object = None, tokens: int = 3) -> Trajectory:
    """A finished attempt of one turn."""
    return Trajectory(
        rollout_id="r1",
        attempt_id="a1",
        group_id="g1",
        tag="Arithmetic",
        seed=0,
        opening=(Message("system", "You add."), Message("user", "2+2?")),
        turns=[Turn(0, None, None, text=answer, completion_tokens=tokens, exact=False)],
        returned=None if returned is None else msgspec.json.encode(returned).decode(),
    )


@pytest.fixture
def attempt_with() -> Callable[..., Trajectory]:
    return make_attempt


@pytest.fixture
def attempt_of_two_turns() -> Trajectory:
    first = Turn(0, None, None, text="look", outcome=Outcome("a lake", 0.0), completion_tokens=2, exact=False)
    second = Turn(1, 0, None, text="swim", completion_tokens=5, exact=False)
    return Trajectory("r1", "a1", "g1", "Lake", 0, opening=(Message("user", "go"),), turns=[first, second])


class ScriptedPolicy:
    """Replies by a function of the conversation, and counts."""

    renderer = None
    version = 0
    pressure = 0

    def __init__(self, reply: Callable[[Sequence[Message]], str], finish: FinishReason = FinishReason.STOP):
        self._reply = reply
        self._finish = finish
        self.prompts: list[Prompt] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Generation:
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        return Generation(self._reply(prompt.messages), finish=self._finish, exact=False)

    async def close(self) -> None:
        """Holds nothing."""


@pytest.fixture
def scripted() -> type[ScriptedPolicy]:
    return ScriptedPolicy
