"""One stream of groups, seen from its scheduler: its rollouts in the store, and the hooks of the run that it belongs to.

Always true: enqueueing, cancelling and deleting are idempotent, so a decision that was applied before a restart can be
applied again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rollwright.errors import RollwrightError
from rollwright.rollout.episode import Episode
from rollwright.rollout.groups import Decision, Group
from rollwright.rollout.settings import LimitsConfig
from rollwright.store.api import Store
from rollwright.store.records import (
    AttemptStatus,
    CompletionEntry,
    EnqueueRequest,
    RolloutConfig,
    RolloutStatus,
)
from rollwright.store.transitions import FINAL_ROLLOUT
from rollwright.trajectory import OutsideCall, Trajectory

IDS_AT_ONCE = 50_000
"""Page size of queries for rollout ids; each page costs a scan of all of them."""

ENTRIES_AT_ONCE = 5_000
"""Entries of the completion log that are read together: a megabyte, which holds up other calls for milliseconds."""


UNFINISHED = [each for each in RolloutStatus if each not in FINAL_ROLLOUT]


class OpeningGate(Protocol):
    """Decides before every group whether it may be opened now; asked again whenever rollouts have ended."""

    def admits(self, rollouts: int) -> bool:
        """Whether so many more rollouts may be opened beside those in flight."""
        ...

    def refusal(self, rollouts: int) -> RollwrightError | None:
        """Why so many cannot be opened although nothing is in flight; `None`: they can, or something is."""
        ...


class StreamPace(Protocol):
    """Decides how far a finite stream is opened, and when it ends before its last group."""

    def limit(self, lowest_open: int) -> int | None:
        """The number of groups that may be opened by now, if all groups before `lowest_open` have ended; `None`: the
        stream ends here."""
        ...


class StreamHooks:
    """Hooks of a run into a stream: they record results, and give those that are known. The base class does nothing."""

    async def opened(self) -> None:
        """Is awaited after groups were opened, before their rollouts are enqueued."""

    def finished(self, rollout_id: str, encoded: bytes) -> None:
        """Takes the trajectory of a rollout that succeeded, also of one that is filtered later."""

    def failed(self, rollout_id: str, reason: str) -> None:
        """Takes the reason of a rollout that failed for good."""

    def spent(self, rollout_id: str, trajectory: Trajectory) -> None:
        """Takes a rollout that has ended, with the turns that were paid for; of one without a result, nothing else."""

    def ranked(self, group: Group, calls: Sequence[OutsideCall]) -> None:
        """Takes the calls that the judges of a group have made to rank it."""

    def recalled(self, rollout_id: str) -> None:
        """Takes a rollout whose result `recall` gave, before `finished` does."""

    async def settled(self) -> None:
        """Is awaited after some rollouts succeeded."""

    def read_kept(self, rollout_ids: Sequence[str]) -> Mapping[str, bytes]:
        """Encoded trajectories that are kept elsewhere, so that the store need not have them any more."""
        return {}

    def recall(self, rollout_id: str, episode: Episode) -> bytes | None:
        """The encoded trajectory of a rollout whose result is known without playing it."""
        return None


@dataclass(frozen=True)
class StreamRollouts:
    """The rollouts of one stream in the store."""

    store: Store
    mode: str
    limits: LimitsConfig
    resources_id: str | None = None
    """Where workers in other processes find the run's settings."""
    forget: bool = False
    """Whether settled rollouts are deleted, so that a store in memory does not grow."""

    def requests(self, decision: Decision) -> list[EnqueueRequest]:
        retries = RolloutConfig(
            unresponsive_seconds=self.limits.lease_seconds,
            max_attempts=self.limits.max_attempts,
            retry_condition=(AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE),
        )
        return [
            EnqueueRequest(
                input=msgspec.to_builtins(episode),
                rollout_id=rollout_id,
                mode=self.mode,
                resources_id=self.resources_id,
                config=retries,
            )
            for rollout_id, episode in decision.enqueue
        ]

    async def enqueue(self, decision: Decision) -> None:
        await self.store.enqueue_many_rollouts(self.requests(decision))

    async def cancel(self, rollout_ids: Sequence[str], why: str) -> None:
        await self.store.cancel_rollouts(rollout_ids, why)
        await self.release(rollout_ids)

    async def release(self, rollout_ids: Sequence[str]) -> None:
        """Lets the store forget rollouts that are settled, if it may."""
        if self.forget:
            await self.store.delete_rollouts(rollout_ids)


class CompletionsRead:
    """What was read of a store's completion log, so that a run that is resumed reads it once and not at every step of its
    start. Entries are never changed in the store; those of deleted rollouts may still be here."""

    def __init__(self) -> None:
        self.entries: list[CompletionEntry] = []
        self.open_ids: list[str] | None = None
        """Rollouts that had not ended when the store was checked; `None`: it was not, and has to be asked."""

    @property
    def cursor(self) -> int:
        """Position in the log up to which it was read."""
        return self.entries[-1].cursor if self.entries else 0

    async def read_on(self, store: Store) -> list[CompletionEntry]:
        """Reads what was added since the last call; returns all entries."""
        while page := await store.read_completions(self.cursor, limit=ENTRIES_AT_ONCE):
            self.entries += page
        return self.entries


async def rollout_ids(
    store: Store, prefix: str, mode: str | None = None, log: CompletionsRead | None = None
) -> list[str]:
    """Ids in a store with this prefix: those of the completion log, then those that have not ended, which are few beside
    them. To page through all rollouts would cost a scan for each page. `mode`: of those that have not ended; `log`: what was
    read of the completion log."""
    log = CompletionsRead() if log is None else log
    found = [each.rollout_id for each in await log.read_on(store) if each.rollout_id.startswith(prefix)]
    return list(dict.fromkeys([*found, *await open_rollout_ids(store, prefix, mode, log)]))


async def open_rollout_ids(
    store: Store, prefix: str, mode: str | None = None, log: CompletionsRead | None = None
) -> list[str]:
    """Ids in a store with this prefix, of rollouts that have not ended. `mode`: of these only."""
    if log is not None and log.open_ids is not None:
        return [each for each in log.open_ids if each.startswith(prefix)]
    found: list[str] = []
    while True:
        page = await store.query_rollouts(
            status=UNFINISHED, rollout_id_contains=prefix, mode=mode, limit=IDS_AT_ONCE, offset=len(found)
        )
        found += [each.rollout_id for each in page]
        if not page.items or len(found) >= page.total:
            return [each for each in found if each.startswith(prefix)]
