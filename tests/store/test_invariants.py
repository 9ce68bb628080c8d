"""The history checker finds what it is there to find."""

import pytest

from rollwright.store.invariants import complaints, unfinished
from rollwright.store.records import CompletionEntry, Event, EventKind, RolloutStatus


def enqueued(rollout_id: str = "ro-1") -> Event:
    return Event(0, 0.0, EventKind.ENQUEUED, rollout_id)


def claimed(attempt_id: str, time: float = 1.0) -> Event:
    return Event(0, time, EventKind.CLAIMED, "ro-1", attempt_id, lease_expires=time + 10)


def ended(
    attempt_id: str | None, status: str | None, becomes: str, time: float = 2.0, lease: float = 11.0
) -> Event:
    return Event(0, time, EventKind.ENDED, "ro-1", attempt_id, "w", status, lease, becomes)


def numbered(*events: Event) -> list[Event]:
    return [
        Event(number, *(getattr(event, name) for name in Event.__struct_fields__[1:]))
        for number, event in enumerate(events, 1)
    ]


GOOD = numbered(
    enqueued(),
    claimed("at-1"),
    ended("at-1", "unresponsive", "requeuing", time=11.0),
    claimed("at-2", 12.0),
    Event(0, 12.5, EventKind.REFUSED, "ro-1", "at-1", status="succeeded"),
    ended("at-2", "succeeded", "succeeded", time=13.0, lease=22.0),
)


def test_a_good_history_has_no_complaints() -> None:
    assert complaints(GOOD, [CompletionEntry(1, "ro-1", "at-2", RolloutStatus.SUCCEEDED)]) == []
    assert unfinished(GOOD) == set()
    assert unfinished(GOOD[:4]) == {"ro-1"}


def test_a_deleted_rollout_may_come_again() -> None:
    deleted = Event(0, 20.0, EventKind.DELETED, "ro-1")
    assert complaints(numbered(*GOOD, deleted, *GOOD)) == []


def test_a_log_without_its_beginning_is_followed_where_it_can_be() -> None:
    later = Event(0, 20.0, EventKind.ENQUEUED, "ro-2")
    twice = [Event(0, 21.0, EventKind.CLAIMED, "ro-2", attempt) for attempt in ("a", "b")]
    trimmed = numbered(*GOOD, later, *twice)[3:]
    assert len(complaints(trimmed)) == 1
    assert "while a holds it" in complaints(trimmed)[0]
    assert unfinished(trimmed) == {"ro-2"}


@pytest.mark.parametrize(
    ("complaint", "events"),
    [
        ("enqueued again", [enqueued(), enqueued()]),
        ("before it was enqueued", [claimed("at-1")]),
        ("while at-1 holds it", [enqueued(), claimed("at-1"), claimed("at-2")]),
        ("used attempt id", [enqueued(), claimed("a"), ended("a", "failed", "requeuing"), claimed("a")]),
        ("while at-2 holds it", [*GOOD[:4], ended("at-1", "succeeded", "succeeded", time=12.5, lease=20)]),
        (
            "after its lease was over",
            [*GOOD[:4], ended("at-2", "succeeded", "succeeded", time=30.0, lease=22)],
        ),
        ("after it was succeeded", [*GOOD, ended("at-2", "succeeded", "succeeded", 13.0, 22.0)]),
        ("claimed after it was succeeded", [*GOOD, claimed("at-3", 14.0)]),
        ("deleted before its end", [enqueued(), Event(0, 1.0, EventKind.DELETED, "ro-1")]),
    ],
)
def test_a_broken_promise_is_found(complaint: str, events: list[Event]) -> None:
    assert any(complaint in line for line in complaints(numbered(*events)))


def test_events_out_of_order_are_found() -> None:
    assert any("comes after" in line for line in complaints([GOOD[1], GOOD[0]]))


@pytest.mark.parametrize(
    ("complaint", "completions"),
    [
        ("the completion log says None", []),
        ("twice", [CompletionEntry(cursor, "ro-1", "at-2", RolloutStatus.SUCCEEDED) for cursor in (1, 2)]),
        ("says succeeded by at-1", [CompletionEntry(1, "ro-1", "at-1", RolloutStatus.SUCCEEDED)]),
        ("without events", [CompletionEntry(1, "ro-9", None, RolloutStatus.CANCELLED)]),
    ],
)
def test_a_wrong_completion_log_is_found(complaint: str, completions: list[CompletionEntry]) -> None:
    assert any(complaint in line for line in complaints(GOOD, completions))
