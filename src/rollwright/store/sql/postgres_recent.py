"""Rollouts that this process claimed a moment ago, by which it answers their heartbeats without a round trip.

An entry is a row as a claim of this process returned it. It is used for `FRESH_SECONDS` at most, and only while nothing
else is known: it is dropped when this process ends the attempt, runs any ordinary transaction, loses a connection, or
is notified that attempts were taken, and it is not kept if one of these happened while the claim's statement ran. So a
heartbeat contradicts no call of this process that was answered before it. Of a call of another process it may be
unaware for `FRESH_SECONDS`; a report of such an attempt is rejected as ever, because reports are decided by the database.

Leases end by the server's clock, of which this process has an upper bound: the time that a statement read, plus the
time since that statement was sent. The bound is used only while the two clocks agree, that is, while the time between
the last two statements was about the same on both. If the server's clock stands still or jumps, all heartbeats are sent.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rollwright.store.sql.rows import RolloutRow
from rollwright.store.sql.transaction import HeldRows, Stamps, Transaction

FRESH_SECONDS = 0.05
"""A notification of another process takes a few milliseconds; without it, its change is noticed this much later."""

MOST_DISAGREEMENT = 2.0
"""Between two statements neither clock may run more than this many times as far as the other."""

Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(slots=True)
class StatementNews:
    """What a statement for many callers says beyond their results."""

    stamps: Stamps
    now: float | None = None
    """The store's time as the statement read it."""
    claimed: list[RolloutRow] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Ids of the rollouts whose attempts it ended."""


class _Reading(NamedTuple):
    """A reading of the server's clock between two moments of this process's clock."""

    sent: float
    received: float
    now: float


class Sent(NamedTuple):
    """When a statement was sent."""

    time: float
    generation: int


class RecentClaims:
    """Belongs to one event loop."""

    def __init__(self, stamps: Stamps, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows = HeldRows()
        self._expiries: deque[tuple[float, RolloutRow]] = deque()
        """Until when each row may be used, on this process's clock, the earliest first."""
        self._without_writes = Transaction(0.0, stamps, held=self._rows)
        self._generation = 0
        """Counts the moments after which results of earlier statements may be out of date."""
        self._reading: _Reading | None = None
        self._clocks_agree = False

    def recall(
        self, answer: Callable[[Transaction, Argument], Result | None], argument: Argument
    ) -> Result | None:
        """Answers a call from the rows; `None` if it needs a transaction."""
        now = self._clock()
        self._drop_old(now)
        if not self._clocks_agree or self._reading is None:
            return None
        self._without_writes.now = self._reading.now + (now - self._reading.sent)
        return answer(self._without_writes, argument)

    def sending(self) -> Sent:
        """To be called before a statement is sent whose news `learn` gets."""
        return Sent(self._clock(), self._generation)

    def learn(self, sent: Sent, news: StatementNews) -> None:
        """To be called before the statement's callers are answered."""
        if news.now is None:
            return
        self._compare_clocks(_Reading(sent.time, self._clock(), news.now))
        current = sent.generation == self._generation
        for rollout_id in news.ended:
            if rollout_id in self._rows:
                self._rows.forget(rollout_id)
            else:
                self._generation += 1  # its claim may still be on its way back from the server
        if current:
            self._keep(sent.time + FRESH_SECONDS, news.claimed)

    def clear(self) -> None:
        """Something else may have changed rollouts that are held."""
        self._generation += 1
        self._rows.clear()
        self._expiries.clear()

    def _keep(self, until: float, claimed: Sequence[RolloutRow]) -> None:
        self._drop_old(self._clock())  # a process may send no heartbeats at all
        for row in claimed:
            self._rows.keep(row)
            self._expiries.append((until, row))

    def _drop_old(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, old = self._expiries.popleft()
            if self._rows.get(old.rollout_id) is old:
                self._rows.forget(old.rollout_id)

    def _compare_clocks(self, reading: _Reading) -> None:
        before, self._reading = self._reading, reading
        if before is None or reading.sent < before.received:
            return  # of statements that ran at the same time nothing follows
        elapsed = reading.now - before.now
        least, most = reading.sent - before.received, reading.received - before.sent
        self._clocks_agree = least / MOST_DISAGREEMENT <= elapsed <= most * MOST_DISAGREEMENT and elapsed > 0
