"""A user's own function as an agent: `async def agent(task, session)`, or a plain function with the same parameters.

The function plays the whole episode: it asks the session for generations, and what it returns is kept. A plain function
runs in a thread; its session blocks that thread while the engine works. Generations are recorded and journalled like the
turns of any other episode.

A function whose agent speaks a model API points it at `session.base_url` with `session.api_key`: the worker's gateway
then records its calls in the same trajectory.

A function is played in two ways. As the agent of a tag with tasks (`AgentStrategy`), the returned value is stored in the
trajectory and the tag's rewards judge it; an environment that gives it a box judges what it has left there. As the agent of a worker without an environment (`play_function`), the returned
number is the reward.
"""

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from rollwright.agents import (
    AttemptInterrupted,
    EpisodeFailure,
    Journal,
    OutOfRoom,
    Session,
    Stopwatch,
    TimeLimit,
    bounded,
    failed,
    timed_out,
)
from rollwright.agents.outcomes import outcome_of
from rollwright.aio import is_cancellation
from rollwright.engines.base import NO_ACTIONS, Policy
from rollwright.envs.base import Env, Workplace
from rollwright.envs.threaded import BlockingRunner
from rollwright.errors import FormatError
from rollwright.gateway import Gateway, RolloutRecorder
from rollwright.gateway.recorder import NO_CALL
from rollwright.rng import digest
from rollwright.rollout.agent_session import AgentSession, ThreadSession
from rollwright.rollout.episode import EpisodeSettings
from rollwright.sandbox.box import NO_NEEDS, BoxNeeds
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import (
    LEFT_OUT,
    UNDELIVERED,
    Boundary,
    ErrorRecord,
    StopReason,
    Trajectory,
    reward_of,
)

AgentFunction = Callable[[Any, Any], "Awaitable[Any] | Any"]
"""Takes the task and a session (a `ThreadSession` when it is not async); returns a value that JSON can hold, or `None`."""

LONGEST_RETURNED = 1024 * 1024
"""Bytes of a returned value as JSON. It is stored with every trajectory; an agent that returns more means a file."""


class AgentResult(NamedTuple):
    """How a function came to its end."""

    value: Any
    out_of_room: bool
    """Whether it stopped because a prompt left no room for an answer; then it has returned nothing."""


@dataclass(frozen=True)
class AgentStrategy:
    """Plays the tasks of a tag with a function; in a `Workplace`, one part of the task after the other."""

    function: AgentFunction

    @property
    def box_needs(self) -> BoxNeeds:
        needs: BoxNeeds = getattr(self.function, "box_needs", NO_NEEDS)
        return needs

    async def prepare(self) -> None:
        """Makes ready what the agent needs on this machine; quick if it is ready."""
        prepare = getattr(self.function, "prepare", None)
        if prepare is not None:
            await prepare()

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        assert isinstance(session, AgentSession), "attempts open sessions with a gateway"
        trajectory = session.trajectory
        trajectory.opening = ()  # the function writes its own prompts
        if isinstance(env, Workplace):
            result = await _work(self.function, session, env, settings)
        else:
            # Its own copy of the row: the rewards judge by the row as it is in the file.
            result = await run_agent(self.function, deepcopy(getattr(env, "task", None)), session)
        turns = trajectory.turns
        if not turns and not settings.capture.allow_no_calls:
            why = (
                "the agent ended without one answered call, so there is nothing that its reward could be for"
            )
            raise EpisodeFailure(ErrorRecord(Boundary.AGENT, NO_CALL, why, 0))
        trajectory.returned = _encode_returned(result.value, len(turns))
        keep_conversation(session)
        return StopReason.MAX_LENGTH if result.out_of_room else StopReason.TERMINATED


def keep_conversation(session: AgentSession) -> None:
    """Stores the last conversation whose answer was delivered: its messages cannot be derived from the turns."""
    turns = session.trajectory.turns
    heard = next((each for each in reversed(turns) if each.filtered not in (UNDELIVERED, LEFT_OUT)), None)
    if heard is not None:
        session.trajectory.conversation = session.conversation_of(heard)


@dataclass(frozen=True)
class SolutionStrategy:
    """Plays the tasks of a `Workplace` without a model: by the environment's own solution, or by doing nothing."""

    solves: bool

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        assert isinstance(env, Workplace), "checked when the run was built"
        session.trajectory.opening = ()
        while True:
            if self.solves:
                await bounded(env.solve(), settings.limits.step_timeout, Boundary.ENVIRONMENT, 0)
            if await _conclude(env, session.trajectory, settings):
                return StopReason.TERMINATED


async def _work(
    function: AgentFunction, session: AgentSession, env: Workplace, settings: EpisodeSettings
) -> AgentResult:
    """Has an agent do one part of a task after the other, each of which is judged when it is done."""
    while True:
        result = await run_agent(function, deepcopy(env.task), session)
        if await _conclude(env, session.trajectory, settings):
            return result
        session.rejoin_gateway()


async def _conclude(env: Workplace, trajectory: Trajectory, settings: EpisodeSettings) -> bool:
    """Judges what was done; returns whether that was the last part, whose step has the reward."""
    turns = len(trajectory.turns)
    step = await bounded(env.conclude(), settings.limits.step_timeout, Boundary.ENVIRONMENT, turns)
    try:
        outcome = outcome_of(step)
        for name, value in step.info.get("metrics", {}).items():
            trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + float(value)
    except Exception as error:
        told = FormatError(f"environment {trajectory.tag}: {error}")
        raise failed(Boundary.ENVIRONMENT, told, turns) from error
    trajectory.episode_reward += outcome.reward
    if outcome.success is not None:
        trajectory.success = outcome.success
    return outcome.terminated or outcome.truncated


def _encode_returned(value: Any, turns: int) -> str | None:
    """The returned value as JSON text; a value that JSON cannot hold is the agent's failure."""
    if value is None:
        return None
    try:
        plain = msgspec.to_builtins(value, enc_hook=_plain_number)
        _check_numbers(plain)  # which would be stored as null
        encoded = msgspec.json.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        told = FormatError(f"it returned a {type(value).__name__} that JSON cannot hold: {error}")
        raise failed(Boundary.AGENT, told, turns) from error
    if len(encoded) > LONGEST_RETURNED:
        told = FormatError(
            f"it returned {len(encoded)} bytes of JSON; at most {LONGEST_RETURNED} are accepted"
        )
        raise failed(Boundary.AGENT, told, turns)
    return encoded.decode()


def _check_numbers(value: Any) -> None:
    """Raises for a number that JSON has no word for."""
    if isinstance(value, float) and not isfinite(value):
        raise ValueError(f"it holds {value}")
    if isinstance(value, list | dict):
        for each in value if isinstance(value, list) else value.values():
            _check_numbers(each)


def _plain_number(value: Any) -> Any:
    """A number of numpy or torch."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


async def run_agent(
    function: AgentFunction, task: Any, session: AgentSession, boundary: Boundary = Boundary.AGENT
) -> AgentResult:
    """Runs the function to its end. Its exception is a failure of the boundary; an engine's failure ends the attempt, whatever
    the function made of it; running out of room ends the episode."""
    value: Any = None
    error: BaseException | None = None
    try:
        value = await _call(function, task, session)
    except (EpisodeFailure, AttemptInterrupted):
        raise
    except BaseException as raised:
        if is_cancellation(raised):
            raise
        error = raised  # put down to its boundary below
    finally:
        await session.leave_gateway()
    recorder = session.recorder
    if recorder is not None:
        recorder.raise_failure()
    out_of_room = isinstance(error, OutOfRoom) or (recorder is not None and recorder.out_of_room)
    if error is not None and not out_of_room:
        raise failed(boundary, error, len(session.trajectory.turns)) from error
    if recorder is not None and error is None:
        recorder.raise_unused()
    return AgentResult(value, error is not None)


async def _call(function: AgentFunction, task: Any, session: AgentSession) -> Any:
    if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
        return await function(task, session)
    value = await _run_in_thread(function, task, ThreadSession(session, asyncio.get_running_loop()))
    return await value if isawaitable(value) else value


async def _run_in_thread(function: AgentFunction, task: Any, session: ThreadSession) -> Any:
    """In a thread of its own, so that a hung one takes no place from others and does not hold up the process's end."""
    runner = BlockingRunner("agent")
    try:
        return await runner.run(lambda: function(task, session))
    finally:
        session.ended = True
        runner.close()


def function_session(
    claimed: AttemptedRollout,
    policy: Policy,
    settings: EpisodeSettings,
    *,
    journal: Journal,
    on_turn: Callable[[Any], None],
    stopwatch: Stopwatch | None = None,
    gateway: Gateway | None = None,
) -> AgentSession:
    """A session for a rollout that names no environment."""
    trajectory = Trajectory(
        rollout_id=claimed.rollout_id,
        attempt_id=claimed.attempt.attempt_id,
        group_id=str(claimed.metadata.get("group_id", claimed.rollout_id)),
        tag=settings.env_type,
        seed=digest(claimed.rollout_id) & 0x7FFF_FFFF,
    )
    session = AgentSession(
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
    session: AgentSession, function: AgentFunction, task: Any, settings: EpisodeSettings
) -> Trajectory:
    """Plays a rollout without an environment: the number that the function returns becomes the reward of the episode."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    limit = TimeLimit(settings.limits.episode_timeout)
    try:
        with limit:
            result = await run_agent(function, task, session)
    except TimeoutError as error:
        if not limit.expired:
            raise
        if session.recorder is not None:
            session.recorder.raise_failure()
        message = f"the episode took longer than {settings.limits.episode_timeout:g} s"
        raise timed_out(Boundary.SYSTEM, message, len(session.trajectory.turns)) from error
    trajectory = session.seal()
    _apply_reward(trajectory, result.value, session.recorder)
    trajectory.stop = StopReason.MAX_LENGTH if result.out_of_room else StopReason.TERMINATED
    trajectory.duration = loop.time() - started
    return trajectory


def _apply_reward(trajectory: Trajectory, reward: Any, recorder: RolloutRecorder | None) -> None:
    """The reward that the function returned counts; else the one that its agent gave by HTTP; else 0."""
    given = recorder.given if recorder is not None else None
    if given is not None:
        trajectory.episode_reward, trajectory.success = given.reward, given.success
    if reward is not None:
        try:
            trajectory.episode_reward = reward_of(reward, f"the reward that {trajectory.tag} returned")
        except FormatError as error:
            raise failed(Boundary.AGENT, error, len(trajectory.turns)) from error
