"""One episode, from `reset` to its end. Independent of store and scheduler.

Always true: an exception or a hang ends this episode alone, and is recorded with the boundary it came from; the episode
raises `EpisodeFailure`, or `AttemptInterrupted` if the attempt must stop; a cancellation by the attempt's owner passes
through.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import msgspec

from rollwright import rng
from rollwright.agents import (
    AttemptInterrupted,
    ChatAgent,
    EpisodeFailure,
    Journal,
    OutOfRoom,
    Phase,
    Session,
    Stopwatch,
    TimeLimit,
    bounded,
    failed,
    timed_out,
)
from rollwright.aio import is_cancellation
from rollwright.engines.base import Playable, Policy, Sampling
from rollwright.envs.base import Env, HasOpponents, Reset
from rollwright.errors import FormatError
from rollwright.gateway import Gateway
from rollwright.gateway.settings import CaptureRules
from rollwright.rollout.agent_session import AgentSession
from rollwright.rollout.filters import Filter, stops
from rollwright.rollout.opponents import opponent_player
from rollwright.rollout.scoring import EpisodeRewards
from rollwright.rollout.settings import LimitsConfig
from rollwright.sandbox.settings import BoxConfig
from rollwright.trajectory import Boundary, StopReason, Trajectory, Turn


class Episode(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The input of a rollout: which level of which environment to play, as plain data."""

    tag: str
    seed: int
    """The level; the same for every member of the group."""
    mode: str
    """`train` or `val`."""
    group_id: str
    group: int
    """Index of the group in its stream."""
    member: int
    """Index in the group, from 0; redundant members and replacements have indices from `group_size` on."""
    run_seed: int


def read_episode(data: Any) -> Episode:
    """Parses the input of a rollout, which is untrusted."""
    try:
        return msgspec.convert(data, Episode)
    except msgspec.ValidationError as error:
        raise FormatError(f"not an episode: {error}") from error


def level_seed(run_seed: int, mode: str, group: int) -> int:
    """The level of a group depends on the run's seed and the group alone."""
    return rng.seed(run_seed, "level", mode, group)


def draw_key(episode: Episode) -> tuple[rng.KeyPart, ...]:
    """Key of all random draws of an episode. In a finite stream (validation) every group has its own level, which is the
    key: a level is played alike whichever others are played beside it."""
    if episode.mode == "train":
        return (episode.run_seed, episode.mode, episode.group, episode.member)
    return (episode.run_seed, episode.mode, episode.tag, episode.seed, episode.member)


class Strategy(Protocol):
    """Plays the turns of an episode, along one path or several."""

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: "EpisodeSettings",
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        """Plays from the first question to the end. `make_env` makes further environments of the same kind; the strategy
        closes those it makes."""
        ...


@dataclass(frozen=True)
class ChainStrategy:
    """The default strategy: generate, step and observe in a loop, along one path."""

    async def play_turns(
        self,
        session: Session,
        env: Env,
        settings: "EpisodeSettings",
        policy: Policy,
        make_env: Callable[[], Env],
    ) -> StopReason:
        trajectory = session.trajectory
        turn: Turn | None = None
        while len(trajectory.turns) < settings.max_steps:
            if too_old(trajectory, policy.version, settings.max_staleness):
                return StopReason.STALE
            try:
                turn = await settings.agent.act(session, env, turn)
            except OutOfRoom:
                return StopReason.MAX_LENGTH
            with session.waiting(Phase.ENVIRONMENT, "step", agent=turn.agent):
                step = await bounded(
                    env.step(turn.text), settings.limits.step_timeout, Boundary.ENVIRONMENT, turn.id + 1
                )
            turn = session.observe(turn, step)
            if (end := end_of(turn)) is not None:
                return end
            if stops(settings.filters, turn):
                return StopReason.FILTERED
        return StopReason.MAX_STEPS


CHAIN = ChainStrategy()


def end_of(turn: Turn) -> StopReason | None:
    """The stop reason, if the environment ended the episode with its answer to this turn."""
    outcome = turn.outcome
    if outcome is None or not (outcome.terminated or outcome.truncated):
        return None
    return StopReason.TERMINATED if outcome.terminated else StopReason.TRUNCATED


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of the episodes of a tag, the same for all its rollouts."""

    env_type: str
    env_config: dict[str, Any]
    agent: ChatAgent
    sampling: Sampling
    max_steps: int
    sequence_length: int
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    max_staleness: int | None = None
    """Age in policy versions above which an episode is abandoned, because it cannot be trained on. `None`: never."""
    strategy: Strategy = CHAIN
    filters: tuple[Filter, ...] = ()
    """Filters that may end an episode."""
    env_factory: Callable[[], Env] | None = None
    """Makes an environment of this tag. `None`: the registry does, from `env_type` and `env_config`."""
    rewards: EpisodeRewards | None = None
    """Judge the episode when it has ended. `None`: only the environment's own rewards count."""
    box: BoxConfig | None = None
    """The box of each attempt. `None`: it has one only if its environment brings one."""
    capture: CaptureRules = field(default_factory=CaptureRules)
    """Rules for a function's agent that is recorded by the gateway."""


async def play_episode(
    session: Session, env: Env, settings: EpisodeSettings, policy: Policy, make_env: Callable[[], Env]
) -> Trajectory:
    """Plays the session's episode to its end and returns its trajectory."""
    trajectory = session.trajectory
    loop = asyncio.get_running_loop()
    started = loop.time()
    limit = TimeLimit(settings.limits.episode_timeout)
    if has_opponents(type(env)):
        env.use_opponents(opponent_player(session))  # type: ignore[attr-defined]
    try:
        with limit:
            with session.waiting(Phase.ENVIRONMENT, "reset"):
                first = await bounded(
                    env.reset(trajectory.seed), settings.limits.step_timeout, Boundary.ENVIRONMENT, 0
                )
            trajectory.observation = _read_reset(first, trajectory.tag)
            trajectory.opening = settings.agent.opening(env, first.observation)
            trajectory.stop = await settings.strategy.play_turns(session, env, settings, policy, make_env)
    except (EpisodeFailure, AttemptInterrupted):
        raise
    except BaseException as error:
        if is_cancellation(error):
            raise
        done = len(trajectory.turns)
        if limit.expired:
            message = f"the episode took longer than {settings.limits.episode_timeout:g} s"
            raise timed_out(Boundary.SYSTEM, message, done) from error
        raise failed(Boundary.AGENT, error, done) from error
    trajectory.duration = loop.time() - started
    return session.seal()


def _read_reset(first: Any, tag: str) -> str:
    """Reads the observation of `reset`; any other type than text is a failure of the environment."""
    shown = first.observation if isinstance(first, Reset) else None
    if isinstance(shown, str):
        return shown
    given = type(first if shown is None else shown).__name__
    told = FormatError(f"environment {tag}: reset() gave a {given}; a Reset with a text is accepted")
    raise failed(Boundary.ENVIRONMENT, told, 0)


def new_session(
    episode: Episode,
    policy: Policy,
    settings: EpisodeSettings,
    env: Env,
    *,
    rollout_id: str,
    attempt_id: str,
    attempt: int = 1,
    journal: Journal | None = None,
    on_turn: Callable[[Turn], None] | None = None,
    stopwatch: Stopwatch | None = None,
    gateway: Gateway | None = None,
) -> AgentSession:
    """A session with an empty trajectory for this episode. `gateway`: records agents that speak a model API."""
    trajectory = Trajectory(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        group_id=episode.group_id,
        tag=episode.tag,
        seed=episode.seed,
    )
    session = AgentSession(
        trajectory,
        policy,
        settings.sampling,
        draw_key(episode),
        sequence_length=settings.sequence_length,
        generate_timeout=settings.limits.generate_timeout,
        attempt=attempt,
        env=env if playable(type(env)) else None,  # type: ignore[arg-type]
        journal=journal,
        on_turn=on_turn,
        stopwatch=stopwatch,
    )
    session.gateway, session.rules = gateway, settings.capture
    return session


@cache
def has_opponents(kind: type) -> bool:
    """Whether policies of the run may play seats in environments of this class."""
    return issubclass(kind, HasOpponents)


@cache
def playable(kind: type) -> bool:
    """Whether environments of this class are `Playable`; cached, because checking a protocol is slow."""
    return issubclass(kind, Playable)


def too_old(trajectory: Trajectory, version: int, max_staleness: int | None) -> bool:
    """Whether the episode has become too stale to be trained on."""
    oldest = trajectory.oldest_version if max_staleness is not None else None
    return max_staleness is not None and oldest is not None and version - oldest > max_staleness
