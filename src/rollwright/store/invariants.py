"""Checks a store's event log against what the store promises. Pure: events in, complaints out.

It knows nothing of how a store works, only of what may never happen: a rollout with two attempts at once, a
result of an attempt whose lease was over, a rollout that ends twice or goes on after its end, an end that is
not in the completion log. Run it over the log of a store that was killed and opened again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollwright.store.records import AttemptStatus, CompletionEntry, Event, EventKind
from rollwright.store.transitions import FINAL_ROLLOUT

_RESULTS = frozenset({AttemptStatus.SUCCEEDED, AttemptStatus.FAILED})
"""What only an attempt that holds its rollout may report."""


def complaints(events: Iterable[Event], completions: Iterable[CompletionEntry] | None = None) -> list[str]:
    """One line for each broken promise; empty when there is none.

    With `completions`, the whole completion log, each end must be in it exactly once. Of a log whose beginning
    was forgotten together with old rollouts, only those are followed whose own beginning is still there.
    """
    history = _History()
    found = list(history.follow(events))
    if completions is not None:
        found += history.compare(completions)
    return found


def unfinished(events: Iterable[Event]) -> set[str]:
    """The rollouts that were enqueued and have no end yet."""
    history = _History()
    for _ in history.follow(events):
        pass
    return {rollout_id for rollout_id, story in history.stories.items() if story.ended is None}


@dataclass
class _Story:
    """What the events so far have told of one rollout."""

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


class _History:
    def __init__(self) -> None:
        self.stories: dict[str, _Story] = {}
        self._whole = True
        """Whether the log begins at its beginning."""

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
        story = self.stories.get(event.rollout_id)
        if event.kind is EventKind.ENQUEUED:
            if story is not None:
                yield "is enqueued again"
            self.stories.setdefault(event.rollout_id, _Story())
        elif story is None:
            if self._whole:
                yield f"is {event.kind} before it was enqueued"
        elif event.kind is EventKind.CLAIMED:
            yield from story.claim(event)
        elif event.kind is EventKind.ENDED:
            yield from story.end(event)
        elif event.kind is EventKind.DELETED:
            if story.ended is None:
                yield "is deleted before its end"
            del self.stories[event.rollout_id]

    def compare(self, completions: Iterable[CompletionEntry]) -> Iterator[str]:
        logged: dict[str, CompletionEntry] = {}
        for completion in completions:
            if completion.rollout_id in logged:
                yield f"rollout {completion.rollout_id} is in the completion log twice"
            logged[completion.rollout_id] = completion
        for rollout_id, story in self.stories.items():
            entry = logged.pop(rollout_id, None)
            told = (None, None) if entry is None else (str(entry.status), entry.attempt_id)
            if told != (story.ended, story.ended_by):
                yield (
                    f"rollout {rollout_id}: events say {story.ended} by {story.ended_by},"
                    f" the completion log says {told[0]} by {told[1]}"
                )
        for rollout_id in logged:
            yield f"rollout {rollout_id} is in the completion log without events"
