"""The environment protocol, with Gymnasium's tuples in text.

`reset(seed)` and `step(answer)` are async. The answer is the model's unmodified completion, and the environment parses
the action from it. Always true: the level depends on the configuration and the seed alone; a format penalty is reported
in `info` and never in the reward.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypedDict, runtime_checkable

from rollwright.errors import RollwrightError


class EnvironmentFailure(RollwrightError):
    """An environment failed for a reason that the model did not cause."""


class Info(TypedDict, total=False):
    """Additional results of `reset` and `step`; every key is optional."""

    action: str | None
    """The parsed action; `None`: the answer names none."""
    valid: bool
    """Whether the answer had the requested format and named an existing action."""
    penalty: float
    """Format penalty, zero or negative; not part of the reward."""
    success: bool
    """Whether the task is solved."""
    metrics: Mapping[str, float]
    """Metrics of the environment."""


class Reset(NamedTuple):
    """Result of `reset`."""

    observation: str
    info: Info


class Step(NamedTuple):
    """Result of `step`: Gymnasium's five-tuple, in text."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(frozen=True)
class PromptTemplates:
    """Prompt templates of an environment; the agent fills in the placeholders.

    Placeholders: `{instruction}`, `{observation}`, `{turn_idx}` (from 1), `{actions_left}`,
    `{max_response_length}` (tokens).
    """

    system: str
    opening: str
    """The first user message."""
    turn: str
    """Every later user message."""


class Env(Protocol):
    """One environment; it runs one episode at a time and can be reset any number of times."""

    @property
    def instruction(self) -> str:
        """Rules, symbols and available actions under this environment's options."""
        ...

    @property
    def prompts(self) -> PromptTemplates: ...

    async def reset(self, seed: int) -> Reset: ...

    async def step(self, answer: str) -> Step: ...

    async def close(self) -> None: ...


class ModelAccess(Protocol):
    """The run's model, for an environment that plays whole episodes; whatever way a call comes in, it is recorded."""

    @property
    def base_url(self) -> str:
        """Address for an SDK of OpenAI or Anthropic; belongs to this episode alone."""
        ...

    @property
    def api_key(self) -> str: ...

    async def complete(self, body: bytes, agent: str = "agent") -> tuple[int, bytes]:
        """Answers one request of OpenAI's chat completions, without HTTP: its body in; HTTP status and body out."""
        ...


@dataclass(frozen=True)
class EpisodeResult:
    """How an episode ended that an environment played by itself."""

    reward: float
    success: bool | None = None
    """`None`: the environment does not say."""
    components: Mapping[str, float] = field(default_factory=dict)
    """The named rewards that the reward was computed from."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class PlaysEpisodes(Protocol):
    """An environment that brings its own loop: it asks the model itself, and takes no steps."""

    async def play_episode(self, model: ModelAccess) -> EpisodeResult:
        """Plays the level of the last `reset` to its end. What goes wrong is raised; a reward is never made up."""
        ...


class OpponentPlayer(Protocol):
    """Policies of the run, for an environment with other players than the one that is trained."""

    async def __call__(self, policy_name: str, seat: int, prompts: Sequence[tuple[str, str]]) -> str:
        """The answer of a policy to messages, each a role and a text. `policy_name`: one of `policies`; empty: the policy that
        is trained or evaluated itself."""
        ...


@runtime_checkable
class HasOpponents(Protocol):
    """An environment with seats that policies of the run play."""

    def use_opponents(self, play: OpponentPlayer) -> None:
        """Takes the policies, before each `reset`."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """An environment that can be copied during an episode."""

    def fork(self) -> Self:
        """An exact copy that shares no mutable state with the original."""
        ...


@runtime_checkable
class Workplace(Protocol):
    """An environment that gives an agent a box to work in, and judges what the agent has left there."""

    @property
    def task(self) -> Mapping[str, Any]:
        """What is to be done now, in its field `instruction`."""
        ...

    async def conclude(self) -> Step:
        """Judges the work. The step has the reward if the episode has ended with it; else the next instruction follows."""
        ...

    async def solve(self) -> None:
        """Does the work by the environment's own solution."""
        ...


def can_fork(env: Env) -> bool:
    """Whether it has `fork()` and does not declare `stateless = False`."""
    return isinstance(env, Forkable) and bool(getattr(env, "stateless", True))


CLOSE_SECONDS = 5.0
"""Timeout of `close` after an inspection: a hung environment must not block the start of a run."""


@contextmanager
def open_for_inspection(make: Callable[[], Env]) -> Iterator[Env]:
    """Creates an environment for inspection and closes it afterwards, also when the inspection raises. Works inside and
    outside an event loop."""
    env = make()
    try:
        yield env
    finally:
        # In a thread with its own event loop, because `close` is async and a loop may already run in this thread. The thread
        # is a daemon, so a `close` that hangs delays nothing after the timeout.
        closing = threading.Thread(target=_close, args=(env,), name="closing an environment", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _close(env: Env) -> None:
    with suppress(BaseException):  # the inspection is complete, and no episode runs in this environment
        asyncio.run(env.close())
