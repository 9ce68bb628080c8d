"""The environment's side of an episode.

An environment speaks text. `reset(seed)` and `step(answer)` are async and return Gymnasium's tuples; the
answer is the model's completion as it came, and the environment finds the action in it. The level depends
on the configuration and the seed alone. A format penalty travels in `info`, never in the reward.

Opens an environment to inspect it, without playing: what it says of itself, or whether it can be made at all.

Always true: the environment is closed afterwards, also when the inspection raises. One that does not close in time is left
to a daemon thread, which holds up nobody.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypedDict, runtime_checkable

from rollwright.errors import RollwrightError


class EnvironmentFailure(RollwrightError):
    """An environment cannot go on for a reason that is not the player's doing."""


class Info(TypedDict, total=False):
    """What an environment says beside the observation; every key is optional."""

    action: str | None
    """The action it understood; `None`: none."""
    valid: bool
    """Whether the answer had the asked-for format and named an existing action."""
    penalty: float
    """Cost of a wrong format, zero or negative; not part of the reward."""
    success: bool
    """Whether the task is solved now."""
    metrics: Mapping[str, float]
    """Figures of the environment's own."""


class Reset(NamedTuple):
    observation: str
    info: Info


class Step(NamedTuple):
    """Gymnasium's five-tuple, in text."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(frozen=True)
class Prompts:
    """How an environment introduces itself to a model. Placeholders are filled by the agent.

    Known placeholders: `{instruction}`, `{observation}`, `{turn_idx}` (from 1), `{actions_left}`,
    `{max_response_length}` (tokens).
    """

    system: str
    opening: str
    """The first user message."""
    turn: str
    """Every later user message."""


class Env(Protocol):
    """One environment; it can be reset again and again, one episode at a time."""

    @property
    def instruction(self) -> str:
        """Rules, symbols and available actions, true to this environment's options."""
        ...

    @property
    def prompts(self) -> Prompts: ...

    async def reset(self, seed: int) -> Reset: ...

    async def step(self, answer: str) -> Step: ...

    async def close(self) -> None: ...


@runtime_checkable
class Forkable(Protocol):
    """An environment that can be copied in the middle of an episode."""

    def fork(self) -> Self:
        """An exact copy that shares nothing with the original."""
        ...


def can_fork(env: Env) -> bool:
    """Whether it can be copied: it has `fork()`, and does not say by `stateless = False` that it holds what cannot."""
    return isinstance(env, Forkable) and bool(getattr(env, "stateless", True))


CLOSE_SECONDS = 5.0
"""Inspections happen while a run is prepared, which must not hang with one environment."""


@contextmanager
def inspected_env(make: Callable[[], Env]) -> Iterator[Env]:
    """A new environment, closed at the end. For code without an event loop, or in one."""
    env = make()
    try:
        yield env
    finally:
        # In a thread with an event loop of its own, because `close` is async and a loop may run in this one.
        closing = threading.Thread(target=_close, args=(env,), name="closing an environment", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _close(env: Env) -> None:
    with suppress(BaseException):  # it has said what it was asked for; it is never played
        asyncio.run(env.close())
