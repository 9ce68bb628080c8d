"""Checks a store's event log against the store's invariants. Pure: events in, complaints out.

It depends on no backend, only on what may never happen: a rollout with two attempts at once, a result from an attempt
with an expired lease, a rollout that ends twice or is claimed after its end, an end that is not in the completion log. Run
it over the log of a store that was killed and opened again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollwright.store.records import AttemptStatus, CompletionEntry, Event, EventKind
from rollwright.store.transitions import FINAL_ROLLOUT

_RESULTS = frozenset({AttemptStatus.SUCCEEDED, AttemptStatus.FAILED})
"""Statuses that only an attempt that holds its rollout may report."""


def complaints(events: Iterable[Event], completions: Iterable[CompletionEntry] | None = None) -> list[str]:
    """One line for each violation; empty when there is none.

    With `completions`, the whole completion log, each end must be in it exactly once. If the beginning of the log was
    deleted together with old rollouts, only rollouts whose own beginning is still there are checked.
    """
    replay = _Replay()
    found = list(replay.follow(events))
    if completions is not None:
        found += replay.compare(completions)
    return found


def unfinished(events: Iterable[Event]) -> set[str]:
    """The rollouts that were enqueued and have no end yet."""
    replay = _Replay()
    for _ in replay.follow(events):
        pass
    return {rollout_id for rollout_id, state in replay.states.items() if state.ended is None}


@dataclass
class _RolloutState:
    """State of one rollout after the events so far."""

    current: str | None = None
    """The attempt that holds it."""
    attempts: set[str | None] = field(default_factory=set)
    ended: str | None = None
    """Its final status."""
    ended_by: str | None = None

    def claim(self, event: Event) -> Iterator[str]:
        if self.ended:
            yield f"is claimed after it was {self.ended}"
        if self.current:
            yield f"is claimed by {event.attempt_id} while {self.current} holds it"
        if event.attempt_id is None or event.attempt_id in self.attempts:
            yield f"is claimed with the used attempt id {event.attempt_id}"
        self.current = event.attempt_id
        self.attempts.add(event.attempt_id)

    def end(self, event: Event) -> Iterator[str]:
        if self.ended:
            yield f"ends as {event.becomes} after it was {self.ended}"
        if event.attempt_id != self.current:
            yield f"is ended by {event.attempt_id} while {self.current} holds it"
        over = event.lease_expires is not None and event.lease_expires <= event.time
        if event.status in _RESULTS and over:
            yield f"takes {event.status} from {event.attempt_id} after its lease was over"
        self.current = None
        if event.becomes in FINAL_ROLLOUT:
            self.ended, self.ended_by = event.becomes, event.attempt_id


class _Replay:
    def __init__(self) -> None:
        self.states: dict[str, _RolloutState] = {}
        self._whole = True
        """Whether the log is complete from its first event."""

    def follow(self, events: Iterable[Event]) -> Iterator[str]:
        last = 0
        for event in events:
            if last == 0:
                self._whole = event.sequence == 1
            if event.sequence <= last:
                yield f"event {event.sequence} comes after event {last}"
            last = event.sequence
            for line in self._take(event):
                yield f"event {event.sequence}: rollout {event.rollout_id} {line}"

    def _take(self, event: Event) -> Iterator[str]:
        state = self.states.get(event.rollout_id)
        if event.kind is EventKind.ENQUEUED:
            if state is not None:
                yield "is enqueued again"
            self.states.setdefault(event.rollout_id, _RolloutState())
        elif state is None:
            if self._whole:
                yield f"is {event.kind} before it was enqueued"
        elif event.kind is EventKind.CLAIMED:
            yield from state.claim(event)
        elif event.kind is EventKind.ENDED:
            yield from state.end(event)
        elif event.kind is EventKind.DELETED:
            if state.ended is None:
                yield "is deleted before its end"
            del self.states[event.rollout_id]

    def compare(self, completions: Iterable[CompletionEntry]) -> Iterator[str]:
        logged: dict[str, CompletionEntry] = {}
        for completion in completions:
            if completion.rollout_id in logged:
                yield f"rollout {completion.rollout_id} is in the completion log twice"
            logged[completion.rollout_id] = completion
        for rollout_id, state in self.states.items():
            entry = logged.pop(rollout_id, None)
            told = (None, None) if entry is None else (str(entry.status), entry.attempt_id)
            if told != (state.ended, state.ended_by):
                yield (
                    f"rollout {rollout_id}: events say {state.ended} by {state.ended_by},"
                    f" the completion log says {told[0]} by {told[1]}"
                )
        for rollout_id in logged:
            yield f"rollout {rollout_id} is in the completion log without events"
