"""A user's own function as an agent: `async def agent(task, session) -> reward`.

The function plays the whole episode: it asks the session for generations and returns the reward. A plain function is
run in a thread; its session blocks that thread while the engine works. What it sampled is recorded and journalled like
any other episode's turns.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from typing import Any

from rollwright.agents import (
    EpisodeFailure,
    Interrupted,
    Journal,
    Session,
    TimeLimit,
    failed,
    timed_out,
)
from rollwright.draws import digest
from rollwright.envs.threaded import BlockingRunner
from rollwright.errors import RollwrightError
from rollwright.policies.base import Parsed, Policy, ToolSpec
from rollwright.rollout.episode import EpisodeSettings
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import Boundary, Message, StopReason, Trajectory, Turn

AgentFunction = Callable[[Any, Any], "Awaitable[float | None] | float | None"]
"""Takes the task and a session (a `ThreadSession` when it is not async); returns the reward, or `None` for 0."""


class ThreadSession:
    """A session for code in a thread."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop
        self.ended = False
        """Whether the episode is over: a thread that was given up must not sample any more."""

    def generate(
        self,
        messages: Sequence[Message],
        *,
        continues: Turn | None = None,
        agent: str = "agent",
        tools: Sequence[ToolSpec] = (),
    ) -> Turn:
        if self.ended:
            raise RollwrightError("the episode is over: it was given up, or ended already")
        call = self._session.generate(messages, continues=continues, agent=agent, tools=tools)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def parse(self, turn: Turn) -> Parsed:
        return self._session.parse(turn)


def _is_async(function: AgentFunction) -> bool:
    """Also of an object that is called like a function."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


async def _in_a_thread(function: AgentFunction, task: Any, session: ThreadSession) -> float | None:
    """In a thread of its own, so that a hung one takes no place from others and does not hold up the process's end."""
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
    journal: Journal,
    on_turn: Callable[[Turn], None],
) -> Session:
    """A session for a rollout that names no environment."""
    trajectory = Trajectory(
        rollout_id=claimed.rollout_id,
        attempt_id=claimed.attempt.attempt_id,
        group_id=str(claimed.metadata.get("group_id", claimed.rollout_id)),
        tag=settings.env_type,
        seed=digest(claimed.rollout_id) & 0x7FFF_FFFF,
    )
    return Session(
        trajectory,
        policy,
        settings.sampling,
        (claimed.rollout_id,),
        sequence_length=settings.sequence_length,
        generate_timeout=settings.limits.generate,
        attempt=claimed.attempt.sequence_id,
        journal=journal,
        on_turn=on_turn,
    )


async def play_function(
    session: Session, function: AgentFunction, task: Any, settings: EpisodeSettings
) -> Trajectory:
    """Runs the function to its end; its reward becomes the episode's."""
    trajectory = session.trajectory
    loop = asyncio.get_running_loop()
    started = loop.time()
    limit = TimeLimit(settings.limits.episode)
    try:
        with limit:
            if _is_async(function):
                reward = await function(task, session)  # type: ignore[misc]
            else:
                reward = await _in_a_thread(function, task, ThreadSession(session, loop))
            trajectory.episode_reward = 0.0 if reward is None else float(reward)
    except (EpisodeFailure, Interrupted):
        raise
    except Exception as error:
        done = len(trajectory.turns)
        if limit.expired:
            raise timed_out(
                Boundary.SYSTEM, f"the episode took longer than {settings.limits.episode:g} s", done
            ) from error
        raise failed(Boundary.AGENT, error, done) from error
    trajectory.stop = StopReason.TERMINATED
    trajectory.duration = loop.time() - started
    return session.seal()
