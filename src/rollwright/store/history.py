"""Checks a store's event log against what the store promises. Pure: events in, complaints out.

It knows nothing of how a store works, only of what may never happen: a rollout with two attempts at once, a
result of an attempt whose lease was over, a rollout that ends twice or goes on after its end, an end that is
not in the completion log. Run it over the log of a store that was killed and opened again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollwright.store.records import AttemptStatus, Completion, Event, EventKind
from rollwright.store.transitions import FINAL_ROLLOUT

_RESULTS = frozenset({AttemptStatus.SUCCEEDED, AttemptStatus.FAILED})
"""What only an attempt that holds its rollout may report."""


@dataclass
class _Story:
    """What the events so far have told of one rollout."""

    current: str | None = None
    """The attempt that holds it."""
    attempts: set[str] = field(default_factory=set)
    ended: str | None = None
    """Its final status."""
    ended_by: str | None = None


def complaints(events: Iterable[Event], completions: Iterable[Completion] | None = None) -> list[str]:
    """One line for each broken promise; empty when there is none.

    With `completions`, the whole completion log, each end must be in it exactly once.
    """
    stories: dict[str, _Story] = {}
    found: list[str] = []
    last = 0
    for event in events:
        if event.sequence <= last:
            found.append(f"event {event.sequence} comes after event {last}")
        last = event.sequence
        found += [f"event {event.sequence}: {line}" for line in _follow(event, stories)]
    if completions is not None:
        found += _compare(stories, completions)
    return found


def unfinished(events: Iterable[Event]) -> set[str]:
    """The rollouts that were enqueued and have no end yet."""
    stories: dict[str, _Story] = {}
    for event in events:
        _follow(event, stories)
    return {rollout_id for rollout_id, story in stories.items() if story.ended is None}


def _follow(event: Event, stories: dict[str, _Story]) -> list[str]:
    """Takes the event into the stories; returns what is wrong with it."""
    name = f"rollout {event.rollout_id}"
    if event.kind is EventKind.ENQUEUED:
        known = event.rollout_id in stories
        stories.setdefault(event.rollout_id, _Story())
        return [f"{name} is enqueued again"] if known else []
    story = stories.get(event.rollout_id)
    if story is None:
        return [f"{name} is {event.kind} before it was enqueued"]
    match event.kind:
        case EventKind.CLAIMED:
            return [f"{name} {line}" for line in _claim(event, story)]
        case EventKind.ENDED:
            return [f"{name} {line}" for line in _end(event, story)]
        case EventKind.DELETED:
            del stories[event.rollout_id]
            return [] if story.ended else [f"{name} is deleted before its end"]
        case _:
            return []


def _claim(event: Event, story: _Story) -> list[str]:
    wrong = []
    if story.ended:
        wrong.append(f"is claimed after it was {story.ended}")
    if story.current:
        wrong.append(f"is claimed by {event.attempt_id} while {story.current} holds it")
    if event.attempt_id in story.attempts or event.attempt_id is None:
        wrong.append(f"is claimed with the used attempt id {event.attempt_id}")
    story.current = event.attempt_id
    story.attempts.add(event.attempt_id or "")
    return wrong


def _end(event: Event, story: _Story) -> list[str]:
    wrong = []
    if story.ended:
        wrong.append(f"ends as {event.becomes} after it was {story.ended}")
    if event.attempt_id != story.current:
        wrong.append(f"is ended by {event.attempt_id} while {story.current} holds it")
    over = event.lease_expires is not None and event.lease_expires <= event.time
    if event.status in _RESULTS and over:
        wrong.append(f"takes {event.status} from {event.attempt_id} after its lease was over")
    story.current = None
    if event.becomes in FINAL_ROLLOUT:
        story.ended, story.ended_by = event.becomes, event.attempt_id
    return wrong


def _compare(stories: dict[str, _Story], completions: Iterable[Completion]) -> list[str]:
    found = []
    logged: dict[str, Completion] = {}
    for completion in completions:
        if completion.rollout_id in logged:
            found.append(f"rollout {completion.rollout_id} is in the completion log twice")
        logged[completion.rollout_id] = completion
    for rollout_id, story in stories.items():
        entry = logged.pop(rollout_id, None)
        told = (None, None) if entry is None else (str(entry.status), entry.attempt_id)
        if told != (story.ended, story.ended_by):
            found.append(
                f"rollout {rollout_id}: events say {story.ended} by {story.ended_by},"
                f" the completion log says {told[0]} by {told[1]}"
            )
    found += [f"rollout {rollout_id} is in the completion log without events" for rollout_id in logged]
    return found
