"""Stand-alone gateway over a store: rollouts are opened and ended by HTTP, with the leases and journals of any worker.

Always true: an open rollout is an attempt that this gateway holds, with heartbeats and a journal. It ends once: by a report
to the store, because the store revoked it, or because its agent was silent for too long. If the gateway is killed, the
journal remains: the next attempt at the rollout receives the recorded answers to the same calls.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollwright.agents import (
    TIMEOUT,
    AttemptInterrupted,
    EpisodeFailure,
    JournalEntry,
    Session,
    Superseded,
    entries,
)
from rollwright.engines.base import NO_ACTIONS, Policy, Sampling
from rollwright.gateway.endpoint import EndRequest
from rollwright.gateway.recorder import Given, RolloutRecorder
from rollwright.gateway.registry import check_key, unauthorized
from rollwright.gateway.server import Access, Gateway
from rollwright.gateway.settings import CaptureRules, ClientFormats, ClientSampling
from rollwright.gateway.types import decode
from rollwright.rng import seed
from rollwright.store.api import Store
from rollwright.store.errors import AttemptRefused, NotFound, StoreError, StoreUnavailable
from rollwright.store.http.errors import HttpRefusal, error_reply
from rollwright.store.records import AttemptedRollout, AttemptStatus, EnqueueRequest, RolloutConfig
from rollwright.trajectory import Boundary, ErrorRecord, StopReason, Trajectory, check

_REMEMBERED = 10_000
"""Number of ended rollouts that are remembered."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceSettings:
    """How rollouts are recorded and kept."""

    sampling: Sampling
    """Upper limits and defaults of a client's sampling parameters."""
    sequence_length: int = 8192
    generate_seconds: float = 600.0
    episode_seconds: float = 3600.0
    """Time limit of an open rollout, after which it is abandoned."""
    idle_seconds: float = 900.0
    """Time without a call after which a rollout is abandoned, because its agent will not end it."""
    heartbeat_interval: float = 5.0
    lease_seconds: float = 30.0
    """Lease of rollouts created here; without heartbeats for so long, another gateway may take them."""
    max_attempts: int = 3
    """Attempts at a rollout created here before it counts as failed."""
    poll_interval: float = 30.0
    """Seconds for which one call to the store waits for revoked rollouts."""
    rules: CaptureRules = field(default_factory=CaptureRules)
    """Default rules for agents; opening a rollout may override them."""
    agent_ends: bool = True
    """Whether a rollout's own key may end it and set its reward. If the trained model could read that key, only the
    administrator's key should."""
    tag: str = "gateway"
    """Tag of the trajectories."""


class OpenRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rollout to open: a new one, one by its id, or, with neither id nor input, the next that waits."""

    input: Any = msgspec.UNSET
    rollout_id: str | None = None
    mode: str | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    client_sampling: ClientSampling | None = None
    """Treatment of a client's temperature and top_p; `None`: the gateway's setting."""
    client_formats: ClientFormats | None = None
    """Treatment of forced tool choices and JSON formats; `None`: the gateway's setting."""
    allow_no_calls: bool | None = None
    """Whether it may end with a result without a call; `None`: the gateway's setting."""

    def rules(self, usual: CaptureRules) -> CaptureRules:
        asked = {
            "client_sampling": self.client_sampling,
            "client_formats": self.client_formats,
            "allow_no_calls": self.allow_no_calls,
        }
        return usual.model_copy(update={name: value for name, value in asked.items() if value is not None})


_OPEN = msgspec.json.Decoder(OpenRequest)


class AttemptJournal:
    """Journal of one attempt in the store; can drop entries that no longer apply and keep those that were replayed."""

    def __init__(self, store: Store, held: tuple[str, str], recorded: dict[int, JournalEntry]) -> None:
        self.recorded = recorded
        self._store = store
        self._held = held
        self._all = list(recorded.values())

    async def append(self, entry: JournalEntry) -> None:
        try:
            await self._store.append_journal(*self._held, [entry.to_bytes()])
        except (AttemptRefused, NotFound) as error:
            raise Superseded(str(error)) from error
        self._all.append(entry)

    async def forget_rest(self, played: Trajectory) -> None:
        """Drops the entries that were not replayed, because the agent diverged from them."""
        own = {id(turn.sampled_ids) for turn in played.turns}
        kept = [entry.to_bytes() for entry in self._all if id(entry.turn.sampled_ids) in own]
        self.recorded.clear()
        await self._store.clear_journal(*self._held)
        if kept:
            await self._store.append_journal(*self._held, kept)


@dataclass(eq=False)
class _Held:
    """An open rollout."""

    claimed: AttemptedRollout
    recorder: RolloutRecorder
    access: Access
    opened: float
    ending: bool = False

    @property
    def ids(self) -> tuple[str, str]:
        return self.claimed.rollout_id, self.claimed.attempt.attempt_id


class GatewayService:
    """Rollouts of a store, opened for agents of any kind. `run` lasts until it is cancelled; then `close`."""

    polls = False

    def __init__(
        self,
        store: Store,
        policy: Policy,
        gateway: Gateway,
        settings: ServiceSettings,
        *,
        admin_key: str,
        worker_id: str = "gateway",
    ) -> None:
        self._store = store
        self._policy = policy
        self._gateway = gateway
        self._admin_key = check_key("admin key", admin_key).encode()
        self._worker_id = worker_id
        self._settings = settings
        self._held: dict[str, _Held] = {}
        self._ended: dict[str, tuple[EndRequest, Mapping[str, Any]]] = {}
        """Results of the latest ended rollouts, for repeated requests."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that seal rollouts which the store revoked."""

    def listen(self) -> None:
        self._gateway.listen(self)

    async def run(self) -> None:
        """Serves, sends heartbeats, and abandons rollouts that were revoked or are idle.

        Raises an error of the store that is not transient.
        """
        self.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._heartbeat())
                tasks.create_task(self._hear_of_cancellations())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def close(self) -> None:
        """Releases open rollouts, so that another gateway can resume from their journals at once."""
        for held in list(self._held.values()):
            await self._let_go(held)
            await self._report(held, AttemptStatus.CANCELLED, "the gateway was told to stop")
        await self._gateway.close()

    # -- what the endpoint calls ------------------------------------------------------------------------

    def admit(self, rollout_id: str | None, key: bytes | None) -> None:
        """Checks the key before the body of a request is read."""
        if self._is_admin(key):
            return
        if rollout_id is None:
            raise unauthorized("opening a rollout needs the administrator's key")
        self._check_agent(rollout_id, key, self._held.get(rollout_id))

    async def create(self, key: bytes | None, body: bytes, claim_id: str | None) -> Mapping[str, Any]:
        """Opens a rollout; returns its address, its key and its input."""
        if not self._is_admin(key):
            raise unauthorized("opening a rollout needs the administrator's key")
        request: OpenRequest = decode(_OPEN, body or b"{}")
        try:
            claimed = await self._claim(request, claim_id)
            held = self._held.get(claimed.rollout_id)
            if held is None or held.claimed.attempt.attempt_id != claimed.attempt.attempt_id:
                held = await self._open(claimed, request.rules(self._settings.rules))
        except (StoreError, StoreUnavailable) as error:
            raise _refused(error) from None
        return {
            "rollout_id": claimed.rollout_id,
            "attempt": claimed.attempt.sequence_id,
            "input": claimed.input,
            "base_url": held.access.base_url,
            "api_key": held.access.api_key,
        }

    async def end(self, rollout_id: str, key: bytes | None, request: EndRequest) -> Mapping[str, Any]:
        """Seals the rollout and commits it."""
        held = self._held.get(rollout_id)
        if not self._is_admin(key):
            self._check_agent(rollout_id, key, held)
        if held is None:
            earlier = self._ended.get(rollout_id)
            if earlier is not None and earlier[0] == request:
                return earlier[1]  # a repeated request, whose first response was lost
            raise HttpRefusal(410, "sealed", f"rollout {rollout_id[:80]!r} is not open here")
        if held.ending:
            raise HttpRefusal(409, "ending", f"rollout {rollout_id[:80]!r} is being ended by another call")
        held.ending = True
        try:
            await self._gateway.close_rollout(held.recorder)
            answer = await self._commit(held, request)
        except StoreUnavailable as error:
            raise _refused(error) from None  # it stays held, so that it can be ended a little later
        except HttpRefusal:
            self._held.pop(rollout_id, None)
            raise
        finally:
            held.ending = False
        self._held.pop(rollout_id, None)
        self._ended[rollout_id] = request, answer
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return answer

    def _is_admin(self, key: bytes | None) -> bool:
        return key is not None and hmac.compare_digest(key, self._admin_key)

    def _check_agent(self, rollout_id: str, key: bytes | None, held: _Held | None) -> None:
        """Raises unless the key belongs to the open attempt, or to an ended one that repeats its request."""
        if not self._settings.agent_ends:
            raise unauthorized("ending a rollout needs the administrator's key here")
        if held is not None and key is not None and hmac.compare_digest(key, held.access.api_key.encode()):
            return
        try:
            self._gateway.registry.find(rollout_id, key)
        except HttpRefusal as refusal:
            if held is not None or refusal.status != 410:
                raise

    # -- opening ----------------------------------------------------------------------------------------

    async def _claim(self, request: OpenRequest, claim_id: str | None) -> AttemptedRollout:
        if request.input is msgspec.UNSET:
            if request.rollout_id is not None:
                return await self._store.start_attempt(request.rollout_id, self._worker_id, claim_id=claim_id)
            claimed = await self._store.dequeue_rollout(self._worker_id, claim_id=claim_id)
            if claimed is None:
                raise NotFound("no rollout waits; give an input to make one")
            return claimed
        wanted = EnqueueRequest(
            input=request.input,
            rollout_id=request.rollout_id,
            mode=request.mode,
            metadata=request.metadata,
            config=RolloutConfig(
                max_attempts=self._settings.max_attempts, unresponsive_seconds=self._settings.lease_seconds
            ),
        )
        return await self._store.start_requested_rollout(wanted, self._worker_id, claim_id=claim_id)

    async def _open(self, claimed: AttemptedRollout, rules: CaptureRules) -> _Held:
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        again = claimed.attempt.sequence_id > 1
        recorded = entries(await self._store.read_journal(claimed.rollout_id)) if again else {}
        journal = AttemptJournal(self._store, ids, recorded)
        settings = self._settings
        trajectory = Trajectory(
            rollout_id=claimed.rollout_id,
            attempt_id=claimed.attempt.attempt_id,
            group_id=str(claimed.metadata.get("group_id", claimed.rollout_id)),
            tag=settings.tag,
            seed=seed(claimed.rollout_id),
        )
        session = Session(
            trajectory,
            self._policy,
            settings.sampling,
            (claimed.rollout_id,),
            sequence_length=settings.sequence_length,
            generate_timeout=settings.generate_seconds,
            attempt=claimed.attempt.sequence_id,
            env=NO_ACTIONS,
            journal=journal,
        )

        async def go_another_way() -> None:
            await journal.forget_rest(trajectory)

        recorder = RolloutRecorder(session, settings.sampling, rules=rules, on_replay_differs=go_another_way)
        held = _Held(claimed, recorder, self._gateway.open(recorder), time.monotonic())
        self._held[claimed.rollout_id] = held
        return held

    # -- ending -----------------------------------------------------------------------------------------

    async def _let_go(self, held: _Held) -> None:
        self._held.pop(held.claimed.rollout_id, None)
        await self._gateway.close_rollout(held.recorder)

    async def _commit(self, held: _Held, request: EndRequest) -> Mapping[str, Any]:
        recorder = held.recorder
        trajectory = recorder.session.seal()
        turns = len(trajectory.turns)
        try:
            recorder.raise_failure()
            if request.error is not None:
                line = " ".join(request.error.split())
                raise EpisodeFailure(ErrorRecord(Boundary.AGENT, "reported", line, turns))
            recorder.raise_unused()
        except EpisodeFailure as failure:
            return await self._report_failure(held, failure.record)
        except AttemptInterrupted as error:
            raise HttpRefusal(409, "attempt_refused", str(error)) from None
        given = Given(request.given_reward, request.success)
        if not isinstance(request.returned, msgspec.UnsetType):
            trajectory.returned = msgspec.json.encode(request.returned).decode()
        trajectory.episode_reward = given.reward
        trajectory.success = given.success
        trajectory.stop = StopReason.TERMINATED
        trajectory.duration = time.monotonic() - held.opened
        encoded = check(trajectory).to_bytes()
        try:
            await self._store.update_attempt(*held.ids, status=AttemptStatus.SUCCEEDED, trajectory=encoded)
        except StoreError as error:
            raise _refused(error) from None
        return {
            "status": "succeeded",
            "turns": turns,
            "reward": given.reward,
            "metrics": trajectory.metrics,
        }

    async def _report_failure(self, held: _Held, record: ErrorRecord) -> Mapping[str, Any]:
        reason = str(EpisodeFailure(record))
        status = AttemptStatus.TIMEOUT if record.kind == TIMEOUT else AttemptStatus.FAILED
        await self._report(held, status, reason)
        trajectory = held.recorder.session.trajectory
        return {
            "status": "failed",
            "reason": reason,
            "turns": len(trajectory.turns),
            "metrics": trajectory.metrics,
        }

    async def _report(self, held: _Held, status: AttemptStatus, reason: str) -> None:
        try:
            await self._store.update_attempt(*held.ids, status=status, reason=reason)
        except (AttemptRefused, NotFound):
            _log.info("%s is not held any more: nothing to report", held.claimed.rollout_id)

    # -- keeping ----------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            await self._give_up_silent()
            held = [each.ids for each in self._held.values()]
            stats = {"inflight": len(held)}
            self._withdraw(
                await self._store.update_worker(self._worker_id, heartbeat_stats=stats, attempts=held)
            )
            await asyncio.sleep(self._settings.heartbeat_interval)

    async def _hear_of_cancellations(self) -> None:
        while True:
            timeout = self._settings.poll_interval
            self._withdraw(await self._store.wait_for_cancellations(self._worker_id, timeout=timeout))

    def _withdraw(self, lost: list[tuple[str, str]]) -> None:
        for rollout_id, attempt_id in lost:
            held = self._held.get(rollout_id)
            if held is not None and held.ids == (rollout_id, attempt_id):
                self._leaving.add(task := asyncio.create_task(self._let_go(held)))
                task.add_done_callback(self._leaving.discard)

    async def _give_up_silent(self) -> None:
        now = time.monotonic()
        for held in list(self._held.values()):
            if held.recorder.silent_seconds > self._settings.idle_seconds:
                why = f"the agent made no call for {self._settings.idle_seconds:g} s"
            elif now - held.opened > self._settings.episode_seconds:
                why = f"the episode took longer than {self._settings.episode_seconds:g} s"
            else:
                continue
            await self._let_go(held)
            turns = len(held.recorder.session.trajectory.turns)
            await self._report_failure(held, ErrorRecord(Boundary.SYSTEM, TIMEOUT, why, turns))


def _refused(error: StoreError | StoreUnavailable) -> HttpRefusal:
    status, refusal = error_reply(error)
    return HttpRefusal(status, refusal.kind, refusal.message)
