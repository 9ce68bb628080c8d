"""Timeline of a run as Chrome-trace JSON, for Perfetto, `chrome://tracing` and other viewers.

A worker is a process in the trace. A rollout takes one lane of it, with its waits inside; overlapping waits of one rollout
take further lanes. Invariant: on one lane, events are nested or disjoint, as the format demands.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from rollwright.trajectory import Timing, Trajectory, Wait

MICROSECONDS = 1_000_000
"""Microseconds per second; the format's unit."""


class Played(NamedTuple):
    """The part of a trajectory that the timeline shows, which is far smaller."""

    rollout_id: str
    tag: str
    turns: int
    reward: float
    timing: Timing

    @classmethod
    def of(cls, trajectory: Trajectory) -> "Played | None":
        """`None` for a trajectory without a timing."""
        timing = trajectory.timing
        if timing is None:
            return None
        return cls(trajectory.rollout_id, trajectory.tag, len(trajectory.turns), trajectory.reward, timing)


def chrome_trace(played: Iterable[Played]) -> Iterator[str]:
    """Yield the file in pieces; times start with the first rollout."""
    rollouts = sorted(played, key=lambda each: (each.timing.started, each.rollout_id))
    events = _events(rollouts)
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, event in enumerate(events):
        yield (",\n" if number else "") + json.dumps(event, separators=(",", ":"))
    yield "\n]}\n"


def _events(rollouts: Sequence[Played]) -> Iterator[dict[str, Any]]:
    epoch = rollouts[0].timing.started if rollouts else 0.0
    workers = {worker: number for number, worker in enumerate(dict.fromkeys(map(_worker, rollouts)), start=1)}
    for (worker, process), number in workers.items():
        about = {"name": worker or f"process {process}"}
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": about}
    lanes: dict[int, _Lanes] = {number: _Lanes() for number in workers.values()}
    for each in rollouts:
        pid = workers[_worker(each)]
        start = each.timing.started - epoch
        rows = stacked(each.timing.waits)
        taken = lanes[pid].take(start, start + each.timing.wall, max(len(rows), 1))
        yield _event(
            pid,
            taken[0],
            each.rollout_id,
            "rollout",
            start,
            each.timing.wall,
            {"environment": each.tag, "turns": each.turns, "reward": each.reward},
        )
        for lane, row in zip(taken, rows, strict=False):
            for wait in row:
                about = {key: value for key in ("agent", "name", "tokens") if (value := getattr(wait, key))}
                name = " ".join([wait.phase, *filter(None, (wait.agent, wait.name))])
                yield _event(pid, lane, name, wait.phase, start + wait.start, wait.seconds, about)


def stacked(waits: Sequence[Wait]) -> list[list[Wait]]:
    """Divide the waits into as few rows as possible without overlaps."""
    rows: list[list[Wait]] = []
    for wait in sorted(waits, key=attrgetter("start")):
        free = next((row for row in rows if row[-1].stop <= wait.start), None)
        if free is None:
            rows.append([wait])
        else:
            free.append(wait)
    return rows


class _Lanes:
    """Lanes of one worker, with the end of each lane's last event."""

    def __init__(self) -> None:
        self._until: list[float] = []

    def take(self, start: float, stop: float, count: int) -> list[int]:
        free = [lane for lane, until in enumerate(self._until) if until <= start][:count]
        free += range(len(self._until), len(self._until) + count - len(free))
        self._until += [0.0] * (free[-1] + 1 - len(self._until))
        for lane in free:
            self._until[lane] = stop
        return free


def _worker(played: Played) -> tuple[str, int]:
    return played.timing.worker, played.timing.process


def _event(
    pid: int, lane: int, name: str, kind: str, start: float, seconds: float, about: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; lanes count from 1, because lane 0 is the process itself."""
    return {
        "ph": "X",
        "pid": pid,
        "tid": lane + 1,
        "name": name,
        "cat": kind,
        "ts": round(start * MICROSECONDS, 3),
        "dur": round(seconds * MICROSECONDS, 3),
        "args": about,
    }
