"""The environment manager: one environment that plays one rollout after the other.

Always true: it waits for nobody but its own engine call, its own environment and the store. Whatever goes wrong
in an episode is reported to the store as that attempt's end, and the loop goes on with a fresh environment. A
withdrawn attempt stops at once and commits nothing.

An attempt is a task of its own, which only its environment manager cancels. So code of an agent, environment or policy
that raises `CancelledError`, or cancels the task it runs in, ends its attempt as a failure and not the loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from rollwright.agents import (
    TIMEOUT,
    EpisodeFailure,
    Phase,
    ReplayDiffers,
    Session,
    Stopwatch,
    Superseded,
    bounded,
    entries,
    failed,
)
from rollwright.cancellation import is_asked_for
from rollwright.envs.base import Env
from rollwright.errors import FormatError
from rollwright.gateway import Gateway
from rollwright.policies.base import Policy
from rollwright.rollout.activity import Activity
from rollwright.rollout.episode import EpisodeSettings, new_session, play, read_episode
from rollwright.rollout.function import AgentFunction, function_session, play_function
from rollwright.rollout.gate import Gate
from rollwright.rollout.store_journal import StoreJournal
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import AttemptedRollout, AttemptStatus
from rollwright.trajectory import Boundary, ErrorRecord, StopReason, Trajectory, check, check_rewards

DEQUEUE_SECONDS = 60.0
"""How long one call waits for a rollout; it only bounds how long a lost wake-up could go unnoticed."""

CLOSE_SECONDS = 5.0
"""A hung environment gets this long to close before it is abandoned."""

STALE = "stale"
"""Reason under which a worker cancels a rollout that became too old."""


@dataclass(frozen=True)
class Role:
    """How to play one rollout, and with what."""

    settings: EpisodeSettings
    policy: Policy
    function: AgentFunction | None = None
    """The user's own code, in place of an environment and a chat agent."""


@dataclass(frozen=True)
class Result:
    """What an attempt commits: checked and encoded, so that nothing unreadable can be."""

    trajectory: Trajectory
    encoded: bytes


Claim = Callable[[], Awaitable[AttemptedRollout | None]]
"""Gives the next rollout to play, or `None` when there are to be no more."""


class Playbook(Protocol):
    async def __call__(self, claimed: AttemptedRollout) -> Role:
        """Raises what it likes for a rollout that cannot be played here; that rollout fails alone."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """What all environment managers of a worker share."""

    store: Store
    playbook: Playbook
    make_env: Callable[[EpisodeSettings], Env]
    gate: Gate
    """Limits the episodes in flight."""
    activity: Activity = field(default_factory=Activity)
    gateway: Gateway = field(default_factory=Gateway)
    """Where agents that speak a model API are recorded; it listens once one asks for its address."""
    on_failed: Callable[[AttemptedRollout, ErrorRecord], None] | None = None
    """Hears of every attempt that failed, and why."""


class EnvManager:
    def __init__(self, context: RolloutContext, worker_id: str) -> None:
        self._context = context
        self._worker_id = worker_id
        self._env: Env | None = None
        self._env_of: EpisodeSettings | None = None
        """What `_env` was made for; it is kept while the next episode wants the same."""
        self._attempt_task: asyncio.Task[Result | ErrorRecord] | None = None
        self._holds: tuple[str, str] | None = None
        self.left_behind: tuple[str, str] | None = None
        """Rollout and attempt whose end nobody reported, because the loop itself was cancelled meanwhile."""
        self._withdrawn = False

    @property
    def holds(self) -> tuple[str, str] | None:
        """Rollout and attempt being played now."""
        return self._holds

    def withdraw(self) -> None:
        """Stops the episode being played; the loop goes on."""
        if self._attempt_task is not None and not self._withdrawn:
            self._withdrawn = True
            self._attempt_task.cancel()

    async def run_rollout_loop(self, claim: Claim | None = None) -> None:
        """Plays what `claim` gives until it gives nothing; without it, whatever the store has, until cancelled."""
        try:
            while True:
                async with self._context.gate:
                    claimed = await (claim or self._next)()
                    if claimed is None:
                        return
                    await self.run_rollout(claimed)
        finally:
            await self._discard_env()

    async def _next(self) -> AttemptedRollout:
        while True:
            claimed = await self._context.store.dequeue_rollout(self._worker_id, timeout=DEQUEUE_SECONDS)
            if claimed is not None:
                return claimed

    async def run_rollout(self, claimed: AttemptedRollout) -> None:
        """Plays one attempt and reports how it ended."""
        activity = self._context.activity
        self._holds = (claimed.rollout_id, claimed.attempt.attempt_id)
        activity.claimed += 1
        try:
            end = await self._played(claimed)
            if end is None:
                activity.withdrawn += 1
                await self._discard_env()
            else:
                await self._report(claimed, end)
        except (AttemptRefused, NotFound, Superseded):  # cancelled, given to another, or deleted
            activity.refused += 1
        except asyncio.CancelledError:
            self.left_behind = self._holds
            raise
        finally:
            activity.sessions.pop(claimed.rollout_id, None)
            self._holds = None
            self._withdrawn = False

    async def _played(self, claimed: AttemptedRollout) -> Result | ErrorRecord | None:
        """How the attempt ended; `None`: it was withdrawn, also when its code went on regardless."""
        task = self._attempt_task = asyncio.create_task(self._attempt(claimed), name=claimed.rollout_id)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            self._attempt_task = None
        if self._withdrawn:
            return None
        if not task.cancelled():
            return task.result()
        await self._discard_env()
        message = "its code cancelled the attempt; nobody else had"
        return ErrorRecord(Boundary.SYSTEM, asyncio.CancelledError.__name__, message, 0)

    async def _attempt(self, claimed: AttemptedRollout) -> Result | ErrorRecord:
        """Plays from the journal, if there is one; anew, if the journal turns out to be of no use."""
        context = self._context
        stopwatch = Stopwatch(self._worker_id)
        journal = StoreJournal(context.store, claimed.rollout_id, claimed.attempt.attempt_id)
        try:
            with stopwatch.waiting(Phase.STORE, "settings"):
                role = await context.playbook(claimed)
                if claimed.attempt.sequence_id > 1:
                    await self._read_journal(claimed, journal)
            try:
                trajectory = await self._play(claimed, role, journal, stopwatch)
            except ReplayDiffers:
                context.activity.replays_differed += 1
                await journal.clear()
                trajectory = await self._play(claimed, role, journal, stopwatch)
            return Result(trajectory, check_rewards(check(trajectory)).to_bytes())
        except (AttemptRefused, NotFound, Superseded):
            raise
        except EpisodeFailure as failure:
            await self._discard_env()
            return failure.record
        except BaseException as error:
            if is_asked_for(error):
                raise
            await self._discard_env()
            return failed(Boundary.SYSTEM, error, 0).record  # a rollout that cannot even be read fails alone

    async def _read_journal(self, claimed: AttemptedRollout, journal: StoreJournal) -> None:
        """What earlier attempts left; a journal that is damaged is of no use, and counted like one that differs."""
        encoded = await self._context.store.read_journal(claimed.rollout_id)
        try:
            journal.recorded = entries(encoded)
        except FormatError:
            self._context.activity.replays_differed += 1
            await journal.clear()

    async def _play(
        self, claimed: AttemptedRollout, role: Role, journal: StoreJournal, stopwatch: Stopwatch
    ) -> Trajectory:
        activity = self._context.activity
        session: Session
        playing: Awaitable[Trajectory]
        if role.function is not None:
            gateway = self._context.gateway
            session = played = function_session(
                claimed, role.policy, role.settings, journal, activity.count, gateway
            )
            played.stopwatch = stopwatch
            playing = play_function(played, role.function, claimed.input, role.settings)
        else:
            episode = read_episode(claimed.input)
            env = await self._fitting_env(role.settings, stopwatch)
            session = new_session(
                episode,
                role.policy,
                role.settings,
                env,
                rollout_id=claimed.rollout_id,
                attempt_id=claimed.attempt.attempt_id,
                attempt=claimed.attempt.sequence_id,
                journal=journal,
                on_turn=activity.count,
                stopwatch=stopwatch,
            )
            make_env = partial(self._context.make_env, role.settings)
            playing = play(session, env, role.settings, role.policy, make_env)
        activity.sessions[claimed.rollout_id] = session
        try:
            trajectory = await playing
            if journal.recorded:
                raise ReplayDiffers(
                    f"the episode ended without {len(journal.recorded)} turns that were recorded"
                )
            return trajectory
        finally:
            activity.replayed_turns += session.replayed_turns

    async def _report(self, claimed: AttemptedRollout, end: Result | ErrorRecord) -> None:
        session: Session | None = self._context.activity.sessions.get(claimed.rollout_id)
        stopwatch = session.stopwatch if session is not None else Stopwatch()
        with stopwatch.waiting(Phase.STORE, "commit"):
            await self._tell(claimed, end)
        self._context.activity.commit_seconds += stopwatch.waits[-1].seconds

    async def _tell(self, claimed: AttemptedRollout, end: Result | ErrorRecord) -> None:
        activity = self._context.activity
        store = self._context.store
        held = claimed.rollout_id, claimed.attempt.attempt_id
        if isinstance(end, ErrorRecord):
            activity.fail(end, claimed.rollout_id)
            status = AttemptStatus.TIMEOUT if end.kind == TIMEOUT else AttemptStatus.FAILED
            await store.update_attempt(*held, status=status, reason=str(EpisodeFailure(end)))
            if self._context.on_failed is not None:
                self._context.on_failed(claimed, end)
        elif end.trajectory.stop is StopReason.STALE:
            activity.stale += 1
            await store.cancel_rollouts([claimed.rollout_id], STALE)
        else:
            await store.update_attempt(*held, status=AttemptStatus.SUCCEEDED, trajectory=end.encoded)
            activity.finish(end.trajectory)

    async def _fitting_env(self, settings: EpisodeSettings, stopwatch: Stopwatch) -> Env:
        if self._env is None or self._env_of is not settings:
            with stopwatch.waiting(Phase.ENVIRONMENT, "make"):
                await self._discard_env()
                try:
                    self._env = self._context.make_env(settings)
                except BaseException as error:
                    raise failed(Boundary.ENVIRONMENT, error, 0) from error
            self._env_of = settings
        return self._env

    async def _discard_env(self) -> None:
        env, self._env, self._env_of = self._env, None, None
        if env is None:
            return
        try:
            await bounded(env.close(), CLOSE_SECONDS, Boundary.ENVIRONMENT, 0)
        except EpisodeFailure:
            self._context.activity.abandoned_envs += 1
