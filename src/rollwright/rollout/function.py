"""A user-defined function as an agent: `async def agent(task, session) -> reward`.

The function plays the whole episode: it asks the session for generations and returns the reward. A plain function runs
in a thread; its session blocks that thread while the engine works. Its generations are recorded and journalled like the
turns of any other episode.

An agent that uses a model API is given `session.base_url` and `session.api_key`: the worker's gateway then records its
calls in the same trajectory. Both are valid for this episode only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from rollwright.agents import (
    AttemptInterrupted,
    EpisodeFailure,
    Journal,
    OutOfRoom,
    Session,
    Stopwatch,
    TimeLimit,
    failed,
    timed_out,
)
from rollwright.aio import is_asked_for
from rollwright.engines.base import NO_ACTIONS, Parsed, Policy, Sampling, ToolSpec
from rollwright.envs.threaded import BlockingRunner
from rollwright.errors import FormatError, RollwrightError
from rollwright.gateway import Access, CaptureRules, Gateway, RolloutRecorder
from rollwright.gateway.recorder import USUAL_RULES
from rollwright.rng import digest
from rollwright.rollout.episode import EpisodeSettings
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import Boundary, Message, StopReason, Trajectory, Turn, reward_of

Answer = TypeVar("Answer")

AgentFunction = Callable[[Any, Any], "Awaitable[float | None] | float | None"]
"""Takes the task and a session (a `ThreadSession` when it is not async); returns the reward, or `None` for 0."""


class FunctionSession(Session):
    """A session that can also be reached through the worker's gateway."""

    gateway: Gateway | None = None
    rules: CaptureRules = USUAL_RULES
    """Rules for an agent that uses the gateway."""
    recorder: RolloutRecorder | None = None
    """Records calls through the gateway; `None`: the address was not requested yet."""
    _access: Access | None = None

    @property
    def base_url(self) -> str:
        """Address for an SDK: OpenAI's chat completions and responses, Anthropic's messages."""
        return self.access().base_url

    @property
    def api_key(self) -> str:
        return self.access().api_key

    def access(self) -> Access:
        if self._access is None:
            if self.gateway is None:
                raise RollwrightError("session.base_url: this run has no gateway")
            self.recorder = RolloutRecorder(self, self._sampling, rules=self.rules)
            self._access = self.gateway.open(self.recorder)
        return self._access

    async def leave_gateway(self) -> None:
        """Leaves the gateway; later calls are refused."""
        if self.gateway is not None and self.recorder is not None:
            await self.gateway.close_rollout(self.recorder)


class ThreadSession:
    """A session for code in a thread."""

    def __init__(self, session: FunctionSession, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self.ended = False
        """Whether the episode has ended: an abandoned thread must not sample any more."""

    @property
    def base_url(self) -> str:
        return self._access().base_url

    @property
    def api_key(self) -> str:
        return self._access().api_key

    def generate(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
    ) -> Turn:
        return self._wait_for(
            self._session.generate(messages, continues=continues, agent=agent, tools=tools, sampling=sampling)
        )

    def parse(self, turn: Turn) -> Parsed:
        return self._session.parse(turn)

    def _access(self) -> Access:
        async def access() -> Access:
            return self._session.access()

        return self._wait_for(access())

    def _wait_for(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        if self.ended:
            call.close()
            raise RollwrightError("the episode is over: it was given up, or ended already")
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _is_async(function: AgentFunction) -> bool:
    """Whether a function, or the `__call__` of an object, is async."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


async def _run_in_thread(function: AgentFunction, task: Any, session: ThreadSession) -> float | None:
    """Runs in a separate daemon thread, so that a hung call occupies no thread pool and does not block the exit."""
    runner = BlockingRunner("agent")
    try:
        return await runner.run(lambda: function(task, session))  # type: ignore[arg-type, return-value]
    finally:
        session.ended = True
        runner.close()


def function_session(
    claimed: AttemptedRollout,
    policy: Policy,
    settings: EpisodeSettings,
    *,
    journal: Journal,
    on_turn: Callable[[Turn], None],
    stopwatch: Stopwatch | None = None,
    gateway: Gateway | None = None,
) -> FunctionSession:
    """A session for a rollout without an environment."""
    trajectory = Trajectory(
        rollout_id=claimed.rollout_id,
        attempt_id=claimed.attempt.attempt_id,
        group_id=str(claimed.metadata.get("group_id", claimed.rollout_id)),
        tag=settings.env_type,
        seed=digest(claimed.rollout_id) & 0x7FFF_FFFF,
    )
    session = FunctionSession(
        trajectory,
        policy,
        settings.sampling,
        (claimed.rollout_id,),
        sequence_length=settings.sequence_length,
        generate_timeout=settings.limits.generate_timeout,
        attempt=claimed.attempt.sequence_id,
        env=NO_ACTIONS,
        journal=journal,
        on_turn=on_turn,
        stopwatch=stopwatch,
    )
    session.gateway = gateway
    session.rules = settings.capture
    return session


async def play_function(
    session: FunctionSession, function: AgentFunction, task: Any, settings: EpisodeSettings
) -> Trajectory:
    """Runs the function to its end; its reward becomes the episode's.

    An engine failure ends the attempt, even if the function handled it. A full sequence ends the episode.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    limit = TimeLimit(settings.limits.episode_timeout)
    reward: float | None = None
    error: BaseException | None = None
    try:
        with limit:
            if _is_async(function):
                reward = await function(task, session)  # type: ignore[misc]
            else:
                reward = await _run_in_thread(function, task, ThreadSession(session, loop))
    except (EpisodeFailure, AttemptInterrupted):
        raise
    except BaseException as raised:
        if is_asked_for(raised):
            raise
        error = raised  # put down to its boundary below
    finally:
        await session.leave_gateway()
    recorder = session.recorder
    if recorder is not None:
        recorder.raise_failure()
    no_room = isinstance(error, OutOfRoom) or (recorder is not None and recorder.out_of_room)
    if error is not None and (limit.expired or not no_room):
        raise _failure(error, limit.expired, settings, len(session.trajectory.turns)) from error
    if recorder is not None and error is None:
        recorder.raise_unused()
    trajectory = session.seal()
    _apply_reward(trajectory, reward, recorder)
    trajectory.stop = StopReason.TERMINATED if error is None else StopReason.MAX_LENGTH
    trajectory.duration = loop.time() - started
    return trajectory


def _failure(error: BaseException, expired: bool, settings: EpisodeSettings, turns: int) -> EpisodeFailure:
    if expired:
        message = f"the episode took longer than {settings.limits.episode_timeout:g} s"
        return timed_out(Boundary.SYSTEM, message, turns)
    return failed(Boundary.AGENT, error, turns)


def _apply_reward(trajectory: Trajectory, reward: float | None, recorder: RolloutRecorder | None) -> None:
    """The reward that the function returned counts; else the one that its agent gave by HTTP; else 0."""
    given = recorder.given if recorder is not None else None
    if given is not None:
        trajectory.episode_reward, trajectory.success = given.reward, given.success
    if reward is not None:
        try:
            trajectory.episode_reward = reward_of(reward, f"the reward that {trajectory.tag} returned")
        except FormatError as error:
            raise failed(Boundary.AGENT, error, len(trajectory.turns)) from error
