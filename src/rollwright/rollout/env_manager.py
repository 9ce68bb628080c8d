"""The environment manager: one environment that plays one rollout after the other.

Always true: it waits for nobody but its own engine call, its own environment and the store. Whatever goes wrong
in an episode is reported to the store as that attempt's end, and the loop goes on with a fresh environment. A
withdrawn attempt stops at once and commits nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rollwright.agents import TIMEOUT, EpisodeFailure, Phase, bounded, failed
from rollwright.envs.base import Env
from rollwright.policies.base import Policy
from rollwright.rollout.activity import Activity
from rollwright.rollout.episode import Episode, EpisodeSettings, new_session, play
from rollwright.rollout.gate import Gate
from rollwright.store.contract import AttemptRefused, Store
from rollwright.store.records import AttemptedRollout, AttemptStatus
from rollwright.trajectory import Boundary, ErrorRecord, StopReason, Trajectory

DEQUEUE_SECONDS = 60.0
"""How long one call waits for a rollout; it only bounds how long a lost wake-up could go unnoticed."""

CLOSE_SECONDS = 5.0
"""A hung environment gets this long to close before it is abandoned."""

STALE = "stale"
"""Reason under which a worker withdraws an episode that became too old."""

SettingsOf = Callable[[Episode], EpisodeSettings]
EnvMaker = Callable[[EpisodeSettings], Env]


@dataclass(frozen=True)
class RolloutContext:
    """What all environment managers of a worker share."""

    store: Store
    policy: Policy
    settings_of: SettingsOf
    """How to play an episode."""
    make_env: EnvMaker
    gate: Gate
    """Limits the episodes in flight."""
    activity: Activity = field(default_factory=Activity)


class EnvManager:
    def __init__(self, context: RolloutContext, worker_id: str) -> None:
        self._context = context
        self._worker_id = worker_id
        self._env: Env | None = None
        self._env_of: EpisodeSettings | None = None
        """What `_env` was made for; it is kept while the next episode wants the same."""
        self._task: asyncio.Task[None] | None = None
        self._holds: tuple[str, str] | None = None
        self._withdrawn = False

    @property
    def holds(self) -> tuple[str, str] | None:
        """Rollout and attempt being played now."""
        return self._holds

    def withdraw(self) -> None:
        """Stops the episode being played; the loop goes on."""
        if self._holds is not None and self._task is not None and not self._withdrawn:
            self._withdrawn = True
            self._task.cancel()

    async def run_rollout_loop(self, max_rollouts: int | None = None) -> None:
        """Plays until it is cancelled, or has played `max_rollouts`."""
        self._task = asyncio.current_task()
        played = 0
        try:
            while max_rollouts is None or played < max_rollouts:
                async with self._context.gate:
                    claimed = await self._context.store.dequeue_rollout(
                        self._worker_id, timeout=DEQUEUE_SECONDS
                    )
                    if claimed is not None:
                        await self._run(claimed)
                        played += 1
        finally:
            await self._discard_env()

    async def _run(self, claimed: AttemptedRollout) -> None:
        """Plays one attempt and reports how it ended."""
        activity = self._context.activity
        self._holds = (claimed.rollout_id, claimed.attempt.attempt_id)
        try:
            await self._report(claimed, await self._attempt(claimed))
        except AttemptRefused:
            activity.refused += 1
        except asyncio.CancelledError:
            if not self._withdrawn or self._task is None or self._task.uncancel() > 0:
                raise  # not, or not only, because the attempt was withdrawn
            activity.withdrawn += 1
            await self._discard_env()
        finally:
            activity.sessions.pop(claimed.rollout_id, None)
            self._holds = None
            self._withdrawn = False

    async def _attempt(self, claimed: AttemptedRollout) -> Trajectory | ErrorRecord:
        context = self._context
        try:
            episode = msgspec.convert(claimed.input, Episode)
            settings = context.settings_of(episode)
            env = await self._fitting_env(settings)
        except EpisodeFailure as failure:
            return failure.record
        except Exception as error:  # noqa: BLE001 - a rollout that cannot even be read fails alone
            return failed(Boundary.SYSTEM, error, 0).record
        session = new_session(
            episode,
            context.policy,
            settings,
            env,
            rollout_id=claimed.rollout_id,
            attempt_id=claimed.attempt.attempt_id,
            attempt=claimed.attempt.sequence_id,
            on_turn=context.activity.count,
        )
        context.activity.sessions[claimed.rollout_id] = session
        try:
            return await play(session, env, settings, context.policy)
        except EpisodeFailure as failure:
            await self._discard_env()
            return failure.record

    async def _report(self, claimed: AttemptedRollout, end: Trajectory | ErrorRecord) -> None:
        activity = self._context.activity
        store = self._context.store
        held = claimed.rollout_id, claimed.attempt.attempt_id
        if (session := activity.sessions.get(claimed.rollout_id)) is not None:
            session.phase = Phase.STORE
        if isinstance(end, ErrorRecord):
            activity.fail(end)
            status = AttemptStatus.TIMEOUT if end.kind == TIMEOUT else AttemptStatus.FAILED
            await store.update_attempt(*held, status=status, reason=str(EpisodeFailure(end)))
        elif end.stop is StopReason.STALE:
            activity.stale += 1
            await store.update_attempt(*held, status=AttemptStatus.CANCELLED, reason=STALE)
        else:
            activity.finish(end)
            await store.update_attempt(*held, status=AttemptStatus.SUCCEEDED, trajectory=end.to_bytes())

    async def _fitting_env(self, settings: EpisodeSettings) -> Env:
        if self._env is None or self._env_of is not settings:
            await self._discard_env()
            try:
                self._env = self._context.make_env(settings)
            except Exception as error:
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
