"""Plays environments that bring their own loop: verifiers, NeMo-Gym, inspect and others of their kind.

Always true: every call of the model is recorded like an agent's; an error of the environment, or a silence that is longer than
`limits.step_timeout`, is a failure of the attempt and never a reward; the reward is the environment's own, with its components.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollwright.agents import Session, failed, timed_out
from rollwright.engines.base import Policy
from rollwright.envs.base import Env, EpisodeResult, PlaysEpisodes
from rollwright.errors import FormatError
from rollwright.gateway.in_process import complete
from rollwright.rollout.agent_session import AgentSession
from rollwright.rollout.episode import EpisodeSettings
from rollwright.rollout.function import keep_conversation, run_agent
from rollwright.trajectory import Boundary, StopReason, Trajectory, reward_of


@dataclass(frozen=True)
class SessionModel:
    """The model of a session, as environments see it."""

    session: AgentSession

    @property
    def base_url(self) -> str:
        return self.session.base_url

    @property
    def api_key(self) -> str:
        return self.session.api_key

    async def complete(self, body: bytes, agent: str = "agent") -> tuple[int, bytes]:
        return await complete(self.session.record(), body, agent)


@dataclass(frozen=True)
class WholeEpisodeStrategy:
    """Lets the environment play."""

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: EpisodeSettings,
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        assert isinstance(session, AgentSession), "attempts open sessions with a gateway"
        assert isinstance(env, PlaysEpisodes), "chosen for environments that play episodes"
        session.trajectory.opening = ()  # the environment writes its own prompts

        async def play(_: Any, session: AgentSession) -> EpisodeResult:
            return await _watch(
                env.play_episode(SessionModel(session)), session, settings.limits.step_timeout
            )

        played = await run_agent(play, None, session, Boundary.ENVIRONMENT)
        keep_conversation(session)
        if played.value is not None:
            _store(played.value, session.trajectory)
        full = played.out_of_room or session.record().out_of_room
        return StopReason.MAX_LENGTH if full else StopReason.TERMINATED


async def _watch(playing: Any, session: AgentSession, seconds: float) -> EpisodeResult:
    """Waits for the end of the episode, as long as it calls the model at least every `seconds`."""
    task = asyncio.ensure_future(playing)
    recorder = session.record()
    left = seconds
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=left)
            if (left := seconds - recorder.silent_seconds) <= 0 and not task.done():
                why = f"the episode went on for {seconds:g} s without a call of the model"
                raise timed_out(Boundary.ENVIRONMENT, why, len(session.trajectory.turns))
        return task.result()  # type: ignore[no-any-return]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _store(result: EpisodeResult, trajectory: Trajectory) -> None:
    try:
        trajectory.episode_reward = reward_of(result.reward, f"the reward of {trajectory.tag}")
        trajectory.components = {
            name: reward_of(value, f"the reward {name} of {trajectory.tag}")
            for name, value in result.components.items()
        }
        for name, value in result.metrics.items():
            trajectory.metrics[name] = reward_of(value, f"the metric {name} of {trajectory.tag}")
    except FormatError as error:
        raise failed(Boundary.ENVIRONMENT, error, len(trajectory.turns)) from error
    trajectory.success = result.success
