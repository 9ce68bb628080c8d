"""One attempt at a rollout: from its settings and its journal to a trajectory that can be committed.

Always true: whatever goes wrong in the episode is the result of the attempt, as an `ErrorRecord`, and raises nothing;
only a cancellation by the attempt's owner, or a store that took the rollout away, gets out. A trajectory is checked and
encoded before it is returned, so nothing unreadable can be committed. Turns that an earlier attempt recorded come from
the journal; where the replay differs, the journal is cleared and the episode is played anew, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rollwright.agents import (
    EpisodeFailure,
    JournalEntry,
    Phase,
    ReplayDiffers,
    Session,
    Stopwatch,
    Superseded,
    bounded,
    entries,
    failed,
)
from rollwright.aio import is_cancellation
from rollwright.engines.base import Policy
from rollwright.envs.base import Env
from rollwright.errors import FormatError
from rollwright.gateway import Gateway
from rollwright.rollout.accounting import Activity
from rollwright.rollout.concurrency import InflightLimit
from rollwright.rollout.episode import EpisodeSettings, new_session, play_episode, read_episode
from rollwright.rollout.function import AgentFunction, AgentStrategy, function_session, play_function
from rollwright.rollout.scoring import EpisodeRewards, task_of
from rollwright.sandbox.attempts import AttemptBoxes, current_boxes, use_boxes
from rollwright.sandbox.box import NO_NEEDS, BoxLabel
from rollwright.sandbox.pool import BoxPools
from rollwright.sandbox.settings import AUTO
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound
from rollwright.store.records import AttemptedRollout
from rollwright.trajectory import (
    Boundary,
    ErrorRecord,
    OutsideCall,
    StopReason,
    Trajectory,
    Turn,
    check,
    check_rewards,
)
from rollwright.trajectory.usage import collect_calls, sum_calls

CLOSE_SECONDS = 5.0
"""A hung environment gets this long to close before it is abandoned."""


@dataclass(frozen=True)
class Assignment:
    """The settings and the policy that one rollout is played with."""

    settings: EpisodeSettings
    policy: Policy
    function: AgentFunction | None = None
    """User-defined agent function, in place of an environment and a chat agent."""


class SettingsSource(Protocol):
    """Looks up the assignment of a claimed rollout."""

    async def __call__(self, claimed: AttemptedRollout) -> Assignment:
        """May raise anything for a rollout that cannot be played here; only that rollout fails."""
        ...


@dataclass(frozen=True)
class RolloutContext:
    """Resources that all environment managers of a worker share."""

    store: Store
    assign: SettingsSource
    make_env: Callable[[EpisodeSettings], Env]
    inflight: InflightLimit
    """Limits the episodes in flight."""
    activity: Activity = field(default_factory=Activity)
    gateway: Gateway = field(default_factory=Gateway)
    """Records agents that use a model API; it listens from the first request for its address on."""
    boxes: BoxPools = field(default_factory=BoxPools)
    """Boxes of attempts that need one."""
    on_failed: Callable[[AttemptedRollout, ErrorRecord], None] | None = None
    """Observer of failed attempts, for example a command's output."""


@dataclass(frozen=True)
class PlayedAttempt:
    """The result of an attempt: its trajectory, checked and encoded."""

    trajectory: Trajectory
    encoded: bytes


class EnvSlot:
    """The environment of one manager; reused while the next episode has the same settings."""

    def __init__(self, context: RolloutContext) -> None:
        self._context = context
        self._env: Env | None = None
        self._made_for: EpisodeSettings | None = None

    async def take(self, settings: EpisodeSettings, stopwatch: Stopwatch) -> Env:
        """Returns an environment for these settings: the one that is held, or a new one."""
        if self._env is None or self._made_for is not settings:
            with stopwatch.waiting(Phase.ENVIRONMENT, "make"):
                await self.discard()
                try:
                    self._env = self._context.make_env(settings)
                except BaseException as error:
                    raise failed(Boundary.ENVIRONMENT, error, 0) from error
            self._made_for = settings
        return self._env

    async def discard(self) -> None:
        """Closes the environment: after a failure its state is unknown."""
        env, self._env, self._made_for = self._env, None, None
        if env is None:
            return
        try:
            await bounded(env.close(), CLOSE_SECONDS, Boundary.ENVIRONMENT, 0)
        except EpisodeFailure:
            self._context.activity.abandoned_envs += 1


class StoreJournal:
    """The turn journal of one attempt, kept in the store."""

    def __init__(self, store: Store, rollout_id: str, attempt_id: str) -> None:
        self.recorded: dict[int, JournalEntry] = {}
        self._store = store
        self._held = (rollout_id, attempt_id)

    async def load(self) -> bool:
        """Reads the turns that earlier attempts recorded; `False`: they are damaged."""
        encoded = await self._store.read_journal(self._held[0])
        try:
            self.recorded = entries(encoded)
        except FormatError:
            return False
        return True

    async def append(self, entry: JournalEntry) -> None:
        """Makes a turn durable; raises `Superseded` if the attempt has lost its rollout."""
        try:
            await self._store.append_journal(*self._held, [entry.to_bytes()])
        except (AttemptRefused, NotFound) as error:
            raise Superseded(str(error)) from error

    async def clear(self) -> None:
        """Deletes the recorded turns, here and in the store."""
        self.recorded.clear()
        await self._store.clear_journal(*self._held)


class RolloutAttempt:
    """One attempt by one worker, from the claim on."""

    def __init__(
        self, context: RolloutContext, claimed: AttemptedRollout, slot: EnvSlot, worker_id: str
    ) -> None:
        self.claimed = claimed
        self.stopwatch = Stopwatch(worker_id)
        self._context = context
        self._slot = slot
        self._journal = StoreJournal(context.store, claimed.rollout_id, claimed.attempt.attempt_id)
        self._session: Session | None = None
        self._outside: list[OutsideCall] = []
        """Calls for this attempt that are no turns of its trajectory."""

    def paid(self, record: ErrorRecord) -> bytes | None:
        """The turns that a failed rollout has paid for, here and in earlier attempts, without their tokens; `None`: none."""
        played = [] if self._session is None else self._session.trajectory.turns
        turns = [*played, *(each.turn for each in self._journal.recorded.values())]
        if not turns and not self._noted():
            return None
        claimed = self.claimed
        counted = [
            Turn(
                id=place,
                after=None,
                extends=None,
                agent=turn.agent,
                prompt_tokens=turn.prompt_tokens,
                completion_tokens=turn.completion_tokens,
                cached_tokens=turn.cached_tokens,
                reasoning_tokens=turn.reasoning_tokens,
                count=turn.count,
                policy=turn.policy,
            )
            for place, turn in enumerate(turns)
        ]
        ids = claimed.rollout_id, claimed.attempt.attempt_id, claimed.rollout_id.rpartition("-m")[0]
        tag = str(claimed.input.get("tag", "")) if isinstance(claimed.input, Mapping) else ""
        failed_one = Trajectory(*ids, tag, 0, turns=counted, stop=StopReason.ERROR, error=record)
        failed_one.judged = sum_calls(self._noted())
        return failed_one.to_bytes()

    def used_calls(self) -> tuple[OutsideCall, ...]:
        """All calls that the rollout has paid for so far, as sums."""
        turns = () if self._session is None else self._session.trajectory.turns
        return sum_calls([*(_as_outside(each) for each in turns), *self._noted()])

    def _noted(self) -> list[OutsideCall]:
        return [*self._outside, *(() if self._session is None else self._session.outside)]

    async def play(self) -> PlayedAttempt | ErrorRecord:
        """Plays the rollout to its end, or to its failure."""
        try:
            with self.stopwatch.waiting(Phase.STORE, "settings"):
                assignment = await self._context.assign(self.claimed)
                if self.claimed.attempt.sequence_id > 1:
                    await self._recover_journal()
            if isinstance(strategy := assignment.settings.strategy, AgentStrategy):
                await strategy.prepare()
            with collect_calls() as self._outside:
                try:
                    with use_boxes(self._new_boxes(assignment.settings)):
                        trajectory = await self._play_once(assignment)
                except ReplayDiffers:
                    await self._discard_journal()
                    with use_boxes(self._new_boxes(assignment.settings)):
                        trajectory = await self._play_once(assignment)
            trajectory.judged = sum_calls(self._noted())
            return PlayedAttempt(trajectory, check_rewards(check(trajectory)).to_bytes())
        except (AttemptRefused, NotFound, Superseded):
            raise
        except EpisodeFailure as failure:
            await self._slot.discard()
            return failure.record
        except BaseException as error:
            if is_cancellation(error):
                raise
            await self._slot.discard()
            # Also a rollout whose input or settings cannot be read: it fails alone.
            return failed(Boundary.SYSTEM, error, 0).record

    def _new_boxes(self, settings: EpisodeSettings) -> AttemptBoxes:
        """The attempt's boxes, none of which has started yet."""
        config, attempt = settings.box, self.claimed.attempt
        label = BoxLabel(
            rollout_id=self.claimed.rollout_id,
            attempt_id=attempt.attempt_id,
            worker=attempt.worker_id or "",
            lease_seconds=30.0 if config is None else config.lease_seconds,
        )
        strategy = settings.strategy
        needs = strategy.box_needs if isinstance(strategy, AgentStrategy) else NO_NEEDS
        if config is None:
            return AttemptBoxes(self._context.boxes.get(AUTO), label, needs=needs)
        pool = self._context.boxes.get(config.backend, config.options)
        return AttemptBoxes(pool, label, config.spec(), warm=config.warm, needs=needs)

    async def _play_once(self, assignment: Assignment) -> Trajectory:
        """Plays the episode once; raises `ReplayDiffers` if it did not follow the journal to the journal's end."""
        if assignment.function is None:
            trajectory = await self._play_env(assignment)
        else:
            trajectory = await self._play_function(assignment, assignment.function)
        if left := len(self._journal.recorded):
            raise ReplayDiffers(f"the episode ended without {left} turns that were recorded")
        return trajectory

    async def _play_env(self, assignment: Assignment) -> Trajectory:
        """Plays an environment with a chat agent, or with the strategy that the settings name."""
        claimed, settings = self.claimed, assignment.settings
        episode = read_episode(claimed.input)
        env = await self._slot.take(settings, self.stopwatch)
        session = new_session(
            episode,
            assignment.policy,
            settings,
            env,
            rollout_id=claimed.rollout_id,
            attempt_id=claimed.attempt.attempt_id,
            attempt=claimed.attempt.sequence_id,
            journal=self._journal,
            on_turn=self._context.activity.count,
            stopwatch=self.stopwatch,
            gateway=self._context.gateway,
        )
        current_boxes().gateway = lambda: session.base_url
        self._show_in_flight(session)
        try:
            make_env = partial(self._context.make_env, settings)
            trajectory = await play_episode(session, env, settings, assignment.policy, make_env)
            return await self._score(settings.rewards, task_of(env), trajectory)
        finally:
            self._context.activity.replayed_turns += session.replayed_turns

    async def _score(
        self, rewards: EpisodeRewards | None, task: Mapping[str, Any], trajectory: Trajectory
    ) -> Trajectory:
        """Judges an episode that has ended by the rewards of its tag."""
        if rewards is None or trajectory.stop is StopReason.STALE:
            return trajectory
        with self.stopwatch.waiting(Phase.ENVIRONMENT, "rewards"):
            scored = await rewards.score(task, trajectory)
        scored.timing = self.stopwatch.read()
        return scored

    async def _play_function(self, assignment: Assignment, function: AgentFunction) -> Trajectory:
        """Runs a user-defined function as the agent."""
        session = function_session(
            self.claimed,
            assignment.policy,
            assignment.settings,
            journal=self._journal,
            on_turn=self._context.activity.count,
            stopwatch=self.stopwatch,
            gateway=self._context.gateway,
        )
        self._show_in_flight(session)
        try:
            return await play_function(session, function, self.claimed.input, assignment.settings)
        finally:
            self._context.activity.replayed_turns += session.replayed_turns

    def _show_in_flight(self, session: Session) -> None:
        """Lists the session in the activity; the manager takes it off the list after the commit."""
        self._session = session
        self._context.activity.sessions[self.claimed.rollout_id] = session

    async def _recover_journal(self) -> None:
        """Reads the turns of earlier attempts. A damaged journal is discarded and counted like one that differs."""
        if not await self._journal.load():
            await self._discard_journal()

    async def _discard_journal(self) -> None:
        """Its turns, and those that were played beyond it, are in no trajectory, but they were paid for."""
        self._context.activity.replays_differed += 1
        turns = [each.turn for each in self._journal.recorded.values()]
        if self._session is not None:
            turns += self._session.trajectory.turns
            self._outside += self._session.outside
            self._session = None
        self._outside += [_as_outside(each) for each in turns]
        await self._journal.clear()


def _as_outside(turn: Turn) -> OutsideCall:
    return OutsideCall("", "", turn.usage, turn.agent, turn.policy)
